"""A source leg inside vLLM: how a request is cut to its cached blocks, and the fields of its hold."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from support.source_request import BLOCK, Asked
from support.tickets import FLEET, PULL, signed

from cluster import wire
from cluster.ids import InstanceId, RequestId, TransferId
from cluster.scan import run
from decode.peers import ProducerPeers
from decode.pulls import Pulls
from engine.vllm.connector.cached import cut_to_cached, only_whole_blocks
from kvtransfer.fields import handed_over, held_in, pull_in, sane
from kvtransfer.keys import InstanceKeys, instance_key
from kvtransfer.screen import Screen

NOW = 1_800_000_000.0


def core(cached: int) -> Any:
    manager = SimpleNamespace(get_computed_blocks=lambda _request: (None, cached, 0))
    return SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=manager))


@pytest.mark.parametrize(("cached", "pictures", "had"), [(8, (), 8), (8, (6,), 4), (8, (9,), 8), (4, (1,), 0)])
def test_a_source_leg_is_cut_to_the_cached_blocks(cached: int, pictures: tuple[int, ...], had: int) -> None:
    request = Asked(19, pictures)
    assert cut_to_cached(request, core(cached), BLOCK) == had
    assert request.prompt_token_ids == request._all_token_ids == list(range(had + 1))
    assert request.num_prompt_tokens == had + 1 and not request.mm_features
    assert request.block_hashes == list(range((had + 1) // BLOCK))
    assert (request.kv_transfer_params is None) == (had == 0), "a request with no cached blocks asks for no hold"


def test_without_the_engines_core_nothing_is_held() -> None:
    request = Asked(19)
    assert cut_to_cached(request, None, BLOCK) == 0
    assert request.num_prompt_tokens == 1 and request.kv_transfer_params is None


def test_a_prompt_of_embeddings_is_left_alone() -> None:
    request = Asked(19)
    request.prompt_token_ids, request.prompt_embeds = None, object()
    assert cut_to_cached(request, core(8), BLOCK) == 0
    assert request.kv_transfer_params is None and request.num_prompt_tokens == 19


def test_the_hold_has_whole_blocks_and_is_marked_as_from_the_cache() -> None:
    fields = {"remote_num_tokens": 9, "remote_block_ids": ([5, 7, 8],), "remote_engine_id": "e",
              "remote_request_id": "r", "baton_slot": [1, "0f" * 16], "remote_host": "p", "remote_port": 1,
              "do_remote_prefill": True}  # fmt: skip
    assert handed_over(fields)
    only_whole_blocks(fields, BLOCK)
    assert (fields["remote_num_tokens"], fields["remote_block_ids"]) == (8, ([5, 7],))
    assert not handed_over(fields) and held_in(fields, 100) == 0, "none of its tokens was computed for this request"
    pull = pull_in(sane(fields))
    assert not isinstance(pull, str) and (pull.tokens, pull.blocks) == (8, 2)


def test_a_failed_pull_of_a_cached_prefix_counts_no_recomputed_tokens() -> None:
    for ours, lost in ((True, 8), (False, 0)):
        pulls = Pulls(ProducerPeers())
        pulls.peers.met("e", "p", 0.0)
        pulls.allocated("r", "e", 8, 0.0, handed_over=ours)
        pulls.said("r", "a read failed")
        pulls.ended("r", 1.0)
        assert pulls.recomputed_tokens == lost
        assert pulls.peers.of("e").failed == 1, "peer health counts it all the same"


def test_the_transfer_fields_of_a_source_leg_and_of_its_prefill_leg() -> None:
    name = TransferId(RequestId("mine"), 1, 3)
    leg = wire.source_fields({"max_completion_tokens": 7, "stream": True}, transfer=name)
    assert leg["max_tokens"] == 1 and leg["max_completion_tokens"] is None and leg["stream"] is False
    asked = leg["kv_transfer_params"]
    assert asked[wire.CACHED_ONLY] is True and asked["do_remote_decode"] and not asked["do_remote_prefill"]
    assert asked[wire.TRANSFER] == str(name)
    held = wire.TransferFields({"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1]],
                                "remote_engine_id": "e", wire.TRANSFER: "the source's", wire.FROM_CACHE: True,
                                "remote_prefill_cached_tokens": 5})  # fmt: skip
    assert held.is_from_cache
    pulls = wire.prefill_fields({}, transfer=name, source=held)["kv_transfer_params"]
    assert pulls["do_remote_prefill"] and pulls["do_remote_decode"], (
        "the prefill leg pulls from the source, and holds for D"
    )
    assert (pulls[wire.TRANSFER], pulls["remote_engine_id"], pulls[wire.FROM_CACHE]) == (str(name), "e", True)
    assert "remote_prefill_cached_tokens" not in pulls and wire.CACHED_ONLY not in pulls


def judged(fields: dict[str, Any]) -> bool:
    """Whether an engine's guard lets these fields pass."""
    keys = InstanceKeys(InstanceId("p"), (instance_key(FLEET, InstanceId("p")),))
    raw = json.dumps({"model": "m", "prompt": "x", "kv_transfer_params": fields}).encode()
    return run(Screen(0.0).judge(raw, "application/json", keys, NOW)) is None


def test_the_fields_of_a_source_leg_must_be_signed() -> None:
    """Without the fleet's key no client can use an engine as a source, or make an engine pull from another host."""
    name = TransferId(RequestId("mine"), 1, 3)
    asked = wire.source_fields({}, transfer=name)["kv_transfer_params"]
    held = wire.TransferFields({**PULL, wire.FROM_CACHE: True})
    pulls = wire.prefill_fields({}, transfer=name, source=held)["kv_transfer_params"]
    for fields in (asked, pulls):
        assert judged(signed(fields, "p", at=NOW))
        assert not judged(fields)
    assert not judged({**signed(pulls, "p", at=NOW), "remote_host": "203.0.113.9"})
    assert not judged({**signed(pulls, "p", at=NOW), "remote_block_ids": [[7]]})
    plain = wire.prefill_fields({}, transfer=name)["kv_transfer_params"]
    assert not judged({**signed(plain, "p", at=NOW), wire.CACHED_ONLY: True})
