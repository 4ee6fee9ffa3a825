"""Heartbeats may be lost, repeated or reordered: each name has one owner, no epoch decreases, silent members leave."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.ids import InstanceId
from cluster.registry.membership import ChangeKind, Heartbeat, Member, Membership, MemberState, decode, encode

TTL = 6.0
NAMES = ("prefill-0", "decode-0")
AGENTS = ("alfa", "bravo", "charlie")

beats = st.builds(
    Heartbeat,
    id=st.sampled_from(NAMES).map(InstanceId),
    agent=st.sampled_from(AGENTS),
    epoch=st.integers(1, 4),
    seq=st.integers(0, 6),
    state=st.sampled_from(
        [MemberState.READY, MemberState.READY, MemberState.READY, MemberState.DRAINING, MemberState.GONE]
    ),
    url=st.just("http://10.0.0.1:8100"),
    sent_at=st.sampled_from([0.0, 1000.0, 4600.0]),
)
readings = st.tuples(st.floats(0.0, 8.0), st.none() | st.lists(beats, max_size=5))
"""Seconds since the reading before, and the heartbeats read; None: the registry could not be read."""


class Reader:
    """Folds readings into a membership, and checks its invariants after each fold."""

    def __init__(self) -> None:
        self.membership = Membership(TTL)
        self.now = 0.0
        self.there: dict[InstanceId, Member] = {}
        self.epochs: dict[InstanceId, int] = {}
        self.new_at: dict[InstanceId, float] = {}
        self.heard_again_at = 0.0
        self.deaf = False

    def read(self, after_s: float, heard: list[Heartbeat] | None) -> None:
        self.now += after_s
        if heard is None:
            self.membership.deaf()
            assert {member.id for member in self.membership.snapshot()} == set(self.there), (
                "a member left although the registry could not be read"
            )
            self.deaf = True
            return
        if self.deaf:
            self.deaf, self.heard_again_at = False, self.now
        before = dict(self.there)
        for change in self.membership.fold(heard, self.now, 1000.0):
            assert change.because.startswith(change.id)
            self.follow(change.what, change.id, change.member)
        self.check(before, heard)

    def follow(self, what: ChangeKind, name: InstanceId, member: Member | None) -> None:
        """Follow one change: the changes alone give the members, and a name gets another owner only after the first has
        left or expired.
        """
        if what is ChangeKind.JOINED:
            assert name not in self.there and member is not None
            self.there[name] = member
        elif what in {ChangeKind.LEFT, ChangeKind.EXPIRED}:
            assert member is not None and self.there.pop(name).beat.agent == member.beat.agent

    def check(self, before: dict[InstanceId, Member], heard: list[Heartbeat]) -> None:
        members = self.membership.snapshot().members
        assert [member.id for member in members] == sorted(self.there), "changes and snapshot differ"
        for member in members:
            last = before.get(member.id)
            assert member.beat.agent == self.there[member.id].beat.agent
            assert member.beat.epoch >= self.epochs.get(member.id, 0), "an epoch went back"
            if last is None or member.beat != last.beat:
                assert member.beat in heard, "a heartbeat that was not in the reading"
                assert last is None or last.beat.agent != member.beat.agent or member.beat.order > last.beat.order
                self.new_at[member.id] = self.now
            silent_s = self.now - max(self.new_at[member.id], self.heard_again_at)
            assert silent_s < TTL, "a silent member is still there"
            self.epochs[member.id] = member.beat.epoch
            self.there[member.id] = member


@settings(max_examples=300, deadline=None)
@given(st.lists(readings, max_size=30))
def test_any_readings_keep_the_invariants(script: list[tuple[float, list[Heartbeat] | None]]) -> None:
    reader = Reader()
    for after_s, heard in script:
        reader.read(after_s, heard)
    assert {member.id for member in reader.membership.snapshot()} == set(reader.there)


@settings(max_examples=150, deadline=None)
@given(st.lists(readings, max_size=15), st.randoms(use_true_random=False))
def test_the_order_within_a_reading_does_not_matter(script: list[Any], chance: Any) -> None:
    one, other, now = Membership(TTL), Membership(TTL), 0.0
    for after_s, heard in script:
        now += after_s
        if heard is None:
            one.deaf()
            other.deaf()
            continue
        said = list(
            {(beat.id, beat.agent, beat.order): beat for beat in heard}.values()
        )  # no two heartbeats with one number
        shuffled = [*said, *said[:2]]
        chance.shuffle(shuffled)
        assert one.fold(said, now) == other.fold(shuffled, now)
        assert one.snapshot() == other.snapshot()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_single_agents_stay_members_although_heartbeats_are_lost(data: st.DataObject) -> None:
    """Each name has one agent; heartbeats are lost, late or repeated. All names stay members, with the newest heartbeat
    that was read.
    """
    membership = Membership(TTL)
    sent = {name: [] for name in NAMES}  # type: dict[str, list[Heartbeat]]
    last: dict[str, Heartbeat] = {}
    for tick in range(data.draw(st.integers(1, 25))):
        reading = []
        for name in NAMES:
            beat = Heartbeat(id=InstanceId(name), agent="alfa", epoch=1 + tick // 10, seq=tick, url="http://x:1")
            sent[name].append(replace(beat, state=MemberState.READY))
            stored = data.draw(st.sampled_from(sent[name][-3:]))
            reading.append(stored)
            last[name] = max(last.get(name, stored), stored, key=lambda heard: heard.order)
        what = {change.what for change in membership.fold(reading, float(tick))}
        assert what <= {ChangeKind.JOINED, ChangeKind.CHANGED, ChangeKind.STALE}
    assert {member.id: member.beat for member in membership.snapshot()} == last


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
FIELDS = tuple(json.loads(encode(Heartbeat(id=InstanceId("a"), agent="b", url="http://x:1"))))


@given(st.binary(max_size=200) | junk.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_heartbeat_or_a_fault(payload: bytes) -> None:
    read, fault = decode(payload)
    assert (read is None) == bool(fault)


@settings(max_examples=300)
@given(beats, st.dictionaries(st.sampled_from(FIELDS), junk, max_size=3))
def test_an_altered_heartbeat_is_read_whole_or_not_at_all(beat: Heartbeat, bent: dict[str, Any]) -> None:
    read, fault = decode(json.dumps({**json.loads(encode(beat)), **bent}).encode())
    if read is None:
        assert fault and fault.isprintable()
    else:
        assert decode(encode(read)) == (read, "")


@given(beats)
def test_the_codec_keeps_everything(beat: Heartbeat) -> None:
    assert decode(encode(beat)) == (beat, "")
