"""The prefix-cache index of instances with tiers: what it still holds, in which tier, and what that is worth."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from costs.step import StepCost
from router.core.values import Reported, Wanted
from router.fleet.view import FleetView
from router.predict.held_chunks import TOKENS_PER_CHUNK
from router.predict.prefix_cache import PrefixCacheIndex
from router.predict.step_model import SURE, TIER_WORTH, UNKNOWN, Make, StepModel
from router.scheduler.scoring.workload import workload

EACH = int(TOKENS_PER_CHUNK)
A, B, C = (list(range(start, start + 10)) for start in (0, 100, 200))


def index(*tiers: tuple[float, float], cache: int = 10) -> PrefixCacheIndex:
    """One instance whose KV cache has room for so many chunks."""
    found = PrefixCacheIndex()
    found.join(0, cache * EACH, 1)
    found.keeps(0, tiers)
    return found


def holds(found: PrefixCacheIndex, chunks: list[int]) -> int:
    return found.match(chunks).chunks_of(0)


def test_without_tiers_what_does_not_fit_is_forgotten() -> None:
    found = index()
    for now, chunks in enumerate((A, B)):
        found.sent(0, chunks, now)
    assert (holds(found, A), holds(found, B)) == (0, 10)


def test_with_a_tier_evicted_chunks_are_held_and_worth_less() -> None:
    found = index((1000.0, 0.8))
    for now, chunks in enumerate((A, B)):
        found.sent(0, chunks, now)
    assert (holds(found, A), holds(found, B)) == (8, 10)
    found.sent(0, A[:5], 2)
    assert holds(found, A) == 5 + int(0.8 * 5), "its beginning is in the cache again"


def test_chunks_are_forgotten_when_the_last_tier_has_dropped_them() -> None:
    found = index((1000.0, 1.0))
    for now, chunks in enumerate((A, B)):
        found.sent(0, chunks, now)
    found.removed(0, 4 * EACH)
    assert (holds(found, A), holds(found, B)) == (6, 10)
    found.removed(0, 6 * EACH)
    assert (holds(found, A), holds(found, B)) == (0, 10)


def test_answers_leave_with_the_kv_cache() -> None:
    """Tiers get prompts alone: what they drop are prompts, and the oldest prompt stays however much was answered."""
    found = index((1000.0 * EACH, 1.0))
    found.sent(0, A, 0.0)
    for now in range(20):
        found.wrote(0, 5 * EACH, 1.0 + now)
    assert len(found) == 20, "the prompt, and the answers that the KV cache has room for"
    assert holds(found, A) == 10
    found.removed(0, 4 * EACH)
    assert holds(found, A) == 6


def test_the_end_of_a_prompt_goes_to_the_tiers() -> None:
    found = index((1000.0 * EACH, 1.0))
    for number in range(10):
        sent = found.sent(0, [number], float(number))
        assert sent is not None
        found.answered(sent, float(number), prompt_tokens=5 * EACH, text_bytes=5 * 1024)
    assert len(found) == 50
    found.removed(0, 10 * EACH)
    assert [holds(found, [number]) for number in range(10)] == [0, 0, *[1] * 8]


def test_each_of_three_tiers_has_its_worth() -> None:
    found = index((20.0 * EACH, 0.8), (1e9, 0.5))
    for now, chunks in enumerate((A, B, C)):
        found.sent(0, chunks, now)
    assert [holds(found, each) for each in (A, B, C)] == [5, 8, 10]
    found.keeps(0, ((10.0 * EACH, 0.8), (1e9, 0.5)))
    found.wrote(0, 0, 3.0)
    assert [holds(found, each) for each in (A, B, C)] == [5, 5, 10], "host memory has no more than the cache"


def test_a_tier_that_saves_nothing_is_no_match() -> None:
    found = index((1000.0, 0.0))
    for now, chunks in enumerate((A, B)):
        found.sent(0, chunks, now)
    assert holds(found, A) == 0 and found.match(A).chunks_of(0) == 0


def test_a_prompt_of_one_chunk_in_a_tier_is_a_match() -> None:
    found = index((1000.0 * EACH, 0.9), cache=1)
    found.sent(0, A[:1], 0.0)
    found.sent(0, B[:1], 1.0)
    assert (holds(found, A[:1]), holds(found, B[:1])) == (1, 1)


def test_what_a_tier_had_says_nothing_of_the_kv_cache() -> None:
    found = index((1e9, 0.3))
    for now in range(60):
        sent = found.sent(0, [1000 + now], float(now))
        assert sent is not None
        found.answered(sent, float(now), prompt_tokens=40 * EACH, text_bytes=1024 * 40, cached_tokens=39 * EACH)
    assert found._held[0].capacity_tokens == 10 * EACH


def test_tiers_are_forgotten_with_their_instance() -> None:
    found = index((1000.0, 0.5))
    found.leave(0)
    found.join(0, 10 * EACH, 2)
    for now, chunks in enumerate((A, B)):
        found.sent(0, chunks, now)
    assert (holds(found, A), holds(found, B)) == (0, 10)


def test_tiers_are_consistent_whatever_comes() -> None:
    """An upper tier has no name that the index lacks, and no more than it has room for; entries stay within bounds."""
    chance = random.Random(3)
    found = PrefixCacheIndex(entries_max=300)
    for row in range(3):
        found.join(row, 8 * EACH, 1)
        found.keeps(row, ((16.0 * EACH, 0.9), (1e9, 0.5))[:row])
    for now in range(2000):
        row, start = chance.randrange(3), chance.randrange(12)
        chunks = list(range(100 * start, 100 * start + chance.randrange(1, 14)))
        what = chance.randrange(6)
        if what < 3:
            sent = found.sent(row, chunks, float(now), chance.choice((0.0, 150.0, 256.0, 900.0)))
            if sent is not None and what == 2:
                size = len(chunks) * chance.choice((150, 256, 900))
                found.answered(sent, float(now), prompt_tokens=size, text_bytes=1024 * len(chunks))
        elif what == 3:
            found.used(row, chunks, float(now))
        elif what == 4:
            found.wrote(row, chance.randrange(3 * EACH), float(now))
        else:
            found.removed(row, chance.randrange(4 * EACH))
        for number, held in found._held.items():
            assert len(held.upper) == number
            assert held.sizes.keys() == held.entries.keys() and held.tokens == pytest.approx(sum(held.sizes.values()))
            for tier, room in zip(held.upper, (8, 16), strict=False):
                assert tier.names.keys() <= held.entries.keys() and tier.held <= room * EACH + 1e-6
                assert tier.names == {name: held.sizes[name] for name in tier.names}
                assert tier.held == pytest.approx(sum(tier.names.values()), abs=1e-6)
        assert len(found) <= 300
        match = found.match(chunks)
        assert all(0 <= match.chunks_of(each) <= len(chunks) for each in range(3))


def make(kv_bytes: float) -> Make:
    cost = StepCost(
        floor_ms=1.0, start_ms=0.0, token_ms=0.05, area_ms=0.0, decode_ms=1.0, context_ms=0.0, request_ms=0.0
    )
    return Make(prefill=cost, decode=cost, kv_bytes=kv_bytes)


@pytest.mark.parametrize(
    ("kv_bytes", "tier", "worth"),
    [(0.0, "host", TIER_WORTH), (131072.0, "host", 0.87), (131072.0, "disk", 0.126), (1e6, "disk", 0.0)],
)
def test_a_hit_is_worth_a_prefill_less_its_loading(kv_bytes: float, tier: str, worth: float) -> None:
    """An 8B model, 128 KiB a token, at 20,000 tokens/s: 6.6 µs from host memory against 50 computed."""
    model = StepModel()
    model.know(0, make(kv_bytes))
    assert model.rows[0].tier_worth(tier) == pytest.approx(worth, abs=0.002)


@pytest.mark.parametrize(
    ("gb_s", "worth"),
    [({}, 0.126), ({"disk": 6.0}, 0.563), ({"disk": 1.0}, 0.0), ({"host": 1.0}, 0.126), ({"disk": 1e4}, 1.0)],
)
def test_a_measured_rate_replaces_the_assumed_one(gb_s: dict[str, float], worth: float) -> None:
    """128 KiB a token: 44 µs from a disk with the assumed 3 GB/s, 22 µs with 6 GB/s, and 131 µs with 1 GB/s."""
    model = StepModel()
    model.know(0, make(131072.0))
    model.rows[0].tiers = {"host": gb_s.get("host", 0.0), "disk": gb_s.get("disk", 0.0)}
    assert model.rows[0].tier_worth("disk") == pytest.approx(worth, abs=0.002)


def test_an_engine_without_a_profile_is_priced_by_its_own_bytes_once_its_prompts_were_timed() -> None:
    model = StepModel()
    model.reach(1)
    at = model.rows[0]
    at.tiers, at.token_bytes = {"host": 10.0, "disk": 0.5}, 30_000
    assert at.tier_worth("disk") == TIER_WORTH, "nothing is known of its prompts"
    for tokens in range(100, 100 + 37 * SURE, 37):
        plain_ms = UNKNOWN.prompt_ms(tokens)
        model.prompt_took(0, plain_ms, 4.0 * plain_ms)
    cost_ms = UNKNOWN.prefill.token_ms * at.prefill_factor
    assert at.tier_worth("disk") == pytest.approx(1 - 0.06 / cost_ms, abs=1e-6) and 0.3 < at.tier_worth("disk") < 0.6
    assert at.tier_worth("host") == TIER_WORTH, "3 µs of some 120, but the wait for a step is in no rate"
    at.tiers["disk"] = 0.1
    assert at.tier_worth("disk") == 0.0


def told(name: str, **more: Any) -> Reported:
    """A heartbeat of an instance with a cache of 10 chunks."""
    one = Instance(id=InstanceId(name), role=Role.BOTH, url=f"http://{name}", epoch=1)
    load = Load(kv_tokens=10 * EACH)
    return Reported(instance=one, state="ready", accepting=True, credits=9, load=load, models=({"id": "m"},), **more)


@pytest.mark.parametrize(("gb_s", "chosen"), [({}, "q"), ({"disk": 10.0}, "q"), ({"disk": 0.2}, "p")])
def test_a_prompt_on_a_slow_disk_is_computed_elsewhere(gb_s: dict[str, float], chosen: str) -> None:
    """Both compute equally fast, and q has the prompt on disk, with a little more to do than p. If its disk is slower
    than its computing, the prompt goes to p.
    """
    view = FleetView(lambda _: make(65536.0))
    prefixes = view.all().prefixes = PrefixCacheIndex()
    view.fold((told("p"), told("q")))
    for now, chunks in enumerate((A, B)):
        prefixes.sent(view.get(InstanceId("q")).row, chunks, now)
    view.fold((told("p"), told("q", kept={"host": 0, "disk": 100_000}, kept_gb_s=gb_s)))
    for now, chunks in enumerate((A, B), 2):
        prefixes.sent(view.get(InstanceId("q")).row, chunks, now)
    view.leg_started(InstanceId("q"))
    wanted = Wanted(model="m", hand_over=False, prompt_tokens=10 * EACH, prefix=tuple(A), output_tokens=4.0,
                    prefix_block_tokens=float(EACH), one_prompt=True)  # fmt: skip
    found = workload(view.all(), wanted)
    assert found.decode == InstanceId(chosen), found


def test_a_router_learns_of_tiers_from_heartbeats() -> None:
    view = FleetView()
    prefixes = view.all().prefixes = PrefixCacheIndex()

    def hears(kept: dict[str, int], **more: Any) -> None:
        view.fold((told("p", kept=kept, **more),))

    hears({})
    speed = view.all().inflight.step_model.rows[0]
    assert speed.tiers == {}
    hears({"host": 100_000, "disk": 0}, kept_gb_s={"host": 7.5}, kv_token_bytes=2048)
    assert (speed.tiers, speed.token_bytes) == ({"host": 7.5, "disk": 0.0}, 2048)
    for now, chunks in enumerate((A, B)):
        prefixes.sent(0, chunks, now)
    assert prefixes.match(A).chunks_of(0) == 9 and prefixes.match(B).chunks_of(0) == 10
