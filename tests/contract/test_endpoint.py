"""Every carrier does the same under an endpoint: loopback on virtual time, and NIXL on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from support.endpoints import PAIR_KEY, World

from cluster.ids import InstanceId
from kvtransfer.carrier import CarrierFailed, Grid, Progress, Way
from kvtransfer.envelope import Envelopes, Fault
from kvtransfer.loopback import Weather
from kvtransfer.messages import Peer, Release
from kvtransfer.pacing import Limits
from kvtransfer.terms import Terms

Make = Callable[..., World]


@pytest.fixture(params=["loopback", "nixl"])
def make(request) -> Iterator[Make]:
    """`make(**settings)`: a world with a producer `p` and a consumer `d` that know each other."""
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="endpoints over NIXL (pip install nixl nixl-cu13)")
    made: list[World] = []

    def start(**settings) -> World:
        world = World(nixl=request.param == "nixl", **settings)
        made.append(world)
        world.party("p")
        world.party("d")
        world.introduce("p", "d")
        return world

    yield start
    for world in made:
        world.close()


def hand_over(world: World, count: int = 5, *, stamped: bool = True):
    """A hold on `p` and its pull by `d`, ordered and not polled yet."""
    p, d = world.parties["p"], world.parties["d"]
    id_ = world.new_id("p")
    offer = p.prefill(id_, count)
    assert offer is not None
    stamp = p.offers[id_][1]
    pulled = d.pull(offer, "p", stamp if stamped else None)
    assert pulled is not None
    return pulled


def test_bytes_come_and_are_used_while_the_producer_does_nothing(make) -> None:
    world = make()
    p, d = world.parties["p"], world.parties["d"]
    things = d.carrier.open_things, p.carrier.open_things
    pulled = hand_over(world)
    world.until(lambda: pulled.outcome is not None, without=("p",))
    assert (pulled.outcome, pulled.right) == ("use", True)
    assert d.endpoint.counts.stamps_stood == 1
    world.until(lambda: not p.holds)  # the release comes as soon as the producer looks
    assert len(p.table) == 0 and len(p.free) == len(d.free) == world.blocks
    assert d.endpoint.counts.bytes_read == 5 * 2 * world.block_bytes == d.carrier.traffic.bytes - 16
    assert (d.carrier.open_things, p.carrier.open_things) == things, "flights are given back"


def test_a_hold_that_went_before_the_read_is_never_used(make) -> None:
    world = make()
    p, d = world.parties["p"], world.parties["d"]
    id_ = world.new_id("p")
    offer = p.prefill(id_, 3)
    stamp = p.offers[id_][1]
    p.abort(id_)
    other = world.new_id("p")
    assert p.prefill(other, 16) is not None  # all of the memory is somebody else's now, and its slot stamped anew
    pulled = d.pull(offer, "p", stamp)
    world.until(lambda: pulled.outcome is not None, without=("p",))
    assert pulled.outcome == "recompute"
    assert d.endpoint.counts.stamps_gone == 1 and d.free and len(d.free) == world.blocks


def test_without_a_stamp_the_producer_is_asked(make) -> None:
    world = make()
    p, d = world.parties["p"], world.parties["d"]
    pulled = hand_over(world, stamped=False)
    for _ in range(12):
        world.step(without=("p",))
    assert pulled.outcome is None, "nothing is used on nobody's word"
    world.until(lambda: pulled.outcome is not None)
    assert (pulled.outcome, pulled.right) == ("use", True)
    assert d.endpoint.counts.stamps_stood == 0 and not p.endpoint.counts.refused


def test_many_parts_and_several_at_once(make) -> None:
    """Parts as small as two blocks, a link as narrow as three parts: all arrive, in turns."""
    world = make(blocks=64, limits=Limits(part_bytes=1024, link_bytes=3 * 1024, all_bytes=1 << 20))
    large = hand_over(world, 40)
    small = hand_over(world, 2)
    world.until(lambda: small.outcome is not None)
    world.until(lambda: large.outcome is not None)
    assert [each.outcome for each in world.parties["d"].past] == ["use", "use"] and large.right and small.right
    assert world.parties["d"].past[0] is small, "a small one does not wait for a large one"
    assert world.parties["d"].carrier.traffic.done == 20 + 1 + 2


def test_blocks_are_pushed(make) -> None:
    world = make(terms=Terms(heartbeat_s=0.05))  # a registration that came before leg 1 is repeated so often
    p, d = world.parties["p"], world.parties["d"]
    id_ = world.new_id("p")
    pulled = d.reserve(id_, "p", 4)
    world.step()
    p.prefill(id_, 4)
    world.until(lambda: pulled.outcome is not None and not p.holds)
    assert (pulled.outcome, pulled.right) == ("use", True)
    assert p.endpoint.counts.bytes_written == 4 * 2 * world.block_bytes


def test_a_refused_ticket_is_no_handoff(make) -> None:
    world = make()
    p, d = world.parties["p"], world.parties["d"]
    id_ = world.new_id("p")
    offer = p.prefill(id_, 2)
    pulled = d.pull(offer, "p", None, ticket="bad")
    world.until(lambda: pulled.outcome is not None and d.idle)
    assert pulled.outcome == "recompute"
    assert p.endpoint.counts.refused["a ticket: forged"] == 1


def genuine(world: World) -> bytes:
    """A note that `d` could send to `p`: the release of a hold there is not."""
    envelopes = Envelopes(Peer(InstanceId("d"), 1), lambda _: PAIR_KEY)
    envelopes._number = 10_000
    note = envelopes.close(Release(world.new_id("p"), 7), Peer(InstanceId("p"), 1))
    assert note is not None
    return note


def test_garbage_kills_nothing_and_is_counted(make) -> None:
    world = make()
    p, d = world.parties["p"], world.parties["d"]
    note = genuine(world)
    bad = [b"", b"id:1", b"id", os.urandom(64), note[:-1], note + b"x", bytes(8) + note, b"\xff" * 3000]
    bad += [bytes([*note[:at], note[at] ^ 1, *note[at + 1 :]]) for at in range(0, len(note), 5)]
    sent = sum(d.carrier.notify(p.carrier.name, each) for each in [*bad, note, note])
    said = p.endpoint.introduction(InstanceId("d"))
    for each in (b"", b"x" * 100, said[:-1], said[: len(said) // 2], said + b"x", os.urandom(len(said)), None, 7):
        d.obey(d.endpoint.introduce(each, world.now))
    assert d.endpoint.counts.refused["no introduction"] == 8
    world.until(lambda: p.carrier.traffic.notes_in >= sent and not p.endpoint.busy)
    refused = p.endpoint.envelopes.refused
    assert refused.total() == len(bad) + 1 and refused[Fault.REPEATED] == 1
    pulled = hand_over(world)
    world.until(lambda: pulled.outcome is not None)
    assert pulled.outcome == "use"


def test_a_peer_that_is_gone_costs_a_recomputation(make) -> None:
    world = make(terms=Terms(read_s_max=0.5, cut_s=0.2, confirm_s_max=0.3))
    p, d = world.parties["p"], world.parties["d"]
    id_ = world.new_id("p")
    offer = p.prefill(id_, 4)
    stamp = p.offers[id_][1]
    p.dead = True
    p.endpoint.close()
    pulled = d.pull(offer, "p", stamp)
    world.until(lambda: pulled.outcome is not None, without=("p",))
    assert pulled.outcome == "recompute"
    world.until(lambda: len(d.free) == world.blocks, without=("p",))
    d.obey(d.endpoint.forget(InstanceId("p"), world.now))
    assert d.endpoint.peers == () and d.endpoint.counts.links_cut == 1
    assert d.endpoint.ledger.statistics(world.now).leaked == 0


def test_the_next_life_of_a_peer(make) -> None:
    world = make()
    d = world.parties["d"]
    former = world.parties["p"]
    id_ = former.me.epoch and world.new_id("p")
    offer = former.prefill(id_, 4)
    former.dead = True
    former.endpoint.close()
    world.party("p", epoch=2)
    world.introduce("p", "d")
    assert d.endpoint.peers == (Peer(InstanceId("p"), 2),)
    stale = d.pull(offer, "p", former.offers[id_][1])
    assert stale is not None and stale.outcome == "refused", "of a life that is known to be over"
    pulled = hand_over(world)
    world.until(lambda: pulled.outcome is not None)
    assert pulled.outcome == "use" and pulled.right


def test_a_client_that_leaves_frees_both_sides(make) -> None:
    world = make(blocks=64, limits=Limits(part_bytes=512, link_bytes=512))
    p, d = world.parties["p"], world.parties["d"]
    pulled = hand_over(world, 40)
    world.step()
    d.abort(pulled.id)
    world.until(lambda: len(d.free) == len(p.free) == world.blocks and p.idle and d.idle)
    assert d.carrier.traffic.posted < 40, "what was not posted yet is not posted any more"
    assert pulled.outcome == "aborted"


# --- the carrier itself ----------------------------------------------------------------------------------------------


def test_a_carrier_refuses_what_cannot_be(make) -> None:
    world = make()
    p, d = world.parties["p"].carrier, world.parties["d"].carrier
    memory = world.parties["d"].memory
    ours = d.prepare(None, [Grid(memory.address, 64, 64, 8)])
    theirs = d.prepare(p.name, [Grid(world.parties["p"].memory.address, 64, 128, 8)])
    things = d.open_things
    for pieces, others in (([], []), ([0], [0, 1]), ([8], [0]), ([0], [-1])):
        with pytest.raises(CarrierFailed):
            d.post(Way.READ, ours, pieces, theirs, others)
    with pytest.raises(CarrierFailed):
        d.post(Way.READ, ours, [0], ours, [0])
    for bad in (b"", b"\x00" * 40, p.metadata()[:9]):
        with pytest.raises(CarrierFailed):
            d.introduce(bad)
    with pytest.raises(CarrierFailed):
        d.prepare("nobody", [Grid(0, 64, 64, 1)])
    assert d.open_things == things and not d.notify("nobody", b"hello")
    d.forget("nobody")
    d.drop(ours)
    d.forget(p.name)
    with pytest.raises(CarrierFailed):
        d.post(Way.READ, ours, [0], theirs, [0])


def test_flights_are_released_when_they_have_ended(make) -> None:
    world = make(weather=Weather(delay_s=1.0))
    d = world.parties["d"].carrier
    ours = d.prepare(None, [Grid(world.parties["d"].memory.address, 64, 64, 8)])
    theirs = d.prepare(world.parties["p"].carrier.name, [Grid(world.parties["p"].memory.address, 64, 64, 8)])
    flight = d.post(Way.READ, ours, range(8), theirs, range(8))
    if d.look(flight) is Progress.UNDER_WAY:
        assert not d.release(flight) and d.traffic.releases_refused == 1
    world.until(lambda: d.look(flight) is not Progress.UNDER_WAY)
    assert d.look(flight) is Progress.DONE and d.release(flight) and d.traffic.bytes == 512
    assert d.traffic.wire_s > 0
