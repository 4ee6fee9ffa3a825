"""A push as a script. Failures that users of other systems reported have their number; "there" is that system.

`World` (tests/support/pushing.py) puts real block contents behind both halves. It fails by itself where a wrong byte is
used, or a block is freed twice, given out twice, or written while it belongs to another request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.pushing import Site, Transfer, World

from cluster.ids import InstanceId, RequestId, TransferId
from decode import push as d
from kvtransfer.push import (
    REPEATED,
    STALE,
    AbortPush,
    Begun,
    CutLink,
    FreeBlocks,
    ImpossibleMove,
    Message,
    PeerLost,
    PeerSeen,
    Proof,
    PushDone,
    PushRefused,
    PushTerms,
    PushTick,
    Received,
    Register,
    Send,
    Withdraw,
)
from kvtransfer.rows import rows
from kvtransfer.ticket import TicketPeer
from prefill import push as p

P, D, E = (InstanceId(name) for name in "pde")
PEER_P, PEER_D, PEER_E = TicketPeer(P, 7), TicketPeer(D, 3), TicketPeer(E, 4)
ID = TransferId(RequestId("r"), 1, 7)
S1 = (3 << 32) + 1
"""The serial of the first reservation of a consumer in its third life."""
TERMS = PushTerms()
PROOF = Proof("ticket-1", "acme", left_s=60.0)
REGISTER = Register(ID, S1, 0, (1, 2), 9, "ticket")
RESERVE = d.Reserve(ID, P, 0, (1, 2), 30, 9, "ticket")
NOT_WRITTEN = PushDone(ID, S1, ok=False, tokens=0, because="")


def plain(effects: list[Any]) -> list[Any]:
    """The effects without their reasons."""
    found = []
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, PushDone):
            effect = Send(effect.to, replace(effect.message, because=""))  # noqa: PLW2901
        found.append(replace(effect, because="") if hasattr(effect, "because") else effect)
    return found


# --- the tables ------------------------------------------------------------------------------------------------------


def test_memory_is_not_freed_while_a_write_may_be_under_way() -> None:
    over = {p.PushHoldCause.WRITES_ENDED, p.PushHoldCause.WRITES_FAILED, p.PushHoldCause.LINK_ENDED}
    for state, cause, row in rows(p.ROWS):
        if (
            state in {p.PushHoldState.STREAMING, p.PushHoldState.WRITING, p.PushHoldState.DRAINING}
            and row.state is p.PushHoldState.RELEASED
        ):
            assert cause in over, f"{state} ends by {cause}"
    for dst, why, went in rows(d.ROWS):
        if went.state not in d.ROWS:
            assert why in {d.PushPullCause.WRITTEN, d.PushPullCause.NOT_WRITTEN, d.PushPullCause.LINK_ENDED}, (
                f"{dst} ends by {why}"
            )


def test_only_the_producers_report_leads_to_use() -> None:
    ways = {(state, cause) for state, cause, row in rows(d.ROWS) if row.state is d.PushPullState.DONE}
    assert ways == {
        (d.PushPullState.RESERVED, d.PushPullCause.WRITTEN),
        (d.PushPullState.WRITING, d.PushPullCause.WRITTEN),
    }


def test_every_state_ends_by_time_and_a_request_gets_one_outcome_at_most() -> None:
    assert all(p.PushHoldCause.TIME_UP in causes for causes in p.ROWS.values())
    assert all(d.PushPullCause.TIME_UP in causes for causes in d.ROWS.values())
    after = {row.state for _, _, row in rows(d.ROWS) if d.PushPullAct.RECOMPUTE in row.acts} & set(d.ROWS)
    assert after == {d.PushPullState.QUARANTINED}
    assert all(d.PushPullAct.RECOMPUTE not in row.acts for row in d.ROWS[d.PushPullState.QUARANTINED].values())


# --- the protocol ----------------------------------------------------------------------------------------------------


def test_push_as_the_producer_sees_it() -> None:
    half = p.Pushes(7)
    assert half.handle(p.OpenHold(ID, "acme"), 0.0) == []
    registered = half.handle(p.Registered(PEER_D, REGISTER, PROOF), 0.0)
    assert registered == [p.PostWrite(ID, S1, D, 0, (), (1, 2), 9), Send(D, Begun(ID, S1))]
    assert half.handle(p.Filled(ID, (5, 6), 30), 0.0) == []
    ended = plain(half.handle(p.WritesEnded(ID, ok=True), 0.0))
    assert ended == [Send(D, PushDone(ID, S1, ok=True, tokens=30, because="")), FreeBlocks(ID, (5, 6), "")]


def test_push_as_the_consumer_sees_it() -> None:
    half = d.Reservations(3)
    assert half.handle(RESERVE, 0.0) == [Send(P, REGISTER)]
    assert half.handle(Received(PEER_P, Begun(ID, S1)), 0.0) == []
    done = PushDone(ID, S1, ok=True, tokens=16, because="")
    assert half.handle(Received(PEER_P, done), 0.0) == [d.Use(ID, (1, 2), 16)], "16 of 30: the rest is computed here"


def test_a_prompt_that_was_computed_before_the_consumer_had_room() -> None:
    half = p.Pushes(7)
    half.handle(p.OpenHold(ID, "acme"), 0.0)
    assert half.handle(p.Filled(ID, (5, 6), 30), 0.0) == [p.Offer(ID, (5, 6), 30)]
    registered = half.handle(p.Registered(PEER_D, REGISTER, PROOF), 0.0)
    assert registered == [p.PostWrite(ID, S1, D, 0, (5, 6), (1, 2), 9), Send(D, Begun(ID, S1))]
    ended = plain(half.handle(p.WritesEnded(ID, ok=False), 0.0))
    assert ended == [Send(D, NOT_WRITTEN), FreeBlocks(ID, (5, 6), "")]


def test_writes_that_end_before_the_engine_reports_the_prompt() -> None:
    half = p.Pushes(7)
    for event in (p.OpenHold(ID, "acme"), p.Registered(PEER_D, REGISTER, PROOF), p.WritesEnded(ID, ok=True)):
        effects = half.handle(event, 0.0)
    assert effects == []
    filled = plain(half.handle(p.Filled(ID, (5, 6), 30), 0.0))
    assert filled == [Send(D, PushDone(ID, S1, ok=True, tokens=30, because="")), FreeBlocks(ID, (5, 6), "")]


def test_a_prompt_that_no_consumer_registers_for_ends_with_its_lease() -> None:
    half = p.Pushes(7)
    half.handle(p.OpenHold(ID, "acme"), 0.0)
    half.handle(p.Filled(ID, (5, 6), 30), 1.0)
    assert half.next_wakeup() == 1.0 + TERMS.lease_s
    assert FreeBlocks(ID, (5, 6), "") in plain(half.handle(PushTick(), 1.0 + TERMS.lease_s))


def test_contradictory_events_of_an_engine_raise_and_change_nothing() -> None:
    half = p.Pushes(7)
    half.handle(p.OpenHold(ID, "acme"), 0.0)
    half.handle(p.Filled(ID, (5, 6), 30), 0.0)
    for event in (p.Filled(ID, (7, 8), 30), p.WritesEnded(ID, ok=True)):
        with pytest.raises(ImpossibleMove):
            half.handle(event, 0.0)
    consumer = d.Reservations(3)
    consumer.handle(RESERVE, 0.0)
    with pytest.raises(ImpossibleMove):
        consumer.handle(replace(RESERVE, id=ID._replace(attempt=2), blocks=(2, 3)), 0.0)
    assert len(half.book.entries) == len(consumer.book.entries) == 1


def test_timers_that_have_fired_are_not_lost_when_an_event_raises() -> None:
    half, other = p.Pushes(7), ID._replace(attempt=2)
    half.handle(p.OpenHold(ID, "acme"), 0.0)
    half.handle(p.Filled(ID, (5, 6), 30), 0.0)
    half.handle(p.OpenHold(other, "acme"), 0.0)
    with pytest.raises(ImpossibleMove):
        half.handle(p.WritesEnded(other, ok=True), TERMS.lease_s)
    wakeup = half.next_wakeup()
    assert wakeup is not None and wakeup < TERMS.lease_s
    assert FreeBlocks(ID, (5, 6), "") in plain(half.handle(PushTick(), TERMS.lease_s))


def test_full_halves_refuse_and_the_request_is_served_without_them() -> None:
    other = ID._replace(attempt=2)
    half, consumer = p.Pushes(7, PushTerms(entries_max=1)), d.Reservations(3, PushTerms(entries_max=1))
    half.handle(p.OpenHold(ID, "acme"), 0.0)
    assert plain(half.handle(p.OpenHold(other, "acme"), 0.0)) == [PushRefused(other, "")]
    consumer.handle(RESERVE, 0.0)
    refused = plain(consumer.handle(replace(RESERVE, id=other, blocks=(3, 4)), 0.0))
    assert refused == [PushRefused(other, ""), Send(P, Withdraw(other, S1 + 1)), FreeBlocks(other, (3, 4), "")]
    half = p.Pushes(7, PushTerms(remembered_max=2))
    ids = [ID._replace(attempt=attempt) for attempt in range(4)]
    for id_ in ids[:2]:
        half.handle(p.OpenHold(id_, "acme"), 0.0)
        half.handle(AbortPush(id_, "left"), 0.0)
    assert plain(half.handle(p.OpenHold(ids[2], "acme"), 0.0)) == [PushRefused(ids[2], "")]
    assert half.handle(p.OpenHold(ids[3], "acme"), TERMS.remember_s) == []


@pytest.mark.parametrize("proof", [Proof("t", "evil", 60.0), PROOF])
def test_a_registration_needs_a_ticket_of_its_tenant_that_was_not_used(proof: Proof) -> None:
    half, other = p.Pushes(7), ID._replace(attempt=2)
    for id_ in (ID, other):
        half.handle(p.OpenHold(id_, "acme"), 0.0)
    half.handle(p.Registered(PEER_D, REGISTER, PROOF), 0.0)
    again = half.handle(p.Registered(PEER_D, replace(REGISTER, id=other), proof), 0.0)
    assert [each for each in plain(again) if isinstance(each, p.PostWrite)] == []
    assert plain(again) == [Send(D, replace(NOT_WRITTEN, id=other))]


def test_peers_that_are_seen_again_in_the_same_life_change_nothing() -> None:
    half = d.Reservations(3)
    half.handle(PeerSeen(PEER_P), 0.0)
    half.handle(RESERVE, 0.0)
    assert half.handle(PeerSeen(PEER_P), 0.0) == [] and half.handle(PeerSeen(TicketPeer(P, 6)), 0.0) == []
    assert half.book.ignored == {STALE: 1}
    restarted = plain(half.handle(PeerSeen(TicketPeer(P, 8)), 0.0))
    assert restarted == [Send(P, Withdraw(ID, S1)), d.Recompute(ID, "")]


# --- stories on two sides --------------------------------------------------------------------------------------------


def pushed(world: World, blocks: int = 2) -> tuple[TransferId, Site, Site]:
    """The producer computes, the consumer has reserved blocks, and both know of each other."""
    id_ = world.new_id("p")
    producer, consumer = world.site("p"), world.site("d")
    producer.open(id_, blocks)
    consumer.reserve(id_, producer.me.instance, blocks)
    world.deliver_all()
    return id_, producer, consumer


def end(site: Site, transfer: Transfer, *, fail: bool = False) -> None:
    """Carry out one write to its end."""
    for _ in range(100):
        for part in range(len(transfer.parts)):
            if transfer in site.transfers:
                site.step(transfer, part, fail=fail)


def outcome(site: Site, id_: TransferId) -> str | None:
    return site.legs[id_].outcome


def is_(kind: type[Message]) -> Callable[[Message], bool]:
    return lambda message: isinstance(message, kind)


def whole(world: World) -> str | None:
    """The outcome of a fresh push from beginning to end: it shows whether the pair still works."""
    id_, producer, consumer = pushed(world)
    producer.post(producer.transfers[-1], 1)
    producer.fill(id_)
    end(producer, producer.transfers[-1])
    world.deliver_all()
    return outcome(consumer, id_)


def test_vllm_46283_aborted_push_is_reclaimed() -> None:
    """The producer never reports the end of its writes: the link is cut, and then the blocks are free."""
    world = World()
    id_, _, consumer = pushed(world)
    consumer.abort(id_)
    assert consumer.owned == 2, "the producer may be writing"
    world.network.clear()
    world.now += TERMS.cut_s
    consumer.tell(PushTick())
    assert consumer.cuts == [P] and consumer.owned == 2
    consumer.cut(P)
    assert consumer.owned == 0


def test_vllm_46283_a_producer_that_answers_ends_it_sooner() -> None:
    world = World()
    id_, producer, consumer = pushed(world)
    consumer.abort(id_)
    world.deliver_all()
    assert consumer.owned == 2
    producer.post(producer.transfers[0], 1)
    end(producer, producer.transfers[0], fail=True)
    world.deliver_all()
    assert (consumer.owned, producer.owned) == (0, 0)


def test_vllm_29906_aborts_during_the_last_step_hold_nothing() -> None:
    world = World(blocks=4)
    producer = world.site("p")
    for _ in range(50):
        id_ = world.new_id("p")
        producer.open(id_, 4)
        producer.abort(id_)
        producer.fill(id_)
        assert producer.owned == 0
        assert producer.pool.take(4, ("test",)) == (0, 1, 2, 3)
        producer.pool.hand_over((0, 1, 2, 3), ("test",), None)


def test_sglang_36926_whatever_is_dropped_is_given_back() -> None:
    """Every message of one kind is lost, for each kind: no block stays, and the request is served all the same."""
    for kind in (Register, Begun, PushDone, Withdraw):
        world = World()
        id_, producer, consumer = pushed(world)
        world.deliver_all(but=is_(kind))
        producer.fill(id_)
        for _ in range(200):
            for transfer in tuple(producer.transfers):
                if not transfer.posted:
                    producer.post(transfer, 1)
                end(producer, transfer)
            world.deliver_all(but=is_(kind))
            world.pass_time(1.0)
            world.check()
        assert outcome(consumer, id_) in {"use", "recompute"}, kind
        world.fall_silent()


def test_llm_d_1138_a_producer_crash_strands_nothing_at_the_consumer() -> None:
    world = World()
    id_, _, consumer = pushed(world)
    world.restart("p")
    world.notice("d", "p", lost=False)
    assert outcome(consumer, id_) == "recompute", "at once"
    world.network.clear()
    world.pass_time(TERMS.cut_s)
    assert consumer.owned == 0


@pytest.mark.parametrize("silent", [False, True])
def test_sglang_24159_a_producer_that_fails_does_not_keep_the_consumer_waiting(silent: bool) -> None:
    """There the router waited up to 1800 s (also sglang 29482, aibrix 2289)."""
    world = World()
    id_, producer, consumer = pushed(world)
    if silent:
        world.pass_time(TERMS.reserve_s_max)
    else:
        producer.post(producer.transfers[0], 1)
        producer.abort(id_)
        end(producer, producer.transfers[0], fail=True)
        world.deliver_all()
    assert outcome(consumer, id_) == "recompute"


def test_sglang_28651_an_abort_storm_passes() -> None:
    """There 12 groups took more than an hour to recover from one storm."""
    world = World(blocks=60)
    for turn in range(120):
        id_, producer, consumer = pushed(world, 1)
        for site in world.sites.values():
            site.abort(id_)
        producer.fill(id_)
        for transfer in tuple(producer.transfers):
            producer.post(transfer, 1)
            end(producer, transfer, fail=turn % 3 == 0)
        world.deliver_all()
    assert (producer.owned, consumer.owned) == (0, 0)
    assert whole(world) == "use"


def test_smg_2382_a_dead_consumer_does_not_poison_the_producer() -> None:
    """The consumer dies while the producer writes to it; the consumer's next life is served at once."""
    world = World()
    id_, producer, _ = pushed(world)
    producer.post(producer.transfers[0], 1)
    world.restart("d")
    world.notice("p", "d", lost=False)
    end(producer, producer.transfers[0])
    producer.fill(id_)
    world.deliver_all()
    assert producer.owned == 0 and whole(world) == "use"


def test_vllm_50754_a_write_that_cannot_be_posted_is_reported() -> None:
    """There the producer wrote a log line, and the consumer counted towards writes that never came (llm-d 2433)."""
    world = World()
    id_, producer, consumer = pushed(world)
    producer.tell(p.WritesEnded(id_, ok=False))
    world.deliver_all()
    assert outcome(consumer, id_) == "recompute" and consumer.owned == 0


def test_nixl_1983_a_write_over_an_ended_link_fails_and_harms_no_request() -> None:
    """The registration arrives after the consumer has ended the link and used its blocks for others (also nixl 795)."""
    world = World(blocks=2)
    id_ = world.new_id("p")
    producer, consumer = world.site("p"), world.site("d")
    producer.open(id_, 2)
    consumer.reserve(id_, P, 2)
    consumer.cut(P)
    assert (outcome(consumer, id_), consumer.owned) == ("recompute", 0)
    consumer.pool.take(2, ("somebody",))
    world.deliver_all(but=is_(Withdraw))
    producer.post(producer.transfers[0], 1)
    end(producer, producer.transfers[0])
    world.deliver_all()
    assert consumer.pool.owned("somebody") == 2
    producer.fill(id_)
    assert producer.owned == 0


def test_sglang_24580_pages_are_not_reused_while_a_push_may_write_them() -> None:
    """An aborted decode request's pages went to the next request, and the old transfer overwrote them (also 24578)."""
    world = World(blocks=2)
    id_, producer, consumer = pushed(world)
    transfer = producer.transfers[0]
    producer.post(transfer, 1)
    producer.compute(id_)
    producer.step(transfer, 0)
    consumer.abort(id_)
    assert consumer.pool.take(1, ("next",)) is None
    producer.compute(id_)
    end(producer, transfer)  # `World` fails where a write meets a block that is not its own
    producer.fill(id_)
    world.deliver_all()
    assert consumer.pool.take(2, ("next",)) == (0, 1)


def test_sglang_30233_an_incomplete_prompt_is_not_generated_from() -> None:
    """The producer gave the prompt up (too long for it): what it had written by then is not used."""
    world = World()
    id_, producer, consumer = pushed(world)
    producer.post(producer.transfers[0], 1)
    producer.compute(id_)
    producer.step(producer.transfers[0], 0)
    producer.abort(id_)
    end(producer, producer.transfers[0], fail=True)
    world.deliver_all()
    assert outcome(consumer, id_) == "recompute"


def test_a_later_life_of_the_producer_cannot_vouch_for_the_one_before() -> None:
    half, later = d.Reservations(3), TicketPeer(P, 8)
    half.handle(RESERVE, 0.0)
    for ok in (True, False):
        assert half.handle(Received(later, PushDone(ID, S1, ok=ok, tokens=30, because="")), 0.0) == []
    producer = p.Pushes(8)
    assert plain(producer.handle(p.OpenHold(ID, "acme"), 0.0)) == [PushRefused(ID, "")]
    assert producer.handle(Received(PEER_D, Withdraw(ID, S1)), 0.0) == []


def test_only_the_producer_speaks_for_its_writes() -> None:
    half = d.Reservations(3)
    half.handle(RESERVE, 0.0)
    assert half.handle(Received(TicketPeer(E, 7), PushDone(ID, S1, ok=True, tokens=30, because="")), 0.0) == []
    assert half.handle(Received(PEER_P, PushDone(ID, S1 - 1, ok=True, tokens=30, because="")), 0.0) == []


@pytest.mark.parametrize("opened", [False, True])
def test_nothing_is_written_after_the_producer_answered_not_written(opened: bool) -> None:
    """A withdrawal overtakes its registration: the consumer has freed its blocks, so the registration is refused."""
    half = p.Pushes(7)
    if opened:
        half.handle(p.OpenHold(ID, "acme"), 0.0)
    assert plain(half.handle(Received(PEER_D, Withdraw(ID, S1)), 0.0)) == [Send(D, NOT_WRITTEN)]
    assert plain(half.handle(p.Registered(PEER_D, REGISTER, PROOF), 0.0)) == [Send(D, NOT_WRITTEN)]
    assert plain(half.handle(p.OpenHold(ID, "acme"), 0.0)) == [PushRefused(ID, "")]
    silent = p.Pushes(7, PushTerms(remembered_max=1))
    silent.handle(AbortPush(ID._replace(attempt=2), "left"), 0.0)
    assert silent.handle(Received(PEER_D, Withdraw(ID, S1)), 0.0) == [], "it cannot remember the refusal"


def test_a_refused_registration_stays_refused() -> None:
    """Another consumer has the hold, and dies; a copy of the refused registration comes: its blocks are long freed."""
    half, second = p.Pushes(7), replace(PROOF, tag="ticket-2")
    half.handle(p.OpenHold(ID, "acme"), 0.0)
    half.handle(p.Registered(PEER_E, REGISTER, PROOF), 0.0)
    for event in (None, PeerLost(E)):
        if event is not None:
            half.handle(event, 0.0)
        assert plain(half.handle(p.Registered(PEER_D, REGISTER, second), 0.0)) == [Send(D, NOT_WRITTEN)]
    full = p.Pushes(7, PushTerms(remembered_max=1))
    full.handle(p.OpenHold(ID, "acme"), 0.0)
    full.handle(p.Registered(PEER_E, REGISTER, PROOF), 0.0)
    assert full.handle(p.Registered(PEER_D, REGISTER, second), 0.0) == []
    assert half.handle(p.Registered(PEER_E, REGISTER, PROOF), 0.0) == [] and half.book.ignored[REPEATED] == 1


@pytest.mark.parametrize("giver", ["p", "d"])
def test_a_push_under_way_is_not_freed_by_either_side(giver: str) -> None:
    """One side gives the push up: the producer keeps the blocks that are read, the consumer those that are written."""
    world = World()
    id_, producer, consumer = pushed(world)
    producer.fill(id_)
    producer.post(producer.transfers[0], 1)
    world.site(giver).abort(id_)
    world.deliver_all()
    assert (producer.owned, consumer.owned) == (2, 2)
    end(producer, producer.transfers[0])
    world.deliver_all()
    assert (producer.owned, consumer.owned) == (0, 0)
    assert outcome(consumer, id_) == ("recompute" if giver == "p" else None)


def test_a_peer_that_does_not_answer_may_still_touch_memory() -> None:
    """The request is recomputed at once; its blocks wait for the end of the link."""
    world = World()
    id_, _, consumer = pushed(world)
    world.notice("d", "p", lost=True)
    assert (outcome(consumer, id_), consumer.owned) == ("recompute", 2)
    consumer.cut(P)
    assert consumer.owned == 0


def test_a_push_that_takes_too_long_is_not_free_before_the_producer_says_so() -> None:
    world = World()
    id_, producer, consumer = pushed(world)
    producer.fill(id_)
    producer.post(producer.transfers[0], 1)
    world.now += TERMS.reserve_s_max
    consumer.tell(PushTick())
    assert (outcome(consumer, id_), consumer.owned) == ("recompute", 2)
    world.deliver_all()
    world.now += TERMS.cut_s
    producer.tell(PushTick())
    world.deliver_all()
    assert (producer.owned, consumer.owned) == (2, 2), "it still writes, and asks for the link to be cut"
    assert producer.cuts == [D]
    producer.cut(D)
    world.deliver_all()
    assert (producer.owned, consumer.owned) == (0, 0)


def test_a_cut_that_is_not_carried_out_shows_as_a_leak() -> None:
    world = World()
    id_, _, consumer = pushed(world)
    consumer.abort(id_)
    world.network.clear()
    for _ in range(2):
        assert consumer.leaked == 0
        world.now += TERMS.cut_s
        consumer.tell(PushTick())
    assert consumer.leaked == 1
    assert sum(isinstance(effect, CutLink) for effect in consumer.effects) == 2
    consumer.cut(P)
    assert consumer.leaked == 0
