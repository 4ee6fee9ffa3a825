"""Evictions in vLLM's KV events: counted as vLLM 0.32 writes them; routers forget evicted chunks once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from engine.vllm.evictions import Evictions
from router.core.values import Reported
from router.fleet.view import FleetView
from router.predict.prefix_cache import PrefixCacheIndex


def batch(*events: dict[str, Any]) -> bytes:
    """As `ZmqEventPublisher` sends it: an array of time, events and rank; events are maps with their `type`."""
    return msgspec.msgpack.encode([1.5, list(events), 0])


def stored(blocks: int, block_size: int = 16) -> dict[str, Any]:
    hashes = [bytes([at]) * 32 for at in range(blocks)]
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "block_size": block_size,
        "token_ids": list(range(blocks * block_size)), "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip


def removed(blocks: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [2**63 + at for at in range(blocks)], "medium": "GPU", **more}


def heard(*batches: bytes) -> Evictions:
    found = Evictions()
    for each in batches:
        found.hear(each)
    return found


def test_tokens_are_those_of_the_blocks() -> None:
    found = heard(batch(stored(3, 128)), batch(removed(2), stored(1, 128), removed(1)))
    assert (found.tokens, found.clears) == (3 * 128, 0)


def test_a_clearing_is_counted_apart() -> None:
    assert heard(batch(stored(3)), batch({"type": "AllBlocksCleared"})).clears == 1


@pytest.mark.parametrize("more", [{"group_idx": 1}, {"medium": "CPU"}])
def test_other_groups_and_tiers_do_not_count(more: dict[str, Any]) -> None:
    assert heard(batch(stored(3), removed(2, **more))).tokens == 0
    assert heard(batch(stored(3), removed(2, group_idx=0, medium=None))).tokens == 32


def test_a_lower_tiers_blocks_have_no_size() -> None:
    """vLLM 0.32 writes a block size of 0 for lower tiers. Blocks of the KV cache keep their own size."""
    below = {**stored(1, 0), "medium": "CPU"}
    assert heard(batch(stored(3, 128), below), batch(removed(2))).tokens == 256


def moved(kind: str, medium: str, *blocks: int, size: int = 16) -> dict[str, Any]:
    hashes = [bytes([at]) * 32 for at in blocks]
    return {
        **(stored(0, size) if kind == "BlockStored" else {}),
        "type": kind,
        "block_hashes": hashes,
        "medium": medium,
    }


def test_a_block_counts_when_its_last_tier_drops_it() -> None:
    found = Evictions(tiered=True)
    assert found.kept == {"host": 0, "disk": 0}
    for medium in ("GPU", "CPU"):
        found.hear(batch(moved("BlockStored", medium, 1, 2, 3, size=16 if medium == "GPU" else 0)))
    found.hear(batch(moved("BlockStored", "STORAGE", 1, 2, size=0)))
    assert (found.tokens, found.kept) == (0, {"host": 48, "disk": 32})
    found.hear(batch(moved("BlockRemoved", "GPU", 1, 2, 3), moved("BlockRemoved", "CPU", 1, 2, 3)))
    assert (found.tokens, found.kept) == (16, {"host": 0, "disk": 32}), "the third was on no disk"
    found.hear(batch(moved("BlockStored", "GPU", 1), moved("BlockRemoved", "STORAGE", 1, 2)))
    assert (found.tokens, found.kept) == (32, {"host": 0, "disk": 0})
    found.hear(batch({"type": "AllBlocksCleared"}, moved("BlockRemoved", "GPU", 1, 2)))
    assert (found.tokens, found.clears) == (48, 0), "each block counts once"


def test_a_block_that_no_tier_has_had_is_not_counted() -> None:
    """vLLM offloads prompts alone. Were the blocks of answers counted, routers would forget prompts in their place."""
    found = Evictions(tiered=True)
    found.hear(batch(moved("BlockStored", "GPU", 1, 2, 3), moved("BlockStored", "CPU", 1)))
    found.hear(batch(moved("BlockRemoved", "GPU", 1, 2, 3)))
    assert (found.tokens, found.kept) == (0, {"host": 16, "disk": 0})
    found.hear(batch(moved("BlockStored", "GPU", 1, 2), moved("BlockRemoved", "CPU", 1)))
    assert found.tokens == 0, "the KV cache has it again"
    found.hear(batch(moved("BlockRemoved", "GPU", 1, 2)))
    assert found.tokens == 16, "the first was a prompt's"


def test_the_number_of_remembered_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.vllm.evictions.BLOCKS_MAX", 2)
    found = Evictions(tiered=True)
    found.hear(batch(moved("BlockStored", "GPU", 1, 2), moved("BlockStored", "CPU", 1, 2)))
    found.hear(batch(moved("BlockStored", "GPU", 3)))
    assert found.tokens == 16
    found.restart()
    found.hear(batch(moved("BlockRemoved", "GPU", 2)))
    assert found.tokens == 0


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode({"a": 1}), batch({"type": "Other"})])
def test_a_payload_that_is_no_batch_is_refused_and_changes_nothing(payload: bytes) -> None:
    found = heard(batch(stored(1), removed(1)))
    with pytest.raises(msgspec.DecodeError):
        found.hear(payload)
    assert found.tokens == 16


def test_a_new_start_counts_from_nothing() -> None:
    found = heard(batch(stored(1), removed(1), {"type": "AllBlocksCleared"}))
    found.restart()
    assert (found.tokens, found.clears) == (0, 0)


# --- and routers forget evicted chunks --------------------------------------------------------------------------------

NAMES = list(range(10))
EACH = 256
"""Tokens of a chunk."""


class Seen:
    """One instance as its agent reports it, and ten chunks that were sent there."""

    def __init__(self, *, first: tuple[int, int] = (0, 0)) -> None:
        self.view = FleetView()
        self.prefixes = self.view.all().prefixes = PrefixCacheIndex()
        self.hears(first)
        sent = self.prefixes.sent(0, NAMES, 1.0)
        assert sent is not None
        size = len(NAMES) * EACH
        self.prefixes.answered(sent, 1.0, prompt_tokens=size, text_bytes=1024 * len(NAMES), cached_tokens=0)

    def hears(self, evicted: tuple[int, int], epoch: int = 1) -> int:
        """Take a report of the agent. The number of chunks that the index then expects there."""
        one = Instance(id=InstanceId("p"), role=Role.PREFILL, url="u", epoch=epoch)
        load = Load(kv_tokens=100_000)
        self.view.fold(
            (Reported(instance=one, state="ready", accepting=True, credits=9, load=load, models=(), evicted=evicted),)
        )
        return self.prefixes.match(NAMES).chunks_of(0)


def test_as_much_is_forgotten_as_was_evicted_since_the_last_report() -> None:
    seen = Seen()
    assert seen.hears((0, 0)) == 10
    assert seen.hears((3 * EACH, 0)) == 7
    assert seen.hears((3 * EACH, 0)) == 7, "once"
    assert seen.hears((5 * EACH, 0)) == 5
    assert seen.hears((5 * EACH, 1)) == 0


def test_evictions_before_a_router_started_do_not_count() -> None:
    seen = Seen(first=(50 * EACH, 3))
    assert seen.hears((50 * EACH, 3)) == 10
    assert seen.hears((51 * EACH, 3)) == 9


def test_a_new_engine_has_nothing_and_counts_anew() -> None:
    seen = Seen(first=(50 * EACH, 3))
    assert seen.hears((0, 0), epoch=2) == 0
    assert seen.view.get(InstanceId("p")).evicted == (0, 0)


def test_a_router_without_a_prefix_cache_index_takes_the_report() -> None:
    seen = Seen()
    seen.view.all().prefixes = None
    seen.hears((EACH, 1))
    assert seen.view.get(InstanceId("p")).evicted == (EACH, 1)
    assert seen.prefixes.match(NAMES).chunks_of(0) == 10, "the view does not use this index any more"
