"""Settings with a wrong unit: which field was meant, and the value to write there."""

from __future__ import annotations

import pytest

from cluster.spec.about import settings_of
from cluster.spec.settings import Hardware, Limits, SloClass
from cluster.spec.units import converted, meant, normal, shown, unit_of

TARGETS = list(settings_of(SloClass))
LIMITS = list(settings_of(Limits))
HARDWARE = list(settings_of(Hardware))


@pytest.mark.parametrize(
    ("key", "known", "right"),
    [
        ("ttft", TARGETS, "ttft_ms"),
        ("ttft_s", TARGETS, "ttft_ms"),
        ("ttft_seconds", TARGETS, "ttft_ms"),
        ("ttftMs", TARGETS, "ttft_ms"),
        ("TPOT-S", TARGETS, "tpot_ms"),
        ("stall_ms", LIMITS, "stall_s"),
        ("body_max", LIMITS, "body_bytes_max"),
        ("body_mb_max", LIMITS, "body_bytes_max"),
        ("body_max_mb", LIMITS, "body_bytes_max"),
        ("memory", HARDWARE, "memory_gib"),
        ("memory_mib", HARDWARE, "memory_gib"),
        ("power_kw", HARDWARE, "power_w"),
        ("ttft_mb", TARGETS, None),
        ("attain", TARGETS, None),
        ("min", TARGETS, None),
        ("ms", TARGETS, None),
    ],
)
def test_meant(key: str, known: list[str], right: str | None) -> None:
    assert meant(key, known) == right


@pytest.mark.parametrize(
    ("value", "name", "key", "right"),
    [
        ("0.5", "ttft_ms", "ttft_s", "500"),
        ("500", "ttft_ms", "ttft", "500"),
        ("500ms", "ttft_ms", "ttft_s", "500"),
        ("0.5 s", "ttft_ms", "", "500"),
        ("2min", "stall_s", "", "120"),
        ("1500us", "tpot_ms", "", "1.5"),
        ("32MiB", "body_bytes_max", "", "33554432"),
        ("32", "body_bytes_max", "body_mb_max", "32000000"),
        ("1_000", "ttft_ms", "", "1000"),
        ("1e3", "ttft_ms", "", "1000"),
        ("80 GiB", "memory_gib", "", "80"),
        ("81920", "memory_gib", "memory_mib", "80"),
        ("0.7kW", "power_w", "", "700"),
        ("95%", "attainment", "", "0.95"),
        ("7", "count", "", "7"),
        ("7 apples", "count", "", None),
        ("7 MiB", "ttft_ms", "", None),
        ("fast", "ttft_ms", "", None),
        ("", "ttft_ms", "", None),
        ("9" * 400, "ttft_ms", "", None),
    ],
)
def test_converted(value: str, name: str, key: str, right: str | None) -> None:
    assert converted(value, name, key) == right


def test_units_of_our_own_names() -> None:
    assert [unit_of(name) for name in ("ttft_ms", "stall_s", "body_bytes_max", "memory_gib", "power_w")] == [
        *("milliseconds", "seconds", "bytes", "GiB", "watts")
    ]
    assert [unit_of(name) for name in ("share", "min", "count", "price_per_hour", "admin_port")] == [""] * 5


def test_numbers_are_shown_without_needless_digits() -> None:
    assert [shown(number) for number in (500.0, 0.95, 1.5, 1e9, 0.000001, 1 / 3, -2.0)] == [
        *("500", "0.95", "1.5", "1000000000", "0.000001", "0.333333", "-2")
    ]


def test_normal() -> None:
    assert [normal(key) for key in ("ttftMs", "key-file", "Key File", "TTFT_MS")] == [
        *("ttft_ms", "key_file", "key_file", "ttft_ms")
    ]
