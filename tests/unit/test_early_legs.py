"""Early legs: the rules of both sides, their notices, and when a router sends one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ids import InstanceId, RequestId, TransferId
from cluster.wire import EARLY, PINS, TRANSFER, early_fields
from decode.early import ASK_AGAIN_S, LEGS_MAX, WAIT_S_MAX, EarlyLegs
from engine.vllm.connector.notices import NoticeChannel
from kvtransfer.early_notes import NOTE_BYTES_MAX, Ready, Want, encode, parse
from kvtransfer.fields import pull_in, sane
from prefill.callers import CALLERS_MAX, NAMES_MAX, REMEMBER_S, Callers
from router.core.early_leg import LEAD_S, early_in_s

P, OTHER = "engine-p", "engine-q"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["want", "ready", "fields", "token"])
                                                                | st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


def ready(name: str = "n", engine: str = P, token: int | None = 5) -> Ready:
    return Ready(name, {"remote_engine_id": engine, "do_remote_prefill": True}, token)


# --- notices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("note", [Want("a"), ready(), Ready("b", {}, None, 7)])
def test_a_notice_is_read_as_it_was_written(note: Want | Ready) -> None:
    assert parse(encode(note)) == note


@given(JSON)
def test_no_notice_raises(value: Any) -> None:
    note = parse(json.dumps(value).encode())
    assert note is None or parse(encode(note)) == note


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[" * 100_000, b"\xff", None, "x", b"[]", b'{"want":""}', b'{"want":7}', b'{"ready":"a"}',
            b'{"ready":"a","fields":{},"token":-1}', b'{"ready":"a","fields":{},"token":true}',
            json.dumps({"want": "x" * 300}).encode(), b" " * (NOTE_BYTES_MAX + 1)]
)  # fmt: skip
def test_what_is_no_notice_is_none(raw: object) -> None:
    assert parse(raw) is None


def test_an_early_legs_fields_are_no_hold_for_vllms_connector() -> None:
    name = TransferId(RequestId("r"), 1, 2)
    fields = early_fields(name, InstanceId("p"), pins=True)["kv_transfer_params"]
    assert fields == {TRANSFER: str(name), EARLY: "p", PINS: True}
    assert sane(fields) is fields and isinstance(pull_in(fields), str)


# --- as D ------------------------------------------------------------------------------------------------------------


def test_a_leg_waits_until_its_own_producer_says_that_the_hold_is_there() -> None:
    legs = EarlyLegs()
    legs.opened("r", "n", P, 0.0)
    assert legs.waits("r", 1.0) and legs.waiting == 1
    assert legs.told(OTHER, ready()) == [] and legs.told(P, ready(engine=OTHER)) == [], "of another engine"
    assert legs.told(P, ready("m")) == [], "of another hold"
    assert legs.waits("r", 1.0)
    assert legs.told(P, ready()) == ["r"] and legs.ready("r") == ready()
    assert not legs.waits("r", 1.0) and legs.waiting == 0
    assert legs.told(P, ready()) == [], "twice"
    legs.finished("r")
    assert "r" not in legs and legs.told(P, ready()) == []
    assert legs.counts == {"early legs": 1, "early legs told": 1, "early notices ignored": 5}


def test_a_leg_asks_at_once_and_again() -> None:
    legs = EarlyLegs()
    legs.opened("r", "n", P, 3.0)
    assert legs.due(3.0) == [(P, "n")] and legs.due(3.0 + ASK_AGAIN_S - 0.01) == []
    assert legs.due(3.0 + ASK_AGAIN_S) == [(P, "n")]
    legs.told(P, ready())
    assert legs.due(100.0) == []


def test_a_leg_is_computed_here_if_its_producer_is_unknown_or_lost_or_time_is_up() -> None:
    legs = EarlyLegs()
    legs.opened("unknown", "a", "", 0.0)
    assert not legs.waits("unknown", 0.0) and legs.untold == 0, "no one can tell it anything"
    legs.opened("lost", "b", P, 0.0)
    legs.opened("other", "c", OTHER, 0.0)
    legs.lost(lambda engine: engine == P)
    assert not legs.waits("lost", 0.0) and legs.waits("other", 0.0)
    assert legs.waits("other", WAIT_S_MAX - 1) and not legs.waits("other", WAIT_S_MAX)
    assert legs.told(OTHER, ready("c", OTHER)) == [], "too late: the leg is computed here"
    assert legs.counts["early legs computed here"] == 3 and legs.waiting == 0


def test_a_hold_that_comes_while_its_prompt_is_computed_here_is_declined_once() -> None:
    legs = EarlyLegs()
    legs.opened("r", "n", P, 0.0)
    legs.lost(lambda engine: engine == P)
    assert legs.take_given_back() == [] and (legs.waiting, legs.untold) == (0, 1), "its producer is heard on"
    assert legs.told(OTHER, ready(engine=OTHER)) == [] and legs.take_given_back() == [], "not its producer's"
    assert legs.told(P, ready()) == [] and legs.take_given_back() == [("r", ready())] and legs.untold == 0
    assert legs.ready("r") is None and legs.take_given_back() == []
    assert legs.told(P, ready()) == [] and legs.take_given_back() == [], "twice"
    legs.finished("r")
    assert "r" not in legs and legs.waiting == legs.untold == 0
    assert legs.counts["early holds declined"] == 1 and legs.counts["early notices ignored"] == 2


def test_a_leg_that_the_engine_computes_while_it_waits_declines_its_hold() -> None:
    """vLLM computes a request that wants its prompt's log probabilities, though the connector says that it waits."""
    legs = EarlyLegs()
    legs.opened("r", "n", P, 0.0)
    legs.scheduled("r")
    assert not legs.waits("r", 0.0) and (legs.waiting, legs.untold) == (0, 1)
    assert legs.told(P, ready()) == [] and legs.take_given_back() == [("r", ready())]


def test_an_aborted_leg_is_forgotten_and_a_late_notice_changes_nothing() -> None:
    legs = EarlyLegs()
    legs.opened("r", "n", P, 0.0)
    legs.finished("r")
    legs.finished("r")
    assert legs.told(P, ready()) == [] and legs.due(9.0) == [] and not legs.waits("r", 9.0)


def test_legs_beyond_the_limit_are_computed_here() -> None:
    legs = EarlyLegs()
    for number in range(LEGS_MAX + 1):
        legs.opened(f"r{number}", f"n{number}", P, 0.0)
    assert legs.waiting == LEGS_MAX and not legs.waits(f"r{LEGS_MAX}", 0.0)


# --- as P ------------------------------------------------------------------------------------------------------------


def test_early_callers_are_told_when_the_hold_is_made_and_later_ones_at_once() -> None:
    callers = Callers()
    assert callers.wanted("d", "n", 0.0) is None and callers.asked == 1
    assert callers.filled("r", ready()) == ("d",) and callers.asked == 0
    assert callers.wanted("d", "n", 1.0) == ready(), "asked again: its notice may have been lost"
    callers.over("r")
    assert callers.wanted("d", "n", 2.0) is None, "the hold is over"
    callers.over("r")


def test_questions_are_bounded_and_forgotten() -> None:
    callers = Callers()
    for number in range(CALLERS_MAX + 3):
        callers.wanted(f"d{number}", "n", 0.0)
    assert len(callers.filled("r", ready())) == CALLERS_MAX
    for number in range(NAMES_MAX + 5):
        callers.wanted("d", f"n{number}", 0.0)
    assert callers.asked == NAMES_MAX
    callers.wanted("d", "new", REMEMBER_S)
    assert callers.asked == 1 and callers.filled("s", ready("n1")) == ()


WORDS = ["want", "lose want", "fill", "deliver", "lose", "abort D", "end hold", "tick"]


@given(st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 2)), max_size=60))
def test_in_any_order_no_leg_stays_behind_a_hold_that_stands(events: list[tuple[str, int]]) -> None:
    """Notices may be lost, and come in any order. A leg that asks again is told of its hold while that stands."""
    callers, legs = Callers(), EarlyLegs()
    standing: set[int] = set()
    filled: set[int] = set()
    waiting: set[int] = set()
    flying: list[Ready] = []
    now = 0.0

    def ask(*, arrives: bool) -> None:
        for _, name in legs.due(now):
            answer = callers.wanted("d", name, now) if arrives else None
            flying.extend([] if answer is None else [answer])

    for what, number in events:
        name = f"n{number}"
        if what in {"want", "lose want"}:
            legs.opened(f"d{number}", name, P, now)
            waiting |= {number} if legs.waits(f"d{number}", now) else set()
            ask(arrives=what == "want")
        elif what == "fill" and number not in filled:
            filled.add(number)
            standing.add(number)
            flying.extend([ready(name)] * len(callers.filled(f"p{number}", ready(name))))
        elif what == "deliver" and flying:
            note = flying.pop(0)
            moved = legs.told(P, note)
            assert {f"n{each[1:]}" for each in moved} <= {note.name}, "told of its own hold only"
            waiting -= {int(each[1:]) for each in moved}
        elif what == "lose" and flying:
            flying.pop(0)
        elif what == "abort D":
            legs.finished(f"d{number}")
            waiting.discard(number)
        elif what == "end hold":
            callers.over(f"p{number}")
            standing.discard(number)
        elif what == "tick":
            now += ASK_AGAIN_S
        assert {each for each in range(3) if legs.waits(f"d{each}", now)} == waiting
        assert legs.waiting == legs.untold == len(waiting), "none is computed here: no producer is lost"
    now += ASK_AGAIN_S
    ask(arrives=True)
    for note in flying:
        waiting -= {int(each[1:]) for each in legs.told(P, note)}
    assert waiting.isdisjoint(standing), "their legs have been told of the holds that stand"


# --- the notice channel ----------------------------------------------------------------------------------------------


class Agent:
    """A stand-in for a NIXL agent. If it `breaks`, its calls raise."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.notes: dict[str, list[bytes]] = {}
        self.breaks = breaks

    def get_agent_metadata(self) -> bytes:
        return b"here"

    def add_remote_agent(self, payload: bytes) -> bytes:
        self._break()
        return b"agent-" + payload

    def make_connection(self, name: str) -> None:
        self._break()

    def remove_remote_agent(self, name: str) -> None:
        self._break()

    def send_notif(self, name: str, note: bytes) -> None:
        self._break()
        self.sent.append((name, note))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self._break()
        found, self.notes = self.notes, {}
        return found

    def _break(self) -> None:
        if self.breaks:
            raise RuntimeError("no")


def test_a_channel_reads_notices_only_of_engines_that_it_knows() -> None:
    agent = Agent()
    channel = NoticeChannel(agent)
    agent.notes = {"agent-p": [b"x"]}
    assert channel.heard() == [], "no engine is known yet, and nothing is asked of NIXL"
    channel.meet(P, b"p")
    agent.notes = {"agent-p": [b"1", b"2"], "stranger": [b"3"]}
    assert channel.heard() == [(P, b"1"), (P, b"2")] and P in channel
    assert channel.tell(P, b"hello") and agent.sent == [("agent-p", b"hello")]
    channel.part(P)
    assert not channel.tell(P, b"hello") and P not in channel


def test_a_channel_that_breaks_raises_nothing() -> None:
    agent = Agent()
    channel = NoticeChannel(agent)
    channel.meet(P, b"p")
    agent.breaks = True
    assert not channel.tell(P, b"x") and channel.heard() == []
    channel.meet(OTHER, b"q")
    assert OTHER not in channel
    channel.part(P)


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("able", "expected_s", "queued", "sent"),
    [
        (False, 0.1, False, None),
        (True, 0.1, True, 0.0),
        (True, LEAD_S + 2.0, True, 2.0),
        (True, None, False, 0.0),
        (True, None, True, None),
        (True, -3.0, False, 0.0),
    ],
)
def test_when_an_early_leg_is_sent(able: bool, expected_s: float | None, queued: bool, sent: float | None) -> None:
    assert early_in_s(able=able, expected_s=expected_s, queued=queued) == pytest.approx(sent)
