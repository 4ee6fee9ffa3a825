"""Conversations that need three times the KV caches of two engines (`support.tier_talks`)."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
from support.tier_talks import SETUPS, heard_with

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1200)]


def test_conversations_find_their_beginnings_in_tiers(tmp_path: Path) -> None:
    """With tiers less than half as many prompt tokens are computed again as without, whether the router knows of the
    tiers, does not, or goes by load alone. Answers are the same. Whether knowledge saves tokens or time is printed
    only: one run of each decides nothing (`make bench-tiers` has several, and does not show it).

    Not checked: other loads, other models, tiers on disk.
    """
    found = {}
    for number, name in enumerate(SETUPS):
        heard, told = heard_with(tmp_path / f"{number}", name)
        found[name] = heard, told
        first_ms = sorted(1000 * each for each in heard.first_s)
        print(
            f"{name}: first token {mean(first_ms):.0f} ms ({first_ms[0]:.0f} to {first_ms[-1]:.0f}), "
            f"{heard.computed} of {heard.prompts} prompt tokens computed; agents: {told}"
        )
    (known, telling), (unknown, silent), (by_load, _), (none, _) = found.values()
    assert known.said == unknown.said == by_load.said == none.said
    assert max(known.computed, unknown.computed, by_load.computed) < 0.5 * none.computed
    assert telling.kept and not silent.kept and silent.evicted > telling.evicted
