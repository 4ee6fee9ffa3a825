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
from engine.vllm.placement import CudaGpu, MachineShare, of_type, share, split, visible_gpus

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
        "instance decode-0 needs 4 GPUs, and 2 can be used here (`baton doctor`): lower its shape (tp, pp, dp), or "
        "-tp/-pp/-dp after --"
    )


def engine(name: str, *vllm_args: str, gpu: str | None = None) -> WantedEngine:
    return WantedEngine(name=name, role=Role.BOTH, model=None, vllm_args=vllm_args, gpu=gpu)


@pytest.fixture
def no_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take ports without a look at the network."""
    monkeypatch.setattr(HeldPorts, "take", lambda *_, **__: 1)


def placed(
    wanted: list[WantedEngine], found: list[CudaGpu], used_mib: dict[str, int] | None = None
) -> dict[str, MachineShare]:
    hardware = EngineHardware(gpus=tuple(found), cores=(0,), vllm=None, nixl=None)
    with HeldPorts() as ports:
        return {each.wanted.name: each.placed for each in place(wanted, hardware, ports, 0, used_mib or {})}


def test_each_engine_gets_as_many_gpus_as_its_own_flags_say(no_ports: None) -> None:
    """A prefill pool with tp: 2 beside decode engines of one GPU: four GPUs are enough, and none is shared."""
    got = placed([engine("decode-0"), engine("prefill-0", "-tp", "2"), engine("decode-1")], gpus(4))
    assert got == {
        "prefill-0": MachineShare(gpus=("0", "1")),
        "decode-0": MachineShare(gpus=("2",)),
        "decode-1": MachineShare(gpus=("3",)),
    }


def test_prefill_context_parallel_ranks_have_a_gpu_each() -> None:
    """vLLM's own sum (`ParallelConfig.world_size`); decode context parallel ranks are the tensor parallel ones."""
    flags = ("-tp", "2", "--prefill-context-parallel-size", "2", "--decode-context-parallel-size", "2")
    assert engine("prefill-0", *flags).gpus == 4


def test_a_gpu_with_another_programs_model_comes_last(no_ports: None) -> None:
    """vLLM does not start where less is free than it would take, while other GPUs are idle."""
    used = {"0": 40_000, "1": 500, "2": 40_000}
    got = placed([engine("prefill-0"), engine("decode-0")], gpus(4), used)
    assert (got["prefill-0"].gpus, got["decode-0"].gpus) == (("1",), ("3",))
    assert placed([engine("both-0", "-tp", "3")], gpus(4), used)["both-0"].gpus == ("1", "3", "0")


def typed(*names: str) -> list[CudaGpu]:
    return [CudaGpu(id=str(index), name=name) for index, name in enumerate(names)]


H100, L40S = "NVIDIA H100 80GB HBM3", "NVIDIA L40S"


def test_an_engine_gets_gpus_of_the_type_that_its_pool_names(no_ports: None) -> None:
    wanted = [
        engine("prefill-0", gpu="L40S"),
        engine("decode-0", "-tp", "2", gpu="H100-SXM"),
        engine("prefill-1", gpu="l40s"),
        engine("prefill-2", gpu="L40S"),
    ]
    assert placed(wanted, typed(H100, L40S, H100, L40S)) == {
        "prefill-0": MachineShare(gpus=("1",), gpu_memory_share=0.45),
        "prefill-1": MachineShare(gpus=("3",), gpu_memory_share=0.45),
        "prefill-2": MachineShare(gpus=("1",), gpu_memory_share=0.45),
        "decode-0": MachineShare(gpus=("0", "2")),
    }


def test_engines_of_no_type_take_what_those_with_one_leave(no_ports: None) -> None:
    got = placed([engine("decode-0"), engine("prefill-0", gpu="H100-SXM")], typed(H100, L40S))
    assert (got["prefill-0"].gpus, got["decode-0"].gpus) == (("0",), ("1",))


def test_the_gpus_of_one_engine_are_of_one_type_where_there_are_enough(no_ports: None) -> None:
    assert placed([engine("both-0", "-tp", "2")], typed(L40S, H100, H100))["both-0"].gpus == ("1", "2")
    assert placed([engine("both-0", "-tp", "2")], typed(L40S, H100))["both-0"].gpus == ("0", "1")


def test_a_type_that_the_machine_does_not_have_or_tell_leaves_all_gpus(no_ports: None) -> None:
    assert placed([engine("both-0", gpu="B200")], typed(H100))["both-0"].gpus == ("0",)
    assert placed([engine("both-0", gpu="B200")], typed(""))["both-0"].gpus == ("0",)


def test_an_instance_that_needs_more_gpus_of_its_type_than_there_are_is_refused() -> None:
    with pytest.raises(UsageError, match="instance both-0 needs 2 GPUs of type L40S, and 1 can be used here"):
        placed([engine("both-0", "-tp", "2", gpu="L40S")], typed(H100, H100, L40S))


def test_two_engines_on_one_gpu_split_its_memory() -> None:
    assert share(2, gpus(1), ()) == (MachineShare(gpus=("0",), gpu_memory_share=0.45),) * 2


def test_the_fullest_gpu_decides_the_memory_of_all() -> None:
    parts = share(3, gpus(2), ())
    assert [part.gpus for part in parts] == [("0",), ("1",), ("0",)]
    assert {part.gpu_memory_share for part in parts} == {0.45}


def test_engines_of_several_gpus() -> None:
    assert [part.gpus for part in share(2, gpus(4), (), gpus_each=(2, 2))] == [("0", "1"), ("2", "3")]


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


@given(
    wanted=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([None, "H100-SXM", "L40S", "B200"])), min_size=1),
    names=st.lists(st.sampled_from([H100, L40S, "Odd"]), min_size=1, max_size=8),
)
def test_no_gpu_is_promised_more_memory_than_it_has(wanted: list[tuple[int, str | None]], names: list[str]) -> None:
    found = typed(*names)
    wanted = [(min(each, len(of_type(found, gpu))), gpu) for each, gpu in wanted]
    used: dict[str, float] = {}
    parts = share(len(wanted), found, (), gpus_each=[each for each, _ in wanted], types=[gpu for _, gpu in wanted])
    for (each, _), part in zip(wanted, parts, strict=True):
        assert len(set(part.gpus)) == len(part.gpus) == each
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
        ("0,0,1", []),
        ("MIG-x,MIG-x", []),
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
