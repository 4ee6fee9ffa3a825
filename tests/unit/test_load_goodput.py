"""The judge of one trial of a search for goodput."""

from __future__ import annotations

import pytest

from baton.load_goodput import _deadline_s, _Judge, tokens_asked
from loadgen.arrival import Arrival
from loadgen.record import Record
from loadgen.report import Targets
from loadgen.search import misses_alone


def test_a_request_that_the_end_of_the_trial_cuts_was_beside_others() -> None:
    """Else requests beside a long one would look as if they had missed alone, and the search would end."""
    arrivals = [Arrival(at_s=float(at), input_tokens=10, output_tokens=10) for at in range(9)]
    judge = _Judge(arrivals, Targets(100.0, None, None, None), 0.9, sender=None)  # type: ignore[arg-type]
    for number in (*range(1, 9), 0):
        judge._cut = number == 0
        at_s = float(number)
        end_s = 100.0 if number == 0 else at_s + 0.5
        judge.take(Record(request=number, at_s=at_s, sent_s=at_s, end_s=end_s, input_tokens=10, output_tokens=10))
    assert len(judge._ended) == 9
    assert not misses_alone(judge._ended, 0.9)
    assert misses_alone(judge._ended[:-1], 0.9)


@pytest.mark.parametrize(
    ("extra", "tokens"),
    [({}, 128), ({"max_tokens": 512}, 512), ({"min_tokens": 200, "max_tokens": 300}, 300), ({"max_tokens": "x"}, 128),
     ({"max_tokens": 5}, 128)],
)  # fmt: skip
def test_an_answer_that_the_extra_body_makes_longer_is_not_overdue_early(extra: dict[str, object], tokens: int) -> None:
    arrival = Arrival(at_s=1.0, input_tokens=10, output_tokens=128)
    found = _deadline_s(arrival, Targets(500.0, None, 40.0, None), tokens_asked(extra))
    assert found == pytest.approx(1.0 + 0.5 + 0.04 * (tokens - 1))
