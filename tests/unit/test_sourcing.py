"""What a source leg's answer says of the hold that its instance may have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.http.upstream import Answer, EngineLost
from router.request.sourcing import _may_hold

pytestmark = pytest.mark.interpreted


def said(status: int, body: Any) -> Answer:
    return Answer(status, "application/json", json.dumps(body).encode())


@pytest.mark.parametrize(
    ("answer", "may"),
    [
        (EngineLost("refused", reached=False), False),
        (EngineLost("reset", reached=True), True),
        (said(404, {}), False),
        (said(503, {}), True),
        (said(200, ["nonsense"]), True),
        (said(200, {"choices": [{"finish_reason": "abort"}]}), True),
        (said(200, {"choices": [{"finish_reason": "length"}]}), False),
    ],
)
def test_a_source_that_names_no_hold_may_have_one_if_it_failed_at_its_work(
    answer: Answer | EngineLost, may: bool
) -> None:
    assert _may_hold(answer) is may
