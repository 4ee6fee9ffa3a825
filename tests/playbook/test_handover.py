"""The hand-over rules that engines run, as stories. Failures that users of other systems reported have their number.

In a docstring "there" is the system of the report, which the test's name names.

`World` (tests/support/handover.py) puts real block contents behind `prefill` and `decode`, the objects that the
connector runs inside vLLM. `World` fails by itself where a wrong byte is used, a block is freed twice, a read writes
into another request's block, or a hold's end is reported twice. Tests of writing (push) are in `test_push.py`.

These rules cannot see wrong bytes, so such failures have no test here: layouts that both sides read differently (vllm
52617), what a model or a cache dtype makes of the bytes (vllm 52627, 42179), buses that corrupt them (dynamo 12463).
The proofs and digests of a pair find those.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.handover import TERMS, Offer, World

from decode.peers import ASIDE_S, FAILURES
from decode.table import BECAUSE, READINGS, WANTS, PullAct, PullCause, Reading, Want
from kvtransfer.hold_marks import CLEAR, Slot
from kvtransfer.rows import rows

STALE = BECAUSE[Reading.GONE]


# --- the tables ------------------------------------------------------------------------------------------------------


def test_only_a_mark_that_stood_after_the_last_read_leads_to_use() -> None:
    """vllm 21570: a one-sided read does not tell which request the blocks belonged to."""
    assert {(state, cause) for state, cause, row in rows(READINGS) if PullAct.USE in row.acts} == {
        (Reading.CONFIRMED, PullCause.RIGHT)
    }
    into = {(state, cause) for state, cause, row in rows(READINGS) if row.state is Reading.CONFIRMED}
    assert into == {(Reading.LANDED, PullCause.ALL_SEEN)}
    assert {(state, cause) for state, cause, row in rows(READINGS) if row.state is Reading.LANDED} == {
        (Reading.READING, PullCause.ALL_READ)
    }
    assert READINGS[Reading.READING][PullCause.ALL_READ].acts == (PullAct.LOOK,)


def test_a_reading_ends_only_when_nothing_of_it_is_under_way() -> None:
    """vllm 56104: a failed part does not free what its siblings still write into."""
    for state, cause, row in rows(READINGS):
        if row.state not in READINGS:
            assert cause in {PullCause.ALL_READ, PullCause.ALL_SEEN, PullCause.RIGHT, PullCause.WRONG}, (
                f"{state} ends by {cause}"
            )


def test_each_end_says_one_thing_and_tells_the_producer_unless_its_hold_is_gone() -> None:
    for state, cause, row in rows(READINGS):
        if row.state not in READINGS:
            assert len({PullAct.USE, PullAct.RECOMPUTE} & set(row.acts)) == 1, f"{state} by {cause}"
            assert (PullAct.GIVE_BACK in row.acts) is (row.state is not Reading.STALE)
    assert all(PullAct.RECOMPUTE in row.acts for row in WANTS[Want.SPOILT].values() if row.state is Want.OVER)


# --- a hand-over -----------------------------------------------------------------------------------------------------


def begun(world: World, offer: Offer | None = None, at: str = "d"):
    """A hold, and a leg whose reads are under way."""
    return world.consumers[at].pull(world.held() if offer is None else offer)


def whole(world: World, at: str = "d") -> str:
    """The outcome of a fresh hand-over from beginning to end: it shows whether the pair still works."""
    leg = begun(world, at=at)
    world.consumers[at].finish()
    world.deliver_all()
    return leg.outcome


@pytest.mark.parametrize("ranks", [1, 2])
def test_from_beginning_to_end(ranks: int) -> None:
    world = World(ranks=ranks)
    assert whole(world) == "use"
    assert (world.p.taken, world.d.taken, world.p.idle, world.d.idle) == (0, 0, True, True)


def test_blocks_are_free_when_the_last_rank_has_heard_of_the_read() -> None:
    world = World(ranks=2)
    begun(world)
    world.d.finish()
    world.deliver()
    world.p.step()
    assert world.p.taken == 2, "one rank's notice frees nothing"
    world.deliver_all()
    assert world.p.taken == 0


# --- A. blocks leaked or stranded ------------------------------------------------------------------------------------


def test_vllm_41269_rejected_before_admission_releases_at_once() -> None:
    """Leg 2 fails validation at the consumer, before the consumer has blocks for it."""
    world = World()
    world.d.reject(world.held())
    world.deliver_all()
    assert world.p.taken == 0


def test_vllm_29906_aborts_during_the_last_step_hold_nothing() -> None:
    """The abort comes while the step runs that completes the prompt: its blocks are free at once."""
    world = World(blocks=4)
    for turn in range(50):
        name = f"n{turn}"
        assert world.p.open(f"r{turn}", 4, name)
        world.p.step()
        if turn % 2:
            world.p.release(name)
        assert world.p.fill(f"r{turn}", aborted=not turn % 2) is None
        assert world.p.taken == 0
        world.p.step()
    assert world.p.holds.slots.free == 4


def test_vllm_25897_a_short_lease_is_enough_for_a_slow_consumer() -> None:
    """There the timeout was raised from 120 to 480 s. Here a waiting consumer renews the lease, and a consumer that is
    gone costs one lease.
    """
    world = World()
    slow, gone = world.held(), world.held()
    for _ in range(20):
        world.d.beat(slow)
        world.deliver_all()
        world.pass_time(5.0)
    assert (set(world.p.kept), gone.request in world.p.kept) == ({slow.request}, False), "100 s later"
    leg = begun(world, slow)
    world.d.finish()
    assert leg.outcome == "use"


@pytest.mark.parametrize("when", ["before", "running", "held", "twice"])
def test_vllm_25067_a_name_that_is_given_up_holds_nothing_whenever_it_comes(when: str) -> None:
    world = World()
    if when == "before":
        world.p.release("name")
    assert world.p.open("r", 2, "name")
    world.p.step()
    if when == "running":
        world.p.release("name")
    offer = world.p.fill("r")
    assert (offer is None) is (when in {"before", "running"})
    world.p.step()
    for _ in range({"held": 1, "twice": 2}.get(when, 0)):
        world.p.release("name")
        world.p.step()
    assert world.p.taken == 0 and world.p.idle
    if offer is not None:
        leg = begun(world, offer)
        world.d.finish()
        world.deliver_all()
        assert (leg.outcome, leg.because) == ("recompute", STALE)


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_vllm_50425_a_client_that_leaves_frees_both_sides(moved: int) -> None:
    """Also sglang 21652: the read cannot be taken back, so both sides keep its blocks until its end."""
    world = World()
    begun(world)
    for _ in range(moved):
        world.d.move(next(read for read in world.d.under_way if read.moves))
    world.d.step()
    assert world.d.taken == 2
    world.d.finish()
    world.deliver_all()
    assert (world.p.taken, world.d.taken) == (0, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_vllm_21570_the_producer_frees_while_the_consumer_reads(ranks: int) -> None:
    """Half of the bytes that were read are the prompt's, half are the next request's: none of them is used."""
    world = World(blocks=2, ranks=ranks)
    leg = begun(world)
    world.d.move(world.d.under_way[0])
    world.pass_time(TERMS.lease)
    other = world.held()
    assert other.blocks == leg.offer.blocks
    world.d.finish()
    assert (leg.outcome, leg.because) == ("recompute", STALE)
    assert not world.network, "the hold is gone: no producer is told"
    assert set(world.p.kept) == {other.request}


def test_aibrix_1772_retrieved_after_expiry_is_not_used_and_is_counted() -> None:
    """There the producer wrote a log line about potentially invalid blocks, and the consumer served them."""
    world = World()
    leg = begun(world)
    world.pass_time(TERMS.lease)
    world.d.finish()
    assert leg.outcome == "recompute" and world.d.pulls.recomputed_tokens == 2


def test_vllm_58063_a_consumer_lets_go_of_a_producer_that_was_replaced() -> None:
    world = World()
    legs = [begun(world), begun(world)]
    world.d.move(world.d.under_way[0])
    world.restart_p()
    world.d.meet("p")
    world.d.finish(fail=True)
    assert [leg.outcome for leg in legs] == ["recompute"] * 2 and world.d.taken == 0
    assert whole(world) == "use"


def test_sglang_36926_whatever_is_dropped_is_given_back() -> None:
    """Every notice is lost: blocks come back with their leases, and the request is served all the same."""
    world = World()
    legs = [begun(world), begun(world)]
    world.d.finish()
    assert [leg.outcome for leg in legs] == ["use"] * 2
    world.fall_silent()


def test_dynamo_14507_a_release_after_the_prompt_is_computed_works_at_once() -> None:
    """There it was a no-op: the blocks came back when the transfer timed out."""
    world = World()
    world.held(name="name")
    world.p.release("name")
    world.p.step()
    assert world.p.taken == 0


@pytest.mark.parametrize("fail", [False, True])
def test_llm_d_1138_a_producer_crash_strands_nothing_at_the_consumer(fail: bool) -> None:
    """The transport reports a failed read, or brings the bytes of the producer's next life."""
    world = World()
    leg = begun(world)
    world.restart_p()
    world.d.finish(fail=fail)
    assert leg.outcome == "recompute" and world.d.taken == 0


@pytest.mark.parametrize("order", ["release first", "read first"])
def test_vllm_46240_and_43226_two_ends_at_once_are_reported_once(order: str) -> None:
    """The router releases a hold while its consumer reports the read; `World` fails on a second report of the end."""
    world = World(ranks=2)
    offer = world.held(name="name")
    leg = begun(world, offer)
    world.d.finish()
    assert leg.outcome == "use"
    if order == "release first":
        world.p.release("name")
        world.p.step()
    world.deliver_all()
    world.p.release("name")
    world.deliver_all()
    world.pass_time(TERMS.longest)
    assert world.p.taken == 0 and world.p.idle


def test_one_rank_is_read_before_the_other_hears_of_the_release() -> None:
    """Ranks do not step at the same time: every rank ends the hold once, by a release or by a read."""
    world = World(ranks=2)
    leg = begun(world, world.held(name="name"))
    world.d.finish()
    world.p.release("name")
    world.p.decide()
    world.p.rank_steps(0)
    world.deliver_all()
    assert leg.outcome == "use" and world.p.taken == 0


# --- B. hangs and cascades -------------------------------------------------------------------------------------------


def test_dynamo_13088_no_request_waits_for_ever_under_churn() -> None:
    """There 24 of 1536 requests never ended. Here producers die and return all the time, and each request ends."""
    world = World(blocks=40)
    for turn in range(60):
        begun(world, world.held(1))
        if turn % 4 == 1:
            world.restart_p()
            world.d.meet("p")
        if turn % 3 == 1:
            world.d.finish(fail=turn % 2 == 0)
        if turn % 5 == 2:
            world.network.clear()
        world.deliver_all()
        world.pass_time(1.0)
    world.d.finish()
    assert {leg.outcome for leg in world.d.legs} == {"use", "recompute"}
    world.fall_silent()


def test_sglang_9266_failed_transfers_leave_no_entry() -> None:
    """There each failure took one slot of the pool with it, until nothing could be served (also 9926, 10110, 12293)."""
    world = World(blocks=2)
    for _ in range(50):
        begun(world)
        world.d.finish(fail=True)
        world.deliver_all()
    assert {leg.outcome for leg in world.d.legs} == {"recompute"} and world.d.idle
    world.now += 2 * ASIDE_S + 600
    assert whole(world) == "use"


def test_a_pair_that_does_not_work_is_set_aside_and_let_in_again() -> None:
    world = World()
    for _ in range(FAILURES):
        begun(world)
        world.d.finish(fail=True)
        world.deliver_all()
    refused = begun(world)
    assert refused.outcome == "recompute" and "have failed" in refused.because
    world.deliver_all()
    assert world.p.taken == 0, "and the producer is told at once"
    world.now += ASIDE_S
    assert whole(world) == whole(world) == "use"


def test_sglang_16903_a_consumer_outlives_its_producer() -> None:
    """There the consumer had to be restarted when the producer died (also sglang 34289)."""
    world = World()
    begun(world)
    world.restart_p()
    world.d.finish(fail=True)
    world.d.meet("p")
    assert whole(world) == "use"


def test_sglang_28651_an_abort_storm_passes() -> None:
    """There 12 groups took more than an hour to recover from one storm."""
    world = World(blocks=60)
    for turn in range(120):
        assert world.p.open(f"r{turn}", 1, f"n{turn}")
        world.p.step()
        offer = world.p.fill(f"r{turn}", aborted=turn % 3 == 0)
        if offer is not None and turn % 4 == 0:
            begun(world, offer)
        world.p.release(f"n{turn}")
        if turn % 2:
            world.p.step()
        world.d.finish(fail=turn % 5 == 0)
        world.deliver_all()
    assert (world.p.taken, world.d.taken) == (0, 0)
    world.now += 600
    assert whole(world) == "use"


def test_smg_2382_a_dead_consumer_does_not_poison_the_producer() -> None:
    """A consumer dies in the middle of a read. Another consumer pulls the same hold at once, and the dead consumer's
    next life is served, too.
    """
    world = World(consumers=("d", "e"))
    offer = world.held()
    begun(world, offer)
    world.restart_d()
    again = begun(world, offer, at="e")
    world.consumers["e"].finish()
    world.deliver_all()
    assert again.outcome == "use"
    assert whole(world) == "use" and world.p.taken == 0


def test_vllm_50047_a_reference_to_a_former_life_is_not_read() -> None:
    """There a consumer served a dead engine for up to an hour."""
    world = World()
    offer = world.held()
    world.restart_p()
    world.d.meet("p")
    leg = begun(world, offer)
    assert leg.outcome == "recompute" and "was not introduced" in leg.because and not world.d.under_way


# --- C. silent wrong output ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["another mark", "clear", "consumed", "reused", "expired", "restarted", "no slot"])
def test_vllm_52234_a_bad_reference_is_never_answered_from(case: str) -> None:
    """Synthetic references against a real engine gave garbage, and once the previous prompt's answer, with HTTP 200."""
    world = World(blocks=2)
    offer = world.held(name="name")
    assert offer.slot is not None
    used = {
        "another mark": replace(offer, slot=Slot(offer.slot.index, bytes(range(16)))),
        "clear": replace(offer, slot=Slot(offer.slot.index + 1, offer.slot.mark)),
        "no slot": replace(offer, slot=None),
        "restarted": replace(offer, life=2),
    }.get(case, offer)
    if case in {"consumed", "reused"}:
        world.p.release("name")
        world.p.step()
    if case == "reused":
        assert world.held().blocks == offer.blocks
    if case == "expired":
        world.pass_time(TERMS.lease)
    if case == "restarted":
        world.restart_p()
        world.d.meet("p")
        assert world.held().blocks == offer.blocks, "in the same place, under the same name"
    leg = begun(world, used)
    world.d.finish()
    world.deliver_all()
    assert leg.outcome == "recompute" and world.d.taken == 0


def test_vllm_52234_a_consumed_reference_cannot_be_consumed_again() -> None:
    """Also after a preemption, when the engine asks for the same blocks a second time (vllm 53250)."""
    world = World()
    offer = world.held()
    for outcome in ("use", "recompute"):
        leg = begun(world, offer)
        world.d.finish()
        world.deliver_all()
        assert leg.outcome == outcome


def test_vllm_56104_a_failed_part_waits_for_its_siblings() -> None:
    """There the first failure freed the blocks while other parts were still being written into them."""
    world = World()
    leg = begun(world, world.held(4))
    first, second = world.d.under_way
    world.d.move(first, fail=True)
    world.d.step()
    assert not leg.outcome and world.d.taken == 4
    world.d.move(second)
    world.d.step()
    assert not leg.outcome and not world.network, "the producer is told only when no read is under way"
    world.d.finish()
    assert leg.outcome == "recompute" and world.d.taken == 0 and len(world.network) == 1


def test_sglang_23020_hundreds_of_handoffs_through_few_blocks() -> None:
    """There accuracy fell from 96 % to 46 % after a hundred requests. Here every byte of 300 hand-overs is checked."""
    world = World(blocks=5, ranks=2, consumers=("d", "e"))
    for turn in range(300):
        at = "de"[turn % 2]
        leg = begun(world, world.held(1 + turn % 3, name=f"n{turn}"), at)
        if turn % 7 == 0 and world.consumers[at].under_way:
            world.consumers[at].move(world.consumers[at].under_way[0])
            world.p.release(f"n{turn}")
            world.p.step()
        world.consumers[at].finish(fail=turn % 13 == 0)
        world.deliver_all()
        world.check()
        assert leg.outcome
    assert sum(leg.outcome == "use" for each in world.consumers.values() for leg in each.legs) > 200
    world.fall_silent()


def test_a_hold_that_ends_between_the_read_and_the_look_is_not_used() -> None:
    """The bytes are right, but the consumer cannot confirm that: it computes the prompt."""
    world = World()
    leg = begun(world, world.held(name="name"))
    for read in list(world.d.under_way):
        while read.moves:
            world.d.move(read)
    world.p.release("name")
    world.p.step()
    world.d.finish()
    assert (leg.outcome, leg.because) == ("recompute", STALE)


@pytest.mark.parametrize("torn", range(0, 17, 4))
def test_a_mark_that_is_torn_is_no_mark(torn: int) -> None:
    """The mark is read byte by byte, and the producer clears its slot after `torn` of the 16 bytes."""
    world = World()
    leg = begun(world, world.held(name="name"))
    for _ in range(2):
        for read in [each for each in world.d.under_way if not each.slot]:
            while read.moves:
                world.d.move(read)
        world.d.step()
    (look,) = world.d.under_way
    for _ in range(torn):
        world.d.move(look)
    world.p.release("name")
    world.p.step()
    world.d.finish()
    assert leg.outcome == ("use" if torn == 16 else "recompute"), "all 16 bytes were read while the mark stood"


def test_a_producer_whose_slots_cannot_be_read_is_not_used() -> None:
    world = World()
    leg = begun(world)
    world.d.blind = True
    world.d.finish()
    world.deliver_all()
    assert (leg.outcome, leg.because) == ("recompute", BECAUSE[Reading.UNSEEN]) and world.p.taken == 0


@pytest.mark.parametrize("proof", [b"", CLEAR.hex().encode(), b"0" * 31, bytes(range(16)).hex().encode()])
def test_a_stranger_frees_nothing(proof: bytes) -> None:
    """A notice without the hold's mark changes nothing, neither for a hold nor for a leg that still runs."""
    world = World()
    offer = world.held()
    assert world.p.open("running", 2)
    world.p.step()
    for request in (offer.request, "running", "never"):
        world.d.say(offer.engine, 0, f"{request}:1".encode() + (b":" + proof if proof else b""))
    world.deliver_all()
    assert world.p.taken == 4 and world.p.ranks[0].counts["notices ignored"] == 3


# --- D. drain, rollout -----------------------------------------------------------------------------------------------


def test_dynamo_13559_a_producer_that_drains_knows_when_it_may_go() -> None:
    """There transfers were cut 5 s after SIGTERM (also dynamo 9344, 11173, vllm 32420)."""
    world = World()
    leg = begun(world)
    world.held(name="unread")
    world.pass_time(5.0)
    assert world.p.holds.held == 2
    world.d.finish()
    world.deliver_all()
    assert (leg.outcome, world.p.holds.held) == ("use", 1)
    world.p.release("unread")
    world.p.step()
    assert world.p.idle


def test_smg_1172_two_revisions_of_a_producer_are_two_lives() -> None:
    """A rollout replaces the producer under its name: nothing is pulled across revisions (also kthena 1589)."""
    world = World()
    old = begun(world)
    world.restart_p()
    world.d.meet("p")
    new = begun(world)
    world.d.finish()
    world.deliver_all()
    assert (old.outcome, new.outcome) == ("recompute", "use")
