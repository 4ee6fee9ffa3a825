"""The agent socket (`door`): which processes may connect, and what cannot end it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvtransfer import door as d
from kvtransfer.asks import Ask, Forget, HeldState, Introduce, Metadata

pytestmark = pytest.mark.sockets


class Engine:
    """Answers as the connector's scheduler half does, and records the questions."""

    def __init__(self, path: Path, engine_id: str) -> None:
        self.engine_id, self.asked = engine_id, list[Ask]()
        self.door = d.Door(path, self.answer)

    def answer(self, ask: Ask) -> dict[str, Any]:
        self.asked.append(ask)
        if isinstance(ask, Forget):
            raise RuntimeError("a bug")  # noqa: TRY004 - a bug is of any class
        if isinstance(ask, Metadata):
            return {"engine_id": self.engine_id, "payloads": [{"rank": 0, "data": "eHl6"}]}
        return {"ok": True}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path / "p" / "door", "e-p")
    yield made
    made.door.close()


def test_only_this_user_may_connect(engine: Engine) -> None:
    assert engine.door.path.stat().st_mode & 0o777 == 0o600
    assert engine.door.path.parent.stat().st_mode & 0o777 == 0o700


def test_the_user_that_the_kernel_reports_decides(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert d.ask(engine.door.path, {"ask": "state"}) == {"ok": True}
    monkeypatch.setattr(d, "_user_of", lambda _client: os.getuid() + 1)
    with pytest.raises((OSError, ValueError)):
        d.ask(engine.door.path, {"ask": "state"})
    assert engine.asked == [HeldState()]


def test_a_folder_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="closed to others"):
        Engine(tmp_path / "door", "e")


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too long"):
        Engine(tmp_path / ("x" * 100) / "door", "e")


def test_a_socket_left_from_before_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "p" / "door"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.bind(str(path))  # its process ends without a word: the path stays, and no process listens
    again = Engine(path, "e-2")
    try:
        assert d.ask(again.door.path, {"ask": "metadata"})["engine_id"] == "e-2"
    finally:
        again.door.close()
    assert not again.door.path.exists()


def test_the_socket_of_an_engine_that_runs_is_not_taken_over(engine: Engine) -> None:
    """With two engines at one path, one of them would hand over nothing, and no log would say so."""
    with pytest.raises(d.DoorTaken, match=r"another engine answers at .*/door: give each engine a door of its own"):
        Engine(engine.door.path, "e-2")
    assert d.ask(engine.door.path, {"ask": "metadata"})["engine_id"] == "e-p"


def test_an_engine_that_is_left_to_vllm_says_so_at_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "p" / "door"
    one = d.left_to_vllm(path, "data parallelism", "bfloat16")
    assert one is not None
    try:
        assert d.left_to_vllm(path, "data parallelism") is None, "the engine's other ranks would give the same answer"
        for asked in ({"ask": "metadata"}, {"ask": "state"}):
            assert d.ask(path, asked) == {"left_to_vllm": "data parallelism", "dtype": "bfloat16"}
        refusal = d.ask(path, {"ask": "release", "transfer_id": "r-1/1/1"})
        assert set(refusal) == {"error"} and "data parallelism" in refusal["error"]
    finally:
        one.close()


def test_several_questions_on_one_connection(engine: Engine) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client, client.makefile("rwb") as lines:
        client.connect(str(engine.door.path))
        for question, key in (('{"ask":"state"}', "ok"), ("garbage", "error"), ('{"ask":"metadata"}', "engine_id")):
            lines.write(question.encode() + b"\n")
            lines.flush()
            assert key in json.loads(lines.readline())


def test_a_bug_in_an_answer_is_told_and_ends_nothing(engine: Engine) -> None:
    assert "a bug" in d.ask(engine.door.path, {"ask": "forget", "engine_id": "e"})["error"]
    assert d.ask(engine.door.path, {"ask": "state"}) == {"ok": True}


def test_garbage_and_half_lines_end_nothing(engine: Engine) -> None:
    for raw in (b"\x00\xff" * 5000 + b"\n", b'{"ask":', b"\n\n\n", b"[" * 200_000 + b"\n"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(engine.door.path))
            client.sendall(raw)
    assert d.ask(engine.door.path, {"ask": "state"}) == {"ok": True}


def test_a_client_too_many_is_turned_away_and_places_come_back(engine: Engine) -> None:
    crowd = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(d.CLIENTS_MAX)]
    for client in crowd:
        client.connect(str(engine.door.path))
        client.sendall(b'{"ask":"state"}\n')
        client.recv(100)
    with pytest.raises((OSError, ValueError)):
        d.ask(engine.door.path, {"ask": "state"})
    for client in crowd:
        client.close()
    end = time.monotonic() + 5
    while True:
        try:
            assert d.ask(engine.door.path, {"ask": "state"}) == {"ok": True}
            break
        except (OSError, ValueError):
            assert time.monotonic() < end
    while threading.active_count() >= d.CLIENTS_MAX:  # each sees the end of its client by itself
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_door_outlives_a_moment_without_threads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as limited:
        limited.setattr(d.threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        for _ in range(d.CLIENTS_MAX + 1):
            with pytest.raises((OSError, ValueError)):
                d.ask(engine.door.path, {"ask": "state"})
    assert d.ask(engine.door.path, {"ask": "state"}) == {"ok": True}


def test_engines_without_agents_are_introduced_to_each_other(engine: Engine, tmp_path: Path) -> None:
    other = Engine(tmp_path / "d" / "door", "e-d")
    try:
        d.introduce_each_other(("p", engine.door.path), ("d", other.door.path))
    finally:
        other.door.close()
    for one, name, engine_id in ((engine, "d", "e-d"), (other, "p", "e-p")):
        met = one.asked[1] if isinstance(one.asked[1], Introduce) else one.asked[-1]
        assert isinstance(met, Introduce) and (met.instance, met.engine_id) == (name, engine_id)
