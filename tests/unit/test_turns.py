"""Engines that share a GPU start one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.plan import PlacedEngine, WantedEngine
from baton.turns import Turns, must_start_apart
from cluster.instance import Role
from engine.vllm.placement import CudaGpu, MachineShare, share

FIXED = ("--kv-cache-memory-bytes", "1G")


def engine(name: str, *gpus: str, args: tuple[str, ...] = (), kind: str = "vllm") -> PlacedEngine:
    wanted = WantedEngine(name=name, role=Role.DECODE, model=None, vllm_args=args, engine=kind)
    return PlacedEngine(wanted=wanted, port=1, agent_port=2, side_channel_port=3, placed=MachineShare(gpus=gpus))


def test_engines_that_share_a_gpu_start_one_after_the_other() -> None:
    turns, (first, second, third) = Turns(), (engine(name, "0") for name in ("a", "b", "c"))
    assert turns.before(first) == ""
    turns.begin(first)
    assert (turns.before(second), turns.before(third)) == ("a", "a")
    turns.settled("a")
    turns.begin(second)
    assert turns.before(third) == "b"
    turns.settled("b")
    assert turns.before(third) == ""


def test_an_engine_that_restarts_beside_a_ready_one_waits_for_nothing() -> None:
    turns, engines = Turns(), [engine("a", "0"), engine("b", "0")]
    for each in engines:
        turns.begin(each)
        turns.settled(each.wanted.name)
    turns.begin(engines[0])
    assert turns.before(engines[0]) == ""
    assert turns.before(engines[1]) == "a"  # if it has to be started again, too


def test_no_engine_waits_for_restarts_that_fail_one_after_the_other() -> None:
    """Restarts that take long are never too many for the agent (`SuperviseLimits.window_s`)."""
    turns, first, second = Turns(), engine("a", "0"), engine("b", "0")
    turns.begin(first)
    turns.settled("a")  # ready
    turns.restarts(first)
    assert turns.before(second) == "a"
    for _ in range(3):
        turns.restarts(first)  # the one before has failed
        assert turns.before(second) == ""
    turns.settled("a")  # ready again
    turns.restarts(first)
    assert turns.before(second) == "a"


def test_what_was_never_begun_may_end() -> None:
    turns = Turns()
    turns.settled("a")
    assert turns.before(engine("b", "0")) == ""


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (engine("a", "0", "1"), engine("b", "1", "2"), True),
        (engine("a", "0"), engine("b", "1"), False),
        (engine("a"), engine("b"), False),  # on cores
        (engine("a", "0", args=FIXED), engine("b", "0", args=FIXED), False),
        (engine("a", "0", args=FIXED), engine("b", "0"), True),  # b would measure a's memory
        (engine("a", "0", args=("--kv_cache_memory_bytes=1G",)), engine("b", "0", args=FIXED), False),
        (engine("a", "0", kind="mock"), engine("b", "0", kind="mock"), False),
    ],
)
def test_which_engines_start_one_after_the_other(one: PlacedEngine, other: PlacedEngine, expected: bool) -> None:
    assert must_start_apart(one, other) is expected
    assert must_start_apart(other, one) is expected


def test_engines_with_gpus_of_their_own_start_together() -> None:
    gpus = [CudaGpu(id="0"), CudaGpu(id="1")]
    alone = [replace(engine(f"e{at}"), placed=each) for at, each in enumerate(share(2, gpus, ()))]
    shared = [replace(engine(f"e{at}"), placed=each) for at, each in enumerate(share(3, gpus, ()))]
    assert not must_start_apart(*alone)
    assert [must_start_apart(shared[0], each) for each in shared[1:]] == [False, True]
