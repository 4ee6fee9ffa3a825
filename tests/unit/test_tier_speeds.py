"""How fast an engine loads from its tiers: as vLLM's metrics count it, and as heartbeats say it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.instance import TIER_GB_S_MAX, TIER_GB_S_MIN
from cluster.registry.membership import Heartbeat, decode, encode
from engine.vllm.metrics import parse_tiers
from engine.vllm.tier_speeds import LEAST_BYTES, TierCounts, TierSpeeds

GB = 1e9


def page(engine: int = 0, scale: float = 1.0) -> str:
    label = f'engine="{engine}",model_name="m"'
    return (
        f"vllm:kv_offload_load_bytes_total{{{label}}} {scale * 4e9}\n"
        f"vllm:kv_offload_load_time_total{{{label}}} {scale * 0.5}\n"
        f"vllm:kv_offload_store_bytes_total{{{label}}} 9e9\n"
        f"vllm:kv_offload_load_time_created{{{label}}} 1.7e9\n"
        f'vllm:kv_offload_tiering_read_bytes_total{{{label},tier="1:BoundedFiles"}} {scale * 3e9}\n'
        f'vllm:kv_offload_tiering_read_time_total{{{label},tier="1:BoundedFiles"}} {scale * 1.5}\n'
        f'baton:kv_token_bytes{{{label},of="worker"}} 1024.0\n'
        f'baton:kv_token_bytes{{{label},of="all"}} 2048.0\n'
    )


def test_vllms_counts_are_read_for_each_rank() -> None:
    counts = TierCounts(4e9, 0.5, 3e9, 1.5, 1024.0, 2048.0)
    assert parse_tiers(page(), 1) == (counts,)
    assert parse_tiers(page(0) + page(1, 2.0), 2) == (counts, TierCounts(8e9, 1.0, 6e9, 3.0, 1024.0, 2048.0))
    assert parse_tiers("", 2) == (TierCounts(), TierCounts())
    assert parse_tiers(page() + page(), 1)[0].token_bytes == 2048.0, "several API servers tell the same"


_NAMES = st.sampled_from(
    [f"vllm:kv_offload_{what}_total" for what in ("load_bytes", "load_time", "tiering_read_bytes", "tiering_read_time")]
    + [f'baton:kv_token_bytes{{of="{of}"}}' for of in ("all", "worker")]
)
_LINES = st.one_of(st.text(max_size=20), st.builds("{} {}".format, _NAMES, st.floats().map(str)))


@given(st.lists(_LINES).map("\n".join))
def test_whatever_an_engine_says_a_heartbeat_can_be_read(text: str) -> None:
    speeds = TierSpeeds()
    for ranks in (1, 1, 2):
        speeds.hear(parse_tiers(text, ranks)[0])
    said = encode(Heartbeat(id="p", agent="a", url="http://h:1", kept_gb_s=dict(speeds.gb_s),  # type: ignore[arg-type]
                            kv_token_bytes=speeds.token_bytes))  # fmt: skip
    assert decode(said)[1] == ""


def test_a_tier_is_as_fast_as_its_loads_were() -> None:
    """What is on disk goes through host memory: a second there and a quarter of one here for each 2 GB."""
    speeds = TierSpeeds()
    assert speeds.gb_s == {} and speeds.token_bytes == 0
    speeds.hear(TierCounts(disk_bytes=2 * GB, disk_s=1.0))
    assert speeds.gb_s == {}, "how long the second part of its way takes is not known"
    speeds.hear(TierCounts(host_bytes=2 * GB, host_s=0.25, disk_bytes=2 * GB, disk_s=1.0, token_bytes=2048.0))
    assert speeds.gb_s == {"host": 8.0, "disk": 1.6} and speeds.token_bytes == 2048


def test_workers_copy_at_the_same_time() -> None:
    """Their bytes and their seconds are added up, so the quotient is one worker's rate."""
    two, replicated = TierSpeeds(), TierSpeeds()
    two.hear(TierCounts(2 * GB, 1.0, worker_token_bytes=512.0, token_bytes=1024.0))
    replicated.hear(TierCounts(2 * GB, 1.0, worker_token_bytes=512.0, token_bytes=512.0))
    assert (two.gb_s["host"], replicated.gb_s["host"]) == (4.0, 2.0)


def test_new_loads_replace_old_ones() -> None:
    speeds, moved, took = TierSpeeds(), 0.0, 0.0
    for gb_s in [8.0] * 30 + [1.0] * 40:
        moved, took = moved + GB, took + 1.0 / gb_s
        speeds.hear(TierCounts(moved, took))
        speeds.hear(TierCounts(moved, took))  # a reading without loads changes nothing
        if gb_s == 8.0:
            assert speeds.gb_s["host"] == pytest.approx(8.0)
    assert speeds.gb_s["host"] == pytest.approx(1.0, rel=0.05)


def test_few_bytes_say_nothing() -> None:
    speeds = TierSpeeds()
    speeds.hear(TierCounts(LEAST_BYTES - 1.0, 1.0))
    assert speeds.gb_s == {}
    speeds.hear(TierCounts(2.0 * LEAST_BYTES, 1.001))
    assert set(speeds.gb_s) == {"host"}


def test_an_engine_that_starts_anew_counts_from_nothing() -> None:
    told, seen = TierSpeeds(), TierSpeeds()
    for speeds in (told, seen):
        speeds.hear(TierCounts(5 * GB, 1.0))
    told.restart()
    assert told.gb_s["host"] == 5.0, "it is the same machine"
    for speeds in (told, seen):  # one agent was told of the restart, the other one sees it in the counts
        speeds.hear(TierCounts(GB, 1.0))
        assert speeds.gb_s["host"] == pytest.approx(5.5 / 1.9, rel=0.01)


@pytest.mark.parametrize(("took_s", "bound"), [(1e-12, TIER_GB_S_MAX), (1e9, TIER_GB_S_MIN)])
def test_nonsense_is_bounded(took_s: float, bound: float) -> None:
    speeds = TierSpeeds()
    speeds.hear(TierCounts(GB, took_s))
    assert speeds.gb_s["host"] == bound


# --- the heartbeat ----------------------------------------------------------------------------------------------------


def said(**more: object) -> bytes:
    return json.dumps({"id": "p", "agent": "a", "url": "http://h:1", **more}).encode()


def test_a_heartbeat_without_rates_is_of_an_engine_that_has_measured_none() -> None:
    beat, fault = decode(said())
    assert beat is not None and (beat.kept_gb_s, beat.kv_token_bytes, fault) == ({}, 0, "")
    beat, _ = decode(said(kept_gb_s={"host": 12, "disk": 0.5}, kv_token_bytes=2048))
    assert beat is not None and beat.kept_gb_s == {"host": 12.0, "disk": 0.5} and beat.kv_token_bytes == 2048
    assert decode(encode(beat))[0] == beat


@pytest.mark.parametrize(
    "more",
    [
        {"kept_gb_s": {"host": value}}
        for value in (0, -1.0, 1e-4, 1.1e4, 1e308, float("nan"), float("inf"), "9", None, [3])
    ]
    + [{"kept_gb_s": {"tape": 1.0}}, {"kept_gb_s": [1.0]}, {"kv_token_bytes": -1}, {"kv_token_bytes": 2**60}],
)
def test_a_heartbeat_with_an_impossible_rate_is_refused(more: dict[str, Any]) -> None:
    beat, fault = decode(said(**more))
    assert beat is None and fault


def test_rates_at_their_bounds_are_taken() -> None:
    told = {"host": TIER_GB_S_MAX, "disk": TIER_GB_S_MIN}
    beat, fault = decode(msgspec.json.encode({"id": "p", "agent": "a", "url": "http://h:1", "kept_gb_s": told}))
    assert beat is not None and (beat.kept_gb_s, fault) == (told, "")
