"""Tokens of a mock against the twin's own record of them (support.twin), and when each is given out."""

from __future__ import annotations

import random

import pytest
from support.twin import Linear, Record, ask, text

from cluster.ids import RequestId
from engine.mock.playback import Playback
from engine.twin import events as ev
from engine.twin.config import TwinConfig, Version
from engine.twin.machine import Twin

COSTS = Linear()


class Driven:
    """A twin, its record and its playback, which get the same effects at the times that a test chooses."""

    def __init__(self, config: TwinConfig) -> None:
        self.twin, self.record = Twin(config, COSTS), Record()
        self.playback = Playback(COSTS, self._made, self._told)
        self.given: dict[str, dict[int, tuple[int, int]]] = {}
        self.over: list[str] = []
        self.now = 0
        self.tell(ev.StartEngine(1), 0)

    def tell(self, event: ev.Event, now: int) -> None:
        self.now = now
        effects = self.twin.handle(event, now)
        self.record.add(effects)
        self.playback.take(effects, now)

    def look(self, now: int) -> None:
        """Time passes, and the twin has nothing due."""
        self.now = now
        self.playback.take((), now)

    def due(self) -> int | None:
        times = [time for time in (self.twin.next_wakeup(), self.playback.next_due()) if time is not None]
        return min(times, default=None)

    def play(self, until: int | None = None) -> None:
        while (due := self.due()) is not None and (until is None or due <= until):
            wakeup = self.twin.next_wakeup()
            self.tell(ev.Tick(), due) if wakeup is not None and wakeup <= due else self.look(due)

    def _made(self, request: RequestId, key: int, first: int, count: int) -> None:
        assert request not in self.over
        mine = self.given.setdefault(request, {})
        assert first == len(mine), "in order, each once"
        mine |= dict.fromkeys(range(first, first + count), (self.now, key))

    def _told(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.RequestFinished):
            assert len(self.given.get(effect.request, {})) == effect.outputs, "all its tokens came before its end"
            self.over.append(effect.request)


def test_a_token_comes_at_its_steps_end() -> None:
    driven = Driven(TwinConfig(num_blocks=1000))
    driven.tell(ev.Submit(ask("a", text((1, 20)), 10)), 100)
    driven.play()
    expected = driven.record.tokens(COSTS)["a"]
    assert driven.given["a"] == {index: (when, key) for index, (when, key) in expected.items()}
    assert len(expected) == 10


def test_a_token_is_not_given_before_it_is_certain() -> None:
    """An abort during a step takes that step's token back, so the token may not have been given out."""
    driven = Driven(TwinConfig(num_blocks=1000))
    driven.tell(ev.Submit(ask("a", text((1, 20)), 1000)), 0)
    driven.play(until=50_000)
    had = len(driven.given["a"])
    driven.tell(ev.AbortRequest(RequestId("a")), 50_001)
    driven.play()
    assert had <= len(driven.given["a"]) == driven.record.finished("a").outputs < 1000


def test_an_engine_that_dies_gives_out_no_more_tokens() -> None:
    driven = Driven(TwinConfig(num_blocks=1000))
    driven.tell(ev.Submit(ask("a", text((1, 20)), 1000)), 0)
    driven.play(until=50_000)
    driven.tell(ev.Die(), 60_000)
    had = len(driven.given["a"])
    driven.look(10**9)
    assert len(driven.given["a"]) == had > 10
    assert driven.due() is None


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_played_tokens_are_the_twins(seed: int, asynchronous: bool) -> None:
    """Random requests, aborts and late wakeups, in a cache that is too small: nothing missing, nothing twice."""
    chance = random.Random(seed)
    config = TwinConfig(num_blocks=40, max_model_len=400, max_num_batched_tokens=64, max_num_seqs=8,
                    version=Version(async_scheduling=asynchronous))  # fmt: skip
    driven, now = Driven(config), 0
    for number in range(30):
        now += chance.randrange(1, 60_000)
        late = chance.random() < 0.3
        if not late:
            driven.play(until=now)
        prompt = text((chance.randrange(4), chance.randrange(1, 120)))
        driven.tell(ev.Submit(ask(str(number), prompt, chance.randrange(1, 60))), max(now, driven.now))
        if chance.random() < 0.2:
            driven.tell(ev.AbortRequest(RequestId(str(chance.randrange(number + 1)))), driven.now)
        if late:
            now += chance.randrange(100_000)
            driven.tell(ev.Tick(), now)
    driven.play()
    expected = driven.record.tokens(COSTS)
    ended = {over.request for over in driven.record.of(ev.RequestFinished)}
    assert len(ended) == 30
    for request in ended:
        keys = [key for _, (_, key) in sorted(driven.given.get(request, {}).items())]
        assert keys == [key for _, (_, key) in sorted(expected.get(request, {}).items())], request
