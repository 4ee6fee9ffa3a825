"""The thread that follows a worker's reads: it tells when pulls have ended, and a step may wait for that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from decode.reads import Landings, Reads
from engine.vllm.connector.slot_reads import Follower
from kvtransfer.hold_marks import CLEAR, SLOT_BYTES

LONG_S = 60.0
"""Longer than any test: a wait of this time has been ended by something else."""


class Agent:
    """A stand-in for a NIXL agent. Its reads end once `over` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def check_xfer_state(self, handle: Any) -> str:
        return "DONE" if self.over.is_set() else "PROC"

    def get_xfer_telemetry(self, handle: Any) -> Any:
        return None

    def release_xfer_handle(self, handle: Any) -> None:
        pass

    def send_notif(self, agent_name: str, notif_msg: bytes) -> None:
        pass

    def transfer(self, handle: Any) -> str:
        return "PROC"


@contextmanager
def following(agent: Agent) -> Iterator[tuple[Reads, Follower, threading.Semaphore]]:
    told = threading.Semaphore(0)
    reads = Reads(agent, Landings(memoryview(bytearray(SLOT_BYTES)), 0), lambda *_: None)
    follower = Follower(reads, lambda: None, told.release)
    try:
        yield reads, follower, told
    finally:
        follower.stop()


def test_a_wait_ends_with_the_pull() -> None:
    agent = Agent()
    with following(agent) as (reads, follower, told):
        reads.add("r", ["read"], (), CLEAR)
        follower.wake()
        threading.Thread(target=agent.over.set).start()
        follower.wait(LONG_S)
        assert told.acquire(timeout=LONG_S), "the engine core was told"
        outcome = reads.take("r")
        assert outcome is not None and outcome.good


def test_nothing_is_waited_for_without_a_pull_or_after_its_end() -> None:
    agent = Agent()
    with following(agent) as (reads, follower, told):
        follower.wait(LONG_S)
        agent.over.set()
        reads.add("r", ["read"], (), CLEAR)
        follower.wake()
        assert told.acquire(timeout=LONG_S)
        follower.wait(LONG_S)
        assert reads.take("r") is not None
        follower.wait(LONG_S)


def test_a_wait_is_bounded() -> None:
    with following(Agent()) as (reads, follower, _):
        reads.add("r", ["read"], (), CLEAR)
        follower.wake()
        follower.wait(0.0)
        assert reads.take("r") is None
