"""A worker of D: which of P's blocks it reads, and into which of its own (Baton's check and vLLM's rules behind it,
together), and what it reports.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="make setup installs torch")
pytest.importorskip("vllm", reason="make setup installs vLLM")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own deprecations as it is imported
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from engine.vllm.connector.links import NotServed
    from engine.vllm.connector.metadata import ExpectedHold, WorkerReport
    from engine.vllm.connector.worker import BatonWorker

BLOCKS = 1000


def worker(pieces: int, *, parts_here: int = 1, parts_there: int = 1) -> Any:
    """A rank of D whose blocks have `pieces` of P's; its attention divides a block into `parts_here`."""
    made: Any = object.__new__(BatonWorker)
    info = SimpleNamespace(remote_physical_blocks_per_logical=parts_there, remote_block_size=16, remote_tp_size=1)
    made.transfer_topo = SimpleNamespace(
        get_engine_info=lambda _: info, block_size_ratio=lambda size: 16 * pieces // size, tp_ratio=lambda _: 1
    )
    made.tp_mappings = {"p": SimpleNamespace(all_source_ranks=(0,))}
    made.dst_num_blocks = {"p": BLOCKS * parts_there}
    made.block_size = 16 * pieces
    made._physical_blocks_per_logical_kv_block = parts_here
    made._digests, made._links = None, SimpleNamespace(check_slot=lambda *_: None)
    made._has_mamba, made._group_spec_types = False, (FullAttentionSpec,)
    made.kv_cache_config = SimpleNamespace(transfer_groups=[SimpleNamespace(kv_cache_spec=None)])
    return made


def pull(held: int, local: int, cached: int) -> ReqMeta:
    """P holds blocks 100, 101 and so on; D reads into its blocks 10, 11 and so on, after its `cached` ones."""
    remote = RemoteMeta(block_ids=([100 + n for n in range(held)],), host="", port=0, engine_id="p", request_id="r")
    mine = [10 + n for n in range(local)]
    return ReqMeta((mine,), (mine,), 1, local_num_computed_blocks=(cached,), remote=remote)


def read(one: Any, meta: ReqMeta, pieces: int) -> dict[int, int]:
    """What vLLM reads, as its `_read_blocks`: each piece of D's blocks, and P's block that arrives there."""
    one._check(meta, ExpectedHold(None))
    assert meta.remote is not None
    here, there = meta.local_block_ids, meta.remote.block_ids
    if pieces > 1:
        here, there = one._map_block_ids_for_block_size_ratio(here, there, pieces)
    (here,), (there,) = one._apply_prefix_caching(here, there, 1, 1)
    return dict(zip(here, there, strict=True))


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("held", range(1, 12))
def test_each_block_arrives_at_its_own_place(held: int, pieces: int) -> None:
    """Also where D's blocks are larger, its cache has some of the prompt, and the last block is not full."""
    blocks = -(-held // pieces)
    for cached in range(blocks):
        got = read(worker(pieces), pull(held, blocks - cached, cached), pieces)
        # Piece n of D's first block to read is the prompt's block `cached * pieces + n`.
        begin, first = 10 * pieces, cached * pieces
        assert got == {begin + n: 100 + first + n for n in range(held - first)}, cached


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_hold_longer_than_the_prompt_is_read_from_its_beginning(pieces: int) -> None:
    got = read(worker(pieces), pull(held=9, local=2, cached=1), pieces)
    assert got == {10 * pieces + n: 100 + pieces + n for n in range(2 * pieces)}


@pytest.mark.parametrize(("pieces", "held"), [(1, 2), (2, 4)])
def test_a_hold_that_ends_before_the_blocks_to_read_is_not_read(pieces: int, held: int) -> None:
    with pytest.raises(NotServed, match="would be read"):
        worker(pieces)._check(pull(held, local=2, cached=1), ExpectedHold(None))


def test_blocks_that_attention_divides_otherwise_are_not_read() -> None:
    """vLLM takes the end of P's list of parts, and P's last block may have unused ones behind the prompt's."""
    with pytest.raises(NotServed, match="divides"):
        worker(1, parts_there=2)._check(pull(held=2, local=3, cached=0), ExpectedHold(None))


def test_reports_of_ranks_are_combined_without_loss() -> None:
    one = WorkerReport(Counter(), {"p": {0: "cut"}, "a": {0: "met"}}, {})
    two = WorkerReport(Counter(), {"p": {1: "met"}, "b": {1: "met"}}, {})
    assert one.aggregate(two).peers == {"p": {0: "cut", 1: "met"}, "a": {0: "met"}, "b": {1: "met"}}


class Notices:
    """The agent's side: which hold's proof a notice would carry."""

    def __init__(self) -> None:
        self.slot: object = None
        self.told: list[tuple[str, object]] = []

    @contextmanager
    def pulling(self, slot: object) -> Iterator[list[object]]:
        self.slot = slot
        yield []
        self.slot = None


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rank that cannot post a read; a request without blocks to read only notifies, as in vLLM."""
    one = worker(1)
    one._remote_agents, one._invalid_remote_engines, one._recving_transfers = {"p": {}}, set(), {}
    one._recv_failures, one._expected, one._told = set(), {}, WorkerReport(Counter(), {}, {})
    one._parts, one.nixl_wrapper = SimpleNamespace(take=lambda _: None), Notices()
    one._handle_failed_transfer = lambda request, *_, **__: one._recv_failures.add(request)

    def posts(self: Any, request: str, meta: ReqMeta) -> None:
        if any(meta.local_block_ids):
            self._recv_failures.add(request)
        else:
            self.nixl_wrapper.told.append((request, self.nixl_wrapper.slot))

    monkeypatch.setattr(NixlPullConnectorWorker, "_read_blocks_for_req", posts)
    return one


def awaited(held: int) -> ReqMeta:
    return replace(pull(held, local=3, cached=0), awaiting_kvs=True)


@pytest.mark.parametrize("held", [3, 1])  # a read that cannot be posted, and one that is refused before
def test_a_pull_that_does_not_begin_counts_against_the_pair_and_gives_the_hold_back(refusing: Any, held: int) -> None:
    slot: Any = object()
    refusing._expected["r"] = ExpectedHold(slot)
    refusing._read_blocks_for_req("r", awaited(held))
    assert refusing._told.refused == {"r"} and refusing._told
    assert refusing.nixl_wrapper.told == [("r", slot)], "the producer frees its blocks"
    assert "r" not in refusing._expected


def test_a_hold_is_not_given_back_while_another_ranks_read_is_under_way(refusing: Any) -> None:
    refusing._expected["r"], refusing._recving_transfers["r"] = ExpectedHold(None), ["handle"]
    refusing._read_blocks_for_req("r", awaited(1))
    assert refusing._told.refused == {"r"} and refusing.nixl_wrapper.told == []


def test_refused_pulls_of_all_ranks_are_reported() -> None:
    one = WorkerReport(Counter(), {}, {}, refused=frozenset("a"))
    assert one.aggregate(WorkerReport(Counter(), {}, {}, refused=frozenset("b"))).refused == {"a", "b"}


@pytest.mark.parametrize("waits", [False, True])
def test_a_notice_whose_handshake_fails_is_forgotten(waits: bool) -> None:
    """A request that waits for its blocks is reported as received, and forgotten then."""
    made: Any = object.__new__(BatonWorker)
    made._expected, made._recving_metadata = {"r": ExpectedHold(None)}, {"r": None} if waits else {}
    failures: set[str] = set()
    assert made._handle_failed_transfer("r", None, failures, record_failed_transfer=False)
    assert failures == {"r"} and ("r" in made._expected) == waits
