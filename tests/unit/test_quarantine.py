"""Quarantine: routers that read each other's words in any order set the same instances aside."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from cluster.readable import SMALL_BYTES_MAX
from cluster.registry.membership import QUARANTINED_MAX, Heartbeat, MemberKind, decode, encode
from cluster.registry.proofs import PROOF_BYTES_MAX
from router.core.journey import Choose, Chosen
from router.core.values import Wanted
from router.fleet import events
from router.fleet.events import entry_of
from router.fleet.quarantine import (
    BECAUSE_MAX,
    DISPLACED_MAX,
    READMITTED_MAX,
    STAMP_MAX,
    STAMPS_AHEAD,
    WORDS_MAX,
    Quarantine,
    Word,
)
from router.fleet.view import FleetView
from router.scheduler.decision_log import DecisionLog, fleet_of, scheduler_of
from router.scheduler.placements import SchedulingContext
from router.scheduler.scoring.policies import POLICIES
from sim.replay import replay

A, B = InstanceId("a"), InstanceId("b")


def test_the_last_word_holds() -> None:
    one, other = Quarantine("one"), Quarantine("other")
    one.say(A, aside=True, because="its link drops")
    assert other.hear(one.words)
    assert other.aside == {A: "its link drops"}
    other.say(A, aside=False)
    assert not other.hear(one.words), "an older word changes nothing"
    assert one.hear(other.words)
    assert one.aside == {}


NAMES = st.sampled_from(["one", "other", "third"])
TURNS = st.lists(st.tuples(NAMES, st.sampled_from([A, B]), st.booleans() | NAMES), max_size=12)


@settings(deadline=None)  # the machine may be busy
@given(turns=TURNS, order=st.permutations(["one", "other", "third"]))
def test_all_agree_in_the_end(turns: list[tuple[str, InstanceId, bool | str]], order: list[str]) -> None:
    routers = {name: Quarantine(name) for name in ("one", "other", "third")}
    for name, instance, what in turns:
        if isinstance(what, bool):
            routers[name].say(instance, aside=what)
        else:
            routers[name].hear(routers[what].words)
    for _ in range(2):
        for name in order:
            for other in order:
                routers[name].hear(routers[other].words)
    assert routers["one"].words == routers["other"].words == routers["third"].words


def test_a_quarantine_is_bounded_and_fits_a_heartbeat() -> None:
    kept = Quarantine("r" * 128)
    for number in range(2 * (WORDS_MAX + READMITTED_MAX)):
        kept.say(InstanceId(f"{number:03}{'x' * 125}@1234"), aside=number % 2 == 0, because="\U0001f98a" * 500 + "\n")
    assert len(kept.words) == WORDS_MAX + READMITTED_MAX == QUARANTINED_MAX
    assert all(len(word.because) == BECAUSE_MAX for word in kept.words.values())
    assert len(kept.aside) == WORDS_MAX
    said = {str(name): tuple(word) for name, word in kept.words.items()}
    beat = Heartbeat(id=InstanceId("r"), agent="r", url="http://r", kind=MemberKind.ROUTER, quarantined=said)
    assert decode(encode(beat, spare=PROOF_BYTES_MAX)) == (beat, "")
    assert len(msgspec.json.encode({"words": kept.words})) < SMALL_BYTES_MAX, "what a peer is told at once"


def two_that_hold_too_many() -> tuple[Quarantine, Quarantine]:
    """Two routers whose operators have set 17 and 16 different instances aside at the same time: one more than fits."""
    one, other = Quarantine("one"), Quarantine("other")
    for number in range(17):
        one.say(InstanceId(f"a{number}"), aside=True, because="x")
    for number in range(16):
        other.say(InstanceId(f"b{number}"), aside=True, because="y")
    assert len(one.words) + len(other.words) == WORDS_MAX + 1
    return one, other


@pytest.mark.parametrize("one_reads_first", [True, False])
def test_routers_that_hold_too_many_words_together_drop_the_same_one(*, one_reads_first: bool) -> None:
    """Before, each dropped its own oldest word, took the other's, and dropped that: they never agreed."""
    one, other = two_that_hold_too_many()
    pairs = [(one, other), (other, one)]
    for _ in range(3):
        for reader, said in pairs if one_reads_first else pairs[::-1]:
            reader.hear(said.words)
    assert one.words == other.words
    assert len(one.aside) == WORDS_MAX and "a0" not in one.aside, "of the oldest the one by the lower router name"
    assert not one.hear(other.words) and not other.hear(one.words), "nothing changes any more"


def test_a_word_that_is_displaced_is_named_once_at_every_router_that_knew_it() -> None:
    one, other = two_that_hold_too_many()
    before = one.words
    assert one.hear(other.words) and one.take_displaced() == {"a0": before[InstanceId("a0")]}
    assert one.take_displaced() == {}
    assert not one.hear(before) and one.take_displaced() == {}, "a router that has not heard of it yet goes on"
    assert other.hear(one.words) and other.take_displaced() == {}, "it has never known this word"
    assert other.hear(before) and set(other.take_displaced()) == {"a0"}
    assert not other.hear(before) and other.take_displaced() == {}


def test_a_displaced_word_that_is_said_again_and_displaced_again_is_named_again() -> None:
    one, other = two_that_hold_too_many()
    one.hear(other.words)
    assert set(one.take_displaced()) == {"a0"}
    one.say(InstanceId("a1"), aside=False)
    one.say(InstanceId("a0"), aside=True)
    assert "a0" in one.aside and one.take_displaced() == {}, "only a word of an instance that is let in made room"
    crowd = {InstanceId(f"c{number}"): Word(100 + number, True, "", "other") for number in range(WORDS_MAX)}
    assert one.hear(crowd)
    assert "a0" in one.take_displaced()


def full() -> Quarantine:
    """A router with as many instances aside as fit: `a0` to `a31`."""
    one = Quarantine("one")
    for number in range(WORDS_MAX):
        one.say(InstanceId(f"a{number}"), aside=True)
    return one


def test_the_last_heartbeat_of_a_router_that_died_does_not_undo_a_readmission() -> None:
    """Before, `d` returned and took the readmission's room, and the next reading set the readmitted one aside again."""
    one, let_in, d = full(), InstanceId("a31"), InstanceId("d")
    one.hear({d: Word(1, True, "slow", "0")})
    assert set(one.take_displaced()) == {d}
    died = {let_in: one.words[let_in], d: Word(1, True, "slow", "0")}
    one.say(let_in, aside=False)
    for _ in range(3):
        one.hear(died)
        assert let_in not in one.aside and one.take_displaced() == {}
    assert d in one.aside, "there is room for it now"


def test_a_readmission_holds_when_another_instance_takes_the_room() -> None:
    one, other, let_in, new = full(), Quarantine("other"), InstanceId("a31"), InstanceId("new")
    other.hear(one.words)
    one.say(let_in, aside=False)
    assert not one.refusal(new)
    one.say(new, aside=True)
    for _ in range(2):
        one.hear(other.words)
        other.hear(one.words)
    assert one.words == other.words and let_in not in one.aside and new in one.aside
    assert one.take_displaced() == {}, "nobody exceeded the bound"


def test_a_readmission_that_is_not_announced_any_more_is_announced_again_to_who_missed_it() -> None:
    one, other, let_in = Quarantine("one"), Quarantine("other"), InstanceId("a")
    other.say(let_in, aside=True)
    one.hear(other.words)
    one.say(let_in, aside=False)
    for number in range(READMITTED_MAX):
        one.say(InstanceId(f"b{number}"), aside=False)
    assert let_in not in one.words
    one.hear(other.words)
    assert let_in not in one.aside
    other.hear(one.words)
    assert other.aside == one.aside == {}


def test_an_operators_word_outdoes_words_that_are_not_kept() -> None:
    one, high = Quarantine("one"), InstanceId("high")
    one.hear({high: Word(500, False, "", "other")})
    one.hear({InstanceId(f"b{number}"): Word(1, False, "", "other") for number in range(READMITTED_MAX)})
    assert high not in one.words
    one.say(high, aside=True)
    assert one.words[high].stamp > 500


def test_a_long_list_of_words_costs_no_more_for_each() -> None:
    """Before, the word to displace was looked for among all, once for each that was displaced."""
    crowd = {InstanceId(f"c{number}"): Word(1, True, "", "other") for number in range(1500)}
    calls = 0

    def count(_frame: Any, event: str, _what: Any) -> None:
        nonlocal calls
        calls += event == "call"

    one, before = Quarantine("one"), sys.getprofile()
    sys.setprofile(count)
    try:
        one.hear(crowd)
    finally:
        sys.setprofile(before)
    assert len(one.words) == WORDS_MAX
    assert calls < 20 * len(crowd)


def test_a_word_that_is_displaced_again_is_among_the_last_to_be_forgotten() -> None:
    one, again = full(), {InstanceId("d"): Word(1, True, "", "00")}
    one.hear({InstanceId("d"): Word(1, True, "", "0")})
    for number in range(DISPLACED_MAX - 1):
        one.hear({InstanceId(f"c{number}"): Word(1, True, "", "0")})
    one.hear(again)
    one.hear({InstanceId("e"): Word(1, True, "", "0")})
    assert {"d", "e"} <= set(one.take_displaced())
    assert not one.hear(again) and one.take_displaced() == {}


def test_what_is_remembered_of_displaced_words_is_bounded() -> None:
    one = Quarantine("one")
    for number in range(WORDS_MAX):
        one.say(InstanceId(f"a{number}"), aside=True)
    for number in range(3 * DISPLACED_MAX):
        one.hear({InstanceId(f"c{number}"): Word(1, True, "", "0")})
    assert len(one._displaced) <= DISPLACED_MAX
    assert len(one.take_displaced()) <= DISPLACED_MAX
    one.hear({InstanceId(f"r{number}"): Word(1, False, "", "0") for number in range(3 * DISPLACED_MAX)})
    assert len(one._readmitted) == DISPLACED_MAX and len(one.words) == QUARANTINED_MAX


CROWD = [InstanceId(name) for name in "abcdef"]
CROWDED = st.lists(st.tuples(NAMES, st.sampled_from(CROWD), st.booleans() | NAMES), max_size=24)


@settings(deadline=None)
@given(turns=CROWDED, order=st.permutations(["one", "other", "third"]))
def test_all_agree_in_the_end_also_beyond_the_bound(
    turns: list[tuple[str, InstanceId, bool | str]], order: list[str]
) -> None:
    """Whatever was said and heard, in whatever order: the routers then have the same instances aside, and stay with
    them. No instance is aside whose highest word lets it in.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("router.fleet.quarantine.WORDS_MAX", 2)
        patched.setattr("router.fleet.quarantine.READMITTED_MAX", 2)
        routers = {name: Quarantine(name) for name in ("one", "other", "third")}
        highest: dict[InstanceId, Word] = {}
        for name, instance, what in turns:
            if isinstance(what, bool):
                routers[name].say(instance, aside=what)
                said = routers[name].words[instance]
                highest[instance] = max(said, highest.get(instance, said), key=lambda word: (word.stamp, word.router))
            else:
                routers[name].hear(routers[what].words)
        for _ in range(2 + len(CROWD)):
            announced = [routers[name].words for name in order]  # all read the same announcements
            for name in order:
                for words in announced:
                    routers[name].hear(words)
        assert routers["one"].aside == routers["other"].aside == routers["third"].aside
        assert not any(routers[name].hear(routers[other].words) for name in order for other in order)
        assert not {name for name, word in highest.items() if not word.aside} & routers["one"].aside.keys()


def test_an_instance_set_aside_gets_no_request_also_after_a_restart() -> None:
    view = FleetView()
    instance = Instance(id=A, role=Role.DECODE, url="http://a", epoch=1)
    view.add(instance)
    view.seen(A, None, Load())
    assert view.get(A).said_state == "up"
    view.set_aside({A: "slow"})
    assert (view.get(A).ready, view.get(A).said_state) == (False, "quarantined")
    assert not len(view.all().ready(None).any)
    view.add(Instance(id=A, role=Role.DECODE, url="http://a", epoch=2))
    view.seen(A, None, Load())
    assert not view.get(A).ready
    view.set_aside({})
    assert view.get(A).ready
    assert len(view.all().ready(None).any) == 1


def test_a_decision_log_records_quarantine() -> None:
    """Without these events the log's choices could not be made again."""
    lines: list[bytes] = []
    log = DecisionLog(lines.append, "least_load")
    view = FleetView()
    fleet = fleet_of(log, view)
    for name in (A, B):
        fleet.handle(events.Added(Instance(id=name, role=Role.BOTH, url=f"http://{name}")), 0.0)
        fleet.handle(events.ProbeSucceeded(name, ({"id": "m"},), Load()), 0.0)
    _, scheduler = scheduler_of(log, view, POLICIES["least_load"], admission=False, foresees=False)
    ask = Choose(frozenset(), hand_over=False)
    for reasons in ({A: "slow"}, {B: "slow"}):
        fleet.handle(events.SetAside(reasons), 0.0)
        (chosen,) = scheduler.handle(events.Asked(SchedulingContext(Wanted(model="m", hand_over=False)), ask, 0.0), 0.0)
        assert isinstance(chosen, Chosen)
        assert chosen.decode not in reasons
    replayed = replay(map(entry_of, lines))
    assert (replayed.choices, replayed.differences) == (2, ())


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("a", Word(2**53, True, "", "other")), ("a", Word(STAMP_MAX, True, "", "other")),
        ("a", Word(0, True, "", "other")),
        ("a", Word(-1, True, "", "other")), ("a", Word(5, True, "x" * 121, "other")),
        ("a", Word(5, True, "\x1b", "other")),
        ("a", Word(5, True, "", "")), ("a", Word(5, True, "", "o ther")),
        ("a", Word(5, True, "", "other@1")), ("", Word(5, True, "", "other")),
        ("a:b", Word(5, True, "", "other")), ("x" * 129, Word(5, True, "", "other")),
    ],
)  # fmt: skip
def test_what_no_router_says_is_not_heard(name: str, word: Word) -> None:
    """A word with the highest stamp would hold for ever; the other words could not be announced to other routers."""
    one = Quarantine("one")
    assert not one.hear({InstanceId(name): word})
    assert one.words == {}


@pytest.mark.parametrize("stamp", [STAMP_MAX, STAMP_MAX - 1, 2**40])
def test_an_operators_word_holds_against_a_forged_one(stamp: int) -> None:
    """Before, a word with the highest stamp and the highest name could not be taken back by any router."""
    one, other, forged = Quarantine("one"), Quarantine("other"), {A: Word(stamp, True, "", "zzz")}
    other.hear(forged)
    one.say(B, aside=True)
    one.say(A, aside=False)
    for _ in range(100):  # the forger goes on announcing it
        for each in (one, other):
            each.hear(forged)
            each.hear({**one.words, **other.words})
    assert set(one.aside) == set(other.aside) == {B}


def test_stamps_that_a_forger_has_driven_up_step_by_step_are_outdone_and_learned() -> None:
    one, new, steps = Quarantine("one"), Quarantine("new"), 5
    for step in range(1, steps + 1):
        assert one.hear({A: Word(step * STAMPS_AHEAD, True, "", "zzz")})
        one.hear({A: Word(STAMP_MAX - 1, True, "", "zzz")})
    one.say(A, aside=False)
    one.say(B, aside=True)
    for _ in range(steps + 1):
        new.hear(one.words)
    assert new.words == one.words, "a router that starts later needs a few more announcements"


def test_after_the_highest_stamp_there_is_still_an_announcement() -> None:
    one = Quarantine("one")
    one._keep(A, Word(STAMP_MAX - 1, True, "", "other"))
    one.say(B, aside=True)
    assert one.words[B].stamp < STAMP_MAX, "other routers take no higher stamp"
    quarantined = {name: (*word,) for name, word in one.words.items()}
    encode(
        Heartbeat(id=InstanceId("one"), agent="a", kind=MemberKind.ROUTER, url="http://x:1", quarantined=quarantined)
    )
    assert set(one.aside) == {A, B}
