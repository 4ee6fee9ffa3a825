"""Rolling statistics of the last minutes: windows, percentiles, sums of several routers."""

from __future__ import annotations

import pytest

from router.telemetry.rolling import NOW_SLOTS, SLOT_S, SLOTS, RollingStatistics, bucket, percentile, together


def test_percentiles_are_within_six_percent() -> None:
    counts: dict[str, int] = {}
    for milliseconds in range(1, 1001):
        number = str(bucket(milliseconds / 1000))
        counts[number] = counts.get(number, 0) + 1
    for share in (0.1, 0.5, 0.9, 0.99):
        assert percentile(counts, share) == pytest.approx(share, rel=0.06)
    assert percentile({}, 0.5) is None
    assert percentile({str(bucket(0.0)): 1}, 0.5) < 0.001


def test_windows_forget() -> None:
    lately = RollingStatistics()
    lately.served(0.0, [0.2], (), ())
    now = SLOT_S * NOW_SLOTS
    lately.ended(now, "failed")
    told = lately.told(now)
    assert told["now"]["outcomes"] == {"failed": 1}
    assert told["five_minutes"]["outcomes"] == {"served": 1, "failed": 1}
    assert [slot["ended"] for slot in told["history"]].count(1) == 2
    assert len(told["history"]) == SLOTS
    later = lately.told(SLOT_S * SLOTS)
    assert later["five_minutes"]["outcomes"] == {"failed": 1}
    assert lately.told(1e6)["five_minutes"]["outcomes"] == {}


def test_queue_length_is_a_mean_and_waits_are_differences() -> None:
    lately = RollingStatistics()
    lately.look(0.0, 4, {"queue_p": 10.0})
    lately.look(1.0, 0, {"queue_p": 12.5, "credit": 1.0})
    told = lately.told(1.0)["now"]
    assert told["line"] == 2.0
    assert told["waits"] == {"queue_p": 12.5, "credit": 1.0}


def test_slo_results_are_counted_by_class() -> None:
    lately = RollingStatistics()
    lately.judged(0.0, "chat", "met", late_ttft=False, late_tpot=False)
    lately.judged(0.0, "chat", "missed", late_ttft=False, late_tpot=True)
    assert lately.told(0.0)["now"]["results"] == {"chat": {"met": 1, "missed": 1, "late_ttft": 0, "late_tpot": 1}}


def test_two_routers_are_the_sum() -> None:
    one, other = RollingStatistics(), RollingStatistics()
    for each, count in ((one, 2), (other, 3)):
        for _ in range(count):
            each.served(0.0, [0.1], (), ())
    other.ended(0.0, "failed")
    told = together([one.told(0.0), other.told(0.0)])
    assert told["now"]["outcomes"] == {"served": 5, "failed": 1}
    assert sum(told["now"]["values"]["ttft"].values()) == 5
    assert told["history"][-1]["ended"] == 6
    assert told["history"][-1]["ttft_s"] == pytest.approx(0.5)
