"""Two saved results: what differs, how surely, and what cannot be compared."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest

from baton.cli import main
from loadgen.arrival import Arrival
from loadgen.compare import QuantityDifference, compare
from loadgen.record import Record, Timings, line_of, record_of
from loadgen.report import Targets


def load(
    seed: int, count: int = 300, slower: float = 1.0, rate: float = 10.0, noise: int = 0, shift: float = 0.0
) -> list[Record]:
    """Requests drawn from `seed`, sent through a queue; `noise` seeds the scatter of their service times."""
    rng, noisy = np.random.default_rng(seed), np.random.default_rng([seed, noise])
    records, free = [], 0.0
    for number, moment in enumerate(np.cumsum(rng.exponential(1 / rate, count)) + shift):
        work = float(rng.exponential(0.05)) * slower * float(noisy.uniform(0.9, 1.1))
        at_s = float(moment)
        free = max(free, at_s) + work
        first, last = free - at_s, free - at_s + 0.1 * slower
        times = array("d", [at_s + first, at_s + last])
        records.append(record_of(number, Arrival(at_s, 100, 2), Timings(at_s, at_s + first, times[1], times)))
    return records


def by_name(a: list[Record], b: list[Record]) -> dict[str, QuantityDifference]:
    found = compare(a, b, Targets(ttft_ms=200))
    return {each.name: each for each in found.differences}


def test_a_slower_server_is_found_on_the_same_requests() -> None:
    a, b = load(1), load(1, slower=1.3, noise=1)
    found = compare(a, b, Targets(ttft_ms=200))
    assert found.paired and found.unlike == ()
    assert {"TTFT mean", "E2E mean", "TPOT mean", "attainment"} <= set(found.worse)
    told = by_name(a, b)["TPOT mean"]
    assert told.change == pytest.approx(30.0, rel=1e-3)
    assert told.low is not None and told.high is not None and told.low <= 30.0001 and told.high >= 29.9999
    assert {by_name(b, a)[name].verdict for name in ("TTFT mean", "attainment")} == {"better"}


def test_no_difference_is_told_where_there_is_none() -> None:
    """A server is compared with itself ten times. In 95 % of tables all ten rows are to be right."""
    wrong = sum(bool(compare(load(seed), load(seed, noise=1), Targets(ttft_ms=200)).worse) for seed in range(10))
    assert wrong <= 2  # at most 0.5 wrong tables expected; more than 2 have a probability of 1.2 %


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (load(1, shift=0.5), "other requests or moments"),
        (load(1, rate=20.0), "other rates: "),
        (load(1, count=200), "other numbers of requests: 300 and 200"),
        ([], "holds no request"),
    ],
)
def test_what_cannot_be_compared_is_said(other: list[Record], said: str) -> None:
    found = compare(load(1), other, Targets())
    assert any(said in each for each in found.unlike), found.unlike
    assert not found.paired


def test_a_closed_loop_is_not_an_open_one() -> None:
    closed = load(1)
    for each in closed:
        each.closed_loop = True
    assert any("closed" in each for each in compare(load(1), closed, Targets()).unlike)


def test_few_requests_have_no_interval_and_none_no_value() -> None:
    few = load(1, count=5)
    assert {each.verdict for each in compare(few, few, Targets()).differences} == {""}
    for each in few:
        each.error = "timeout"
    found = by_name(few, few)
    assert (found["TTFT mean"].a, found["answered"].a) == (None, 0.0)


def written(path: Path, records: list[Record], more: bytes = b"") -> str:
    path.write_bytes(b"".join(map(line_of, records)) + more)
    return str(path)


def test_the_command_s_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = written(tmp_path / "a", load(1))
    same = written(tmp_path / "same", load(1), b"half a li")
    slow = written(tmp_path / "slow", load(1, slower=1.3))
    other = written(tmp_path / "other", load(1, shift=0.5))
    empty = written(tmp_path / "empty", [])
    assert main(["load", "--compare", a, same]) == 0
    shown = capsys.readouterr()
    assert "the same requests" in shown.out and "left out: 1 lines" in shown.err
    assert main(["load", "--compare", a, slow, "--ttft-ms", "200", "--json"]) == 1
    assert '"worse": ["TTFT mean"' in capsys.readouterr().out
    assert main(["load", "--compare", a, other]) == 2
    assert "not comparable: other requests" in capsys.readouterr().out
    for bad in (empty, str(tmp_path / "nowhere")):
        assert main(["load", "--compare", a, bad]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["load", "http://x", "--compare", a, same]) == 2
