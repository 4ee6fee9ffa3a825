"""The router's times by part over a whole load: their means add up, and a missing part is not made up."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from loadgen.arrival import Arrival
from loadgen.record import Record, Timings, record_of
from loadgen.stages import stages_of
from loadgen.stream import TIMING_HEADER, Tally
from router.request import trace


def record(timing: dict[str, Any] | None, error: str | None = None) -> Record:
    found = record_of(0, Arrival(0.0, 10, 2), Timings(0.0, 0.1, 0.3, array("d", [0.1, 0.2])))
    found.timing, found.error = timing, error
    return found


def told(way: str, **parts: float | None) -> dict[str, Any]:
    return {"way": way, "total_ms": 50.0, "ttft_ms": parts}


def test_means_add_up_to_the_total_also_where_requests_have_different_parts() -> None:
    (found,) = stages_of(
        [
            record(told("plain", total=10.0, router=1.0, prefill=6.0, queue_p=None, credit=0.0, residual=3.0)),
            record(told("plain", total=30.0, router=2.0, prefill_leg=25.0, credit=0.0, residual=3.0)),
            record(told("plain", total=1000.0, router=1000.0, residual=0.0), error="cut_off"),
            record(None),
        ]
    )
    assert (found.way, found.sum, found.count, found.total.mean) == ("plain", "ttft", 2, 20.0)
    assert {part.name: (part.mean, part.count) for part in found.parts} == {
        "router": (1.5, 2), "prefill": (3.0, 1), "prefill_leg": (12.5, 1), "residual": (3.0, 2),
    }  # fmt: skip
    assert sum(part.mean for part in found.parts) == pytest.approx(found.total.mean)
    assert found.parts[-1].name == "residual"


def test_ways_stand_apart_the_most_frequent_first() -> None:
    found = stages_of([record(told(way, total=1.0, residual=1.0)) for way in ("seeded", "plain", "plain")])
    assert [(each.way, each.count) for each in found] == [("plain", 2), ("seeded", 1)]
    assert stages_of([]) == stages_of([record(None)]) == ()


@pytest.mark.parametrize("timing", [{}, {"ttft_ms": 3}, {"ttft_ms": {"total": "x"}}, {"ttft_ms": {"router": 1.0}}])
def test_timing_without_a_sum_is_left_out(timing: dict[str, Any]) -> None:
    assert stages_of([record(timing)]) == ()


def test_the_header_is_the_router_s() -> None:
    assert TIMING_HEADER == trace.HEADER


def events(comment: bytes) -> bytes:
    first = json.dumps({"choices": [{"text": "a", "finish_reason": "length"}]}).encode()
    return b"data: " + first + b"\n\ndata: [DONE]\n\n" + comment


@pytest.mark.parametrize(
    ("comment", "timing"),
    [
        (b': x-baton-timing {"way": "plain"}\n\n', {"way": "plain"}),
        (b': x-baton-timing {"way": "plain"', None),
        (b": x-baton-timing 3\n\n", None),
        (b": x-baton-timing " + b"[" * 4000 + b"\n\n", None),
        (b": other\n\n", None),
        (b"", None),
    ],
)
def test_the_router_s_comment_is_read_from_the_stream_s_end(comment: bytes, timing: Any) -> None:
    tally = Tally()
    tally.feed(events(comment), 1.0)
    found = tally.end()
    assert (found.timing, found.error, len(found.token_s), found.text) == (timing, None, 1, "")


def test_a_text_is_kept_where_it_is_wanted() -> None:
    tally = Tally(keep=True)
    pieces = [{"delta": {"role": "assistant", "content": ""}}, {"delta": {"content": "a b"}}, {"text": " c"}, 3]
    body = b"".join(b"data: " + json.dumps({"choices": [each]}).encode() + b"\n\n" for each in pieces)
    for at in range(0, len(body), 7):
        tally.feed(body[at : at + 7], 1.0)
    assert tally.end().text == "a b c"
