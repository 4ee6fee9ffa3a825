"""Data parallel ranks through registry, agents and routers: mocks of two ranks each; one mock dies."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from support.cluster import Cluster, within

from cluster.instance import Load
from engine.vllm.metrics import parse_loads

FILE = """
models:
  - name: meta-llama/Llama-3.1-8B
    pools:
      prefill: {start: 1, shape: {dp: 2}}
      decode: {start: 2, shape: {dp: 2}}
router: {policy: least_load}
"""
COMPLETIONS = "/v1/completions"
TOKENS = 20
RANKS = [f"{name}@{rank}" for name in ("decode-0", "decode-1", "prefill-0") for rank in "01"]


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ranks")
    path = folder / "baton.yaml"
    path.write_text(FILE)
    cluster = Cluster.start(folder, str(path), "--engine", "mock")
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        assert cluster.stop() == 0


def post(url: str, body: dict[str, Any] | None, *, method: str = "POST", **headers: str) -> tuple[int, dict[str, Any]]:
    told = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), told, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def body(cluster: Cluster, number: int) -> dict[str, Any]:
    return {"model": cluster.model, "prompt": f"{number} hello " * 60, "max_tokens": TOKENS, "temperature": 0}


def loads(cluster: Cluster, name: str) -> tuple[Load, ...]:
    return parse_loads(cluster.metrics(name), 2)


def test_every_rank_is_chosen_and_pulled_from_and_a_killed_mock_costs_no_request(ranked: Cluster) -> None:
    assert list(ranked.status()) == [
        f"{name}@{rank}" for name in ("decode-0", "decode-1", "prefill-0") for rank in "01"
    ]
    within(30, lambda: ranked.router_metric('baton_pair_proofs_total{result="passed"}', 0.0) >= 8)
    before = {name: loads(ranked, name) for name in ranked.urls}
    with ThreadPoolExecutor(8) as pool:
        # The router does not pass on a client's rank header: otherwise all of these would go to one rank.
        each = [pool.submit(post, ranked.endpoint + COMPLETIONS, body(ranked, number), X_data_parallel_rank="1")
                for number in range(48)]  # fmt: skip
        answers = [one.result() for one in each]
    assert [status for status, _ in answers] == [200] * 48
    tokens = sum(answer["usage"]["prompt_tokens"] for _, answer in answers)
    computed = [now.prompt_tokens - then.prompt_tokens
                for now, then in zip(loads(ranked, "prefill-0"), before["prefill-0"], strict=True)]  # fmt: skip
    pulled = [now.external_kv_tokens - then.external_kv_tokens for name in ("decode-0", "decode-1")
              for now, then in zip(loads(ranked, name), before[name], strict=True)]  # fmt: skip
    assert sum(computed) == sum(pulled) == tokens
    assert min(computed) > tokens / 4 and min(pulled) > tokens / 16
    shown = post(ranked.admin + "/ui/data", None, method="GET")[1]["instances"]
    assert [each["id"] for each in shown] == RANKS and all(each["credits"] > 0 for each in shown)
    status, answer = post(ranked.urls["prefill-0"] + COMPLETIONS, body(ranked, 1), X_data_parallel_rank="2")
    assert status == 400 and "out of range" in answer["error"]["message"]
    alone = post(ranked.urls["decode-1"] + COMPLETIONS, body(ranked, 1), X_data_parallel_rank="1")[1]
    assert answers[1][1]["choices"] == alone["choices"]

    epochs = {name: each["epoch"] for name, each in ranked.status().items()}
    with ThreadPoolExecutor(8) as pool:
        each = [pool.submit(post, ranked.endpoint + COMPLETIONS, body(ranked, number)) for number in range(100, 180)]
        within(20, lambda: sum(one.done() for one in each) > 10)
        os.kill(_mock(ranked, "decode-0"), signal.SIGKILL)
        assert [one.result()[0] for one in each] == [200] * 80
    within(30, lambda: [one["state"] for one in ranked.status().values()] == ["ready"] * 6)
    after = {name: one["epoch"] for name, one in ranked.status().items()}
    assert {name.partition("@")[0] for name in after if after[name] == epochs[name]} == {"decode-1", "prefill-0"}
    assert all(after[name] > epochs[name] for name in RANKS[:2])


def test_an_engine_is_drained_whole_and_quarantined_by_rank(ranked: Cluster) -> None:
    def states() -> dict[str, str]:
        with urllib.request.urlopen(ranked.admin + "/ready", timeout=30) as answer:
            return {each["id"]: each["state"] for each in json.loads(answer.read())["instances"]}

    assert post(f"{ranked.admin}/quarantine/decode-1@0", {"because": "a test"})[0] == 200
    assert post(f"{ranked.admin}/drain/decode-0", {"deadline_s": 30})[0] == 202
    aside = {"decode-1@0": "quarantined", "decode-0@0": "draining", "decode-0@1": "draining"}
    within(10, lambda: states() == dict.fromkeys(RANKS, "up") | aside)
    assert post(ranked.endpoint + COMPLETIONS, body(ranked, 1))[0] == 200
    assert post(f"{ranked.admin}/resume/decode-0@1", {})[0] == 202
    assert post(f"{ranked.admin}/quarantine/decode-1@0", None, method="DELETE")[0] == 200
    within(10, lambda: states() == dict.fromkeys(RANKS, "up"))


def _mock(cluster: Cluster, name: str) -> int:
    """The id of the mock's process that stands for an engine."""
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        words = process.cmdline()
        if "mock" in words and name in words and "--instances" in words:
            return process.pid
    raise AssertionError(f"{name} has no process")
