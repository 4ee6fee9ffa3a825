"""The start of a vLLM server: its flags, its environment, and which of several settings wins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.instance import Role
from engine.vllm.command import CONNECTOR_MODULE, FORKS, SPAWNED_FOR, command, environment, printable
from engine.vllm.spec import EngineSpec, given, value_of

SITE = "/baton/cpu_site"


def spec(**changes: Any) -> EngineSpec:
    fields: dict[str, Any] = {
        "instance": InstanceId("prefill-0"),
        "role": Role.PREFILL,
        "model": "org/model",
        "python": "/env/bin/python",
        "device": "cpu",
        "port": 8100,
        "side_channel_port": 5600,
    }
    return EngineSpec(**(fields | changes))


def flag(argv: list[str], name: str) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else None


def transfer_config(**changes: Any) -> dict[str, Any]:
    text = flag(command(spec(**changes)), "--kv-transfer-config")
    assert text is not None
    config: dict[str, Any] = json.loads(text)
    return config


def env(base: Mapping[str, str] | None = None, **changes: Any) -> dict[str, str]:
    return environment(spec(**changes), base or {}, SITE)


def test_the_server_is_started_as_a_module_with_model_and_address() -> None:
    argv = command(spec(host="10.0.0.1"))
    assert argv[:5] == ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model"]
    assert (flag(argv, "--host"), flag(argv, "--port")) == ("10.0.0.1", "8100")


@pytest.mark.parametrize(
    ("role", "kv_role"),
    [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer"), (Role.BOTH, "kv_both")],
)
def test_role_decides_the_transfer_config(role: Role, kv_role: str) -> None:
    assert transfer_config(role=role) == {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": 120},
    }


def test_a_gpu_engine_keeps_vllms_lease_and_moves_gpu_memory() -> None:
    config = transfer_config(device="gpu")
    assert config["kv_buffer_device"] == "cuda"
    assert "kv_connector_extra_config" not in config


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_our_connector_is_named_with_its_module_and_its_agent_socket(device: str) -> None:
    config = transfer_config(device=device, connector="baton", door="/run/p/door", kv_lease_s=7)
    assert (config["kv_connector"], config["kv_connector_module_path"]) == ("BatonConnector", CONNECTOR_MODULE)
    assert config["kv_connector_extra_config"] == {"kv_lease_duration": 7, "door": "/run/p/door"}
    assert config["kv_load_failure_policy"] == "recompute"
    assert "door" not in transfer_config(connector="baton", door="").get("kv_connector_extra_config", {})
    assert transfer_config(connector="baton", digests=True)["kv_connector_extra_config"]["digests"] is True
    assert "digests" not in transfer_config(connector="nixl", digests=True).get("kv_connector_extra_config", {})


def test_kv_events_come_to_our_socket_unless_the_user_sets_them_otherwise() -> None:
    config = json.loads(flag(command(spec(kv_events="/run/e/events")), "--kv-events-config"))
    assert (config["enable_kv_cache_events"], config["publisher"]) == (True, "zmq")
    assert config["endpoint"] == "ipc:///run/e/events"
    for mine in ((), ("-dp", "4", "-dph"), ("--kv-events-config", "{}"), ("--kv-events-config.publisher", "null")):
        one = spec(kv_events="/run/e/events" if mine else "", extra_args=mine)
        ours = command(one)[: -len(mine) or None]
        assert (one.evictions, "--kv-events-config" in ours) == ("", False)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("connector", ["nixl", "baton"])
def test_mamba_states_have_the_layout_that_a_hand_over_needs(device: str, connector: str) -> None:
    """vLLM sets this layout by itself only on CPU, and only for connectors with vLLM's own names."""
    name = "VLLM_SSM_CONV_STATE_LAYOUT"
    assert env(device=device, connector=connector)[name] == "DS"
    assert env({name: "SD"}, device=device, connector=connector)[name] == "SD"
    assert env(device=device, connector=connector, extra_env={name: "SD"})[name] == "SD"
    assert name not in env(device=device, extra_args=("--kv-transfer-config", "{}"))


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_lease_that_was_asked_for_is_given(device: str) -> None:
    assert transfer_config(device=device, kv_lease_s=5)["kv_connector_extra_config"] == {"kv_lease_duration": 5}


def test_eager_mode_only_on_cpu() -> None:
    assert "--enforce-eager" in command(spec())
    assert "--enforce-eager" not in command(spec(device="gpu"))


def test_flags_left_to_vllm_are_not_given() -> None:
    argv = command(spec())
    for name in ("--max-model-len", "--dtype", "--served-model-name", "--gpu-memory-utilization"):
        assert name not in argv


def test_settings_become_flags() -> None:
    argv = command(spec(max_model_len=2048, dtype="float32", served_name="x", gpu_memory_share=0.45, device="gpu"))
    values = [flag(argv, name) for name in ("--max-model-len", "--dtype", "--served-model-name")]
    assert values == ["2048", "float32", "x"]
    assert flag(argv, "--gpu-memory-utilization") == "0.45"


def test_engines_fetch_media_only_from_hosts_that_the_user_names() -> None:
    """With an image URL, a client could make the engine send requests to any host inside the cluster's network."""
    words = command(spec())
    assert words[words.index("--allowed-media-domains") + 1] == "none.invalid"
    assert environment(spec(), {}, "site")["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
    mine = ("--allowed-media-domains", "pictures.example.org")
    assert command(spec(extra_args=mine)).count("--allowed-media-domains") == 1


@pytest.mark.parametrize(
    ("mine", "pins"),
    [
        ((), True),
        (("--enable-force-include-usage",), False),
        (("--enable_force_include_usage",), False),
        (("--no-enable-force-include-usage",), True),
        (("--enable-force-include-usage", "--no-enable-force-include-usage"), True),
        (("--no-enable-force-include-usage", "--enable-force-include-usage"), False),
        (("--speculative-config", "{}"), False),
        (("--return-sampling-mask",), False),
        (("--no-return-sampling-mask",), True),
        (("--spec-method", "ngram"), False),
        (("--spec-model", "draft"), False),
        (("--spec_tokens=3",), False),
    ],
)
def test_flags_that_rule_pinning_out(mine: tuple[str, ...], pins: bool) -> None:
    """With a count in every chunk, a first token that the router gives early would lack its count."""
    one = spec(extra_args=mine)
    assert one.pins == pins
    assert ("--logits-processors" in command(one)) == pins


def test_the_users_flags_come_last_and_verbatim() -> None:
    mine = ("--seed", "7", "--compilation-config", '{"a b": 1}')
    assert command(spec(extra_args=mine))[-4:] == list(mine)


@pytest.mark.parametrize(
    "mine",
    [
        ("--dtype", "auto"),
        ("--dtype=auto",),
        ("--kv-transfer-config", "{}"),
        ("--kv-transfer-config.kv_connector", "X"),
        ("--kv_transfer_config", "{}"),
        ("--no-enforce-eager",),
        ("--gpu-memory-utilization=0.2",),
        ("--shutdown-timeout", "3"),
        ("--max_model_len=99",),
    ],
)
def test_a_flag_the_user_gives_is_not_given_twice(mine: tuple[str, ...]) -> None:
    argv = command(spec(dtype="float32", max_model_len=2048, gpu_memory_share=0.5, extra_args=mine))
    name = mine[0].partition("=")[0].partition(".")[0].replace("_", "-").replace("--no-", "--")
    same = [word for word in argv[: -len(mine)] if word.partition("=")[0] == name]
    assert not same


@pytest.mark.parametrize(
    ("args", "is_given"),
    [
        (("-tp", "2"), True),
        (("-tp=2",), True),
        (("-tp2",), True),
        (("--tensor-parallel-size", "2"), True),
        (("--tensor_parallel_size=2",), True),
        (("-t", "p"), False),
        (("--tensor-parallel-size-x", "2"), False),
        (("--seed", "2"), False),
        ((), False),
    ],
)
def test_given_knows_every_way_to_write_a_flag(args: tuple[str, ...], is_given: bool) -> None:
    assert given(args, "--tensor-parallel-size", "-tp") is is_given


@pytest.mark.parametrize(
    ("args", "value"),
    [
        (("-tp", "2"), "2"),
        (("-tp=3",), "3"),
        (("-tp4",), "4"),
        (("--tensor_parallel_size=5",), "5"),
        (("-tp", "2", "--tensor-parallel-size", "6"), "6"),
        (("--seed", "2"), None),
        (("-tp",), None),
    ],
)
def test_value_of_takes_the_last_one(args: tuple[str, ...], value: str | None) -> None:
    assert value_of(args, "--tensor-parallel-size", "-tp") == value


@pytest.mark.parametrize(
    "mine", [("--port", "1"), ("--host=x",), ("--model", "m"), ("--ssl_keyfile", "f"), ("--uds=s",)]
)
def test_flags_that_would_make_the_engine_unreachable_are_refused(mine: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=mine[0].partition("=")[0].replace("_", "-")):
        spec(extra_args=mine)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01])
def test_an_impossible_memory_share_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="gpu-memory-share"):
        spec(gpu_memory_share=share)


def test_cpu_environment() -> None:
    made = env(cores=(2, 3))
    assert made == {
        "BATON_CPU_FORKS": "1",
        "KMP_BLOCKTIME": "0",
        "OMP_NUM_THREADS": "2",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        "PYTHONPATH": SITE,
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "2,3",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    }


@pytest.mark.parametrize("place", [{"cores": (0,)}, {"unbound_threads": 1}])
def test_vllms_processes_are_forked_where_baton_places_their_threads(place: dict[str, Any]) -> None:
    assert env(**place)[FORKS] == "1"
    assert env({FORKS: "0"}, **place)[FORKS] == "0"
    assert env(**place, extra_env={FORKS: "0"})[FORKS] == "0"
    assert FORKS not in env()  # vLLM chooses cores and threads for its workers as it spawns them


@pytest.mark.parametrize("name", SPAWNED_FOR)
def test_what_openmp_reads_at_a_process_start_has_vllm_spawn_it(name: str) -> None:
    assert FORKS not in env({name: "1"}, cores=(0,))
    assert FORKS not in env(cores=(0,), extra_env={name: "1"})


def test_gpu_environment_has_nothing_of_the_cpus() -> None:
    made = env(device="gpu", gpus=("1", "3"))
    assert made == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "1,3",
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    }


def test_reads_of_gpu_memory_do_not_go_over_tcp_unless_the_user_says_so() -> None:
    reads = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
    assert env({reads: "auto"}, device="gpu")[reads] == "auto"
    assert env(device="gpu", extra_env={reads: "off"})[reads] == "off"
    assert reads not in env()


def test_gpus_have_nvidia_smis_numbers_unless_the_user_says_otherwise() -> None:
    order = "CUDA_DEVICE_ORDER"
    assert env({order: "FASTEST_FIRST"}, device="gpu", gpus=("1",))[order] == "FASTEST_FIRST"
    assert order not in env(device="gpu")  # the engine has every GPU, whatever their numbers


def test_the_environment_we_were_started_in_wins_over_our_defaults_but_not_over_flags() -> None:
    base = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "OMP_NUM_THREADS": "9",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "all",
        "HF_TOKEN": "secret",
    }
    made = env(base, cores=(0, 1))
    assert (made["VLLM_CPU_KVCACHE_SPACE"], made["OMP_NUM_THREADS"], made["HF_TOKEN"]) == ("4", "9", "secret")
    assert (made["VLLM_NIXL_SIDE_CHANNEL_PORT"], made["VLLM_CPU_OMP_THREADS_BIND"]) == ("5600", "0,1")


def test_without_cores_vllm_binds_as_it_likes() -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" not in env()
    assert env({"VLLM_CPU_OMP_THREADS_BIND": "0-3"})["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"


def test_threads_that_share_cores_are_bound_to_none() -> None:
    made = env(unbound_threads=1)
    assert (made["VLLM_CPU_OMP_THREADS_BIND"], made["OMP_NUM_THREADS"]) == ("nobind", "1")


def test_the_users_environment_wins_over_everything() -> None:
    made = env(cores=(0,), extra_env={"VLLM_CPU_OMP_THREADS_BIND": "5", "VLLM_NIXL_SIDE_CHANNEL_PORT": "7"})
    assert (made["VLLM_CPU_OMP_THREADS_BIND"], made["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == ("5", "7")


def test_our_start_up_folder_stands_before_the_users_path() -> None:
    assert env({"PYTHONPATH": "/mine:/other"})["PYTHONPATH"] == f"{SITE}:/mine:/other"
    assert env({"PYTHONPATH": "/mine"}, extra_env={"PYTHONPATH": "/newer"})["PYTHONPATH"] == f"{SITE}:/newer"
    assert "PYTHONPATH" not in env(device="gpu")


@pytest.mark.parametrize("mine", [("--kv-cache-memory-bytes", "1G"), ("--gpu-memory-utilization=0.1",)])
def test_a_cache_size_among_the_users_flags_is_not_overruled_by_our_default(mine: tuple[str, ...]) -> None:
    assert "VLLM_CPU_KVCACHE_SPACE" not in env(extra_args=mine)


def test_each_tensor_parallel_rank_gets_its_own_cores() -> None:
    made = env(cores=(0, 1, 2, 3), extra_args=("-tp", "2"))
    assert (made["VLLM_CPU_OMP_THREADS_BIND"], made["OMP_NUM_THREADS"]) == ("0,1|2,3", "2")


@pytest.mark.parametrize(
    ("args", "bound"),
    [
        ("-dp 2", "0,1|2,3"),
        ("--data-parallel-size=2 -tp 2", "0|1|2|3"),
        ("-dp 4 -dpl 2", "0,1|2,3"),
        ("-dp 2 --data-parallel-rank 1", "0,1,2,3"),
        ("-dp 1", "0,1,2,3"),
    ],
)
def test_each_data_parallel_rank_here_gets_its_own_cores(args: str, bound: str) -> None:
    """vLLM takes each rank's part of the list, and does not start if a part is missing."""
    assert env(cores=(0, 1, 2, 3), extra_args=tuple(args.split()))["VLLM_CPU_OMP_THREADS_BIND"] == bound


def test_the_user_can_have_compiled_code_on_cpu() -> None:
    assert "TORCHDYNAMO_DISABLE" not in env(extra_args=("--no-enforce-eager",))
    assert env({"TORCHDYNAMO_DISABLE": "0"})["TORCHDYNAMO_DISABLE"] == "0"


def test_keys_stay_out_of_the_argument_list_and_out_of_logs() -> None:
    base = {"VLLM_API_KEY": "k1"}
    assert "k1" not in " ".join(command(spec()))
    assert env(base)["VLLM_API_KEY"] == "k1"
    shown = printable(["x", "--api-key", "k1", "k2", "--seed", "3", "--hf_token=k4"])
    assert shown == ["x", "--api-key", "***", "***", "--seed", "3", "--hf_token=***"]


def test_the_key_of_a_watermark_is_in_no_log() -> None:
    """vLLM takes it as JSON, or as one flag for each of its fields."""
    config = '{"key": "k1"}'
    assert printable(["--watermark-config", config, "--seed", "3"]) == ["--watermark-config", "***", "--seed", "3"]
    assert printable([f"--watermark_config={config}"]) == ["--watermark_config=***"]
    assert printable(["--watermark-config.key", "k1"]) == ["--watermark-config.key", "***"]
    assert printable(["--watermark_config.key=k1"]) == ["--watermark_config.key=***"]


def test_probes_use_the_key_the_engine_asks_for() -> None:
    base = {"VLLM_API_KEY": "of-the-environment"}
    assert spec().api_key({}) is None
    assert spec().api_key(base) == "of-the-environment"
    assert spec(extra_env={"VLLM_API_KEY": "of-the-engine"}).api_key(base) == "of-the-engine"
    assert spec(extra_args=("--api-key", "of-the-flag")).api_key(base) == "of-the-flag"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8100"),
        ("0.0.0.0", "http://127.0.0.1:8100"),
        ("::", "http://[::1]:8100"),
        ("node7", "http://node7:8100"),
        ("fd00::1", "http://[fd00::1]:8100"),
    ],
)
def test_the_url_is_an_address_that_clients_can_reach(host: str, url: str) -> None:
    assert spec(host=host).url == url


def test_the_wait_at_a_stop_follows_the_users_own_timeout() -> None:
    assert spec(shutdown_timeout_s=30).stop_s == 30
    assert spec(extra_args=("--shutdown-timeout=90",)).stop_s == 90
