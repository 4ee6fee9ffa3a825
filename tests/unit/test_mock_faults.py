from __future__ import annotations

import itertools
from typing import Any

import pytest

from cluster.errors import ApiError
from engine.mock.faults import (
    MEANS,
    ON_INSTANCE,
    ON_PULLS,
    ON_REQUESTS,
    FaultKind,
    FaultLeg,
    MockFaults,
    read_faults,
    spoil,
)


def test_every_kind_has_a_meaning_and_a_time() -> None:
    assert set(MEANS) == set(FaultKind) == ON_REQUESTS | ON_PULLS | ON_INSTANCE
    for kind in FaultKind:
        assert read_faults({"fault": kind.value})[0].fault is kind


def test_one_or_many() -> None:
    one, two = read_faults(
        [{"fault": "hang", "after_tokens": 3, "times": 1}, {"fault": "slow", "factor": 4, "seconds": 2}]
    )
    assert (one.fault, one.after_tokens, one.times, one.share) == (FaultKind.HANG, 3, 1, 1.0)
    assert (two.factor, two.seconds) == (4, 2)


BAD: list[tuple[Any, str]] = [
    (None, "JSON object"),
    ("hang", "JSON object"),
    ({}, "must be one of"),
    ({"fault": "hangs"}, "must be one of: refuse, hang"),
    ({"fault": "hang", "shared": 1}, "Did you mean `share`"),
    ({"fault": "hang", "status": 500}, "takes no `status`"),
    ({"fault": "slow", "share": 0.5}, "takes no `share`"),
    ({"fault": "hang", "share": 1.5}, "from 0 to 1"),
    ({"fault": "hang", "times": 0}, "a whole number from 1"),
    ({"fault": "hang", "times": 1.5}, "a whole number"),
    ({"fault": "hang", "after_tokens": True}, "a whole number"),
    ({"fault": "refuse", "status": 200}, "from 400 to 599"),
    ({"fault": "hang", "leg": "both"}, "any, prefill, decode"),
    ({"fault": "hang", "request": 3}, "a text"),
    ({"fault": ["die"]}, "must be one of: refuse, hang"),
    ({"fault": "hang", "leg": {"a": 1}}, "any, prefill, decode"),
]


@pytest.mark.parametrize(("body", "words"), BAD, ids=[str(row[0])[:40] for row in BAD])
def test_bad_faults_are_refused(body: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        read_faults(body)
    assert refused.value.status == 400


def faults(*bodies: dict[str, Any], chance: list[float] | None = None) -> MockFaults:
    made = MockFaults(iter(chance or itertools.repeat(0.5)).__next__)
    made.add(read_faults(list(bodies)))
    return made


def test_the_first_fault_that_fits_strikes() -> None:
    some = faults(
        {"fault": "refuse", "leg": "prefill", "times": 2}, {"fault": "hang", "request": "abc"}, {"fault": "corrupt"}
    )

    def struck(leg: FaultLeg, request: str) -> str | None:
        fault = some.strike(ON_REQUESTS, leg, request)
        return None if fault is None else fault.fault.value

    assert [struck(FaultLeg.PREFILL, "x") for _ in range(3)] == ["refuse", "refuse", None]
    assert struck(FaultLeg.DECODE, "x") is None
    assert struck(FaultLeg.DECODE, "xabcx") == "hang"
    pulled = some.strike(ON_PULLS, FaultLeg.DECODE, "x")
    assert pulled is not None and pulled.fault is FaultKind.CORRUPT
    assert [each["struck"] for each in some.as_json()["faults"]] == [2, 1, 1]


def test_a_share_is_drawn() -> None:
    some = faults({"fault": "refuse", "share": 0.3}, chance=[0.1, 0.3, 0.29, 0.9])
    assert [some.strike(ON_REQUESTS, FaultLeg.ANY, "") is not None for _ in range(4)] == [True, False, True, False]


def test_faults_end() -> None:
    some = faults({"fault": "slow", "factor": 3}, {"fault": "slow", "factor": 2}, {"fault": "unwell"})
    assert (some.factor, some.has(FaultKind.UNWELL)) == (6, True)
    some.end(1)
    assert some.factor == 2
    assert [each.number for each in some.clear()] == [2, 3]
    assert (some.factor, some.has(FaultKind.UNWELL), some.as_json()["faults"]) == (1, False, [])


@pytest.mark.parametrize("kind", [FaultKind.CORRUPT, FaultKind.STALE])
@pytest.mark.parametrize("before", [(), (7, 8), (1, 2, 3, 4)])
def test_a_spoilt_read_has_other_tokens_of_the_same_length(kind: FaultKind, before: tuple[int, ...]) -> None:
    read = spoil(kind, (1, 2, 3), before)
    assert len(read) == 3
    assert read != (1, 2, 3)
    assert spoil(kind, (), before) == ()
    assert read == spoil(kind, (1, 2, 3), before)
