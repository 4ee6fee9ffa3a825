"""Which pool is said to be the bottleneck, and with which words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from router.admin.bottleneck import PoolSeen, PoolsSeen, Where, bottleneck

CALM = PoolsSeen(
    prefill=PoolSeen(instances=2, running=2.0, places=2.0),
    decode=PoolSeen(instances=2, running=20.0, places=22.0),
    rate=5.0,
)


def seen(prefill: dict[str, float] | None = None, decode: dict[str, float] | None = None, **more: Any) -> PoolsSeen:
    return replace(
        CALM, prefill=replace(CALM.prefill, **(prefill or {})), decode=replace(CALM.decode, **(decode or {})), **more
    )


@pytest.mark.parametrize(
    ("given", "where", "says"),
    [
        (CALM, Where.NOWHERE, "No bottleneck: hardly anything waits"),
        (PoolsSeen(prefill=PoolSeen(instances=1), decode=PoolSeen(instances=1)), Where.IDLE, "the fleet is idle"),
        (seen(decode={"waiting": 15.0}), Where.DECODE, "15 requests wait for it on average, about 3.0 s each; none"),
        (seen(prefill={"waiting": 6.0}), Where.PREFILL, "6 requests wait for it on average, about 1.2 s each"),
        (seen(prefill={"waiting": 6.0}, decode={"waiting": 5.0}), Where.BOTH, "Both pools are short: 6 requests wait"),
        (seen(prefill={"waiting": 6.0}, decode={"waiting": 3.0}), Where.PREFILL, "3 for decode. More prefill"),
        (seen(decode={"pulling": 9.0}), Where.HANDOFF, "The hand-over is the bottleneck: 9 requests wait"),
        (seen(prefill={"in_line": 8.0}), Where.PREFILL, "8 requests wait"),
        (seen(decode={"waiting": 1.5}), Where.NOWHERE, "hardly anything waits"),
        (seen(prefill={"instances": 0}), Where.PREFILL, "There is no ready prefill instance"),
        (seen(decode={"instances": 0, "in_line": 4.0}), Where.DECODE, "no ready decode instance, so nothing is handed"),
        (seen(decode={"waiting": 15.0}, rate=0.0), Where.DECODE, "15 requests wait for it on average, and none has"),
    ],
)  # fmt: skip
def test_where_the_bottleneck_is(given: PoolsSeen, where: Where, says: str) -> None:
    verdict = bottleneck(given)
    assert (verdict.where, says in verdict.sentence) == (where, True), verdict.sentence


def test_a_router_without_a_core_comes_first() -> None:
    verdict = bottleneck(seen(decode={"waiting": 15.0}, late_s=0.7))
    assert verdict.where is Where.ROUTER
    assert "gets to its work 700 ms late" in verdict.sentence
    assert bottleneck(seen(decode={"waiting": 15.0}, late_s=0.1)).where is Where.DECODE


def test_places_of_decode_that_prompts_hold_point_to_prefill() -> None:
    """All places of D are taken, and its engines are idle: the requests in the queue for D wait for P."""
    full = {"running": 1.0, "places": 32.0, "limit": 32, "in_line": 20.0}
    verdict = bottleneck(seen(prefill={"waiting": 28.0}, decode=full))
    assert verdict.where is Where.PREFILL
    assert any("prompts under way hold the places of decode" in line for line in verdict.because)
    assert bottleneck(seen(decode={**full, "running": 32.0})).where is Where.DECODE


def test_a_prefill_pool_full_of_holds_points_to_decode() -> None:
    queues = {"prefill": {"waiting": 30.0, "kv_usage": 0.97}, "decode": {"waiting": 10.0}}
    verdict = bottleneck(seen(**queues))
    assert verdict.where is Where.DECODE
    assert any("full of holds" in line for line in verdict.because)
    queues["prefill"]["kv_usage"] = 0.5
    assert bottleneck(seen(**queues)).where is Where.PREFILL


def test_without_a_queue_missed_promises_count() -> None:
    assert bottleneck(seen(judged=100, late_tpot=20, late_ttft=3)).where is Where.DECODE
    assert bottleneck(seen(judged=100, late_tpot=3, late_ttft=20)).where is Where.PREFILL
    assert bottleneck(seen(judged=100, late_tpot=4)).where is Where.NOWHERE
    elsewhere = bottleneck(seen(judged=100, late_ttft=20, ttft_parts={"residual": 3.0, "prefill": 1.0}))
    assert (elsewhere.where, "the largest part is residual" in elsewhere.sentence) == (Where.NOWHERE, True)
    assert bottleneck(seen(judged=100, late_ttft=20, ttft_parts={"queue_p": 3.0})).where is Where.PREFILL


def test_instances_of_both_roles() -> None:
    alone = PoolsSeen(
        prefill=PoolSeen(), decode=PoolSeen(), both=PoolSeen(instances=2, running=8.0, waiting=9.0), rate=3.0
    )
    verdict = bottleneck(alone)
    assert verdict.where is Where.BOTH
    assert "instances that run both legs are the bottleneck: 9 requests wait" in verdict.sentence
    calm = replace(alone, both=replace(alone.both, waiting=0.0))
    assert bottleneck(calm).where is Where.NOWHERE


def test_every_verdict_tells_its_figures() -> None:
    because = bottleneck(seen(decode={"waiting": 15.0, "limit": 32})).because
    assert because[1].startswith("decode: 2 ready instances, 20.0 running, 15.0 waiting in engines")
    assert "22 of 32 places taken" in because[1]
    assert because[-1] == "5.0 requests end a second"
