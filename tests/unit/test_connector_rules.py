"""Pure rules of Baton's connector: slots, notices, fields, names of holds, questions at the agent socket, reads."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.wire import TRANSFER
from decode.reads import Landings, PullOutcome, RankSource, Reads, try_to_read
from kvtransfer.asks import Forget, HeldState, Introduce, Metadata, Payload, ReleaseName
from kvtransfer.asks import parse as parse_ask
from kvtransfer.fields import PullFields, held_in, name_in, pull_in, sane
from kvtransfer.hold_marks import CLEAR, FIELD, SLOT_BYTES, SLOTS_MAX, Slot, Slots, mark_of, slot_in
from kvtransfer.notes import Beat, ReadNote, with_proof
from kvtransfer.notes import parse as parse_note
from prefill.rests import LONG_S, QUIET_S, STEP_S, Rest

KEY = b"k" * 32
MARK = bytes(range(1, 17))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(MARK.hex()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)

# --- slots -----------------------------------------------------------------------------------------------------------


def test_every_mark_is_new_even_for_one_owner_in_one_slot() -> None:
    slots = Slots(1, KEY)
    marks = set()
    for _ in range(50):
        slot = slots.take("a")
        assert slot is not None and slot.index == 0 and slots.take("b") is None
        marks.add(slot.mark)
        slots.give_back(slot)
    assert len(marks) == 50 and CLEAR not in marks
    assert Slots(1, b"l" * 32).take("a") != Slots(1, KEY).take("a")


def test_the_longest_unused_slot_is_taken() -> None:
    slots = Slots(3, KEY)
    first, second = slots.take("a"), slots.take("b")
    assert first is not None and second is not None
    slots.give_back(first)
    taken = [slots.take("c"), slots.take("d")]
    assert [each and each.index for each in taken] == [2, 0] and slots.free == 0


@pytest.mark.parametrize(("count", "key"), [(0, KEY), (SLOTS_MAX + 1, KEY), (1, b"short"), (1, b"x" * 65)])
def test_an_impossible_table_of_slots_is_refused(count: int, key: bytes) -> None:
    with pytest.raises(ValueError, match="a table has"):
        Slots(count, key)


def test_a_slot_travels_as_json() -> None:
    slot = Slot(7, MARK)
    assert slot_in(json.loads(json.dumps({FIELD: slot.field()}))) == slot


@pytest.mark.parametrize(
    "value",
    [
        None, 3, "x", [], [1], [1, MARK.hex(), 2], [-1, MARK.hex()], [SLOTS_MAX, MARK.hex()], [True, MARK.hex()],
        [1, MARK], [1, MARK.hex().upper() + "A"], [1, MARK.hex().upper()], [1, "00" * 16], [1, "é" * 32],
        [1.0, MARK.hex()], [1, " " + MARK.hex()[1:]],
    ],
)  # fmt: skip
def test_what_is_no_slot_is_none(value: Any) -> None:
    assert slot_in({FIELD: value}) is None


@given(JSON)
def test_no_field_raises(value: Any) -> None:
    assert isinstance(slot_in({FIELD: value}), Slot | None) and isinstance(mark_of(value), bytes | None)
    assert isinstance(name_in({TRANSFER: value}), str | None) and isinstance(name_in(value), str | None)
    assert sane(value) in (None, value)
    for key in ("remote_engine_id", "remote_request_id", "remote_num_tokens", "remote_block_ids", FIELD):
        assert isinstance(pull_in({**PULL, key: value}), PullFields | str)


# --- notices ---------------------------------------------------------------------------------------------------------


def test_notices_with_and_without_a_proof() -> None:
    note = b"cmpl-a:b-0-1f:2"
    assert parse_note(note) == ReadNote("cmpl-a:b-0-1f", 2, None)
    assert parse_note(with_proof(note, MARK.hex())) == ReadNote("cmpl-a:b-0-1f", 2, MARK)
    assert parse_note(b"HB:a,,b") == Beat(("a", "b"))


@pytest.mark.parametrize(
    "raw",
    [b"", b":", b"id", b"id:", b":1", b"id:0", b"id:-1", b"id:1e3", b"id:99999", b"\xff\xfe:1", b"id:\xc2\xb2", "id:1",
     None, b"x" * (1 << 20) + b":1", b":" + MARK.hex().encode(), b"id::" + MARK.hex().encode()],
)  # fmt: skip
def test_what_is_no_notice_is_none(raw: Any) -> None:
    assert parse_note(raw) is None


@given(st.binary(max_size=80))
def test_no_notice_raises(raw: bytes) -> None:
    for each in (raw, b"HB:" + raw, raw + b":1:" + MARK.hex().encode()):
        assert isinstance(parse_note(each), ReadNote | Beat | None)


# --- fields ----------------------------------------------------------------------------------------------------------

PULL = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 256,
    "remote_block_ids": [[4, 9]],
    FIELD: [7, MARK.hex()],
}


def test_a_pull_is_read() -> None:
    assert pull_in(PULL) == PullFields("e", "r", 256, 2, Slot(7, MARK))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"remote_engine_id": None}, "no hold"),
        ({"remote_request_id": 4}, "no hold"),
        ({"remote_num_tokens": None}, "how many tokens"),
        ({"remote_num_tokens": True}, "how many tokens"),
        ({"remote_num_tokens": 0}, "how many tokens"),
        ({"remote_block_ids": None}, "block ids"),
        ({"remote_block_ids": [[]]}, "block ids"),
        ({"remote_block_ids": [[1], [2]]}, "block ids"),
        ({"remote_block_ids": [[1, -1]]}, "block ids"),
        ({"remote_block_ids": [[1, "2"]]}, "block ids"),
        ({FIELD: None}, "confirm"),
    ],
)
def test_why_nothing_is_pulled(change: dict[str, Any], why: str) -> None:
    told = pull_in({**PULL, **change})
    assert isinstance(told, str) and why in told


@pytest.mark.parametrize("missing", ["remote_host", "remote_port"])
def test_a_pull_without_an_address_is_refused(missing: str) -> None:
    """vLLM's scheduler would give the request blocks, and wait for ever for a read that no rank began."""
    told = pull_in({name: each for name, each in PULL.items() if name != missing})
    assert isinstance(told, str) and "no address" in told


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_engine_id": []},
        {"remote_request_id": {}},
        {"remote_host": 1},
        {"tp_size": "2"},
        {"pp_size": []},
        {"remote_block_ids": 5},
        {"remote_block_ids": True},
        {"remote_block_ids": 1.5},
        {"remote_block_ids": "ab"},
    ],
)
def test_fields_that_vllm_cannot_read_are_dropped(wrong: dict[str, Any]) -> None:
    assert sane({**PULL, **wrong}) is None and sane(PULL) == PULL and sane("x") is None


def test_names() -> None:
    assert name_in({TRANSFER: "r/1@2"}) == "r/1@2"
    assert [name_in(each) for each in (None, {}, {TRANSFER: ""}, {TRANSFER: "x" * 257}, {TRANSFER: 1})] == [None] * 5


# --- questions at the agent socket -----------------------------------------------------------------------------------


def line(**told: Any) -> bytes:
    return json.dumps(told).encode()


def test_questions() -> None:
    payload = {"rank": 1, "data": base64.b64encode(b"xyz").decode()}
    assert parse_ask(line(ask="metadata")) == Metadata() and parse_ask(line(ask="state")) == HeldState()
    assert parse_ask(line(ask="forget", engine_id="e")) == Forget("e")
    assert parse_ask(line(ask="release", transfer_id="r/1@2")) == ReleaseName("r/1@2")
    met = parse_ask(line(ask="introduce", engine_id="e", instance="p0", payloads=[payload]))
    assert met == Introduce("e", "p0", (Payload(0, 1, b"xyz"),)) and met.ranks == 2
    assert Payload(0, 1, b"xyz").object() == {"stage": 0, **payload}


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"\n", b"{", b"[]", b"1", b"[" * 100_000, b"\xff", line(), line(ask=1), line(ask="open"),
        line(ask="forget"), line(ask="forget", engine_id=""), line(ask="release", transfer_id="x" * 257),
        line(ask="release", transfer_id=[]),
        line(ask="introduce", engine_id="e", instance="p"),
        line(ask="introduce", engine_id="e", instance="p", payloads=[]),
        line(ask="introduce", engine_id="e", instance="p", payloads=[{"rank": 0}]),
        line(ask="introduce", engine_id="e", instance="p", payloads=[{"rank": -1, "data": "eHl6"}]),
        line(ask="introduce", engine_id="e", instance="p", payloads=[{"rank": True, "data": "eHl6"}]),
        line(ask="introduce", engine_id="e", instance="p", payloads=[{"rank": 0, "data": "?"}]),
        line(ask="introduce", engine_id="e", instance="p", payloads=[{"rank": 0, "data": "é"}]),
        line(ask="introduce", engine_id="e", instance="p", payloads=[{"rank": 0, "data": "eHl6"}] * 2),
        line(ask="introduce", engine_id="e", instance="p", payloads=[{"rank": 0, "data": "eHl6"}] * 600),
    ],
)  # fmt: skip
def test_a_bad_question_is_answered_with_the_reason(raw: bytes) -> None:
    assert isinstance(parse_ask(raw), str)


@given(JSON, st.binary(max_size=40))
def test_no_question_raises(value: Any, raw: bytes) -> None:
    assert parse_ask(raw) is not None
    for key in ("ask", "engine_id", "instance", "payloads"):
        told = {"ask": "introduce", "engine_id": "e", "instance": "p", "payloads": [value], key: value}
        assert isinstance(parse_ask(line(**told)), str | Introduce | Metadata | HeldState | Forget)


# --- reads to their end ----------------------------------------------------------------------------------------------


class nixlNotAllowedError(Exception):  # noqa: N801 - NIXL's name
    pass


class Wire:
    """A NIXL agent whose transfers do what a script says."""

    def __init__(self, memory: bytearray, states: dict[str, Iterator[str]], slots: dict[int, bytes]) -> None:
        self.memory, self.states, self.slots = memory, states, slots
        self.released: list[str] = []
        self.notes: list[tuple[str, bytes]] = []
        self.posted: list[str] = []
        self.looks = 0
        self.keeps: set[str] = set()
        """Handles whose release fails."""
        self.writes = True
        """Whether a read of a slot writes into its landing."""

    def check_xfer_state(self, handle: str) -> str:
        assert handle not in self.released
        state = next(self.states[handle]) if handle in self.states else "DONE"
        if state == "raise":
            raise RuntimeError("NIXL_ERR_BACKEND")
        if state == "not told":
            raise nixlNotAllowedError("NIXL_ERR_NOT_ALLOWED")
        return state

    def get_xfer_telemetry(self, handle: str) -> str:
        return f"t-{handle}"

    def release_xfer_handle(self, handle: str) -> None:
        if handle in self.keeps:
            raise RuntimeError("still busy")
        self.released.append(handle)

    def send_notif(self, agent_name: str, notif_msg: bytes) -> None:
        if agent_name == "deaf":
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        self.notes.append((agent_name, notif_msg))

    def transfer(self, handle: str) -> str:
        self.posted.append(handle)
        _, address, landing, _ = handle.split("/")
        place = int(landing) - 1000
        if self.writes:
            self.memory[place : place + SLOT_BYTES] = self.slots[int(address)]
        return "PROC"

    def look(self, agent: str, address: int, landing: int) -> str:
        if agent == "blind":
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self.looks += 1
        return f"{agent}/{address}/{landing}/{self.looks}"


def pulls(places: int = 4, slot: bytes = MARK, **states: list[str]) -> tuple[Reads, Wire]:
    memory = bytearray(places * SLOT_BYTES)
    wire = Wire(memory, {name: iter(each) for name, each in states.items()}, {64: slot, 80: slot})
    return Reads(wire, Landings(memoryview(memory), 1000), wire.look), wire


def test_a_slot_is_read_after_the_last_block_and_the_notice_sent_after_that() -> None:
    p, wire = pulls(h1=["PROC", "DONE"], h2=["PROC", "PROC", "DONE"])
    p.add("r", ["h1", "h2"], [RankSource("a", 64, b"note")], MARK)
    for _ in range(2):
        assert p.step() == 1 and wire.posted == [] and wire.notes == [] and p.take("r") is None
    assert p.step() == 0 and len(wire.posted) == 1 and wire.notes == [("a", b"note")]
    assert p.under_way("r")
    assert p.take("r") == PullOutcome("", ("t-h1", "t-h2")) and not p.under_way("r") and p.take("r") is None


@pytest.mark.parametrize("slot", [CLEAR, MARK[:-1] + b"\0", bytes(reversed(MARK))])
def test_another_mark_means_another_hold(slot: bytes) -> None:
    p, wire = pulls(slot=slot, h=["DONE"])
    p.add("r", ["h"], [RankSource("a", 64, b"note")], MARK)
    assert p.step() == 0
    told = p.take("r")
    assert told is not None and not told.good and not told.broken and wire.notes == [], (
        "the hold is gone: no notice is due"
    )


def test_a_slot_that_was_not_written_to_is_no_mark() -> None:
    p, wire = pulls(h=["DONE"])
    wire.writes = False
    wire.memory[:] = MARK * 4  # of earlier reads
    p.add("r", ["h"], [RankSource("a", 64, b"note")], MARK)
    p.step()
    told = p.take("r")
    assert told is not None and not told.good


@pytest.mark.parametrize("ends", [["ERR"], ["raise"], ["PROC", "ERR"]])
def test_after_a_failed_read_the_notice_is_sent_once_no_read_is_under_way(ends: list[str]) -> None:
    p, wire = pulls(h1=ends, h2=["PROC", "PROC", "PROC", "DONE"])
    p.add("r", ["h1", "h2"], [RankSource("a", 64, b"note")], MARK)
    for _ in range(3):
        assert p.step() == 1 and wire.notes == []
    assert p.step() == 0 and wire.notes == [("a", b"note")] and wire.posted == []
    told = p.take("r")
    assert told is not None and told.because == "a read failed" and told.broken


def test_a_read_whose_handle_cannot_be_released_may_still_write() -> None:
    p, wire = pulls(h=["ERR", "ERR", "ERR"])
    wire.keeps.add("h")
    p.add("r", ["h"], [RankSource("a", 64, b"note")], MARK)
    assert p.step() == 1 and p.step() == 1 and p.take("r") is None
    wire.keeps.clear()
    assert p.step() == 0 and p.take("r") is not None


def test_a_read_whose_state_nixl_does_not_tell_may_still_write() -> None:
    """Its peer was forgotten. NIXL would release the handle at once, and the bytes would still arrive."""
    p, wire = pulls(h=["not told", "not told", "ERR"])
    p.add("r", ["h"], [RankSource("a", 64, b"note")], MARK)
    assert p.step() == 1 and p.step() == 1 and wire.released == [] and p.take("r") is None
    assert p.step() == 0 and wire.released == ["h"]
    told = p.take("r")
    assert told is not None and told.broken


@pytest.mark.parametrize(
    ("beside", "said", "because", "broken"),
    [
        (["PROC", "DONE"], "", "", False),
        (["DONE"], "a block is not what was held", "a block is not what was held", False),
        (["ERR"], "", "a read failed", True),
        (["raise"], "", "a read failed", True),
    ],
)
def test_a_read_beside_is_waited_for_and_the_blocks_are_compared_last(
    beside: list[str], said: str, because: str, broken: bool
) -> None:
    p, wire = pulls(h=["DONE"], beside=beside)
    asked: list[int] = []

    def wrong() -> str:
        asked.append(len(wire.posted))
        assert wire.notes == [], "P frees the blocks only after the comparison"
        return said

    p.add("r", ["h"], [RankSource("a", 64, b"note")], MARK, beside=["beside"], wrong=wrong)
    for _ in beside:
        p.step()
    told = p.take("r")
    assert told == PullOutcome(because, ("t-h",)) and told.broken is broken, "telemetry is of reads of blocks alone"
    assert asked == ([] if broken else [1]) and wire.notes == [("a", b"note")]
    assert wire.released[:2] == ["h", "beside"]


def test_blocks_of_a_lost_hold_are_not_compared_and_blocks_whose_check_raises_not_used() -> None:
    p, _ = pulls(slot=CLEAR, h=["DONE"])
    p.add("r", ["h"], [RankSource("a", 64, b"note")], MARK, wrong=lambda: pytest.fail("the blocks were compared"))
    p.step()
    told = p.take("r")
    assert told is not None and "outlive" in told.because
    p, _ = pulls(g=["DONE"])
    p.add("r", ["g"], [RankSource("a", 64, b"note")], MARK, wrong=lambda: {}["memory that is gone"])
    assert p.step() == 0
    told = p.take("r")
    assert told is not None and told.because == "the blocks could not be checked (KeyError)" and not told.broken


def test_marks_of_an_earlier_life_of_a_producer_do_not_come_again() -> None:
    """Notices and checks go by the mark. A producer that starts anew has other marks for the same holds and slots."""
    earlier, later = (Slots(4, bytes([life]) * 16) for life in (1, 2))
    for number in range(8):
        one, other = earlier.take(f"r{number % 2}"), later.take(f"r{number % 2}")
        assert one is not None and other is not None and one.index == other.index and one.mark != other.mark
        earlier.give_back(one)
        later.give_back(other)


@pytest.mark.parametrize(
    ("states", "reads"),
    [(["DONE"], True), (["PROC", "PROC", "DONE"], True), (["ERR"], False), (["raise"], False), (["PROC"] * 9, False)],
)
def test_a_producer_that_is_met_is_read_from_once(states: list[str], reads: bool) -> None:
    _, wire = pulls(**{"a/64/1000/1": states})
    waits: list[None] = []
    assert try_to_read(wire, lambda: wire.look("a", 64, 1000), lambda: waits.append(None), 5) == reads
    assert len(waits) == min(5, states.count("PROC")) and wire.notes == []
    assert wire.released == (["a/64/1000/1"] if states[-1] in {"DONE", "ERR"} else []), "this read may still write"


def test_a_producer_that_nixl_does_not_find_cannot_be_read() -> None:
    _, wire = pulls()
    assert not try_to_read(wire, lambda: wire.look("blind", 64, 1000), lambda: None, 5) and wire.posted == []


def test_the_marks_of_all_ranks_must_match() -> None:
    p, wire = pulls(h=["DONE"])
    wire.slots[80] = CLEAR
    p.add("r", ["h"], [RankSource("a", 64, b"note"), RankSource("b", 80, b"note")], MARK)
    assert p.step() == 0
    told = p.take("r")
    assert told is not None and not told.good


@pytest.mark.parametrize("agent", ["blind", "deaf"])
def test_a_peer_that_is_gone(agent: str) -> None:
    p, _ = pulls(h=["DONE"])
    p.add("r", ["h"], [RankSource(agent, 64, b"note"), RankSource("a", 80, b"note")], MARK)
    assert p.step() == 0
    told = p.take("r")
    assert told is not None and (told.good, told.notes_lost) == ((False, 0) if agent == "blind" else (True, 1))


def test_pulls_beyond_the_places_wait() -> None:
    p, wire = pulls(places=1)
    wire.states["a/64/1000/1"] = iter(["PROC", "DONE"])
    for name in ("r1", "r2"):
        p.add(name, [], [RankSource("a", 64, b"note")], MARK)
    assert p.step() == 2 and len(wire.posted) == 1
    assert p.step() == 0 and len(wire.posted) == 2
    assert all(told is not None and told.good for told in (p.take("r1"), p.take("r2")))


# --- how often an engine that only has holds polls ---


def test_a_hold_that_ends_is_news() -> None:
    """Sixty holds are read one after the other, in six seconds: each end is seen at once, also the last one."""
    rest, now = Rest(), 100.0
    rest.news(now)
    for _ in range(60):
        now += 0.1
        rest.news(now)
    assert rest.pause_s(now + 0.9 * QUIET_S) == STEP_S


@pytest.mark.parametrize("held_s", [0.5, 1.5, 4.0, 9.0, 60.0])
def test_blocks_are_freed_late_by_half_of_the_time_they_were_held_at_most(held_s: float) -> None:
    rest = Rest()
    rest.news(100.0)
    read_at, now, looks = 100.0 + held_s, 100.0, 0
    while now < read_at:
        now += rest.pause_s(now)
        looks += 1
    assert now - read_at <= min(LONG_S, max(STEP_S, held_s / 2)) + 1e-9
    assert looks <= QUIET_S / STEP_S + 10 + held_s / LONG_S


@pytest.mark.parametrize(
    ("told", "tokens"), [(281, 281), (300, 281), (7, 7), (0, 281), (None, 281), (True, 281), ("9", 281)]
)
def test_how_many_tokens_were_held_for_a_leg_that_is_not_pulled(told: Any, tokens: int) -> None:
    assert held_in({"remote_num_tokens": told}, 281) == tokens
