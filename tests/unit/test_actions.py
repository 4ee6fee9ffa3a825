"""Names of new instances, and which names are none."""

from __future__ import annotations

import pytest

from goodput.actions import new_name, pool_of_new


@pytest.mark.parametrize("pool", ["decode", "org-m-decode", "qwen-20250611", "a"])
@pytest.mark.parametrize("now", [1_104_537_600.0, 1_764_000_000.1234, 4_102_444_800.0])  # the years 2005, 2025, 2100
@pytest.mark.parametrize("number", [1, 1234])
def test_a_new_name_says_its_pool(pool: str, now: float, number: int) -> None:
    assert pool_of_new(new_name(pool, now, number)) == pool


@pytest.mark.parametrize("name", ["decode-0", "qwen-20250611-3", "m-deadbeef-0", "router", "m-19a1b2c3d4e", "", "-"])
def test_names_in_the_cluster_file_are_no_new_ones(name: str) -> None:
    assert pool_of_new(name) == ""
