"""A prompt's beginning from the KV cache of one data parallel rank, pulled by a rank of another engine, and by the
other rank of the same engine: on real engines that `baton up` has started and introduced. The test sends the legs
itself, so that it decides which rank has what.

Not checked: what a router chooses (`tests/live/test_peer_sessions.py`), times, and ranks on several machines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from support import cluster as clusters
from support.cluster import Cluster, within
from support.engine_pair import ask
from support.random_models import LETTERS
from support.tickets import GuardedUrl

from cluster import wire
from cluster.ids import RequestId, TransferId
from engine.vllm.metrics import parse_loads
from kvtransfer.door import ask as knock

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1500)]

FILE = """
models:
  - name: baton-tiny
    pools:
      both: {start: 2, shape: {dp: 2}}
transfer: {connector: baton}
"""
PATH, TOKENS, BLOCK = "/v1/completions", 1800, 128
NAMES = ("both-0@0", "both-0@1", "both-1@0", "both-1@1")


@dataclass(frozen=True)
class Rank:
    """One rank of a running engine."""

    cluster: Cluster
    name: str

    @property
    def engine(self) -> str:
        return self.name.partition("@")[0]

    @property
    def number(self) -> int:
        return int(self.name.partition("@")[2])

    def answer(self, body: Any) -> dict[str, Any]:
        url = GuardedUrl.of(self.cluster, self.engine)
        status, told = ask(url, PATH, body, X_data_parallel_rank=str(self.number))
        assert status == 200, told
        return dict(told)

    def text(self, body: Any) -> str:
        return str(self.answer(body)["choices"][0]["text"])

    def source(self, body: dict[str, Any], name: TransferId) -> wire.TransferFields | None:
        """A source leg: the hold that it makes."""
        return wire.read_transfer(self.answer({**body, **wire.source_fields(body, transfer=name)}))

    def state(self) -> dict[str, Any]:
        (door,) = self.cluster.temporary.glob(f"*/{self.engine}/door{self.number}")
        return dict(knock(door, {"ask": "state"}))

    def pulled(self) -> int:
        return parse_loads(self.cluster.metrics(self.engine), 2)[self.number].external_kv_tokens

    def holds_nothing(self) -> bool:
        state = self.state()
        return all(state[what] == 0 for what in ("holds", "legs", "pulls"))


@dataclass
class Ranks:
    cluster: Cluster
    made: int = 0

    def __getitem__(self, name: str) -> Rank:
        return Rank(self.cluster, name)

    def all(self) -> list[Rank]:
        return [self[name] for name in NAMES]

    def name(self) -> TransferId:
        self.made += 1
        return TransferId(RequestId(f"rank-{self.made}"), 1, 1)

    def introduced(self) -> bool:
        """Whether each rank can pull from the three others. An idle engine reports a handshake at its next step."""
        for each in self.all():
            each.answer({**body(0), "prompt": [97, 98], "max_tokens": 1})
        return all(
            sorted(peer["instance"] for peer in each.state()["peers"].values() if peer["link"] == "met")
            == [name for name in NAMES if name != each.name]
            for each in self.all()
        )

    def pull(self, there: Rank, here: Rank, number: int) -> None:
        """`there` has a prompt in its cache; `here` computes it with that beginning, and hands it over to `there`."""
        asked = body(number)
        alone = here.text({**asked, "cache_salt": f"alone {number}"})
        there.answer({**asked, "max_tokens": 1})
        other = self[f"{there.engine}@{1 - there.number}"]
        if other.name != here.name:
            assert other.source(asked, self.name()) is None, "the other rank's cache is its own"
        held, before = there.source(asked, self.name()), here.pulled()
        assert held is not None and held.producer.endswith(f"_dp{there.number}")
        assert held.tokens == (TOKENS - 1) // BLOCK * BLOCK
        leg = here.answer(wire.prefill_body(asked, transfer=self.name(), source=held))
        assert leg["usage"]["prompt_tokens_details"]["cached_tokens"] == held.tokens
        within(5, lambda: here.pulled() >= before + held.tokens)
        whole = wire.read_transfer(leg)
        assert whole is not None and whole.tokens == TOKENS
        assert there.text(wire.decode_body({**asked, "cache_salt": f"other {number}"}, whole)) == alone
        assert here.text(asked) == alone


def body(number: int, **more: Any) -> dict[str, Any]:
    prompt = [97 + (at * 7 + at * at * number + number) % 26 for at in range(TOKENS)]
    return {"model": "baton-tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "allowed_token_ids": LETTERS, **more}  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "START_S", 600.0)  # four engine cores start on two processor cores
        with Cluster.of(tmp_path_factory.mktemp("ranks"), FILE) as cluster:
            made = Ranks(cluster)
            within(120, made.introduced, lambda: [each.state()["peers"] for each in made.all()])
            yield made


WAYS = [("both-0@0", "both-1@0"), ("both-0@0", "both-1@1"), ("both-1@1", "both-0@0"), ("both-0@0", "both-0@1")]


@pytest.mark.parametrize(("there", "here"), WAYS, ids=[" to ".join(each) for each in WAYS])
def test_a_prompt_that_a_rank_has_is_pulled_by_another(ranks: Ranks, there: str, here: str) -> None:
    for turn in range(3):
        ranks.pull(ranks[there], ranks[here], 10 * WAYS.index((there, here)) + turn)
    within(10, lambda: all(each.holds_nothing() for each in ranks.all()))
    assert all(each.state()["recomputed_tokens"] == 0 for each in ranks.all())


def core_of(cluster: Cluster, rank: Rank) -> int:
    """The process id of a rank's engine core, by the title that vLLM gives it."""
    for process in psutil.Process(cluster.status()[rank.name]["pid"]).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if f"EngineCore_DP{rank.number}" in " ".join(process.cmdline()):
                return process.pid
    raise AssertionError(f"{rank.name} has no engine core")


def test_a_source_rank_that_is_killed_costs_no_answer(ranks: Ranks) -> None:
    """Killed after it has answered with a hold, while clients ask a router, which serves them with ranks that are left.
    vLLM ends the whole server with one of its engine cores, so both ranks leave and come back.
    """
    cluster, there, here = ranks.cluster, ranks["both-0@0"], ranks["both-1@1"]
    asked = [body(100 + number) for number in range(16)]
    alone = [here.text({**each, "cache_salt": "alone"}) for each in asked]
    for each in asked:
        there.answer({**each, "max_tokens": 1})
    held = there.source(asked[0], ranks.name())
    assert held is not None
    core = core_of(cluster, there)
    with ThreadPoolExecutor(3) as clients:
        answers = [clients.submit(ask, cluster.endpoint, PATH, each) for each in asked[1:]]
        within(60, lambda: sum(each.done() for each in answers) >= 3)
        os.kill(core, signal.SIGKILL)
        began = time.monotonic()
        assert here.text(wire.decode_body(asked[0], held.untold())) == alone[0]
        took_s = time.monotonic() - began
        told = [each.result() for each in answers]
    print(f"with a source that was killed {took_s:.2f} s, beside three clients")
    assert took_s < 30.0
    assert [status for status, _ in told] == [200] * len(told), told
    assert [answer["choices"][0]["text"] for _, answer in told] == alone[1:]
    within(30, lambda: all(each.holds_nothing() for each in ranks.all() if each.engine == here.engine))
    within(240, lambda: [each["state"] for each in cluster.status().values()] == ["ready"] * 4)
    within(120, ranks.introduced)
    ranks.pull(there, here, 200)
    ranks.pull(here, there, 201)
    within(30, lambda: all(each.holds_nothing() for each in ranks.all()))
    within(30, cluster.idle)
