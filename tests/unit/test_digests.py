"""A digest of every block shows what is corrupt, stale, missing or in another's place."""

from __future__ import annotations

import random

import pytest
from support.endpoints import World

from kvtransfer.digests import DIGEST_BYTES, digests, wrong

MEMORY = [bytearray(random.Random(seed).randbytes(64)) for seed in range(8)]


def pieces(block: int):
    return MEMORY[block][:32], MEMORY[block][32:]


def test_each_block_counts_in_its_place() -> None:
    offered = digests([3, 1, 4], pieces)
    assert len(offered) == 3 * DIGEST_BYTES and wrong(offered, [3, 1, 4], pieces) == ()
    assert wrong(offered, [1, 4], pieces, first=1) == ()
    assert wrong(offered, [1, 3, 4], pieces) == (0, 1), "swapped"
    assert wrong(offered, [3, 1, 4, 5], pieces) == (3,), "more than was offered"
    assert wrong(offered, [3, 1, 5], pieces) == (2,), "another's"
    assert wrong(b"", [3], pieces) == (0,)


def test_every_flipped_bit_shows() -> None:
    offered = digests([2], pieces)
    for bit in range(64 * 8):
        MEMORY[2][bit // 8] ^= 1 << bit % 8
        assert wrong(offered, [2], pieces) == (0,)
        MEMORY[2][bit // 8] ^= 1 << bit % 8
    assert wrong(offered, [2], pieces) == ()


@pytest.mark.parametrize("fault", ["none", "corrupt", "swapped", "short"])
def test_an_endpoint_recomputes_what_is_not_what_was_offered(fault: str) -> None:
    world = World()
    p, d = world.party("p"), world.party("d")
    world.introduce("p", "d")
    offer = p.prefill(world.new_id("p"), 4)
    assert offer is not None

    def bytes_of(party):
        return lambda block: [party.memory.of(tensor, block) for tensor in range(world.tensors)]

    offered = digests(offer.blocks, bytes_of(p))
    d.endpoint.check = lambda use: not wrong(offered, use.blocks, bytes_of(d))
    first, second = (p.memory.of(1, block) for block in offer.blocks[:2])
    if fault == "corrupt":
        first[7] ^= 1
    elif fault == "swapped":
        first[:], second[:] = bytes(second), bytes(first)
    elif fault == "short":
        second[-16:] = bytes(16)
    pulled = d.pull(offer, "p", p.offers[offer.id][1])
    world.until(lambda: pulled.outcome is not None)
    assert pulled.outcome == ("use" if fault == "none" else "recompute")
    world.until(lambda: not p.holds and len(d.free) == world.blocks)
