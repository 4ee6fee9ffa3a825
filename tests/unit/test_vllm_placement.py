"""Which cores and GPUs of a machine each engine gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.plan import WantedEngine, place
from baton.ports import HeldPorts
from cluster.errors import UsageError
from cluster.instance import Role
from engine.vllm.hardware import EngineHardware
from engine.vllm.placement import CudaGpu, MachineShare, share, split, visible_gpus

SMI = "0, GPU-aaaa, 81559, NVIDIA H100, 80GB\n1, GPU-bbbb, 81559, NVIDIA H100\n2, GPU-bbcc, [N/A], Odd\n"


def gpus(count: int) -> list[CudaGpu]:
    return [CudaGpu(id=str(index)) for index in range(count)]


def test_two_engines_on_two_cores_get_one_each() -> None:
    assert share(2, [], (0, 1)) == (MachineShare(cores=(0,)), MachineShare(cores=(1,)))


def test_cores_are_split_into_contiguous_parts() -> None:
    assert [part.cores for part in share(3, [], range(8))] == [(0, 1), (2, 3, 4), (5, 6, 7)]


def test_engines_that_have_to_share_cores_are_bound_to_none() -> None:
    """Two engines pinned to one core starve each other during their handshake: a first token takes 5 to 24 s."""
    assert share(5, [], (4, 6)) == (MachineShare(threads=1),) * 5


def test_an_engine_with_a_gpu_for_itself_keeps_vllms_memory_default() -> None:
    assert share(2, gpus(4), (0, 1)) == (MachineShare(gpus=("0",)), MachineShare(gpus=("1",)))


def test_an_instance_that_is_too_large_is_named_with_what_makes_it_so() -> None:
    small = WantedEngine(name="prefill-0", role=Role.PREFILL, model=None)
    large = WantedEngine(name="decode-0", role=Role.DECODE, model=None, vllm_args=("-tp", "2", "-dp", "2"))
    hardware = EngineHardware(gpus=tuple(gpus(2)), cores=(0,), vllm=None, nixl=None)
    with pytest.raises(UsageError) as refused:
        place([small, large], hardware, HeldPorts())
    assert str(refused.value) == (
        "instance decode-0 needs 4 GPUs, and this machine has 2: lower its shape (tp, pp, dp), or -tp/-pp/-dp after --"
    )


def test_two_engines_on_one_gpu_split_its_memory() -> None:
    assert share(2, gpus(1), ()) == (MachineShare(gpus=("0",), gpu_memory_share=0.45),) * 2


def test_the_fullest_gpu_decides_the_memory_of_all() -> None:
    parts = share(3, gpus(2), ())
    assert [part.gpus for part in parts] == [("0",), ("1",), ("0",)]
    assert {part.gpu_memory_share for part in parts} == {0.45}


def test_engines_of_several_gpus() -> None:
    assert [part.gpus for part in share(2, gpus(4), (), gpus_each=2)] == [("0", "1"), ("2", "3")]


def test_without_known_cores_no_engine_is_bound() -> None:
    assert share(2, [], ()) == (MachineShare(), MachineShare())


@given(cores=st.lists(st.integers(0, 300), min_size=1, max_size=64, unique=True), parts=st.integers(1, 80))
def test_split_is_fair_and_complete(cores: list[int], parts: int) -> None:
    made = split(cores, parts)
    assert len(made) == parts
    sizes = [len(part) for part in made]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if parts <= len(cores):
        assert [core for part in made for core in part] == cores


@given(engines=st.integers(1, 16), count=st.integers(1, 8), each=st.integers(1, 4))
def test_no_gpu_is_promised_more_memory_than_it_has(engines: int, count: int, each: int) -> None:
    each = min(each, count)
    used: dict[str, float] = {}
    for part in share(engines, gpus(count), (), gpus_each=each):
        assert len(set(part.gpus)) == each
        for gpu in part.gpus:
            used[gpu] = used.get(gpu, 0.0) + (part.gpu_memory_share or 0.9)
    assert max(used.values()) <= 0.9 + 1e-9


@pytest.mark.parametrize(
    ("part", "flags", "words"),
    [
        (MachineShare(cores=(0, 1)), ["--cores", "0,1"], "cores 0, 1"),
        (MachineShare(cores=(3,)), ["--cores", "3"], "core 3"),
        (MachineShare(threads=1), ["--threads", "1"], "shared cores"),
        (MachineShare(gpus=("0",)), ["--gpu", "0"], "GPU 0"),
        (
            MachineShare(gpus=("0", "1"), gpu_memory_share=0.45),
            ["--gpu", "0,1", "--gpu-memory-share", "0.45"],
            "GPUs 0, 1 (45% of their memory)",
        ),
        (MachineShare(), [], "any core"),
    ],
)
def test_a_share_as_flags_and_in_words(part: MachineShare, flags: list[str], words: str) -> None:
    assert (part.flags(), str(part)) == (flags, words)


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("-1", []),
        ("1", ["1"]),
        ("2,0", ["2", "0"]),
        ("1,9,0", ["1"]),
        ("GPU-aa", ["0"]),
        ("GPU-bb", []),
        ("GPU-bbbb", ["1"]),
        ("MIG-x/1", ["MIG-x/1"]),
        (" 0 , 1 ", ["0", "1"]),
    ],
)
def test_visible_gpus_follow_cudas_rules(visible: str | None, ids: list[str]) -> None:
    assert [gpu.id for gpu in visible_gpus(SMI, visible)] == ids


@pytest.mark.parametrize(
    ("visible", "ids"),
    [(None, []), ("", []), ("-1", []), ("void", []), ("1,0", ["1", "0"]), ("GPU-aa,MIG-x", ["GPU-aa", "MIG-x"])],
)
def test_without_nvidia_smi_gpus_are_those_that_the_user_names(visible: str | None, ids: list[str]) -> None:
    assert [gpu.id for gpu in visible_gpus(None, visible)] == ids


def test_name_and_memory_of_a_gpu_are_read_from_nvidia_smi() -> None:
    first, _, odd = visible_gpus(SMI, None)
    assert first == CudaGpu(id="0", name="NVIDIA H100, 80GB", memory_mib=81559)
    assert odd.memory_mib == 0


@pytest.mark.parametrize("junk", ["", "\n", "No devices were found", "a,b", "1;2;3;4"])
def test_no_gpus_in_junk(junk: str) -> None:
    assert visible_gpus(junk, None) == ()
