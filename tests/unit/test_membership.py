"""The members of the fleet: the rules for folding heartbeats, and the reason that comes with each change."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cluster.instance import Load, Role
from cluster.registry.membership import (
    EPOCH_ZERO_S,
    HEARTBEAT_BYTES_MAX,
    ChangeKind,
    Heartbeat,
    MemberKind,
    Membership,
    MemberState,
    decode,
    duration,
    encode,
    next_epoch,
)

TTL = 6.0


def beat(agent: str = "alfa", *, epoch: int = 1, seq: int = 0, **more: Any) -> Heartbeat:
    """A heartbeat of prefill-0, unless told otherwise."""
    fields: dict[str, Any] = {"id": "prefill-0", "where": f"host-{agent}:7", "url": "http://10.0.0.1:8100"}
    return Heartbeat(agent=agent, epoch=epoch, seq=seq, **{"state": MemberState.READY, **fields, **more})


def fold(membership: Membership, now: float, *beats: Heartbeat, wall: float | None = None) -> list[tuple[str, str]]:
    """The changes, as (kind of change, member)."""
    return [(change.what.value, change.id) for change in membership.fold(beats, now, wall)]


def because(membership: Membership, now: float, *beats: Heartbeat, wall: float | None = None) -> str:
    """The reason of the only change."""
    (change,) = membership.fold(beats, now, wall)
    return change.because


def owner(membership: Membership, name: str = "prefill-0") -> str | None:
    """The agent that owns the name."""
    member = membership.snapshot().get(name)
    return member.beat.agent if member else None


# --- coming and going ------------------------------------------------------------------------------------------------


def test_a_member_joins_beats_and_says_goodbye() -> None:
    membership = Membership(TTL)
    assert fold(membership, 0.0, beat(seq=1)) == [("joined", "prefill-0")]
    assert fold(membership, 1.0, beat(seq=2, load=Load(running=3))) == []  # load alone is no news
    (member,) = membership.snapshot()
    assert (member.beat.load.running, member.heard_at, member.joined_at) == (3, 1.0, 0.0)
    assert fold(membership, 2.0, beat(seq=3, state=MemberState.GONE)) == [("left", "prefill-0")]
    assert len(membership.snapshot()) == 0
    assert fold(membership, 2.5, beat(seq=3, state=MemberState.GONE)) == []  # the registry keeps it for a while


def test_each_change_is_explained() -> None:
    membership = Membership(TTL)
    fold(membership, 0.0, beat(seq=1))
    line = because(membership, 1.0, beat(seq=2, state=MemberState.DRAINING, detail="SIGTERM"))
    assert line == "prefill-0: ready → draining (SIGTERM)"
    assert not membership.snapshot().members[0].takes_work
    line = because(membership, 2.0, beat(epoch=2, seq=3, role=Role.PREFILL, models=({"id": "tiny"},), shape={"tp": 2}))
    for part in ("epoch 1 → 2", "draining → ready", "role both → prefill", "models none → tiny", "{'tp': 2}"):
        assert part in line


def test_silent_members_expire_on_the_readers_clock() -> None:
    membership = Membership(TTL)
    fold(membership, 0.0, beat(seq=1), beat("bravo", id="decode-0"))
    assert fold(membership, 5.9, beat(seq=2)) == []
    line = because(membership, 6.0, beat(seq=2))  # the same heartbeat again is not a new one
    assert line.startswith("decode-0 expired: nothing new from agent bravo at host-bravo:7 for 6.0 s")
    assert fold(membership, 11.8, beat(seq=2)) == []
    assert fold(membership, 11.9, beat(seq=2)) == [("expired", "prefill-0")]
    assert fold(membership, 12.0, beat(seq=2)) == []  # the same heartbeat again does not bring it back
    assert fold(membership, 13.0, beat(seq=3)) == [("joined", "prefill-0")]


def test_an_agent_that_is_heard_again_says_so() -> None:
    membership = Membership(TTL)
    fold(membership, 0.0, beat(seq=1))
    fold(membership, 7.0)
    assert "heard again, after it expired" in because(membership, 8.0, beat(seq=2))


def test_a_router_is_a_member_with_its_url() -> None:
    router = beat(id="router-1", kind=MemberKind.ROUTER, url="http://10.0.0.9:8000")
    membership = Membership(TTL)
    fold(membership, 0.0, router)
    assert membership.snapshot().members[0].instance.url == "http://10.0.0.9:8000"


def test_snapshots_are_frozen_and_sorted() -> None:
    membership = Membership(TTL)
    fold(membership, 0.0, beat("bravo", id="b"), beat("alfa", id="a"))
    before = membership.snapshot()
    fold(membership, 1.0, beat("bravo", id="b", seq=1, state=MemberState.GONE))
    assert [member.id for member in before] == ["a", "b"]
    assert [member.id for member in membership.snapshot()] == ["a"]
    assert before.get("b") is not None and before.get("c") is None


# --- name conflicts, restarts, clocks --------------------------------------------------------------------------------


def test_two_agents_with_one_name() -> None:
    membership = Membership(TTL)
    fold(membership, 0.0, beat("alfa", epoch=3, seq=1))
    line = because(membership, 1.0, beat("alfa", epoch=3, seq=2), beat("bravo", epoch=4))
    assert "agent bravo at host-bravo:7 is refused" in line
    assert "agent alfa at host-alfa:7" in line
    assert owner(membership) == "alfa"
    assert fold(membership, 2.0, beat("alfa", epoch=3, seq=3), beat("bravo", epoch=4, seq=1)) == []  # said once
    assert membership.snapshot().refused == (line,)
    fold(membership, 3.0, beat("alfa", epoch=3, seq=4))
    assert membership.snapshot().refused == ()  # the other one gave up


def test_two_agents_with_one_name_heard_at_once() -> None:
    membership = Membership(TTL)
    changes = fold(membership, 0.0, beat("alfa", epoch=3), beat("bravo", epoch=4))
    assert changes == [("joined", "prefill-0"), ("stale", "prefill-0")]
    assert owner(membership) == "bravo"


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_free_name_is_taken_over(goodbye: bool) -> None:
    membership = Membership(TTL)
    fold(membership, 0.0, beat("alfa", epoch=3, seq=1))
    if goodbye:
        fold(membership, 1.0, beat("alfa", epoch=3, seq=2, state=MemberState.GONE))
        line = because(membership, 1.5, beat("bravo", epoch=4))
        assert "takes the name over from agent alfa at host-alfa:7, which left" in line
    else:
        changes = membership.fold([beat("bravo", epoch=4)], 6.0)
        assert [change.what for change in changes] == [ChangeKind.EXPIRED, ChangeKind.JOINED]
    assert owner(membership) == "bravo"


def test_goodbye_and_successor_in_one_reading() -> None:
    membership = Membership(TTL)
    fold(membership, 0.0, beat("alfa", epoch=3, seq=1))
    both = (beat("bravo", epoch=4), beat("alfa", epoch=3, seq=2, state=MemberState.GONE))
    assert fold(membership, 0.5, *both) == [("left", "prefill-0"), ("joined", "prefill-0")]


def test_the_goodbye_of_an_agent_that_was_no_member_changes_nothing() -> None:
    membership = Membership(TTL)
    assert fold(membership, 0.0, beat("alfa", epoch=3, state=MemberState.GONE)) == []
    assert fold(membership, 0.1, beat("bravo", epoch=4)) == [("joined", "prefill-0")]
    assert fold(membership, 0.2, beat("alfa", epoch=5)) == [("refused", "prefill-0")]
    assert fold(membership, 0.3, beat("alfa", epoch=5, seq=1, state=MemberState.GONE)) == []
    assert (owner(membership), membership.snapshot().refused) == ("bravo", ())


def test_a_heartbeat_from_before_a_restart() -> None:
    membership = Membership(TTL)
    fold(membership, 0.0, beat(epoch=2, seq=9))
    line = because(membership, 1.0, beat(epoch=1, seq=8))
    assert line == (
        "prefill-0: a heartbeat from before is ignored: epoch 1 seq 8 of agent alfa at host-alfa:7, "
        "where epoch 2 seq 9 of agent alfa at host-alfa:7 has been heard"
    )
    assert fold(membership, 1.5, beat(epoch=1, seq=8)) == []  # said once
    assert membership.snapshot().members[0].beat.order == (2, 9)
    assert fold(membership, 6.0, beat(epoch=1, seq=8)) == [("expired", "prefill-0")]  # and it kept no member alive


@pytest.mark.parametrize("alive", [True, False])
def test_a_heartbeat_of_the_former_agent(alive: bool) -> None:
    membership = Membership(TTL)
    fold(membership, 0.0, beat("alfa", epoch=3, seq=1))
    fold(membership, 6.0, beat("bravo", epoch=4))
    if not alive:
        fold(membership, 12.0)
    line = because(membership, 12.5 if not alive else 6.5, beat("alfa", epoch=3, seq=2), beat("bravo", epoch=4, seq=0))
    assert "a heartbeat from before" in line
    assert "alfa" in line and "bravo" in line
    assert owner(membership) == ("bravo" if alive else None)


def test_a_successor_needs_a_new_epoch() -> None:
    membership = Membership(TTL)
    fold(membership, 0.0, beat("alfa", epoch=3, seq=1))
    fold(membership, 1.0, beat("alfa", epoch=3, seq=2, state=MemberState.GONE))
    assert fold(membership, 2.0, beat("bravo", epoch=3)) == [("stale", "prefill-0")]
    assert fold(membership, 3.0, beat("bravo", epoch=4)) == [("joined", "prefill-0")]


@pytest.mark.parametrize(("off_s", "said"), [(3600.0, "1.0 h ahead of"), (-3600.0, "1.0 h behind"), (30.0, "")])
def test_an_agents_clock_may_be_off(off_s: float, said: str) -> None:
    membership, wall = Membership(TTL), 1.7e9
    changes = membership.fold([beat(sent_at=wall + off_s)], 0.0, wall)
    assert [change.what for change in changes] == [ChangeKind.JOINED, ChangeKind.SKEWED][: 1 + bool(said)]
    assert said in changes[-1].because
    for second in range(1, 10):  # the member stays, and its skew is not reported again
        now = float(second)
        assert fold(membership, now, beat(seq=second, sent_at=wall + now + off_s), wall=wall + now) == []
    (member,) = membership.snapshot()
    assert member.skew_s == pytest.approx(off_s)
    assert fold(membership, 15.0) == [("expired", "prefill-0")]


def test_without_a_wall_clock_nothing_is_said_of_clocks() -> None:
    membership = Membership(TTL)
    fold(membership, 0.0, beat(sent_at=12.0))
    assert membership.snapshot().members[0].skew_s is None


def test_no_member_expires_while_the_registry_does_not_answer() -> None:
    membership = Membership(TTL)
    fold(membership, 0.0, beat(seq=1), beat("bravo", id="decode-0"))
    for _ in range(3):
        membership.deaf()
    assert len(membership.snapshot()) == 2
    assert fold(membership, 1000.5) == []  # the registry answers again, and has lost its data
    assert fold(membership, 1002.0, beat(seq=900)) == []  # an agent's heartbeat is in it again
    assert fold(membership, 1006.4, beat(seq=900)) == []
    assert fold(membership, 1006.5, beat(seq=901)) == [("expired", "decode-0")]  # the silent agent had one full TTL


# --- epochs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [MemberState.GONE, MemberState.READY])
def test_of_a_router_that_left_only_its_name_and_time_are_remembered(last: MemberState) -> None:
    """Routers have a new name at each start, and whole heartbeats of months take hundreds of megabytes."""
    membership, legs = Membership(TTL), {f"decode-{number}": (1, 2, 3) for number in range(1000)}
    told = beat(id="router-1", kind=MemberKind.ROUTER, legs=legs)
    fold(membership, 0.0, told)
    ((left, _),) = fold(membership, TTL, replace(told, seq=1, state=last)) or fold(membership, 2 * TTL)
    assert left == ("left" if last is MemberState.GONE else "expired")
    kept = membership._parted[told.id].beat
    assert len(encode(told)) > 20_000 and len(encode(kept)) < 1000
    assert (kept.who, kept.order) == (told.who, (1, 1))


def test_epochs_only_rise() -> None:
    assert next_epoch(None, 0, 0.0) == 1
    assert next_epoch(4, 0, 0.0) == 5
    assert next_epoch(4, 9, 0.0) == 10


def test_a_registry_that_lost_its_data_gives_no_epoch_twice() -> None:
    clock_s = EPOCH_ZERO_S + 5000.0
    first = next_epoch(None, 0, clock_s)
    assert first == 5000
    assert next_epoch(None, 0, clock_s + 1.0) > first
    assert next_epoch(first, 0, clock_s - 3600.0) == first + 1  # the clock was set back: the stored epoch counts


# --- codec -----------------------------------------------------------------------------------------------------------

WHOLE = beat(
    seq=7,
    role=Role.DECODE,
    models=({"id": "tiny", "max_model_len": 2048},),
    agent_url="http://10.0.0.1:8200",
    detail="wärmt auf · 3 of 4",
    load=Load(running=1, waiting=2, kv_usage=0.5, external_kv_tokens=9),
    credits=8,
    holds=1,
    revision="4f2a",
    weights="org/tiny@77b0",
    node="9c",
    dtype="bfloat16, float32",
    tenants=("acme", "b-2"),
    shape={"tp": 2, "dp": 1},
    sent_at=1.7e9,
)


def test_codec_round_trip() -> None:
    assert decode(encode(WHOLE)) == (WHOLE, "")


def test_an_instance_has_the_number_format_that_its_agent_announces() -> None:
    assert WHOLE.instance.dtype == "bfloat16, float32" and beat().instance.dtype == "", "empty: unknown"
    data = {**json.loads(encode(WHOLE)), "dtype": "float32\x1b[2J"}
    assert decode(json.dumps(data).encode()) == (None, "control characters in `dtype`")


def test_fields_of_a_newer_version_are_ignored() -> None:
    data = json.loads(encode(WHOLE))
    data["load"]["temperature_c"] = 71
    assert decode(json.dumps({**data, "colour": "red"}).encode()) == (WHOLE, "")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"id": "a b"}, "$.id"),
        ({"id": "a:b"}, "$.id"),
        ({"id": "a\n"}, "$.id"),
        ({"id": None}, "$.id"),
        ({"agent": ""}, "$.agent"),
        ({"epoch": -1}, "$.epoch"),
        ({"epoch": 2**60}, "$.epoch"),
        ({"seq": 1.5}, "$.seq"),
        ({"state": "dancing"}, "$.state"),
        ({"role": "chef"}, "$.role"),
        ({"url": "file:///etc/passwd"}, "$.url"),
        ({"url": "http://x\n"}, "$.url"),
        ({"url": "http://pod..svc:8100"}, "`url`"),
        ({"agent_url": f"http://{'a' * 64}.svc:8200"}, "`agent_url`"),
        ({"where": "x" * 600}, "$.where"),
        ({"where": "x\x1b[31m"}, "where"),
        ({"detail": "two\nlines"}, "detail"),
        ({"tenants": ["a b"]}, "$.tenants"),
        ({"tenants": ["a"] * 65}, "$.tenants"),
        ({"load": {"running": -1}}, "load"),
        ({"load": {"kv_usage": 2.0}}, "load"),
        ({"shape": {"tp": 0}}, "shape"),
        ({"models": [{}] * 65}, "$.models"),
        ({"models": ["tiny"]}, "$.models"),
        ({"models": [{"id": "tiny\n"}]}, "models"),
    ],
)
def test_junk_is_refused_with_a_reason(changed: dict[str, Any], says: str) -> None:
    read, fault = decode(json.dumps({**json.loads(encode(WHOLE)), **changed}).encode())
    assert read is None
    assert says in fault
    assert "\n" not in fault and "\x1b" not in fault


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000, b'{"id": "a"}'])
def test_what_is_no_heartbeat_at_all(payload: bytes) -> None:
    read, fault = decode(payload)
    assert read is None and fault


def test_too_large_a_heartbeat_is_neither_written_nor_read() -> None:
    large = replace(WHOLE, models=({"id": "x" * HEARTBEAT_BYTES_MAX},))
    with pytest.raises(ValueError, match="bytes"):
        encode(large)


@pytest.mark.parametrize(
    ("seconds", "words"), [(59.0, "59 s"), (119.0, "119 s"), (600.0, "10 min"), (3600.0, "1.0 h"), (90000.0, "1.0 d")]
)
def test_durations_read_well(seconds: float, words: str) -> None:
    assert duration(seconds) == words
