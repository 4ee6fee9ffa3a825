"""Turns `baton mock`'s flags into the settings of each mock."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.model_sizes import sizes_of
from baton.number_flags import LARGEST, shown
from cluster.errors import UsageError
from cluster.ids import InstanceId, ranks_of
from cluster.instance import Role
from costs.cost import costs_of
from costs.hardware import gpu_named, is_kv_dtype_priced, kv_dtype_named
from costs.memory import batched_tokens_default, seqs_default
from costs.power import cap_of
from costs.shape import Spans
from costs.shipped import profiles
from costs.transfer import NIC_LATENCY_MS, Link, copies, nic, paths
from engine.mock.settings import MS, Ends, MockSettings, SimpleCosts
from engine.twin.config import StepCosts, TwinConfig, Version

INSTANCES_MAX = 1000
LENGTH_DEFAULT = 32_768
"""Tokens of a prompt and its answer if the model has no shorter limit: enough for any trace that ships."""

SEQS = 256
"""Requests at once if no GPU is named: vLLM's default on smaller GPUs."""

SIMPLE_TOKENS = 1 << 18
"""Tokens of the KV cache with --step-ms, where no model and GPU say it."""

SIMPLE_BATCHED_TOKENS = 8192
"""Token budget of a step, likewise."""

SIMPLE_LINK = Link(latency_ms=NIC_LATENCY_MS, gb_s=36.0)
"""One 400 Gb/s NIC as NIXL reaches it (costs.transfer)."""

SIMPLE_BYTES_PER_TOKEN = 131_072
"""KV of one token of an 8B model (Llama 3.1: 2 × 32 layers × 8 heads × 128 × 2 bytes)."""

_TERM = re.compile(r"(prefill|decode|both)=(\d+)")


def read_instances(text: str) -> dict[Role, int]:
    """``prefill=2,decode=2`` -> counts.

    Raises:
        UsageError: the text has another form.
    """
    counts: dict[Role, int] = {}
    for term in text.split(","):
        found = _TERM.fullmatch(term.strip())
        if found is None or Role(found[1]) in counts:
            raise UsageError(f"--instances {text}: write how many of each role, such as prefill=2,decode=2 or both=1")
        counts[Role(found[1])] = int(found[2])
    if not 0 < sum(counts.values()) <= INSTANCES_MAX:
        raise UsageError(f"--instances {text}: 1 to {INSTANCES_MAX} in all")
    return counts


def read_ends(text: str | None) -> Ends | None:
    """``200`` or ``50-400`` -> after how many tokens answers end by themselves; None: at max_tokens.

    Raises:
        UsageError: the text has another form.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"--output-tokens {text}: write a number of tokens, or the least and the most, such as 50-400")
    return Ends(least, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """The engine that an instance imitates."""

    model: str
    costs: StepCosts
    transfer_ms: Callable[[int, int], float]
    kv_bytes_per_token: int
    first_token_ms: float
    kv_tokens: int
    batched_tokens: int
    seqs: int


def settings_of(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> list[MockSettings]:
    """All instances that the flags ask for.

    Raises:
        UsageError: a flag has a value that cannot be used.
    """
    _check_numbers(args)
    counts, ends = read_instances(args.instances), read_ends(args.output_tokens)
    engine = _simple(args) if args.step_ms is not None or args.prefill_ms_per_1k is not None else _modelled(args)
    return [
        MockSettings(
            name=rank,
            role=role,
            model=args.served_model_name or engine.model,
            config=_config(args, role, engine),
            costs=engine.costs,
            transfer_ms=engine.transfer_ms,
            kv_bytes_per_token=engine.kv_bytes_per_token,
            first_token_ms=engine.first_token_ms,
            answers=ends,
            tp=args.tp,
            speed=args.speed,
            digests=args.digests,
            seed=args.seed,
            api_key=environ.get("VLLM_API_KEY") or None,
        )
        for role, count in counts.items()
        for number in range(count)
        for rank in ranks_of(InstanceId(_name(args, counts, role, number)), args.dp)
    ]


def _name(args: argparse.Namespace, counts: Mapping[Role, int], role: Role, number: int) -> str:
    alone = args.name and sum(counts.values()) == 1
    return str(args.name) if alone else f"{args.name or role.value}-{number}"


_LEAST = {
    "tp": 1, "dp": 1, "kv_blocks": 1, "block_size": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1,
    "max_model_len": 2,
    "step_ms": 0.001, "prefill_ms_per_1k": 0, "lease_s": 0.001, "start_up_s": 0, "drain_s": 0, "speed": 0.001,
    "link_gb_s": 0.001, "power_cap_w": 1,
}  # fmt: skip
"""Least value of each flag that takes a number."""

_LARGEST = {"tp": 1024, "dp": 1024, "block_size": 1 << 20, "kv_blocks": 1 << 32}
"""Largest values of some; of others it is `LARGEST`."""


def _check_numbers(args: argparse.Namespace) -> None:
    for name, least in _LEAST.items():
        value = getattr(args, name)
        most = _LARGEST.get(name, LARGEST)
        if value is not None and not least <= value <= most:
            raise UsageError(
                f"--{name.replace('_', '-')} {shown(value)}: it must be at least {least:g}, up to {most:g}"
            )
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port {args.port}: a port is a number from 0 to 65535")
    count = sum(read_instances(args.instances).values())
    if args.port and args.port + count - 1 > 65535:
        raise UsageError(f"--port {args.port}: {count} instances need that many ports from there on, up to 65535")


def _link(args: argparse.Namespace, otherwise: Link) -> Link:
    if args.link_gb_s is None:
        return otherwise
    return Link(latency_ms=NIC_LATENCY_MS, gb_s=args.link_gb_s)


def _simple(args: argparse.Namespace) -> _Engine:
    """An engine whose steps take the time in the flags."""
    step_ms = 10.0 if args.step_ms is None else args.step_ms
    per_1k_ms = 0.0 if args.prefill_ms_per_1k is None else args.prefill_ms_per_1k
    link = _link(args, SIMPLE_LINK)
    return _Engine(
        model=args.model,
        costs=SimpleCosts(step_ms=step_ms, prefill_ms_per_1k=per_1k_ms),
        transfer_ms=lambda size_bytes, sharers: link.ms(size_bytes, sharers=sharers),
        kv_bytes_per_token=SIMPLE_BYTES_PER_TOKEN,
        first_token_ms=0.0,
        kv_tokens=SIMPLE_TOKENS,
        batched_tokens=SIMPLE_BATCHED_TOKENS,
        seqs=SEQS,
    )


def _modelled(args: argparse.Namespace) -> _Engine:
    """An engine whose steps take the time that the cost model predicts for the GPU."""
    model, gpu, shape = sizes_of(args.model), gpu_named(args.gpu), Spans(tp=args.tp, dp=args.dp)
    if (why := model.undivided_heads(args.tp)) is not None:
        raise UsageError(f"--tp {args.tp}: {why}")
    kv_dtype = kv_dtype_named(args.kv_cache_dtype)
    if args.kv_cache_dtype and not is_kv_dtype_priced(args.kv_cache_dtype):
        raise UsageError(f"--kv-cache-dtype {args.kv_cache_dtype}: mocks do not know its size; leave it out")
    costs = costs_of(
        model, gpu, shape, profiles=profiles(), kv_dtype=kv_dtype, batched_tokens=args.max_num_batched_tokens
    )
    if args.power_cap_w is not None:
        costs = costs.capped(cap_of(args.power_cap_w, gpu.tdp_w))
    if costs.kv_capacity_tokens < 2:
        raise UsageError(f"--model {args.model}: it does not fit on {args.tp} {gpu.name}; raise --tp, or another --gpu")
    link, streams = _link(args, nic(gpu, gpu)), paths(model, shape, shape)
    return _Engine(
        model=args.model,
        costs=costs,
        transfer_ms=lambda size_bytes, sharers: link.ms(size_bytes, paths=streams, sharers=sharers),
        kv_bytes_per_token=costs.kv_bytes_per_token * copies(model, shape),
        first_token_ms=costs.first_token_ms,
        kv_tokens=costs.kv_capacity_tokens,
        batched_tokens=batched_tokens_default(gpu),
        seqs=seqs_default(gpu.name, gpu.memory_gib),
    )


def _config(args: argparse.Namespace, role: Role, engine: _Engine) -> TwinConfig:
    blocks = args.kv_blocks or engine.kv_tokens // args.block_size
    if not blocks:
        raise UsageError(f"--block-size {args.block_size}: the KV cache has {engine.kv_tokens:,} tokens, not one block")
    longest = args.max_model_len or min(LENGTH_DEFAULT, blocks * args.block_size)
    if longest > blocks * args.block_size:
        have = f"{blocks} blocks of {args.block_size}"
        raise UsageError(f"--max-model-len {longest}: it does not fit into {have}; lower it, or raise --kv-blocks")
    return TwinConfig(
        role=role,
        block_size=args.block_size,
        num_blocks=blocks,
        max_num_batched_tokens=args.max_num_batched_tokens or engine.batched_tokens,
        max_num_seqs=args.max_num_seqs or engine.seqs,
        max_model_len=longest,
        start_up_ns=round(args.start_up_s * 1000 * MS * args.speed),
        lease_s=args.lease_s * args.speed,
        version=Version(async_scheduling=args.timing == "gpu", pull_after_forward=args.timing == "cpu"),
    )
