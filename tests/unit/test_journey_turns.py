"""The time in which an aggregated leg that pulls should have answered in one piece."""

import pytest
from msgspec.structs import replace

from cluster.ids import InstanceId
from router.core.events import PrefixSource
from router.core.turns import SLOWER, in_one_piece, longest_s

SOURCE = PrefixSource(InstanceId("s"), 100, 1.0, cold_s=2.0)


@pytest.mark.parametrize(
    ("tokens_max", "tpot_ms", "cold_s"),
    [(1, 0.0, 2.0), (1, 10.0, 2.0), (101, 10.0, 2.0 + SLOWER * 1.0), (101, 0.0, None), (None, 10.0, None)],
    ids=["one token", "one token, times known", "100 more", "no time known", "no limit"],
)
def test_the_longest_time_of_an_answer_in_one_piece(
    tokens_max: int | None, tpot_ms: float, cold_s: float | None
) -> None:
    """Without a limit to the answer, or a time for its tokens, a long answer looks like a pull that stands still."""
    more_s = longest_s(tokens_max, tpot_ms)
    found = None if more_s is None else in_one_piece(SOURCE, more_s)
    assert found == (None if cold_s is None else replace(SOURCE, cold_s=cold_s))


def test_without_a_cold_time_there_is_no_time_for_the_answer() -> None:
    assert in_one_piece(replace(SOURCE, cold_s=0.0), 10.0) is None
