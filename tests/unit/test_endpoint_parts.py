"""What an endpoint is made of: layout, pacing, envelopes, introductions."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
from support.endpoints import PAIR_KEY, World

from cluster.ids import InstanceId, RequestId, TransferId
from kvtransfer.carrier import Grid, Memory
from kvtransfer.endpoint import NOTES_A_POLL_MAX
from kvtransfer.envelope import TAG_BYTES, WINDOW, Envelopes, Fault, pack, unpack
from kvtransfer.introduction import Introduction, read_introduction
from kvtransfer.layout import Shard, Tensor, copies, grids, parts, pieces, ranges, shared, sources, their_block_bytes
from kvtransfer.messages import (
    AskConfirm,
    Begun,
    Claim,
    ClaimRefused,
    Confirmation,
    Done,
    Heartbeat,
    Peer,
    Register,
    Release,
    Withdraw,
)
from kvtransfer.pacing import Limits, Pacer
from kvtransfer.packing import Malformed
from kvtransfer.terms import Terms

# --- layout ----------------------------------------------------------------------------------------------------------


def test_ranges_are_joined_where_blocks_follow_each_other() -> None:
    grid = Grid(1000, 64, 64, 100)
    assert ranges(grid, [3, 4, 5, 9, 8]) == [(1192, 192), (1576, 64), (1512, 64)]
    assert ranges(Grid(0, 32, 64, 10), [0, 1]) == [(0, 32), (64, 32)], "a slice of a block has no neighbour"
    assert copies(grid, [3, 4, 5], Grid(0, 64, 64, 100), [7, 8, 1]) == [(1192, 448, 128), (1320, 64, 64)]


def test_pieces_are_numbered_grid_by_grid() -> None:
    of = (Grid(0, 64, 64, 10), Grid(640, 64, 64, 10))
    assert list(pieces(of, (2, 3, 0))) == [2, 3, 0, 12, 13, 10]
    for wrong in ((10,), (-1,)):
        with pytest.raises(ValueError):
            pieces(of, wrong)
    assert list(parts(5, 100, 250)) == [(0, 2), (2, 4), (4, 5)]
    assert list(parts(2, 100, 1)) == [(0, 1), (1, 2)], "a block is never cut"


def rank_memory(shard: Shard, head_bytes: int, blocks: int) -> bytearray:
    """Every byte says which head it is of: block, outer, head."""
    out = bytearray()
    for block in range(blocks):
        for outer in range(shard.outer):
            for head in shard.here:
                out += bytes([(block * 31 + outer * 7 + head) % 251]) * head_bytes
    return out


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("outer", [1, 2])
def test_every_rank_gets_its_heads_from_any_sharding(heads: int, outer: int) -> None:
    """By copying what the grids say, for all pairs of sizes: the bytes are those of an engine that computed itself."""
    sizes = [tp for tp in (1, 2, 4, 16) if heads % tp == 0 or tp % heads == 0]
    for ours_tp, theirs_tp in ((a, b) for a in sizes for b in sizes):
        for rank in range(ours_tp):
            ours = Shard(ours_tp, rank, heads, outer)
            want = rank_memory(ours, 3, blocks=4)
            got = bytearray(len(want))
            size = len(want) // 4
            for number in sources(ours, theirs_tp):
                theirs = Shard(theirs_tp, number, heads, outer)
                memory = rank_memory(theirs, 3, blocks=4)
                other = Tensor(0, their_block_bytes(ours, theirs, size), 4)
                here, there = grids([Tensor(0, size, 4)], [other], ours, theirs)
                for mine, far in zip(here, there, strict=True):
                    for to, at, length in copies(mine, range(4), far, range(4)):
                        got[to : to + length] = memory[at : at + length]
            assert got == want, (ours_tp, theirs_tp, rank)


def test_equal_shards_share_whole_blocks() -> None:
    assert shared(Shard(2, 1, 8, 2), Shard(2, 1, 8, 2), 96) == ((0, 0, 96),)
    assert len(shared(Shard(1, 0, 8, 2), Shard(2, 1, 8, 2), 96)) == 2, "K and V are apart"
    spread = [sources(Shard(8, rank, 2), 4)[0] for rank in range(8)]
    assert sorted(set(spread)) == [0, 1, 2, 3], "replicas of a head share the readers"


@pytest.mark.parametrize("wrong", [{"tp": 3, "heads": 8}, {"rank": 1}, {"heads": 0}, {"outer": 0}])
def test_impossible_shards(wrong) -> None:
    with pytest.raises(ValueError):
        Shard(**wrong)


def test_memory_of_another_shape_is_refused() -> None:
    ours = [Tensor(0, 64, 4)]
    for theirs, shard in (([], Shard()), ([Tensor(0, 128, 4)], Shard()), ([Tensor(0, 64, 4)], Shard(heads=2))):
        with pytest.raises(ValueError):
            grids(ours, theirs, Shard(), shard)


# --- pacing ----------------------------------------------------------------------------------------------------------

NARROW = Limits(part_bytes=10, link_bytes=40, share=0.75, all_bytes=1000)


def taken(pacer: Pacer[str, str]) -> list[tuple[str, int]]:
    return [(key, number) for _, key, number, _ in pacer.take()]


def test_one_transfer_leaves_room_for_another() -> None:
    pacer: Pacer[str, str] = Pacer(NARROW)
    pacer.add("link", "large", [10] * 100)
    assert taken(pacer) == [("large", 0), ("large", 1), ("large", 2)]
    pacer.add("link", "small", [10])
    assert taken(pacer) == [("small", 0)]


def test_transfers_take_turns_and_a_newcomer_is_not_repaid() -> None:
    pacer: Pacer[str, str] = Pacer(NARROW)
    pacer.add("link", "old", [10] * 100)
    order: list[str] = []
    running = list(pacer.take())
    for turn in range(60):
        if turn == 10:
            pacer.add("link", "new", [10] * 100)
        link, key, number, _ = running.pop(0)
        pacer.ended(link, key, number)
        running += pacer.take()
        order.append(key)
    later = order[-40:]
    assert abs(later.count("old") - later.count("new")) <= 4


def test_limits_hold_and_everything_is_given_out_once() -> None:
    dice = random.Random(7)
    pacer: Pacer[str, int] = Pacer(Limits(part_bytes=10, link_bytes=35, all_bytes=60))
    want = {(link, key): [dice.randint(1, 30) for _ in range(dice.randint(1, 9))] for link in "ab" for key in range(9)}
    for (link, key), sizes in want.items():
        pacer.add(link, key, sizes)
    under_way: list[tuple[str, int, int, int]] = []
    seen: set[tuple[str, int, int]] = set()
    while len(pacer):
        under_way += list(pacer.take())
        for link in "ab":
            sizes = [size for at, _, _, size in under_way if at == link]
            assert sum(sizes) <= 35 or len(sizes) == 1
        assert sum(each[3] for each in under_way) == pacer.under_way <= 60
        link, key, number, size = under_way.pop(dice.randrange(len(under_way)))
        assert want[link, key][number] == size and (link, key, number) not in seen
        seen.add((link, key, number))
        pacer.ended(link, key, number)
        pacer.ended(link, key, number)  # again, which means nothing
    assert len(seen) == sum(map(len, want.values())) and pacer.under_way == 0


def test_what_was_not_given_out_can_be_dropped() -> None:
    pacer: Pacer[str, str] = Pacer(NARROW)
    pacer.add("link", "key", [10] * 6)
    first = taken(pacer)
    assert pacer.drop("link", "key") == (3, 4, 5) and pacer.drop("link", "nobody") == ()
    for _, number in first:
        pacer.ended("link", "key", number)
    assert not len(pacer) and not pacer.under_way
    pacer.add("link", "key", [50])
    assert taken(pacer) == [("key", 0)], "larger than the link: alone"


# --- envelopes -------------------------------------------------------------------------------------------------------

ID = TransferId(RequestId("r-1"), 2, 3)
MESSAGES = [
    Claim(ID, 7, (1, 2, 3, 900), "ticket" * 40),
    AskConfirm(ID, 1 << 33),
    Heartbeat(ID, 0),
    Release(ID, 5),
    Register(ID, 7, 2, (4, 5), 99, "t"),
    Withdraw(ID, 1),
    ClaimRefused(ID, 1, "no"),
    Confirmation(ID, 1, alive=True, because="it is held"),
    Begun(ID, 1),
    Done(ID, 1, ok=False, tokens=12, because=""),
]
P, D = Peer(InstanceId("p"), 1), Peer(InstanceId("d"), 4)


def both() -> tuple[Envelopes, Envelopes]:
    return Envelopes(P, lambda _: PAIR_KEY), Envelopes(D, lambda _: PAIR_KEY)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_as_it_was(message) -> None:
    assert unpack(pack(message)) == message
    p, d = both()
    assert d.read(p.close(message, D) or b"") == (P, message)
    for cut in range(len(pack(message))):
        with pytest.raises(Malformed):
            unpack(pack(message)[:cut])


def test_a_note_counts_once_and_for_one_life() -> None:
    p, d = both()
    notes = [p.close(Release(ID, n), D) or b"" for n in range(WINDOW + 5)]
    assert isinstance(d.read(notes[3]), tuple) and d.read(notes[3]) is Fault.REPEATED
    assert isinstance(d.read(notes[1]), tuple), "overtaken, not repeated"
    assert isinstance(d.read(notes[-1]), tuple)
    assert d.read(notes[2]) is Fault.REPEATED, "too late to tell"
    assert isinstance(d.read(notes[-2]), tuple)
    other_life = Envelopes(D._replace(epoch=5), lambda _: PAIR_KEY)
    assert other_life.read(notes[0]) is Fault.FORGED
    assert p.read(notes[0]) is Fault.FORGED, "sent back to who made it"
    assert Envelopes(D, lambda _: bytes(32)).read(notes[0]) is Fault.FORGED
    assert Envelopes(D, lambda _: None).read(notes[0]) is Fault.NO_KEY
    assert Envelopes(P, lambda _: None).close(Release(ID, 1), D) is None


def test_no_bytes_raise() -> None:
    dice = random.Random(3)
    p, d = both()
    good = [p.close(message, D) or b"" for message in MESSAGES]
    for _ in range(3000):
        note = bytearray(dice.choice(good))
        for _ in range(dice.randint(1, 4)):
            note[dice.randrange(len(note))] = dice.randrange(256)
        cut = bytes(note[: dice.randint(0, len(note))]) if dice.random() < 0.5 else bytes(note)
        found = d.read(cut if cut not in good else b"")
        assert isinstance(found, Fault)
    for _ in range(2000):  # inside the MAC too: a peer may be mad
        data = bytearray(pack(dice.choice(MESSAGES)))
        data[dice.randrange(len(data))] = dice.randrange(256)
        with contextlib.suppress(Malformed):
            unpack(bytes(data[: dice.randint(0, len(data))]))
    assert d.refused.total() == 3000 and len(good[0]) > TAG_BYTES


# --- introductions ---------------------------------------------------------------------------------------------------

SAID = Introduction(
    peer=P,
    link=1 << 20,
    agent="p@1",
    metadata=b"\x00nixl\xff" * 50,
    shard=Shard(4, 2, 8, 2),
    tensors=(Tensor(1 << 46, 4096, 1000, 3), Tensor(5, 4096, 1000, 3)),
    memory=Memory.VRAM,
    stamps=1 << 45,
    slots=64,
)


def test_an_introduction_comes_as_it_was_or_not_at_all() -> None:
    data = SAID.pack()
    assert read_introduction(data) == SAID
    dice = random.Random(5)
    for _ in range(500):
        bad = bytearray(data)
        bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
        assert read_introduction(bytes(bad)) is None
    for cut in range(0, len(data), 7):
        assert read_introduction(data[:cut]) is None
    assert read_introduction(data + b"\x00") is None and read_introduction("text") is None


def test_nobody_is_introduced_under_anothers_name() -> None:
    world = World()
    for name in ("p", "d", "e"):
        world.party(name)
    world.introduce("p", "d")
    d, e = world.parties["d"], world.parties["e"]
    said = read_introduction(e.endpoint.introduction())
    assert said is not None
    for agent in ("p@1", "d@1"):
        forged = Introduction(**{**{name: getattr(said, name) for name in said.__slots__}, "agent": agent})
        d.endpoint.introduce(forged.pack(), world.now)
    assert d.endpoint.counts.refused["an introduction under another's name"] == 2
    assert d.endpoint.peers == (Peer(InstanceId("p"), 1),)


def test_ranks_of_a_peer_are_read_together() -> None:
    """A consumer of one rank pulls from a producer of two: half of every block from each."""
    world = World(block_bytes=256)
    d = world.party("d", shard=Shard(1, 0, 4, 2))
    halves = [world.party(f"p{rank}", shard=Shard(2, rank, 4, 2), block_bytes=128) for rank in range(2)]
    for half in halves:
        said = read_introduction(half.endpoint.introduction())
        assert said is not None
        fields = {name: getattr(said, name) for name in said.__slots__} | {"peer": P, "slots": 0}
        d.endpoint.introduce(Introduction(**fields).pack(), world.now)
    assert d.endpoint.peers == (P,)
    for rank, half in enumerate(halves):
        for block in (3, 4):
            half.memory.of(0, block)[:] = bytes([10 * rank + block]) * 128
    from kvtransfer.events import Allocated, ReservePull

    id_ = TransferId(RequestId("r"), 1, 1)
    d.pulls[id_] = object()
    d.tell(ReservePull(id_, P.instance, (3, 4), 2, "t"))
    d.tell(Allocated(id_, d.take(2)))
    world.until(lambda: d.endpoint.counts.bytes_read == 2 * 2 * 256)
    k0, k1 = bytes([3]) * 64, bytes([13]) * 64
    assert bytes(d.memory.of(0, 0)) == k0 + k1 + k0 + k1


# --- the endpoint's own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends_writes", [True, False])
def test_where_writes_cannot_be_ended_their_blocks_wait_for_the_producers_word(ends_writes: bool) -> None:
    world = World(terms=Terms(cut_s=0.5, reserve_s_max=1.0))
    _, d = world.party("p"), world.party("d")
    d.carrier.ends_writes = ends_writes  # type: ignore[misc]
    world.introduce("p", "d")
    id_ = world.new_id("p")
    d.reserve(id_, "p", 3)
    d.abort(id_)
    until = world.now + 5.0
    world.until(lambda: world.now > until, without=("p",))
    assert (len(d.free) == world.blocks) == ends_writes
    assert d.endpoint.ledger.statistics(world.now).leaked == (0 if ends_writes else 1)
    world.until(lambda: len(d.free) == world.blocks and d.idle)


def test_a_link_is_not_ended_while_a_read_is_under_way() -> None:
    """The producer stalls in the middle of a read and its life is over for everybody: our blocks stay ours."""
    world = World(terms=Terms(read_s_max=0.5, cut_s=0.3, heartbeat_s=0.1))
    p, d = world.party("p"), world.party("d")
    world.introduce("p", "d")
    offer = p.prefill(world.new_id("p"), 4)
    assert offer is not None
    pulled = d.pull(offer, "p", p.offers[offer.id][1])
    world.wire.stopped.add("p@1")
    d.obey(d.endpoint.forget(InstanceId("p"), world.now))
    assert pulled is not None and pulled.outcome == "recompute", "the request does not wait"
    until = world.now + 3.0
    world.until(lambda: world.now > until, without=("p",))
    assert len(d.free) == world.blocks - 4 and d.endpoint.counts.links_cut == 0
    d.check()
    world.wire.stopped.clear()
    world.until(lambda: len(d.free) == world.blocks)
    assert d.endpoint.counts.links_cut == 1


def test_a_flood_of_notes_is_read_in_turns() -> None:
    world = World()
    p, d = world.party("p"), world.party("d")
    world.introduce("p", "d")
    for _ in range(NOTES_A_POLL_MAX + 10):
        d.carrier.notify("p@1", b"noise")
    world.wire.advance(world.now + 1.0)
    p.poll()
    assert p.endpoint.envelopes.refused.total() == NOTES_A_POLL_MAX and p.endpoint.busy
    p.poll()
    assert p.endpoint.envelopes.refused.total() == NOTES_A_POLL_MAX + 10 and not p.endpoint.busy


def test_what_an_endpoint_says_of_itself_is_plain() -> None:
    world = World()
    p, d = world.party("p"), world.party("d")
    world.introduce("p", "d")
    offer = p.prefill(world.new_id("p"), 2)
    assert offer is not None
    pulled = d.pull(offer, "p", p.offers[offer.id][1])
    world.until(lambda: pulled.outcome is not None and not p.holds)
    told = json.loads(json.dumps(d.endpoint.statistics()))
    assert told["bytes_read"] == 2 * 2 * world.block_bytes and told["reads"] == told["stamps_stood"] == 1
    assert told["leaked"] == told["reservations"] == told["flights"] == 0 and told["wire_s"] > 0
