"""`transfer: {connector: baton}` and `--transfer baton` reach the engine, with an agent socket (`--door`) for each."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.clusterfile import read
from baton.commands import engine, up
from baton.plan import PlacedEngine, WantedEngine, from_file, templates
from baton.ray_fleet import launches
from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.instance import Role
from engine.vllm.hardware import EngineHardware
from engine.vllm.placement import CudaGpu, MachineShare
from engine.vllm.transfer import left_by_flags


def planned(wanted: WantedEngine) -> list[str]:
    share = MachineShare(cores=(0,), gpus=())
    return PlacedEngine(wanted=wanted, port=1, agent_port=2, side_channel_port=3, placed=share).words([])


def test_the_cluster_file_names_the_connector(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("models: [{name: baton-tiny}]\ntransfer: {connector: baton}\n")
    assert [each.connector for each in from_file(read(str(file)).usable(), [])] == ["baton", "baton"]
    file.write_text("models: [{name: baton-tiny}]\ntransfer: {connector: baton, digests: true}\n")
    with ExitStack() as closing:
        doors, _ = up._with_doors(from_file(read(str(file)).usable(), []), closing)
        assert all("--digests" in planned(each) for each in doors)
    file.write_text("models: [{name: baton-tiny}]\n")
    assert {each.connector for each in from_file(read(str(file)).usable(), [])} == {"auto"}


def test_an_engine_without_a_given_socket_keeps_what_the_file_says_of_digests_and_peers(tmp_path: Path) -> None:
    """On Ray no socket is given to an engine: it chooses one on its own machine."""
    file = tmp_path / "baton.yaml"
    file.write_text("models: [{name: baton-tiny}]\ntransfer: {connector: baton, digests: true, peers: false}\n")
    launch = launches(templates(read(str(file)).usable(), []), ["--registry", "redis://h:1"], None, None)
    for pool in ("prefill", "decode"):
        words = launch(f"{pool}-0", pool).words
        assert {"--digests", "--no-peers"} <= {*words} and "--door" not in words
    file.write_text("models: [{name: baton-tiny}]\ntransfer: {peers: false}\n")
    assert all("--no-peers" in planned(each) for each in from_file(read(str(file)).usable(), []))
    file.write_text("models: [{name: baton-tiny}]\n")
    assert not {"--digests", "--no-peers"} & {
        word for each in from_file(read(str(file)).usable(), []) for word in planned(each)
    }


def test_the_cluster_file_names_the_tiers(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("models: [{name: baton-tiny}]\nkv: {host_gib: 64, disk_gib: 0.5, disk_folder: /x}\n")
    for each in from_file(read(str(file)).usable(), []):
        words = " ".join(planned(each))
        assert "--kv-host-gib 64 --kv-disk-gib 0.5 --kv-disk-folder /x" in words
    file.write_text("models: [{name: baton-tiny}]\n")
    assert not [word for each in from_file(read(str(file)).usable(), []) for word in planned(each) if "--kv" in word]


def test_the_cluster_file_names_the_tenants_of_a_model(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("models: [{name: a/b, tenants: [ann, bob]}, {name: c/d}]\ntenants: {ann: {}, bob: {}}\n")
    words = {each.name: planned(each) for each in from_file(read(str(file)).usable(), [])}
    assert len(words) == 4
    for name, each in words.items():
        whose = [each[at + 1] for at, word in enumerate(each) if word == "--tenant"]
        assert whose == (["ann", "bob"] if name.startswith("b-") else []), name


def test_each_engine_gets_a_socket_of_its_own_that_is_removed_with_the_cluster() -> None:
    wanted = [WantedEngine(name=f"p-{number}", role=Role.PREFILL, model=None, connector="baton") for number in range(2)]
    with ExitStack() as closing:
        doors, _ = up._with_doors(wanted, closing)
        folder = Path(doors[0].door).parents[1]
        assert folder.stat().st_mode & 0o077 == 0 and len({each.door for each in doors}) == 2
        words = planned(doors[0])
        assert words[words.index("--transfer") + 1] == "baton" and words[words.index("--door") + 1] == doors[0].door
    assert not folder.exists()


@pytest.mark.parametrize("change", [{"connector": "nixl"}, {"engine": "mock"}])
def test_engines_without_batons_connector_get_no_socket(change: dict[str, str]) -> None:
    wanted = replace(WantedEngine(name="p", role=Role.PREFILL, model=None, connector="baton"), **change)
    with ExitStack() as closing:
        assert up._with_doors([wanted], closing)[0] == [wanted]
    words = planned(wanted)
    assert "--door" not in words
    assert (
        "nixl" in words if wanted.engine == "vllm" else "--transfer" not in words
    )  # without the flag the engine would choose by itself


HERE = EngineHardware(gpus=(), cores=(0, 1), vllm="0.32.0", nixl="1.5.1")


@pytest.mark.parametrize(
    ("changed", "hardware", "connector"),
    [
        ({}, HERE, "baton"),
        ({"connector": "nixl"}, HERE, "nixl"),
        ({}, replace(HERE, gpus=(CudaGpu(id="0"),)), "baton"),
        ({"vllm_args": ("--enable-sleep-mode",)}, HERE, "nixl"),
        ({}, replace(HERE, vllm="0.33.0"), "nixl"),
        ({"connector": "baton"}, replace(HERE, vllm="0.33.0"), "baton"),
        ({"ticket_keys_file": None}, HERE, "nixl"),
        ({"vllm_args": ("--kv-transfer-config", "{}")}, HERE, "nixl"),
        ({"vllm_args": ("-dp", "2")}, HERE, "baton"),
        ({"vllm_args": ("-pp", "2")}, HERE, "nixl"),
    ],
    ids=["on CPU", "asked", "on GPUs", "sleep mode", "another vLLM", "asked, another vLLM", "no keys",
         "the user's own", "ranks", "stages"],
)  # fmt: skip
def test_the_connector_that_auto_chooses(changed: dict[str, Any], hardware: EngineHardware, connector: str) -> None:
    wanted = WantedEngine(name="p", role=Role.PREFILL, model=None, connector="auto", ticket_keys_file="keys")
    assert [each.connector for each in up._with_connectors([replace(wanted, **changed)], hardware)] == [connector]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ("--data-parallel-size 2", None),
        ("--data-parallel-size 4 -dpl 4", None),
        ("--data-parallel-size 4 -dpl 2", "data parallelism"),
        ("--data-parallel-start-rank=2 -dp 4 -dpl 2", "data parallelism"),
        ("-dp 2 -dpl 1 --data-parallel-hybrid-lb", "data parallelism"),
        ("--data-parallel-size 2 --data-parallel-rank 1", None),
        ("-pp 2", "pipeline parallelism"),
        ("--prefill-context-parallel-size 2", "context parallelism"),
        ("-dcp=2", "context parallelism"),
        ("--enable-sleep-mode", "sleep mode"),
        ("--no-enable-sleep-mode", None),
        ("-dp 4 --nnodes 2", "data parallelism"),
        ("-dp 4 --data-parallel-backend ray", "data parallelism"),
        ("-dp 4 --data-parallel-backend ray -dpl 4 --nnodes=2", None),
        ("-tp 4 --nnodes 2", None),
        ("-dp 1 -pp 1 -tp 2 --seed 2", None),
        ("--data-parallel-size-local 1", None),
        ("", None),
    ],
)
def test_flags_that_need_vllms_own_connector(args: str, why: str | None) -> None:
    assert left_by_flags(tuple(args.split())) == why


def test_instances_of_one_model_have_one_connector() -> None:
    """Two different connectors cannot hand over to each other. So if one instance must use vLLM's connector, all
    instances of its model do.
    """
    wanted = WantedEngine(name="d", role=Role.DECODE, model="/m", connector="auto", ticket_keys_file="keys")
    stages = replace(wanted, name="p", role=Role.PREFILL, vllm_args=("-pp", "2"))
    other = replace(wanted, name="o", model="/n")
    assert [each.connector for each in up._with_connectors([stages, wanted, other], HERE)] == ["nixl", "nixl", "baton"]
    asked = [replace(stages, connector="baton"), wanted]
    assert [each.connector for each in up._with_connectors(asked, HERE)] == ["baton", "baton"]


def test_a_single_engine_has_its_socket_in_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    args = argparse.Namespace(engine="vllm", door=None)
    assert engine._door(args, "baton", InstanceId("p"), 8100, 1) == f"{tmp_path}/baton/doors/p-8100/door"
    args.door = "/run/" + "x" * 120
    with pytest.raises(UsageError, match="--door"):
        engine._door(args, "baton", InstanceId("p"), 8100, 1)
    assert engine._door(args, "nixl", InstanceId("p"), 8100, 1) == ""
