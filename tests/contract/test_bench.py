"""The benchmarks' mock engines with the plain relay or the router, as processes: two legs, the engine's own bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench import contestants, processes, sender
from engine.vllm.metrics import parse_load
from loadgen.arrival import Arrival
from loadgen.body import Asking
from loadgen.http import LoadConnections
from loadgen.replay import Replay, Sending

ANYWHERE = processes.cores().measured | processes.cores().engines


@pytest.fixture
def engines() -> Iterator[list[str]]:
    running, urls = contestants.engines(2, ANYWHERE)
    with processes.stopping([running]):
        yield urls


@pytest.mark.parametrize("name", [contestants.BATON, contestants.RELAY])
async def test_every_answer_is_handed_over_and_whole(engines: list[str], name: str) -> None:
    processes.asked(f"{engines[0]}/bench", {"pace_ms": 2})
    running, endpoint = contestants.OURS[name](engines[:1], engines[1:], ANYWHERE)
    with processes.stopping([running]):
        before = running.cpu_s()
        sent = await sender.closed_loop(endpoint, connections=4, count=20, prompt_bytes=2048, tokens=5)
        assert (sent.done, sent.rewritten, sent.failed) == (20, 0, 0), sent.examples
        counted = processes.asked(f"{engines[0]}/bench")
        assert (counted["first_legs"], counted["second_legs"], counted["whole"]) == (20, 20, 0)
        assert 0 < running.cpu_s() - before < sent.elapsed_s * 16
        assert running.memory_mb() > 1


@pytest.mark.parametrize("name", [contestants.POLICIES, contestants.POLICIES_PAIRED])
async def test_a_router_with_keys_and_classes_answers_and_hands_over_where_it_has_to(
    engines: list[str], name: str
) -> None:
    running, endpoint = contestants.OURS[name](engines[:1], engines[1:], ANYWHERE)
    with processes.stopping([running]):
        sent = await sender.closed_loop(endpoint, connections=4, count=20, prompt_bytes=2048, tokens=5)
        assert (sent.done, sent.failed) == (20, 0), sent.examples
        counted = processes.asked(f"{engines[0]}/bench")
        assert counted["second_legs"] + counted["whole"] == 20
        assert name in contestants.MAY_SERVE_WHOLE or counted["second_legs"] == 20


async def test_a_router_that_is_gone_is_a_failure(engines: list[str]) -> None:
    running, endpoint = contestants.OURS[contestants.RELAY](engines[:1], engines[1:], ANYWHERE)
    running.stop()
    sent = await sender.closed_loop(endpoint, connections=2, count=4, prompt_bytes=100, tokens=5)
    assert (sent.done, sent.failed) == (0, 4)


def test_a_process_that_does_not_start_says_why() -> None:
    running = processes.Running("nobody", ["python3", "-c", "raise SystemExit('no luck')"], ANYWHERE)
    with processes.stopping([running]), pytest.raises(processes.Failed, match="nobody did not start: no luck"):
        running.line()


async def test_the_relay_on_twins() -> None:
    running, urls = contestants.twin_engines(2, ANYWHERE)
    with processes.stopping([running]):
        router, endpoint = contestants.OURS[contestants.RELAY](urls[:1], urls[1:], ANYWHERE)
        with processes.stopping([router]):
            model = processes.asked(f"{urls[0]}/v1/models")["data"][0]["id"]
            sending = Sending(asking=Asking(model), timeout_s=20)
            load = await Replay(LoadConnections(endpoint), sending).run([Arrival(0.0, 40, 4)] * 3)
        assert [(each.error, each.chunks) for each in load.records] == [(None, 4)] * 3
        assert parse_load(processes.page(f"{urls[1]}/metrics")).external_kv_tokens > 0
