"""Data parallel ranks of real engines, each an instance of its own: hand-overs, caches, and a rank that dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import cluster as clusters
from support.cluster import Cluster, within
from support.engine_pair import ask as post
from support.engine_pair import load
from support.pairs_front import by_url
from support.random_models import write_model
from support.rank_talks import PLACES, TOKENS, ask, found_with, prompts, text

from bench import pair
from bench.pair import Engines, Running
from bench.processes import free_port
from cluster import wire
from cluster.instance import Role
from engine.vllm.metrics import parse_loads
from kvtransfer.door import ask as knock

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1500)]

FILE = """
models:
  - name: baton-tiny
    pools:
      prefill: {start: PS, shape: {dp: P}}
      decode: {start: DS, shape: {dp: D}}
transfer: {connector: auto}
router: {policy: least_load}
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow more seconds for a start: up to four engine cores start on two processor cores."""
    monkeypatch.setattr(clusters, "START_S", 600.0)


def of(prefill: int, decode: int, *, starts: tuple[int, int] = (1, 1)) -> str:
    text = FILE.replace("PS", str(starts[0])).replace("DS", str(starts[1]))
    return text.replace("dp: P", f"dp: {prefill}").replace("dp: D", f"dp: {decode}")


def stream(url: str, prompt: str) -> str:
    """The text of a stream that has come to its end, for the same request as `ask` sends.

    Raises:
        OSError: the status is not 200, or the connection broke.
        AssertionError: the stream has an error event, or no end.
    """
    body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    told = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", told, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        events = answer.read().decode()
    assert events.endswith("data: [DONE]\n\n") and '"error"' not in events, events
    parts = [json.loads(each.removeprefix("data: ")) for each in events.strip().split("\n\n")[:-1]]
    return "".join(text(part) for part in parts)


@pytest.fixture(
    params=[(2, 1, "auto"), (1, 2, "auto"), (2, 2, "auto"), (2, 2, "nixl")], ids=["P", "D", "both", "both by vLLM's"]
)
def ranked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Cluster, int, int]]:
    prefill, decode, connector = request.param
    with Cluster.of(tmp_path, of(prefill, decode).replace("connector: auto", f"connector: {connector}")) as cluster:
        yield cluster, prefill, decode


def test_tokens_are_those_of_a_lone_engine_and_all_are_pulled(ranked: tuple[Cluster, int, int]) -> None:
    cluster, prefill, decode = ranked

    def loads(name: str, ranks: int) -> list[Any]:
        return list(parse_loads(cluster.metrics(name), ranks))

    asked = prompts(24)
    expected = [text(ask(cluster.urls["decode-0"], each, X_data_parallel_rank="0")) for each in asked]
    within(60, lambda: _all_proven(cluster, prefill * decode))
    before = loads("prefill-0", prefill), loads("decode-0", decode)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda each: ask(cluster.endpoint, each), asked))
    assert [text(each) for each in answers] == expected
    sent = sum(each["usage"]["prompt_tokens"] for each in answers)
    within(10, lambda: sum(each.running + each.waiting for each in loads("decode-0", decode)) == 0)
    after = loads("prefill-0", prefill), loads("decode-0", decode)
    by_p = [now.prompt_tokens - then.prompt_tokens for now, then in zip(after[0], before[0], strict=True)]
    pulled = [now.external_kv_tokens - then.external_kv_tokens for now, then in zip(after[1], before[1], strict=True)]
    print(f"prompt tokens {sent}, at each rank of P {by_p}, pulled by each rank of D {pulled}")
    assert sum(by_p) == sent and all(each > sent / 10 for each in (*by_p, *pulled)), (by_p, pulled)
    assert sent - sum(pulled) <= 0.01 * min(by_p), "99 % of each rank's, even if all that is missing is of one rank"
    assert all(each.recomputed_tokens == 0 for each in after[1])
    within(20, lambda: _free_of_holds(cluster))


def _all_proven(cluster: Cluster, pairs: int) -> bool:
    return cluster.router_metric('baton_pair_proofs_total{result="passed"}', 0.0) >= pairs


def _free_of_holds(cluster: Cluster) -> bool:
    held = Counter[str]()
    for name, of_one in cluster.status().items():
        held[name] = round(of_one["load"]["kv_usage"] * 1e6)
    return not +held


MIXED = """
models:
  - name: baton-tiny
    pools:
      prefill: {start: 1}
      decode: {start: 1, shape: {dp: 2}}
      extra: {decode-b: {role: decode, start: 1}}
transfer: {connector: auto}
router: {policy: least_load}
"""
"""A D of two ranks, and a D without ranks."""
MIXED_P = """
models:
  - name: baton-tiny
    pools:
      prefill: {start: 1, shape: {dp: 2}}
      decode: {start: 1}
      extra: {prefill-b: {role: prefill, start: 1}}
transfer: {connector: auto}
router: {policy: least_load}
"""
"""A P of two ranks, and a P without ranks."""


def _ready(cluster: Cluster, instances: int) -> bool:
    states = [each["state"] for each in cluster.status().values()]
    return states == ["ready"] * instances


def _cores(cluster: Cluster) -> dict[str, int]:
    """Process ids of the engine cores of the engine with ranks, by the titles that vLLM gives them."""
    found = {}
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if "EngineCore_DP" in title:
                found[title.split()[0].removeprefix("VLLM::")] = process.pid
    return found


def _said_amid_a_kill(cluster: Cluster, asked: list[str], victim: int) -> list[str]:
    """The answers to these prompts, three at a time, every other one streamed. After the sixth a process is killed.

    Raises an error for any status but 200, and for a stream that breaks.
    """
    with ThreadPoolExecutor(3) as pool:
        answers = [
            pool.submit(stream if number % 2 else lambda *at: text(ask(*at)), cluster.endpoint, each)
            for number, each in enumerate(asked)
        ]
        within(60, lambda: sum(each.done() for each in answers) >= 6)
        os.kill(victim, signal.SIGKILL)
        return [each.result() for each in answers]


def test_a_killed_rank_costs_no_request_and_comes_back(tmp_path: Path) -> None:
    """vLLM ends a server with one of its engine cores: both ranks leave, and come back under new epochs. Every other
    request streams; such a stream goes on at the other D.
    """
    with Cluster.of(tmp_path, MIXED) as cluster:
        within(120, lambda: _all_proven(cluster, 3))
        asked = prompts(40, seed=9)
        expected = [text(ask(cluster.urls["prefill-0"], each, X_data_parallel_rank="0")) for each in asked]
        before = {name: each["epoch"] for name, each in cluster.status().items()}
        cores = _cores(cluster)
        assert sorted(cores) == ["EngineCore_DP0", "EngineCore_DP1"]
        said = _said_amid_a_kill(cluster, asked, cores["EngineCore_DP1"])
        assert said == expected
        within(240, lambda: _ready(cluster, 4))
        after = {name: each["epoch"] for name, each in cluster.status().items()}
        assert after["prefill-0"] == before["prefill-0"] and after["decode-b-0"] == before["decode-b-0"]
        assert all(after[name] > before[name] for name in ("decode-0@0", "decode-0@1"))
        loads = [each.external_kv_tokens for each in parse_loads(cluster.metrics("decode-0"), 2)]
        asked = prompts(24, seed=10)

        def pulled() -> bool:
            for each in asked:
                ask(cluster.endpoint, each)
            now = [each.external_kv_tokens for each in parse_loads(cluster.metrics("decode-0"), 2)]
            return all(after > before for after, before in zip(now, loads, strict=True))

        within(60, pulled)


def test_a_killed_rank_of_p_costs_no_request_and_comes_back(tmp_path: Path) -> None:
    """The same where prompts are computed: prompts under way there, and holds there, go to the other P."""
    with Cluster.of(tmp_path, MIXED_P) as cluster:
        within(120, lambda: _all_proven(cluster, 3))
        asked = prompts(40, seed=11)
        expected = [text(ask(cluster.urls["decode-0"], each)) for each in asked]
        before = {name: each["epoch"] for name, each in cluster.status().items()}
        said = _said_amid_a_kill(cluster, asked, _cores(cluster)["EngineCore_DP1"])
        assert said == expected
        within(240, lambda: _ready(cluster, 4))
        after = {name: each["epoch"] for name, each in cluster.status().items()}
        assert after["decode-0"] == before["decode-0"] and after["prefill-b-0"] == before["prefill-b-0"]
        assert all(after[name] > before[name] for name in ("prefill-0@0", "prefill-0@1"))
        for each in prompts(12, seed=12):
            ask(cluster.endpoint, each)
        within(30, lambda: _free_of_holds(cluster))


def test_prefixes_are_found_as_on_two_instances(tmp_path: Path) -> None:
    rates = []
    for name in PLACES:
        found = found_with(tmp_path / name, name)
        rates.append(found.rate)
        print(
            f"{name}: {found.cached} of {found.prompt} prompt tokens were in a cache, {found.rate:.4f}; "
            f"prompt tokens {found.by_place}"
        )
        assert len(found.by_place) == 2 and min(found.by_place) > sum(found.by_place) / 20
    # In the simulator the two rates are equal (tests/sim/test_ranks.py).
    assert rates[0] > 0.5 and abs(rates[0] - rates[1]) <= 0.02, rates


TIERED = """
models:
  - name: baton-tiny
    pools:
      prefill: {start: 1, shape: {dp: 2}, engine_args: {num-gpu-blocks-override: 24}}
      decode: {start: 1}
transfer: {connector: auto}
router: {policy: least_load}
"""


def _counted(cluster: Cluster, name: str) -> Counter[str]:
    """A metric of the agents by instance, summed over tiers."""
    found = Counter[str]()
    for agent in {each["agent"] for each in cluster.status().values()}:
        with urllib.request.urlopen(f"{agent}/metrics", timeout=30) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(name + "{"):
                    found[line.split('instance="')[1].split('"')[0]] += round(float(line.rsplit(" ", 1)[1]))
    return found


@pytest.mark.parametrize(
    "tiers", ["", "kv: {host_gib: 0.04, disk_gib: 1, disk_folder: FOLDER/kv}\n"], ids=["none", "two"]
)
def test_each_rank_tells_what_its_cache_drops_or_its_tiers_keep(tmp_path: Path, tiers: str) -> None:
    metric = "baton_agent_kv_kept_tokens" if tiers else "baton_agent_kv_evicted_tokens_total"
    long = [f"{number} " + "a fox ran over the hill. " * 60 for number in range(16)]
    with Cluster.of(tmp_path, TIERED + tiers.replace("FOLDER", str(tmp_path))) as cluster:
        within(120, lambda: _all_proven(cluster, 2))  # until then D serves requests aggregated
        for each in long:
            ask(cluster.endpoint, each)
        within(60, lambda: all(_counted(cluster, metric)[f"prefill-0@{rank}"] >= 4 * 1400 for rank in (0, 1)))
        print(metric, _counted(cluster, metric))
        if not tiers:
            assert _counted(cluster, metric)["decode-0"] == 0


EXPERTS = """
models:
  - name: MODEL
    served_name: baton-tiny
    pools:
      prefill:
        start: 1
        shape: {dp: 2, ep: 2}
        engine_args: &args {dtype: float32, max-model-len: 512}
        env: {PYTHONPATH: SITE}
      decode: {start: 1, engine_args: *args}
transfer: {connector: auto}
router: {policy: least_load}
"""
SITE = Path(clusters.__file__).parent / "expert_site"


def test_experts_spread_over_ranks_are_handed_over(tmp_path: Path) -> None:
    """A mixture's ranks compute each step together; on CPU vLLM needs the start-up patch of this test for it."""
    (tmp_path / "model").mkdir()
    model = write_model("experts", tmp_path / "model")
    with Cluster.of(tmp_path, EXPERTS.replace("MODEL", str(model)).replace("SITE", str(SITE))) as cluster:
        within(120, lambda: _all_proven(cluster, 2))
        asked = [each[:400] for each in prompts(12, seed=4)]
        expected = [text(ask(cluster.urls["decode-0"], each, X_data_parallel_rank="0")) for each in asked]
        before = parse_loads(cluster.metrics("prefill-0"), 2), parse_loads(cluster.metrics("decode-0"), 1)
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda each: ask(cluster.endpoint, each), asked))
        assert [text(each) for each in answers] == expected
        after = parse_loads(cluster.metrics("prefill-0"), 2), parse_loads(cluster.metrics("decode-0"), 1)
        by_p = [now.prompt_tokens - then.prompt_tokens for now, then in zip(after[0], before[0], strict=True)]
        pulled = after[1][0].external_kv_tokens - before[1][0].external_kv_tokens
        print(f"experts: prompt tokens at each rank of P {by_p}, pulled {pulled}")
        assert min(by_p) > 0 and pulled == sum(by_p)


@dataclass
class Outside(Engines):
    """Two servers with one rank each of a P that a load balancer outside of vLLM balances, and a D."""

    rpc_port: int = field(default_factory=free_port)

    def _start(self, name: str, role: Role, number: int) -> Running:
        rank = ("--data-parallel-size", "2", "--data-parallel-rank", name[1:], "--data-parallel-address", "127.0.0.1",
                "--data-parallel-rpc-port", str(self.rpc_port), "--enable-expert-parallel")  # fmt: skip
        self.flags = rank if role is Role.PREFILL else ()
        return super()._start(name, role, number)


def test_ranks_that_are_balanced_from_outside_are_engines_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is a mixture of experts. For other models vLLM wants such servers to have no ranks at all."""
    monkeypatch.setattr(pair, "START_S", 600.0)
    (tmp_path / "model").mkdir()
    model = str(write_model("experts", tmp_path / "model"))
    roles = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d": Role.DECODE}
    more = {"max_model_len": 512, "extra_env": {"PYTHONPATH": str(SITE)}}
    with Outside(tmp_path, model, roles, more=more) as engines:
        within(20, lambda: len(knock(engines.door("d"), {"ask": "state"})["peers"]) == 2)
        for number, said in enumerate(prompts(8, seed=33)):
            body = {"model": "tiny", "prompt": said[:400], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            status, answer = post(engines.url(f"p{number % 2}"), "/v1/completions", wire.prefill_body(body))
            transfer = wire.read_transfer(answer)
            assert status == 200 and transfer is not None and transfer.producer.endswith(f"_dp{number % 2}")
            before = load(engines.url("d")).external_kv_tokens
            status, answer = post(engines.url("d"), "/v1/completions", wire.decode_body(body, transfer))
            assert status == 200
            within(5, lambda: load(engines.url("d")).external_kv_tokens - before == transfer.tokens)  # noqa: B023
            alone = post(engines.url("d"), "/v1/completions", {**body, "cache_salt": "alone"})[1]
            assert text(answer) == text(alone)
        _through_a_router(engines)


def _through_a_router(engines: Outside) -> None:
    """A router that has the servers' URLs sends prompts to both, and has their holds pulled."""
    words = [f"--{role}-url={name}={engines.url(name)}" for name, role in
             (("p0", "prefill"), ("p1", "prefill"), ("d", "decode"))]  # fmt: skip
    with by_url("--policy", "least_load", *words, pairs=2) as front:
        before = {name: load(engines.url(name)) for name in ("p0", "p1", "d")}

        def asked(said: str) -> None:
            body = {"model": "tiny", "prompt": said[:400], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            status, answer = post(front.endpoint, "/v1/completions", body)
            alone = post(engines.url("d"), "/v1/completions", {**body, "cache_salt": "alone"})[1]
            assert status == 200 and text(answer) == text(alone)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(asked, prompts(16, seed=34)))
        after = {name: load(engines.url(name)) for name in before}
        by_p = [after[name].prompt_tokens - before[name].prompt_tokens for name in ("p0", "p1")]
        pulled = after["d"].external_kv_tokens - before["d"].external_kv_tokens
        print(f"prompt tokens at each server of P {by_p}, pulled {pulled}")
        assert all(each > sum(by_p) / 10 for each in by_p) and pulled == sum(by_p)
        within(10, lambda: all(knock(engines.door(name), {"ask": "state"})["holds"] == 0 for name in ("p0", "p1")))
