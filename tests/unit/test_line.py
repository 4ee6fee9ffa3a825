"""The flow-control queue: which request is called when a place becomes free. Order by targets: test_admission.py."""

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from router.core.values import Wanted
from router.scheduler.flow_control.queue import FlowControlQueue, place_of


def wants(kind: str) -> Wanted:
    return Wanted(model=kind, hand_over=True)


def line(**kinds: str) -> FlowControlQueue:
    """A queue of requests in this order: their names, and the kind of place that each wants."""
    waiting = FlowControlQueue()
    for who, kind in kinds.items():
        waiting.enter(who, wants(kind))
    return waiting


def test_first_come_first_asked() -> None:
    waiting = line(a="x", b="x", c="x")
    assert waiting.call_first() == ("a",)
    assert waiting.leave("a", placed=True) == ()
    assert waiting.call_first() == ("b",)
    assert len(waiting) == 2


def test_a_request_that_finds_no_place_passes_the_call_to_the_next_of_another_kind() -> None:
    waiting = line(a="x", b="x", c="y", d="x")
    assert waiting.call_first() == ("a",)
    assert waiting.found_none("a") == ("c",), "b is of a's kind, and would find no place either"
    assert waiting.leave("c", placed=True) == ()
    assert waiting.call_first() == ("a",), "a has kept its position"
    assert waiting.found_none("a") == ()


def test_two_places_are_for_two() -> None:
    waiting = line(a="x", b="x", c="x")
    assert waiting.call_first() == ("a",)
    assert waiting.call_first() == (), "a is asking already, and the next one asks after it"
    assert waiting.leave("a", placed=True) == ("b",)
    assert waiting.leave("b", placed=True) == ("c",), "as long as there are places"
    assert waiting.found_none("c") == ()
    assert waiting.leave("c", placed=True) == ()


def test_when_the_fleet_changes_all_may_ask_one_after_the_other_as_long_as_there_are_places() -> None:
    waiting = line(a="x", b="y", c="x", d="y")
    assert waiting.call_all() == ("a",)
    assert waiting.leave("a", placed=True) == ("b",)
    assert waiting.found_none("b") == ("c",)
    assert waiting.leave("c", placed=True) == ("b",), "there may be a place of another kind by now"
    assert waiting.found_none("b") == (), "d wants what b wants"


def test_a_request_that_gives_up_while_called_leaves_the_place_to_the_next() -> None:
    waiting = line(a="x", b="x")
    assert waiting.call_first() == ("a",)
    assert waiting.leave("a", placed=False) == ("b",)
    assert waiting.leave("b", placed=True) == ()
    assert len(waiting) == 0


def test_a_request_that_gives_up_uncalled_is_forgotten() -> None:
    waiting = line(a="x", b="x")
    assert waiting.leave("a", placed=False) == ()
    assert waiting.leave("nobody", placed=False) == ()
    assert waiting.call_first() == ("b",)


def test_a_request_that_changes_its_kind_keeps_its_turn() -> None:
    waiting = line(a="x", b="y", c="x")
    waiting.enter("a", wants("y"))
    assert waiting.call_first() == ("a",)
    assert waiting.found_none("a") == ("c",), "b wants what a wants"
    waiting.enter("b", wants("y"))
    assert len(waiting) == 3


def test_an_empty_queue_calls_no_request() -> None:
    waiting = FlowControlQueue()
    assert (waiting.call_first(), waiting.call_all(), waiting.found_none("a")) == ((), (), ())


def test_an_aged_request_that_finds_no_lane_passes_its_call_on() -> None:
    """A late request may take only the lanes for late requests. Before, the requests behind it were never called."""
    waiting = FlowControlQueue()
    old = Wanted(model="x", hand_over=True, ttft_ms=100.0, arrived=1.0, late=True)
    young = Wanted(model="x", hand_over=True, ttft_ms=60_000.0, arrived=12.0)
    waiting.enter("old", old)
    waiting.enter("young", young)
    waiting.age(12.0)
    for _ in range(2):
        assert waiting.call_first() == ("old",)
        waiting.enter("old", old)  # it asks, and finds no lane
        assert waiting.found_none("old") == ("young",)
        assert waiting.found_none("young") == ()


def sized(tokens: int, ttft_ms: float = 0.0) -> Wanted:
    return Wanted(model="x", hand_over=True, prompt_tokens=tokens, ttft_ms=ttft_ms)


def test_a_request_with_a_target_for_its_first_token_hides_none_without() -> None:
    """It may wait for an instance that prefills, while the other one needs a place only."""
    waiting = FlowControlQueue()
    waiting.enter("interactive", sized(500, 2000.0))
    waiting.enter("batch", sized(500))
    assert waiting.call_first() == ("interactive",)
    assert waiting.found_none("interactive") == ("batch",)


@pytest.mark.parametrize("other", [{"sheds": True}, {"late": True}])
def test_a_request_that_is_not_refused_late_hides_none_that_is(other: dict[str, object]) -> None:
    """They find places by different rules."""
    waiting = FlowControlQueue()
    strict = replace(wants("x"), ttft_ms=500.0, tpot_ms=12.0)
    waiting.enter("strict", strict)
    waiting.enter("other", replace(strict, **other))  # type: ignore[arg-type]
    assert waiting.call_first() == ("strict",)
    assert waiting.found_none("strict") == ("other",)


def test_a_request_that_is_given_up_is_hidden_by_none_that_can_be_in_time() -> None:
    waiting = FlowControlQueue()
    for who, ms in (("large", 900.0), ("small", 50.0)):
        waiting.enter(who, replace(wants("x"), ttft_ms=500.0), ms)
    assert waiting.hopeless(replace(wants("x"), now=0.1), 1.0) == ["large"]
    assert waiting.call_first() == ("small",)
    assert waiting.found_none("small") == ("large",), "there may be a lane for late prompts"


def test_a_request_that_goes_by_another_target_is_queued_by_that() -> None:
    waiting = FlowControlQueue()
    waiting.enter("a", sized(500, 2000.0))
    waiting.enter("b", sized(500, 5000.0))
    assert waiting.patient == 0
    waiting.enter("a", sized(500, 9000.0))
    assert waiting.call_first() == ("b",)
    waiting.enter("a", sized(500))
    assert waiting.patient == 1


def test_a_place_for_which_small_requests_wait_costs_one_question() -> None:
    waiting = FlowControlQueue()
    for tokens in (8000, 100, 500, 1000, 3000):
        waiting.enter(tokens, sized(tokens))
    waiting.enter("large", sized(450_000))
    assert waiting.call_first() == (8000,)
    assert waiting.found_none(8000) == ("large",)
    assert waiting.found_none("large") == ()


def test_a_called_request_that_goes_by_another_target_passes_the_call_on() -> None:
    waiting = FlowControlQueue()
    waiting.enter("a", sized(500, 2000.0))
    waiting.enter("b", sized(100_000, 5000.0))
    assert waiting.call_first() == ("a",)
    waiting.enter("a", sized(500, 9000.0))
    assert waiting.found_none("a") == ("b",)


def test_urgency_is_the_number_that_a_millisecond_makes_late() -> None:
    """Without a target nothing is made late; what is late in any case is not, either."""
    waiting = FlowControlQueue()
    assert waiting.urgency("other", wants("x")) == 0.0
    targets = {"a": 500.0, "b": 1000.0, "none": 0.0}
    for who, target_ms in targets.items():
        waiting.enter(who, replace(wants("x"), ttft_ms=target_ms, arrived=0.0))
    assert waiting.urgency("other", wants("x")) == pytest.approx(1 / 500 + 1 / 1000)
    assert waiting.urgency("a", wants("x")) == pytest.approx(1 / 1000), "not its own"
    assert waiting.urgency("other", wants("y")) == 0.0, "another model's instances"
    assert waiting.hopeless(replace(wants("x"), now=0.6), servers=1.0) == ["a"]
    assert waiting.urgency("other", wants("x")) == pytest.approx(1 / 1000)
    for who in targets:
        waiting.leave(who, placed=True)
    assert waiting.urgency("other", wants("x")) == 0.0


class NeverRead(dict[object, Any]):
    """A dictionary that may not be read through."""

    def values(self) -> Any:
        raise AssertionError("all entries are read")


@pytest.mark.parametrize("seed", range(8))
def test_the_work_that_waits_is_the_sum_of_the_entries_and_is_not_added_up_anew(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, waiting, now = Random(seed), FlowControlQueue(), 0.0
    asks = [replace(wants(model), whose=whose) for model in ("x", "y") for whose in ("", "ann")]
    for step in range(1500):
        now += rng.choice([0.0, 0.01, 0.2])
        here = replace(
            rng.choice(asks), arrived=now, now=now, ttft_ms=rng.choice([0.0, 200.0, 3000.0]),
            prompt_tokens=rng.choice([10, 30_000]), late=rng.random() < 0.1,
        )  # fmt: skip
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                waiting.enter(rng.randrange(40), here, rng.choice([0.0, rng.randrange(1, 8000) / 8, rng.random()]))
            case 4 | 5:
                waiting.leave(rng.randrange(40), placed=rng.random() < 0.5)
            case 6:
                waiting.hopeless(here, servers=rng.choice([0.5, 2.0]))
            case _:
                waiting.age(now)
        if step % 10:
            continue
        for ask in asks:
            plain_ms = sum(each.work_ms for each in waiting._entries.values() if each.waits_for == place_of(ask))
            with monkeypatch.context() as patch:
                patch.setattr(waiting, "_entries", NeverRead(waiting._entries))
                drains_s = waiting.drains_s(ask, 2.0)
            assert drains_s == pytest.approx(plain_ms / waiting._rates.of(place_of(ask), 2.0), abs=1e-6)
    for who in range(40):
        waiting.leave(who, placed=True)
    assert not waiting._work_us, "nothing is left, exactly"


def test_urgency_follows_a_request_whose_target_changes() -> None:
    waiting = FlowControlQueue()
    waiting.enter("a", replace(wants("x"), ttft_ms=500.0))
    waiting.enter("a", replace(wants("x"), ttft_ms=250.0))
    assert waiting.urgency("other", wants("x")) == pytest.approx(1 / 250)
