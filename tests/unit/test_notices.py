"""The notice channel of an engine, over an agent that breaks as NIXL's does."""

from __future__ import annotations

import pytest

from engine.vllm.connector import notices
from engine.vllm.connector.notices import NoticeChannel


class BrokenOnce:
    """An agent as NIXL's: a connection that broke takes nothing more, until the other agent is added anew."""

    def __init__(self) -> None:
        self.sound: set[str] = set()
        self.sent: list[tuple[str, bytes]] = []
        self.reachable = True

    def get_agent_metadata(self) -> bytes:
        return b"me"

    def add_remote_agent(self, payload: bytes) -> bytes:
        name = payload.decode()
        assert name not in self.sound, f"{name} is there already"
        if not self.reachable:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        self.sound.add(name)
        return name.encode()

    def make_connection(self, name: str) -> None:
        assert name in self.sound

    def remove_remote_agent(self, name: str) -> None:
        self.sound.discard(name)

    def send_notif(self, name: str, note: bytes) -> None:
        if name not in self.sound:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        self.sent.append((name, note))

    def breaks(self, name: str) -> None:
        self.sound.discard(name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(notices.time, "monotonic", lambda: now[0])
    return now


def test_a_connection_that_broke_is_made_anew_for_the_next_notice(clock: list[float]) -> None:
    agent = BrokenOnce()
    channel = NoticeChannel(agent)
    channel.meet("p#1", b"p")
    assert channel.tell("p#1", b"one")
    clock[0] += 60.0
    agent.breaks("p")
    assert channel.tell("p#1", b"two"), "before, every notice to this engine was lost until one of the two started anew"
    assert channel.tell("p#1", b"three")
    assert agent.sent == [("p", b"one"), ("p", b"two"), ("p", b"three")]


def test_an_engine_that_cannot_be_reached_is_tried_again_after_a_while(clock: list[float]) -> None:
    agent = BrokenOnce()
    channel = NoticeChannel(agent)
    channel.meet("p#1", b"p")
    clock[0] += 60.0
    agent.breaks("p")
    agent.reachable = False
    assert not channel.tell("p#1", b"one")
    agent.reachable = True
    assert not channel.tell("p#1", b"two"), "each try takes time of the engine's steps"
    clock[0] += notices.AGAIN_S
    assert channel.tell("p#1", b"three")
    assert agent.sent == [("p", b"three")]


def test_an_engine_that_left_is_not_tried_again(clock: list[float]) -> None:
    agent = BrokenOnce()
    channel = NoticeChannel(agent)
    channel.meet("p#1", b"p")
    channel.part("p#1")
    clock[0] += 60.0
    assert not channel.tell("p#1", b"one")
    assert "p#1" not in channel


def test_an_engine_that_was_never_met_is_told_nothing() -> None:
    agent = BrokenOnce()
    assert not NoticeChannel(agent).tell("p#1", b"one")
    assert agent.sent == []
