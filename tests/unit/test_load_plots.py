"""The pictures of a load and of a search."""

from __future__ import annotations

import pytest

from baton import load_plots
from baton.load_found import Goodput
from loadgen.report import Targets
from loadgen.search import Aim, Search, SearchFinished, StopSearch, TrialDone, Try


def test_a_trial_that_ended_early_has_no_share_of_its_own() -> None:
    """It ended after 4 misses, with 10 of 60 known to attain: its share is 17 % at least, and may be 93 %."""
    pytest.importorskip("matplotlib")
    pyplot = load_plots._pyplot()
    search = Search(Aim(attainment=0.95))
    search.start(0.0)
    search.handle(TrialDone(Try(repeat=0, rate=1.0, holds=True, counted=60, attained=60)), 1.0)
    search.handle(TrialDone(Try(repeat=0, rate=2.0, holds=False, counted=60, attained=10, whole=False)), 2.0)
    search.handle(TrialDone(Try(repeat=0, rate=1.5, holds=False, counted=60, attained=50)), 3.0)
    (finished,) = search.handle(StopSearch(), 4.0)
    assert isinstance(finished, SearchFinished)
    figure, axes = pyplot.subplots()
    try:
        load_plots._tries(axes, Goodput(finished, tuple(search.tries), Targets(ttft_ms=5.0), 0.95))
        points = {
            line.get_label(): list(line.get_xdata()) for line in axes.get_lines() if line.get_label() != "promised"
        }
    finally:
        pyplot.close(figure)
    assert points == {
        "attains": [1.0],
        "does not attain": [1.5],
        "does not attain (ended early: at least this share)": [2.0],
    }
