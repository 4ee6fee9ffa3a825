"""The engine contract on vLLM itself: the same checks that mocks pass in tests/contract/test_engine.py."""

from __future__ import annotations

import pytest
from support.cluster import Cluster
from support.engine_contract import CHECKS, Check
from support.engine_pair import Pair
from support.tickets import GuardedUrl


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_vllm_keeps_the_contract(cluster: Cluster, check: Check, request: pytest.FixtureRequest) -> None:
    ours = request.config.getoption("--connector") != "nixl"
    check(Pair(GuardedUrl.of(cluster, "prefill-0"), GuardedUrl.of(cluster, "decode-0"), cluster.model, ours))
