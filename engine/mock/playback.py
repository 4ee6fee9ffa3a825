"""Decides which tokens of a twin's runs exist by now.

The twin announces a run when the run begins, and may cut it short. A run's tokens exist at the ends of its steps, so
they are given out then and not before. Tokens of the last step are given out only after the twin has passed that
moment. For at the same moment the twin may report that a request ended, or was aborted and never got this token.

What always holds: the tokens of a request come in order, each once, and no later effect takes a token back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cluster.ids import RequestId
from engine.twin.config import StepCosts
from engine.twin.events import Cut, Effect, RequestFinished, RequestLost, RequestRefused, RunShare, StepRun

Made = Callable[[RequestId, int, int, int], None]
"""Receives tokens: the request, the key of its answer, the first token's index, the number of tokens."""


@dataclass(slots=True)
class _Playing:
    """The run under way."""

    run: StepRun
    end_ns: int
    steps: int
    shares: list[RunShare]
    done: int = 0
    """Steps whose tokens are given out."""


class Playback:
    """Plays out one twin's runs. `made` is called for tokens, `told` for every other effect, in the right order."""

    def __init__(self, costs: StepCosts, made: Made, told: Callable[[Effect], None]) -> None:
        self._costs = costs
        self._made = made
        self._told = told
        self._playing: _Playing | None = None
        self._next: dict[RequestId, int] = {}
        """The index of the next token of each request that has had one."""

    def next_due(self) -> int | None:
        """When the next token exists for which the twin sends no effect, in engine nanoseconds; None: there is none."""
        playing = self._playing
        if playing is None or playing.done >= playing.steps - 1:
            return None
        return playing.run.at_ns + self._elapsed_ns(playing, playing.done + 1)

    def take(self, effects: Iterable[Effect], now_ns: int) -> None:
        """Take the twin's effects at the time `now_ns`, and give out the tokens that exist by then."""
        self._play(now_ns)
        for effect in effects:
            match effect:
                case StepRun():
                    self._complete()
                    self._playing = _Playing(effect, effect.end_ns, effect.steps, list(effect.shares))
                    self._play(now_ns)
                case Cut(number=number, end_ns=end_ns, steps=steps):
                    playing = self._playing
                    assert playing is not None and playing.run.number == number and playing.done <= steps
                    playing.steps, playing.end_ns = steps, end_ns
                case RequestFinished(request=request, outputs=outputs):
                    self._end(request, outputs)
                    self._told(effect)
                case RequestLost(request=request) | RequestRefused(request=request):
                    self._end(request, 0)
                    self._told(effect)
                case _:
                    self._told(effect)
        if self._playing is not None and self._playing.end_ns <= now_ns:
            self._complete()

    def _elapsed_ns(self, playing: _Playing, steps: int) -> int:
        return self._costs.decode_run_ns(playing.run.batch, playing.run.sum_context, steps)

    def _play(self, now_ns: int) -> None:
        """Give out the tokens whose time has come, except those of the last step: only they are not certain yet."""
        playing = self._playing
        if playing is None or playing.done >= playing.steps - 1:
            return
        run, gone_ns = playing.run, now_ns - playing.run.at_ns
        begun = self._costs.decode_steps_for(run.batch, run.sum_context, gone_ns)
        over = begun if self._elapsed_ns(playing, begun) <= gone_ns else begun - 1
        self._give(playing, min(over, playing.steps - 1))

    def _complete(self) -> None:
        """Give out the rest: the twin has passed the run's end, so requests still in the run have all of its tokens."""
        if self._playing is not None:
            self._give(self._playing, self._playing.steps)
            self._playing = None

    def _give(self, playing: _Playing, upto: int) -> None:
        if upto <= playing.done:
            return
        for share in playing.shares:
            self._give_one(share, share.first + upto)
        playing.done = upto

    def _give_one(self, share: RunShare, upto: int) -> None:
        first = self._next.get(share.request, 0)
        if upto > first:
            self._next[share.request] = upto
            self._made(share.request, share.key, first, upto - first)

    def _end(self, request: RequestId, outputs: int) -> None:
        """Give out what is left of a request that is over with so many tokens (`outputs`)."""
        playing = self._playing
        if playing is not None:
            for share in playing.shares:
                if share.request == request:
                    self._give_one(share, min(outputs, share.first + playing.steps))
                    playing.shares.remove(share)
                    break
        self._next.pop(request, None)
