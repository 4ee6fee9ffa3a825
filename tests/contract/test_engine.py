"""The engine contract on mocks: every field and status that the router, the agent and the doctor use.

tests/live/test_engine_contract.py runs the same checks on vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engine_contract import CHECKS, Check
from support.engine_pair import Pair
from support.mock import Mocks


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Mocks.start("--instances", "prefill=1,decode=1", "--step-ms", "8", "--served-model-name", "mock") as mocks:
        yield Pair(mocks.urls["prefill-0"], mocks.urls["decode-0"], "mock")


@pytest.fixture(scope="module", params=[(), ("--digests",)], ids=["", "digests"])
def apart(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Mocks in two processes: reads and notices go over HTTP. With `--digests`, D also checks the pulled blocks."""
    words = ("--step-ms", "8", "--served-model-name", "mock", *request.param)
    with (
        Mocks.start("--instances", "prefill=1", *words) as one,
        Mocks.start("--instances", "decode=1", *words) as other,
    ):
        yield Pair(one.urls["prefill-0"], other.urls["decode-0"], "mock")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_mocks_keep_the_contract(pair: Pair, check: Check) -> None:
    check(pair)


HANDED_OVER = [check for check in CHECKS if any(word in check.__name__ for word in ("hand", "hold", "release", "pull"))]


@pytest.mark.parametrize("check", HANDED_OVER, ids=lambda check: check.__name__)
def test_mocks_of_two_processes_keep_it(apart: Pair, check: Check) -> None:
    check(apart)
