"""The link of an engine of several ranks with another: each rank tries its own part, at its own time."""

from __future__ import annotations

import pytest

from decode.peers import MET
from decode.rank_links import GONE, RankLinks

CUT = f"{MET}, and rank 1 cannot be read"


def told(links: RankLinks, by_rank: dict[int, str]) -> str | None:
    return links.told({"p": by_rank}).get("p")


def test_one_rank_alone_decides() -> None:
    links = RankLinks(1)
    assert [told(links, {0: state}) for state in (CUT, MET, GONE, MET)] == [CUT, MET, GONE, MET]


def test_an_engine_is_met_once_every_rank_has_met_it() -> None:
    links = RankLinks(2)
    assert links.told({"p": {1: MET}, "other": {0: MET, 1: MET}}) == {"other": MET}
    assert told(links, {0: MET}) == MET


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rank_that_cannot_read_is_not_hidden_by_one_that_can(order: tuple[int, int]) -> None:
    """Else the agent takes the link for met, and no introduction tries the bad rank's part again."""
    links, said = RankLinks(2), {0: CUT, 1: MET}
    assert [told(links, {rank: said[rank]}) for rank in order][-1] == CUT
    assert told(links, {1: MET}) == CUT, "an introduction that comes again: rank 1 repeats its state"
    assert told(links, {0: MET}) == MET


def test_an_engine_that_was_dropped_is_forgotten() -> None:
    links = RankLinks(2)
    assert told(links, {0: MET, 1: CUT}) == CUT
    assert told(links, {0: GONE}) == GONE
    assert told(links, {1: GONE}) == GONE
    assert told(links, {0: MET}) is None and told(links, {1: MET}) == MET
