"""The heads that each rank of D reads, by vLLM's own arithmetic, which vLLM's connector and Baton's use.

`kvtransfer.layout` tells which heads a rank holds. vLLM's mapping must read exactly those for all sizes that `lint` and
the planner accept, and must refuse the others.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from itertools import product
from typing import Any

import pytest

from cluster.spec.pairing import refused_pair
from kvtransfer.layout import HeadShard

pytestmark = pytest.mark.long

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
HEADS = (1, 2, 3, 4, 8, 16)


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    """Import vLLM here, because that takes 7 s of CPU time, which collecting these tests should not cost."""
    pytest.importorskip("vllm", reason="make setup installs vLLM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its compiler
        import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping")


def topology(tp: int, rank: int, heads: int, *, latent: bool = False) -> Any:
    """The topology of one rank of D, as its worker makes it."""
    from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology

    return TransferTopology(
        tp_rank=rank, tp_size=tp, block_size=16, engine_id="d", is_mla=latent, is_mamba=False,
        total_num_kv_heads=heads, attn_backends=[],
    )  # fmt: skip


def possible(tp: int, heads: int) -> bool:
    """Whether vLLM spreads this many heads over this many ranks."""
    return heads % tp == 0 or tp % heads == 0


def plan_of(giver: int, here: Any) -> Any:
    """vLLM's plan of which ranks of P a rank of D reads, and where."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return compute_tp_mapping(here, giver, (FullAttentionSpec,))


def read_heads(giver: int, here: Any) -> list[int]:
    """The heads that arrive in a rank's block, in their order, as `NixlBaseConnectorWorker._build_fa_remote` reads."""
    plan = plan_of(giver, here)
    (ranks,) = plan.source_ranks_per_group
    heads, wanted = here.total_num_kv_heads, here.local_physical_heads
    each = wanted // len(ranks)
    found = []
    for rank in ranks:
        theirs = HeadShard(giver, rank, heads).here
        first = theirs.start + plan.rank_offset_factor * wanted
        assert first + each <= theirs.stop, "it would read beyond the other's block"
        found += range(first, first + each)
    return found


def refuses(giver: int, here: Any) -> bool:
    """Whether the assertions of vLLM's `_validate_remote_agent_handshake` refuse this pair."""
    from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo

    here.register_remote_engine("p", EngineTransferInfo(giver, 64, 16, 1))
    try:
        fewer = here.tp_ratio(giver) < 0
    except AssertionError:
        return True
    return bool(not here.is_mla and fewer and here.is_kv_replicated("p"))


@pytest.mark.parametrize("heads", HEADS)
def test_each_rank_reads_the_heads_that_it_holds(heads: int) -> None:
    compared = 0
    for giver, taker in product(SIZES, SIZES):
        if not (possible(giver, heads) and possible(taker, heads)) or refused_pair(giver, taker, heads):
            continue
        for rank in range(taker):
            held = list(HeadShard(taker, rank, heads).here)
            assert read_heads(giver, topology(taker, rank, heads)) == held, (giver, taker, rank)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("latent", [False, True])
def test_lint_refuses_what_vllm_refuses(heads: int, latent: bool) -> None:
    for giver, taker in product(SIZES, SIZES):
        said = refused_pair(giver, taker, heads, latent=latent)
        assert bool(said) == refuses(giver, topology(taker, 0, heads, latent=latent)), (giver, taker)


def test_a_latent_is_read_whole_from_one_rank() -> None:
    for giver, taker in ((1, 4), (4, 1), (8, 2), (2, 2)):
        for rank in range(taker):
            plan = plan_of(giver, topology(taker, rank, 1, latent=True))
            assert len(plan.all_source_ranks) == 1
            assert plan.rank_offset_factor == 0
