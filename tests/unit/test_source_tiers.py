"""A source leg of an engine with tiers: it is cut when the tiers have said what they have of its prompt."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from support.source_request import BLOCK, Asked

from cluster import wire
from engine.vllm.connector.cached import SourceLegs, is_source

HAD, NOTHING = "asked as a source", "asked as a source, and had nothing"


class Tiers:
    """vLLM's offloading: has so many tokens of a prompt beyond those in the KV cache. None: it still looks."""

    def __init__(self, *said: int | None) -> None:
        self.said = list(said)
        self.asked: list[int] = []
        self.brought = ""

    def tokens_below(self, _request: Any, cached: int) -> int | None:
        self.asked.append(cached)
        return self.said.pop(0)


def legs(*connectors: Any, cached: int = 0, groups: int = 1) -> tuple[SourceLegs, Counter[str]]:
    manager = SimpleNamespace(get_computed_blocks=lambda _request: (None, cached, 0))
    connector = SimpleNamespace(sub_connectors=[object(), *connectors])
    counts: Counter[str] = Counter()
    core = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=manager, connector=connector))
    config = SimpleNamespace(kv_cache_groups=[object()] * groups)
    return SourceLegs(core, BLOCK, config, counts, None), counts


@pytest.mark.parametrize(
    ("cached", "below", "left"),
    [(0, 8, 9), (8, 0, 9), (4, 8, 13), (0, 0, 1), (16, 0, 17), (0, 16, 17)],
)
def test_a_source_leg_is_cut_to_what_cache_and_tiers_have(cached: int, below: int, left: int) -> None:
    tiers, request = Tiers(below), Asked(19)
    sources, counts = legs(tiers, cached=cached)
    sources.arrived(request)
    assert request.num_prompt_tokens == 17, "its whole blocks and a token: the tiers were not asked yet"
    assert sources.looked_up(request, cached)
    assert tiers.asked == [cached]
    assert request.prompt_token_ids == request._all_token_ids == list(range(left))
    assert request.num_prompt_tokens == left and request.block_hashes == list(range(left // BLOCK))
    assert sources.ended(request) == (left > 1)
    assert counts == {HAD if left > 1 else NOTHING: 1}


def test_it_waits_until_the_tiers_know() -> None:
    request = Asked(19)
    sources, _ = legs(Tiers(None, 8))
    sources.arrived(request)
    assert not sources.looked_up(request, 0)
    assert request.num_prompt_tokens == 17
    assert sources.looked_up(request, 0)
    assert request.num_prompt_tokens == 9


def test_it_is_cut_again_if_the_tiers_have_dropped_something_before_there_was_room() -> None:
    request = Asked(19)
    sources, _ = legs(Tiers(12, 4))
    sources.arrived(request)
    assert sources.looked_up(request, 0) and request.num_prompt_tokens == 13
    assert sources.looked_up(request, 0) and request.num_prompt_tokens == 5


def test_a_prompt_that_is_wholly_in_the_tiers_keeps_its_last_token() -> None:
    """vLLM computes the last token of such a prompt again, as it does for any request."""
    request = Asked(16)
    sources, _ = legs(Tiers(16))
    sources.arrived(request)
    assert sources.looked_up(request, 0)
    assert request.num_prompt_tokens == 16 and sources.ended(request)


def test_pictures_are_cut_off_before_the_tiers_are_asked() -> None:
    """The cache may have blocks behind a picture: with these the request would have fewer tokens than computed ones."""
    request = Asked(19, (6,))
    sources, _ = legs(Tiers(0), cached=16)
    sources.arrived(request)
    assert request.num_prompt_tokens == 5 and not request.mm_features
    assert sources.looked_up(request, 4) and request.num_prompt_tokens == 5


@pytest.mark.parametrize("groups", [1, 2])
def test_without_tiers_or_with_several_groups_it_is_cut_to_the_cache_at_once(groups: int) -> None:
    request, tiers = Asked(19), Tiers()
    sources, counts = legs(*([tiers] if groups > 1 else []), cached=8, groups=groups)
    sources.arrived(request)
    assert request.num_prompt_tokens == 9 and counts == {HAD: 1}
    assert sources.looked_up(request, 8) and not tiers.asked
    assert sources.ended(request) and counts == {HAD: 1}


def test_tiers_are_told_of_a_request_whose_tokens_the_connector_brings() -> None:
    """vLLM asks them next, and they would load the prompt from disk while it is pulled."""
    tiers, request = Tiers(), Asked(19)
    sources, _ = legs(tiers)
    sources.brings(request)
    assert tiers.brought == request.request_id
    legs()[0].brings(request)  # without tiers nothing is to be told


def test_which_requests_are_source_legs() -> None:
    request = Asked(19)
    assert is_source(request)
    for fields in (None, {}, {"do_remote_decode": True}, {wire.CACHED_ONLY: True}):
        request.kv_transfer_params = fields
        assert not is_source(request)
