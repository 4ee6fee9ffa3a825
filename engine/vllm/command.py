"""The argument list and the environment of one vLLM server. Pure: a function of its `EngineSpec`.

Baton's flags come first and the user's last, so the user's win; Baton does not repeat a flag that the user gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from cluster.instance import Role
from engine.vllm.evictions import config_of
from engine.vllm.placement import split
from engine.vllm.spec import EngineSpec, given, value_of
from engine.vllm.tiers import beside
from kvtransfer.keys import FILE_VARIABLE

CPU_KV_CACHE_GIB = "1"
"""KV cache of an engine on CPU. vLLM's own default is most of the machine's memory, for each engine."""

CPU_SHAPES_KEPT = "64"
"""Shapes of steps for which oneDNN keeps its compiled kernels; its own default is 1,024."""

CPU_KV_LEASE_S = 120
"""Lease of held blocks on CPU, where a busy decode engine may take longer than vLLM's 30 s to get to a pull."""

PIN = "engine.vllm.pin:PinFirstToken"
"""Baton's logits processor, by the name under which vLLM imports it."""

GUARD = "kvtransfer.guard.Guard"
"""Baton's ASGI middleware, by the name under which vLLM imports it."""

CONNECTORS = {"nixl": "NixlConnector", "baton": "BatonConnector"}
"""The class of each value of `transfer: {connector: …}`."""

CONNECTOR_MODULE = "engine.vllm.connector.facade"
"""The module from which vLLM imports Baton's connector."""

GPU_READS = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
"""UCX's variable for reads from another process' GPU memory. By default (1.22: `uct_cuda_ipc_iface_get_max_get_zcopy`)
GPUs without an active NVLink have none: what D reads goes over TCP, at 0.4 GB/s on one H200 (decision 0008). Writes
are not concerned. NIXL turns it on from the version after 1.5.1 (its pull request 2208)."""

CONV_STATE_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"
"""vLLM's variable for the layout of a Mamba layer's state. Its connector reads one layout only. vLLM chooses that
layout by itself on CPU only, and if `kv_connector` is one of its own names; otherwise such an engine does not start."""

FORKS = "BATON_CPU_FORKS"
"""The variable by which `cpu_site/sitecustomize.py` learns that vLLM's processes may be forked."""

SPAWNED_FOR = ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "LD_PRELOAD")
"""Variables of the user with which vLLM spawns its processes, as it does by itself: OpenMP reads them at a start."""

NO_DOMAIN = "none.invalid"
"""A domain that no machine has (RFC 6761). vLLM takes an empty list to mean that all are allowed."""

REDIRECTS = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"
"""vLLM's variable: whether a host that may be asked for a picture may send the engine on to another host."""

_KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}

SECRET_FLAGS = frozenset({"--api-key", "--hf-token", "--watermark-config"})
"""Flags whose values are kept out of logs, as those of their fields are (`--watermark-config.key`)."""


def command(spec: EngineSpec) -> list[str]:
    """The argument list. The server is started as a module: the `vllm` program fails with the CPU distribution.

    (That program asks for the version of a distribution named `vllm`, and the CPU build is named `vllm-cpu`.)
    """
    argv = [spec.python, "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model]
    argv += ["--host", spec.host, "--port", str(spec.port)]
    for flag, value in _flags(spec):
        if not given(spec.extra_args, flag):
            argv += [flag] if value is None else [flag, value]
    if spec.ticket_keys_file is not None:
        argv += ["--middleware", GUARD]  # may be given many times: the user's own are loaded, too
    return [*argv, *spec.extra_args]


def _flags(spec: EngineSpec) -> Iterator[tuple[str, str | None]]:
    if spec.served_name is not None:
        yield "--served-model-name", spec.served_name
    if spec.dtype is not None:
        yield "--dtype", spec.dtype
    if spec.max_model_len is not None:
        yield "--max-model-len", str(spec.max_model_len)
    if spec.gpu_memory_share is not None:
        yield "--gpu-memory-utilization", f"{spec.gpu_memory_share:g}"
    if spec.device == "cpu":
        yield "--enforce-eager", None  # compiling takes minutes on CPU and gains nothing here
    yield "--kv-transfer-config", json.dumps(_transfer_config(spec))
    if spec.evictions:
        yield "--kv-events-config", json.dumps(config_of(spec.evictions))
    if spec.pins:
        yield "--logits-processors", PIN
    yield "--shutdown-timeout", str(spec.shutdown_timeout_s)
    yield "--enable-scale-out", None  # POST /inference/v1/abort_requests: the router ends a leg and reads its answer
    yield "--enable-prompt-tokens-details", None  # usage says how many tokens came from a cache
    yield "--enable-per-request-metrics", None  # queue and prefill times per leg
    yield "--allowed-media-domains", NO_DOMAIN  # clients' pictures come in the body: no engine asks strangers for them
    yield "--disable-uvicorn-access-log", None  # a line per probe and request would bury what the log is kept for


def _transfer_config(spec: EngineSpec) -> dict[str, object]:
    """vLLM's `--kv-transfer-config`. By default vLLM fails a request whose pull fails; with this configuration it
    recomputes the prompt.
    """
    lease_s = CPU_KV_LEASE_S if spec.kv_lease_s is None and spec.device == "cpu" else spec.kv_lease_s
    config: dict[str, object] = {
        "kv_connector": CONNECTORS[spec.connector],
        "kv_role": _KV_ROLES[Role.BOTH if spec.flips or spec.has_peers else spec.role],
        "kv_buffer_device": "cpu" if spec.device == "cpu" else "cuda",
        "kv_load_failure_policy": "recompute",
    }
    more: dict[str, object] = {} if lease_s is None else {"kv_lease_duration": lease_s}
    if spec.connector == "baton":
        config["kv_connector_module_path"] = CONNECTOR_MODULE
        more |= {"door": spec.door} if spec.door else {}
        more |= {"digests": True} if spec.digests else {}
    if more:
        config["kv_connector_extra_config"] = more
    return config if spec.tiers is None else beside(config, spec.tiers, spec.ranks)


def environment(spec: EngineSpec, base_env: Mapping[str, str], cpu_site: str) -> dict[str, str]:
    """The environment. The spec wins over `base_env`, `base_env` over Baton's defaults, and the user's own over all.

    `cpu_site` is the folder of the start-up patch for CPU engines (`cpu_site/sitecustomize.py`). Keys and tokens
    (VLLM_API_KEY, HF_TOKEN) travel here and never in an argument list, which every user of the machine can read.
    """
    env = dict(base_env)
    env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = spec.side_channel_host
    env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(spec.side_channel_port)
    env.setdefault(REDIRECTS, "0")
    if not given(spec.extra_args, "--kv-transfer-config"):
        env.setdefault(CONV_STATE_LAYOUT, "DS")
    if spec.ticket_keys_file is not None:
        env[FILE_VARIABLE] = spec.ticket_keys_file
    if spec.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
        env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's numbers; CUDA's own put the fastest GPU first
    if spec.device == "cpu":
        env.update(_cpu_environment(spec, base_env))
    else:
        env.setdefault(GPU_READS, "on")
    env.update(spec.extra_env)
    if spec.device == "cpu":
        env["PYTHONPATH"] = ":".join(filter(None, [cpu_site, env.get("PYTHONPATH")]))
    return env


def _cpu_environment(spec: EngineSpec, base_env: Mapping[str, str]) -> dict[str, str]:
    env = {}
    if not (given(spec.extra_args, "--kv-cache-memory-bytes") or given(spec.extra_args, "--gpu-memory-utilization")):
        env["VLLM_CPU_KVCACHE_SPACE"] = CPU_KV_CACHE_GIB  # it would win over those flags
    # Idle OpenMP threads sleep at once instead of spinning 200 ms on a core that another engine needs.
    env["KMP_BLOCKTIME"] = "0"
    # By default oneDNN keeps the compiled kernels of 1,024 shapes of a step: an engine of 0.5 GB has 1.2 GB after 2,500
    # requests of all lengths. With 32 shapes it has 0.65 GB, at the same speed (docs/operations.md, "Engines on CPU").
    env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = CPU_SHAPES_KEPT
    if {"--no-enforce-eager", "--no_enforce_eager"}.isdisjoint(spec.extra_args):
        # Eager except for single functions: the first request with `logprobs` waits until g++ has compiled one.
        env["TORCHDYNAMO_DISABLE"] = "1"
    ranks = workers(spec.extra_args)
    if spec.cores:
        env["OMP_NUM_THREADS"] = str(max(1, len(spec.cores) // ranks))
    elif spec.unbound_threads:
        env["OMP_NUM_THREADS"] = str(spec.unbound_threads)
    env = {name: base_env.get(name, value) for name, value in env.items()}
    if spec.unbound_threads:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    elif spec.cores:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in split(spec.cores, ranks))
    if (spec.cores or spec.unbound_threads) and (base_env.keys() | spec.extra_env.keys()).isdisjoint(SPAWNED_FOR):
        env[FORKS] = base_env.get(FORKS, "1")
    return env


def workers(args: tuple[str, ...]) -> int:
    """The number of worker processes that the user's flags start on this machine, a GPU each: data times pipeline times
    tensor times prefill context parallelism.
    """
    data = value_of(args, "--data-parallel-size-local", "-dpl") or value_of(args, "--data-parallel-size", "-dp")
    sizes = (
        None if given(args, "--data-parallel-rank", "-dpn") else data,  # the other ranks have servers of their own
        value_of(args, "--pipeline-parallel-size", "-pp"),
        value_of(args, "--tensor-parallel-size", "-tp"),
        value_of(args, "--prefill-context-parallel-size", "-pcp"),
    )
    ranks = 1
    for size in sizes:
        ranks *= int(size) if size is not None and size.isdecimal() and int(size) > 0 else 1
    return ranks


def printable(argv: Sequence[str]) -> list[str]:
    """`argv` for a log: the values of secret flags are left out."""
    shown: list[str] = []
    hide = False
    for arg in argv:
        name, equals, _ = arg.partition("=")
        secret = name.partition(".")[0].replace("_", "-") in SECRET_FLAGS
        if arg.startswith("-"):
            hide = secret and not equals  # `--api-key` takes several values: all up to the next flag
            shown.append(f"{name}=***" if secret and equals else arg)
        else:
            shown.append("***" if hide else arg)
    return shown
