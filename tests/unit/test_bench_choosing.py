"""What the benchmarks of lengths and prefixes count."""

from __future__ import annotations

import pytest

from bench import lengths, prefixes
from loadgen.arrival import Arrival


def test_loss_and_coverage_of_a_known_guess() -> None:
    rows = [Arrival(at_s=float(at), input_tokens=1, output_tokens=tokens) for at, tokens in enumerate((5, 10, 20, 40))]
    found = lengths.judged(rows, lengths.Longest(20))
    assert found["coverage"] == [0.75, 0.75, 0.75]
    assert found["loss"] == [
        pytest.approx(sum((level * 20, (1 - level) * 15, (1 - level) * 10)) / 4, abs=0.01) for level in (0.5, 0.9, 0.99)
    ]


def test_answers_are_learned_from_when_they_end() -> None:
    """The second request comes while the first still runs, the third after it."""
    guessed = []

    class Spy(lengths.Window):
        def __call__(self, row: Arrival) -> lengths.Guess:
            served, learn = super().__call__(row)
            guessed.append(served[0])
            return served, learn

    rows = [Arrival(at_s=at, input_tokens=1, output_tokens=100) for at in (0.0, 1.0, 3.5)]
    lengths.judged(rows, Spy(by_client=False))
    assert guessed == [200, 200, 100]


@pytest.mark.interpreted
def test_the_fleet_counts_expected_blocks_and_cached_ones() -> None:
    block = prefixes.BLOCK
    turn = Arrival(at_s=0.0, input_tokens=4 * block, output_tokens=10, prefix=(1, 2, 3, 4), block_tokens=block)
    again = Arrival(at_s=60.0, input_tokens=5 * block, output_tokens=10, prefix=(1, 2, 3, 4, 5), block_tokens=block)
    seen = prefixes.Fleet(prefixes.Case("prefix", 100)).run([turn, again])
    assert (seen.prompt, seen.cached, seen.there, seen.expected, seen.both) == (9, 4, 4, 4, 4)
    apart = prefixes.Fleet(prefixes.Case("prefix", 100, every=2)).run([turn, again])
    assert (apart.cached, apart.there, apart.expected) == (4, 0, 0), "only blocks that the index was told of are judged"


@pytest.mark.interpreted
def test_an_index_that_forgets_nothing_expects_too_much() -> None:
    block = prefixes.BLOCK
    rows = [
        Arrival(at_s=100.0 * at, input_tokens=8 * block, output_tokens=1, prefix=tuple(range(first, first + 8)))
        for at, first in enumerate([1, *(1000 * each for each in range(1, 40)), 1])
    ]
    honest, other = (prefixes.Fleet(prefixes.Case("prefix", 10, forgets=each)).run(rows) for each in (True, False))
    assert (honest.expected, honest.there) == (0, 0)
    assert (other.expected, other.there) == (8, 0)
