"""Holds at the engine and at its ranks: names, slots, leases, notices; and the laws that their tables keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.hold_marks import CLEAR, Slot, Slots
from kvtransfer.notes import Beat, ReadNote
from kvtransfer.rows import rows
from prefill.holds import REMEMBER_S, REMEMBERED_MAX, Holds
from prefill.leases import HOLD_S_MAX, Leases, LeaseTerms, terms
from prefill.orders import Orders
from prefill.table import LEASES, LEGS, HoldAct, HoldCause, LegState, RankHold

KEY = b"k" * 32
TERMS = LeaseTerms(lease=30.0, extension=20.0, longest=300.0)


def holds(count: int = 4) -> Holds:
    return Holds(Slots(count, KEY))


class Rank:
    """One rank and its memory."""

    def __init__(self) -> None:
        self.memory: dict[int, bytes] = {}
        self.leases = Leases(TERMS, self.memory.__setitem__)

    def marked(self, slot: Slot | None) -> bool:
        assert slot is not None
        return self.memory.get(slot.index) == slot.mark


# --- the tables ------------------------------------------------------------------------------------------------------


def test_a_lease_ends_by_clearing_its_slot_before_anything_is_reported() -> None:
    for state, cause, row in rows(LEASES):
        if row.state in {RankHold.OVER, RankHold.READ_EARLY} and state is not RankHold.READ_EARLY:
            assert row.acts[0] is HoldAct.CLEAR, f"{state} by {cause}"
        if HoldAct.REPORT in row.acts:
            assert row.acts == (HoldAct.CLEAR, HoldAct.REPORT)


def test_each_hold_is_reported_once() -> None:
    """vLLM's scheduler asserts that it knows the request: a second report would end the engine."""
    after = {row.state for _, _, row in rows(LEASES) if HoldAct.REPORT in row.acts}
    for state in after:
        assert not [row for row in LEASES.get(state, {}).values() if HoldAct.REPORT in row.acts]


def test_held_blocks_are_freed_by_the_ranks_reports_alone() -> None:
    for state, cause, row in rows(LEGS):
        if row.state is LegState.OVER:
            assert row.acts[-1] is HoldAct.FREE
            assert (cause is HoldCause.REPORTED) == (state in {LegState.HELD, LegState.RELEASED})
    assert {state for state, _, row in rows(LEGS) if row.state is LegState.HELD} == {LegState.COMPUTING}


def test_every_state_is_reached_and_every_state_ends() -> None:
    for table, first, end in ((LEGS, LegState.COMPUTING, LegState.OVER), (LEASES, RankHold.MARKED, RankHold.OVER)):
        reached = {first} | {row.state for _, _, row in rows(table)}  # type: ignore[arg-type]
        assert reached == {*table, end} == set(type(first))
    assert HoldCause.TIME_UP in LEASES[RankHold.KEPT], "whatever consumers do"


# --- the engine's view -----------------------------------------------------------------------------------------------


def test_a_hold_is_released_by_its_name() -> None:
    h = holds()
    slot = h.begin("r", "name", 0.0)
    assert h.wanted("r") and h.filled("r") == slot and (h.held, h.open_legs) == (1, 0)
    assert h.take_orders() == Orders(opened={"r": slot}, held=["r"])
    h.release("name", 2.0)
    h.release("name", 2.0)
    assert h.take_orders() == Orders(released=["r"]), "a rank must not be told twice"
    assert h.held == 1, "until the ranks have cleared its slot"
    h.reported("r")
    assert (h.held, h.slots.free) == (0, 4) and not h.has_orders


def test_a_name_given_up_before_is_never_held() -> None:
    h = holds()
    h.release("later", 1.0)
    h.begin("a", "later", 1.5)
    h.begin("b", "meanwhile", 1.5)
    h.release("meanwhile", 2.0)
    assert not h.wanted("a") and not h.wanted("b") and h.open_legs == 2
    h.take_orders()
    h.dropped("a")
    assert h.counts["given up before held"] == 1 and h.take_orders() == Orders(dropped=["a"])
    h.begin("c", "later", 1.0 + REMEMBER_S - 0.1)
    h.begin("d", "later", 1.0 + REMEMBER_S)
    assert not h.wanted("c") and h.wanted("d")


def test_two_legs_of_one_name_are_both_released() -> None:
    h = holds()
    for request in ("a", "b"):
        h.begin(request, "name", 0.0)
    h.filled("b")
    h.release("name", 1.0)
    assert h.take_orders().released == ["b"] and not h.wanted("a")


def test_a_leg_without_a_name_is_held_and_one_without_a_slot_too() -> None:
    h = holds(1)
    h.begin("a", None, 0.0)
    assert h.begin("b", "n", 0.0) is None and h.wanted("a") and h.wanted("b") and h.filled("b") is None
    assert h.counts["no slot"] == 1 and h.held == 1


def test_an_unknown_request_changes_nothing() -> None:
    h = holds()
    h.reported("never")
    h.dropped("never")
    assert not h.wanted("never") and h.counts["ended unknown"] == 2 and not h.has_orders
    first = h.begin("a", "n", 0.0)
    assert h.begin("a", "n", 0.0) == first and h.slots.free == 3
    h.reported("a")
    assert h.open_legs == 1 and h.counts["out of turn"] == 1, "no report ends a leg that is still computed"


def test_names_that_cannot_be_remembered_are_counted() -> None:
    h = holds()
    for number in range(REMEMBERED_MAX):
        h.release(str(number), 0.0)
    assert h.counts["could not be remembered"] == 0
    h.release("one more", 0.0)
    assert h.counts["could not be remembered"] == 1


@given(st.lists(st.tuples(st.sampled_from("ofhre"), st.integers(0, 3), st.integers(0, 2)), max_size=60))
def test_slots_are_never_shared_nor_lost_and_no_mark_outlives_its_hold(script: list[tuple[str, int, int]]) -> None:
    """Engine and rank together, orders and reports exchanged now and then."""
    h, rank = holds(3), Rank()
    live: dict[str, Slot | None] = {}
    held: set[str] = set()
    for act, number, name in script:
        request = f"r{number}"
        if act == "o":
            live.setdefault(request, h.begin(request, f"n{name}", 0.0))
        elif act == "h" and request in live and h.wanted(request):
            h.filled(request)
            held.add(request)
        elif act == "r":
            h.release(f"n{name}", 0.0)
        elif act == "e" and request in live and request not in held:
            h.dropped(request)
            del live[request]
        elif act == "f":
            rank.leases.step(h.take_orders(), 0.0)
            for ended in rank.leases.take_reports():
                assert ended in held
                h.reported(ended)
                held.discard(ended)
                live.pop(ended)
            marks = {slot.mark for slot in live.values() if slot is not None}
            standing = {mark for mark in rank.memory.values() if mark != CLEAR}
            assert standing == marks, "a slot that is taken anew in the same step keeps its new mark"
        taken = [slot.index for slot in live.values() if slot is not None]
        assert len(set(taken)) == len(taken) == 3 - h.slots.free
        assert (h.held, h.open_legs) == (len(held), len(live) - len(held))


# --- a rank's view ---------------------------------------------------------------------------------------------------


@pytest.fixture
def kept() -> tuple[Holds, Rank, Slot]:
    """One leg, `r`, held since 0."""
    h, rank = holds(), Rank()
    slot = h.begin("r", "name", 0.0)
    h.filled("r")
    rank.leases.step(h.take_orders(), 0.0)
    assert slot is not None and rank.marked(slot)
    return h, rank, slot


def test_a_slot_that_another_leg_takes_in_the_same_step_keeps_its_mark() -> None:
    """With few slots: a leg is aborted, its slot goes to the next leg, and the rank gets both orders at once."""
    h, rank = holds(1), Rank()
    h.begin("a", None, 0.0)
    rank.leases.step(h.take_orders(), 0.0)
    h.dropped("a")
    slot = h.begin("b", None, 0.0)
    rank.leases.step(h.take_orders(), 1.0)
    assert rank.marked(slot)


def test_a_hold_ends_when_all_its_readers_have_read(kept: tuple[Holds, Rank, Slot]) -> None:
    _, rank, slot = kept
    rank.leases.heard("d0", ReadNote("r", 2, slot.mark), 1.0)
    rank.leases.heard("d0", ReadNote("r", 2, slot.mark), 1.0)
    assert rank.marked(slot) and not rank.leases.take_reports(), "the same rank twice is one reader"
    rank.leases.heard("d1", ReadNote("r", 2, slot.mark), 2.0)
    assert not rank.marked(slot) and rank.leases.take_reports() == ["r"] and len(rank.leases) == 0


@pytest.mark.parametrize("mark", [None, CLEAR, bytes(range(16))])
def test_a_notice_without_the_mark_of_a_hold_cannot_end_it(kept: tuple[Holds, Rank, Slot], mark: bytes | None) -> None:
    _, rank, slot = kept
    for note in (ReadNote("r", 1, mark), ReadNote("other", 1, slot.mark), None):
        rank.leases.heard("d", note, 1.0)
    assert rank.marked(slot) and not rank.leases.take_reports() and rank.leases.counts["notices ignored"] == 3


def test_a_hold_without_a_slot_is_ended_by_its_lease_or_its_name_alone() -> None:
    h, rank = holds(1), Rank()
    for request in ("a", "b", "c"):
        h.begin(request, request, 0.0)
        h.filled(request)
    rank.leases.step(h.take_orders(), 0.0)
    rank.leases.heard("d", ReadNote("b", 1, None), 1.0)
    h.release("c", 1.0)
    rank.leases.step(h.take_orders(), 1.0)
    assert rank.leases.take_reports() == ["c"]
    assert rank.leases.expire(30.0) == ["a", "b"] and rank.leases.take_reports() == ["a", "b"]


def test_a_reader_that_is_faster_than_the_engine_ends_the_hold_once() -> None:
    """vllm 46240, 43226: with asynchronous scheduling a rank hears of the read before it hears that blocks are held."""
    h, rank = holds(), Rank()
    slot = h.begin("r", None, 0.0)
    rank.leases.step(h.take_orders(), 0.0)
    h.filled("r")
    assert slot is not None
    for _ in range(2):
        rank.leases.heard("d", ReadNote("r", 1, slot.mark), 1.0)
    assert rank.leases.take_reports() == ["r"] and not rank.marked(slot)
    h.reported("r")
    rank.leases.step(h.take_orders(), 2.0)
    assert rank.leases.expire(1e9) == [] and not rank.leases.take_reports() and len(rank.leases) == 0


def test_a_lease_is_extended_by_heartbeats_but_not_for_ever(kept: tuple[Holds, Rank, Slot]) -> None:
    _, rank, slot = kept
    assert rank.leases.next_wakeup() == 30.0
    now = 0.0
    while now + 5.0 < TERMS.longest:
        now += 5.0
        rank.leases.heard("d", Beat(("r", "unknown")), now)
        assert rank.leases.expire(now) == []
    assert rank.leases.next_wakeup() == TERMS.longest and rank.marked(slot)
    assert rank.leases.expire(TERMS.longest) == ["r"] and not rank.marked(slot)


def test_a_release_after_the_end_of_a_hold_is_too_late(kept: tuple[Holds, Rank, Slot]) -> None:
    h, rank, slot = kept
    rank.leases.heard("d", ReadNote("r", 1, slot.mark), 1.0)
    h.release("name", 1.0)
    rank.leases.step(h.take_orders(), 1.0)
    assert rank.leases.take_reports() == ["r"] and rank.leases.counts["released too late"] == 1


def test_terms_are_vllms_in_any_unit() -> None:
    assert terms(30) == TERMS
    assert terms(600).longest == 600 and terms(3).longest == HOLD_S_MAX
    assert terms(30, 1e9) == LeaseTerms(30e9, 20e9, 300e9)
