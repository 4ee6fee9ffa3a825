"""NIXL agents of our connector: their progress thread is paced, they are locked, and a read's notice is kept back."""

from __future__ import annotations

import contextlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from decode.reads import RankSource
from engine.vllm.connector.paced import PROGRESS_US, NoticesKept, paced
from kvtransfer.hold_marks import Slot
from kvtransfer.notes import with_proof


class AgentConfig:
    """NIXL's agent configuration as in its bindings: C++ keeps the attributes."""

    def __init__(self) -> None:
        self._delay, self._sync = -1, "none"

    pthrDelay = property(lambda self: self._delay, lambda self, value: setattr(self, "_delay", value))  # noqa: N815
    syncMode = property(lambda self: self._sync, lambda self, value: setattr(self, "_sync", value))  # noqa: N815


def api(config: Any) -> ModuleType:
    made = ModuleType("api")
    made.nixlBind = SimpleNamespace(nixlAgentConfig=config)  # type: ignore[attr-defined]
    return made


def test_agents_made_meanwhile_are_paced_and_locked_and_later_ones_are_not() -> None:
    module = api(AgentConfig)
    with paced(module, "strict"):
        config = module.nixlBind.nixlAgentConfig()
        config.pthrDelay, config.syncMode = 0, "none"
        assert (config.pthrDelay, config.syncMode) == (PROGRESS_US, "strict") and isinstance(config, AgentConfig)
        config.pthrDelay = 7
        assert config.pthrDelay == 7
    assert module.nixlBind.nixlAgentConfig is AgentConfig


def test_the_class_comes_back_when_making_fails() -> None:
    module = api(AgentConfig)
    with pytest.raises(RuntimeError), paced(module, "strict"):
        raise RuntimeError("no plugins")
    assert module.nixlBind.nixlAgentConfig is AgentConfig


@pytest.mark.parametrize("config", [None, object, SimpleNamespace(pthrDelay=0)])
def test_other_bindings_are_left_alone(config: Any) -> None:
    module = api(config)
    with paced(module, "strict"):
        assert module.nixlBind.nixlAgentConfig is config


class Agent:
    name = "a"

    def __init__(self) -> None:
        self.did: list[Any] = []

    def make_prepped_xfer(self, *args: Any, **more: Any) -> str:
        self.did.append((args, more))
        return "handle"

    def send_notif(self, agent_name: str, notif_msg: bytes) -> None:
        self.did.append((agent_name, notif_msg))


def test_a_reads_notice_is_kept_and_others_are_proved() -> None:
    agent, slot = Agent(), Slot(3, bytes(range(16)))
    kept = NoticesKept(agent)
    proved = with_proof(b"r:1", slot.proof)
    with kept.pulling(slot) as sources:
        with kept.reading("p0", lambda slot: 4096 + slot.index):
            assert kept.make_prepped_xfer("READ", 1, notif_msg=b"r:1") == "handle" and kept.name == "a"
            kept.make_prepped_xfer("READ", 2)
        with kept.reading("p1", lambda _: 0):
            kept.make_prepped_xfer("READ", 3)
        kept.send_notif("p", notif_msg=b"r:1")
    kept.send_notif("p", notif_msg=b"r:2")
    assert sources == [RankSource("p0", 4099, proved)]
    reads = [(("READ", number), {}) for number in (1, 2, 3)]
    assert agent.did == [*reads, ("p", proved), ("p", b"r:2")]


def test_reads_that_failed_leave_nothing_for_the_next_request() -> None:
    kept = NoticesKept(Agent())
    with contextlib.suppress(RuntimeError), kept.pulling(Slot(3, bytes(16))), kept.reading("p0", lambda _: 0):
        kept.make_prepped_xfer("READ", 1, notif_msg=b"r:1")
        raise RuntimeError
    with kept.pulling(Slot(4, bytes(16))) as sources, kept.reading("p0", lambda _: 0):
        pass
    assert sources == []
