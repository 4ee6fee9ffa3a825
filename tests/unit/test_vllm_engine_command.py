"""`baton engine`: from flags to the specification of an engine, and one clear line for each wrong value."""

from __future__ import annotations

import argparse
import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.simulated import one

from baton.commands import engine
from baton.ports import FREE_PORTS, HeldPorts
from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.instance import Role
from engine.vllm.hardware import EngineHardware
from engine.vllm.placement import CudaGpu
from engine.vllm.spec import EngineSpec
from k8s.crd.settings import Kubernetes
from sim.instance import rules_of

pytestmark = pytest.mark.sockets

CPU = EngineHardware(gpus=(), cores=(0, 1), vllm="0.32.0", nixl="1.5.1")
GPU = EngineHardware(gpus=(CudaGpu(id="0"),), cores=(0, 1), vllm="0.32.0", nixl="1.5.1")
CORE = min(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_hardware", lambda _: CPU)


def spec_of(*words: str, vllm_args: tuple[str, ...] = (), environ: dict[str, str] | None = None) -> Any:
    args = _args(*words, vllm_args=vllm_args)
    with HeldPorts() as ports:
        return engine.spec_of(args, environ or {}, ports)


def _args(*words: str, vllm_args: tuple[str, ...] = ()) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    args = parser.parse_args(words)
    args.vllm_args = list(vllm_args)
    return args


def test_without_a_model_the_bundled_one_is_served() -> None:
    spec = spec_of()
    assert Path(spec.model).name == "model"
    assert (spec.served_name, spec.dtype, spec.max_model_len) == ("baton-tiny", "float32", 2048)
    assert (spec.instance, spec.role, spec.device) == ("both-0", Role.BOTH, "cpu")


def test_a_start_may_take_as_long_as_in_a_pod() -> None:
    """`baton up` has no flag for it, and its first start may download the weights."""
    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    assert parser.parse_args([]).start_timeout == Kubernetes().start_s


@pytest.mark.parametrize("words", ["--start-timeout nan", "--start-timeout 0", "--drain-s inf", "--linger-s -1"])
def test_a_time_is_a_number_that_a_clock_can_reach(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(words.split())
    assert f"{words.split()[1]} must be a number" in capsys.readouterr().err


def test_vllms_build_for_gpus_is_not_started_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_hardware", lambda _: replace(CPU, lacks_gpu=True))
    with pytest.raises(UsageError, match=r"no GPU is found.*CUDA_VISIBLE_DEVICES=0, or --gpu 0"):
        spec_of()
    assert spec_of("--gpu", "0").device == "gpu"
    assert spec_of("--engine", "mock").device == "gpu"


def test_any_other_model_keeps_its_own_settings() -> None:
    spec = spec_of(
        "org/model", "--role", "decode", "--name", "d-7", "--served-model-name", "x", vllm_args=("--seed", "1")
    )
    assert (spec.model, spec.served_name, spec.dtype, spec.max_model_len) == ("org/model", "x", None, None)
    assert (spec.instance, spec.role, spec.extra_args) == ("d-7", Role.DECODE, ("--seed", "1"))


def test_a_folder_must_hold_a_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        spec_of(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"no config\.json"):
        spec_of(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert spec_of(str(tmp_path)).model == str(tmp_path)


def test_port_zero_is_a_free_one() -> None:
    spec = spec_of()
    assert spec.port in FREE_PORTS
    assert spec.side_channel_port in FREE_PORTS


def test_two_engines_that_start_at_once_choose_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes its port a quarter of a minute later, and shares it with another vLLM of the same user."""
    drawn = iter([19400, 19401, 19400, 19401, 19402, 19402, 19403])
    monkeypatch.setattr("secrets.choice", lambda _: next(drawn))
    monkeypatch.setattr(engine, "_cannot_open", lambda *_: None)
    with HeldPorts() as one, HeldPorts() as other:
        specs = [engine.spec_of(_args(), {}, ports) for ports in (one, other)]
    assert [(spec.port, spec.side_channel_port) for spec in specs] == [(19400, 19401), (19402, 19403)]


@pytest.mark.parametrize("flag", ["--port", "--side-channel-port"])
def test_two_engines_that_start_at_once_do_not_share_a_port(flag: str) -> None:
    with HeldPorts() as one, HeldPorts() as other:
        engine.spec_of(_args(flag, "19410"), {}, one)
        with pytest.raises(UsageError, match=f"{flag} 19410 on 127.0.0.1: address already in use; choose another port"):
            engine.spec_of(_args(flag, "19410"), {}, other)


def test_a_busy_port_is_named_with_its_flag() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port {port} on 127.0.0.1: address already in use"):
            spec_of("--port", str(port))
        with pytest.raises(UsageError, match=f"--side-channel-port {port}"):
            spec_of("--side-channel-port", str(port))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--host", "203.0.113.1"), "--port 0: cannot assign"),
        (("--cores", "x"), "--cores x"),
        (("--cores", "0-"), "--cores 0-"),
        (("--cores", "3-1"), "not usable here"),
        (("--cores", "99999"), "not usable here"),
        (("--env", "X"), "NAME=VALUE"),
        (("--gpu-memory-share", "2"), "gpu-memory-share"),
        (("--kv-host-gib", "nan"), "--kv-host-gib nan: give a size from 0 to 1,000,000 GiB, or leave it out"),
        (("--engine", "mock", "--kv-host-gib", "nan"), "--kv-host-gib nan: give a size from 0"),
        (("--kv-host-gib", "1", "--kv-disk-gib", "1e300"), "--kv-disk-gib 1e.300: give a size"),
        (("--kv-disk-gib", "-1"), "--kv-disk-gib -1: give a size"),
    ],
)
def test_wrong_values(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec_of(*words)


def test_tenants_have_names_and_there_are_not_too_many() -> None:
    assert engine.tenants_of(["b", "a.1", "b"]) == ("b", "a.1")
    for names in (["a b"], [""], ["a:b"], [f"t{number}" for number in range(65)]):
        with pytest.raises(UsageError, match="--tenant"):
            engine.tenants_of(names)


def test_cores() -> None:
    assert spec_of("--cores", f"{CORE}").cores == (CORE,)
    assert spec_of("--cores", f"{CORE}-{CORE},{CORE}").cores == (CORE,)


def test_the_environment_may_name_the_side_channel() -> None:
    spec = spec_of(environ={"VLLM_NIXL_SIDE_CHANNEL_PORT": "23457", "VLLM_NIXL_SIDE_CHANNEL_HOST": "localhost"})
    assert (spec.side_channel_host, spec.side_channel_port) == ("localhost", 23457)
    with pytest.raises(UsageError, match="VLLM_NIXL_SIDE_CHANNEL_PORT=x"):
        spec_of(environ={"VLLM_NIXL_SIDE_CHANNEL_PORT": "x"})


def test_peers_cannot_connect_to_a_wildcard() -> None:
    assert spec_of("--host", "0.0.0.0").side_channel_host == "127.0.0.1"


@pytest.mark.parametrize("flag", ["--host", "--agent-host"])
@pytest.mark.parametrize("wildcard", ["", "0.0.0.0", "::"])
def test_a_wildcard_that_is_announced_to_other_machines_is_a_warning(
    capsys: pytest.CaptureFixture[str], flag: str, wildcard: str
) -> None:
    """Routers on this machine reach the engine, whichever machine the registry is on."""
    spec_of(flag, wildcard, "--registry", "redis://203.0.113.9:6379")
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith(f"baton: {flag} ")]
    assert line.startswith(f"baton: {flag} {wildcard or repr('')}: ")
    assert f"give {flag} the address" in line


@pytest.mark.parametrize("host", [None, "127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_an_address_of_this_machine_alone_that_is_announced_to_others_is_a_warning(
    capsys: pytest.CaptureFixture[str], host: str | None
) -> None:
    """The default is one. Children of `baton up` (`--lifeline`) are asked by its router, on this machine, alone."""
    words = () if host is None else ("--host", host)
    spec_of(*words, "--registry", "redis://203.0.113.9:6379")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"baton: --host {host or '127.0.0.1'}: only this machine reaches it")
    assert "--registry is on 203.0.113.9" in line and "give --host the address" in line


@pytest.mark.parametrize(
    "words",
    [
        ("--host", "0.0.0.0"),
        ("--host", "0.0.0.0", "--registry", "redis://127.0.0.1:6379"),
        ("--host", "0.0.0.0", "--registry", "redis://localhost:6379"),
        ("--host", "0.0.0.0", "--registry", "rediss://[::1]:6379"),
        ("--host", "0.0.0.0", "--registry", "redis://[not-an-address"),
        (),
        ("--registry", "redis://127.0.0.1:6379"),
        ("--registry", "redis://localhost:6379"),
        ("--registry", "rediss://[::1]:6379"),
        ("--lifeline", "--registry", "redis://203.0.113.9:6379"),
    ],
)
def test_addresses_that_may_be_announced(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert spec_of(*words).url.startswith("http://127.0.0.1:")
    assert not capsys.readouterr().err


def test_without_nixl_no_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM says so only when the weights are loaded and compiled: after minutes."""
    monkeypatch.setattr(engine, "find_hardware", lambda _: replace(GPU, nixl=None))
    with pytest.raises(UsageError, match="NIXL is not installed in this Python"):
        spec_of()
    assert spec_of("--engine", "mock")
    assert spec_of(vllm_args=("--kv-transfer-config", "{}"))


@pytest.mark.parametrize(("version", "told"), [("0.11.2", True), ("0.32.0+cu130", False), ("unknown", False)])
def test_another_version_of_vllm_is_told(
    version: str, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may end with "unrecognized arguments", and they are none of the user's."""
    monkeypatch.setattr(engine, "find_hardware", lambda _: replace(GPU, vllm=version))
    spec_of()
    said = capsys.readouterr().err
    assert said == ("baton: both-0: vLLM 0.11.2; Baton is tested with 0.32.0\n" if told else "")
    spec_of("--engine", "mock")
    assert capsys.readouterr().err == ""


def test_a_gpu_that_vllms_build_for_cpus_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run on the CPU, without what makes it fit there, and nothing would say so."""
    monkeypatch.setattr(engine, "find_hardware", lambda _: replace(CPU, vllm="0.32.0+cpu", cpu_build=True))
    with pytest.raises(UsageError, match=r"--gpu 1: this Python has vLLM's build for CPUs \(0.32.0\+cpu\)"):
        spec_of("--gpu", "1")
    assert spec_of().device == "cpu"
    assert spec_of("--engine", "mock", "--gpu", "1").device == "gpu"


def test_a_gpu_is_used_when_there_is_one_or_when_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spec_of("--gpu", "1, 2").gpus == ("1", "2")
    assert spec_of("--gpu", "1").device == "gpu"
    monkeypatch.setattr(engine, "find_hardware", lambda _: GPU)
    assert (spec_of().device, spec_of().gpus) == ("gpu", ())


def test_an_engine_starts_apart_from_others_on_the_gpus_that_it_uses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert engine.turns_of(spec_of(), {}) is None, "it runs on CPU"
    named = engine.turns_of(spec_of("--gpu", "0,1", "--name", "named-0"), {})
    monkeypatch.setattr(engine, "find_hardware", lambda _: GPU)
    found = engine.turns_of(spec_of(), {})
    assert named is not None and found is not None and named.take() == ""
    assert found.take().startswith("named-0 ")
    named.release()


def test_a_missing_vllm_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_hardware", lambda _: EngineHardware(gpus=(), cores=(0,), vllm=None, nixl=None))
    with pytest.raises(UsageError, match="vLLM is not installed"):
        spec_of()


def test_the_connector_is_batons_only_with_an_identity_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` chooses Baton's connector only with a registry, ticket keys and an identity file, because otherwise no
    agent introduces its peers. More cases: `test_transfer_flag.py`.
    """
    monkeypatch.setattr(engine, "check_instance_keys", lambda *_: None)
    keys = tmp_path / "p"
    here = ("--registry", "redis://10.0.0.9:6379", "--ticket-keys-file", str(keys))
    assert (spec_of().connector, spec_of(*here).connector) == ("nixl", "nixl")
    Path(f"{keys}.identity").touch()
    spec = spec_of(*here)
    assert spec.connector == "baton"
    assert spec.door.endswith("/door")
    assert spec_of(*here, "--transfer", "nixl").connector == "nixl"
    with pytest.raises(UsageError, match="--transfer baton"):
        spec_of("--digests")


def test_kv_events_are_published_only_with_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a registry no agent makes the socket's folder, and vLLM would not start."""
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert spec_of().kv_events == ""
    assert re.fullmatch(r"/s/baton/events/both-0-\d+/inproc", spec_of("--registry", "redis://10.0.0.9").kv_events)


def test_the_users_environment_is_kept_apart() -> None:
    assert spec_of("--env", "A=1", "--env", "B=x=y").extra_env == {"A": "1", "B": "x=y"}


@pytest.mark.parametrize(
    ("words", "name", "gib", "seqs"),
    [
        ((), "NVIDIA H100 80GB HBM3", 79.6, 1024),
        ((), "NVIDIA A100-SXM4-80GB", 80.0, 256),
        ((), "NVIDIA B200", 180.0, 1024),
        ((), "NVIDIA L4", 22.5, 256),
        (("--max-num-seqs", "64"), "NVIDIA H100 80GB HBM3", 79.6, 64),
        (("--max-num-seqs=64", "-dp", "4"), "NVIDIA H100 80GB HBM3", 79.6, 64),
    ],
)
def test_an_engine_has_as_many_credits_as_it_runs_requests_at_once(
    words: tuple[str, ...], name: str, gib: float, seqs: int
) -> None:
    """With 256 credits, an H100, which runs 1,024 requests at once, would be partly idle."""
    gpu = CudaGpu(id="0", name=name, memory_mib=round(gib * 1024))
    assert engine.seqs_max(words, (gpu,), ()) == seqs


@pytest.mark.parametrize("role", Role)
def test_simulated_agents_have_the_same_rules(role: Role) -> None:
    simulated = one("i", role, config={"max_num_seqs": 96})
    spec = EngineSpec(
        instance=InstanceId("i"),
        role=role,
        model="m",
        python="p",
        device="cpu",
        port=1,
        side_channel_port=2,
        seqs_max=96,
    )
    assert engine.agent_rules(spec)[role] == rules_of(simulated)


def test_the_smallest_of_an_engines_gpus_decides_its_credits() -> None:
    gpus = (
        CudaGpu(id="0", name="NVIDIA H100", memory_mib=81_000),
        CudaGpu(id="1", name="NVIDIA L4", memory_mib=23_000),
    )
    assert engine.seqs_max((), gpus, ("0",)) == 1024
    assert engine.seqs_max((), gpus, ()) == 256
    assert engine.seqs_max((), (), ()) == 256


def test_a_gpu_of_unknown_size_has_the_credits_of_a_large_one() -> None:
    """Without nvidia-smi. With too few credits an H100 would be partly idle."""
    assert engine.seqs_max((), (CudaGpu(id="0"),), ()) == 1024
    assert engine.seqs_max((), (), ("0",)) == 1024
    assert engine.seqs_max(("--max-num-seqs", "64"), (CudaGpu(id="0"),), ()) == 64
    assert engine.seqs_max((), (CudaGpu(id="0", name="NVIDIA L4", memory_mib=23_000),), ("GPU-abc",)) == 256
