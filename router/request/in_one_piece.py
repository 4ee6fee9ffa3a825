"""The answer of a request that is not streamed: its body, and its times, which the router cannot see. A shell."""

from __future__ import annotations

import asyncio
from typing import Final

from cluster.ids import InstanceId
from cluster.request import Request
from router.core import engine_answers
from router.core.events import PrefixSource
from router.core.timing_parts import EngineTold
from router.core.turns import in_one_piece, longest_s
from router.fleet import events as d
from router.http.upstream import Answer
from router.predict.predictors import tokens_limit
from router.request.parts import Parts
from router.request.scheduled import ScheduledRequest
from router.request.trace import RequestTrace


class AnswerInOnePiece:
    """The answer of one request that is not streamed."""

    __slots__ = ("_parts", "_presumed", "_request", "_scheduled", "_trace", "arrived")

    def __init__(self, parts: Parts, request: Request, scheduled: ScheduledRequest, trace: RequestTrace) -> None:
        self._parts: Final = parts
        self._request: Final = request
        self._scheduled: Final = scheduled
        self._trace: Final = trace
        self.arrived: tuple[Answer, EngineTold] | None = None
        """The whole answer."""
        self._presumed: asyncio.TimerHandle | None = None
        """The timer after which the prompt counts as computed. It is kept after it has fired, as a sign that this leg's
        engine computes the prompt; None: another engine computes it, or no time is predicted."""

    def read(self, answer: Answer) -> str | None:
        """Keep the answer of a leg with status 200, or return why it is not a completion."""
        told = engine_answers.completion_in(answer.body)
        if isinstance(told, str):
            return told
        if engine_answers.ABORTED in answer.body:
            return engine_answers.ABORT
        self.arrived = answer, told
        return None

    def presume(self, now: float) -> None:
        """No engine reports when the prompt of such an answer is computed: use the predicted time."""
        context = self._scheduled.context
        if self._scheduled.foretold and context.ttft_ms > 0:
            left_s = self._request.arrived + context.ttft_ms / 1000 - now
            self._presumed = self._parts.engines.loop.call_later(max(0.0, left_s), self._scheduled.prompt_presumed)

    def timed(self, source: PrefixSource, instance: InstanceId) -> PrefixSource | None:
        """The source from which the leg to this instance pulls, with the time of the whole answer
        (`router.core.turns.in_one_piece`).
        """
        more_s = self.longest_s(instance)
        return None if more_s is None else in_one_piece(source, more_s)

    def longest_s(self, instance: InstanceId) -> float | None:
        """Seconds that this instance's answer may take after its first token; None: not known. Where the request sets
        no limit, the model's context does.
        """
        limit, view = tokens_limit(self._request.path, self._request.body), self._parts.view
        if limit is None and view.knows(instance):
            limit = view.get(instance).context(self._scheduled.context.wanted.model or "")
        return longest_s(limit, self._scheduled.context.tpot_ms)

    def presume_no_more(self) -> None:
        """The prompt is known to be computed."""
        if self._presumed is not None:
            self._presumed.cancel()

    def leg_closed(self) -> None:
        """The leg is over without an answer for the client: another one may find the prompt computed elsewhere."""
        self.presume_no_more()
        self._presumed = self.arrived = None

    def engine_said(self, tokens: int | None) -> d.EngineMs | None:
        """The engine's times for an answer of so many tokens; None: the engine reported none, or the number is not
        known. The prompt's time is 0 if this engine has not computed the prompt.
        """
        times = self._trace.times
        if times is None or not tokens:
            return None
        after_s = times.generation_s or 0.0
        prompt_ms = 0.0 if self._presumed is None else times.first_s * 1000
        token_ms = after_s * 1000 / (tokens - 1) if tokens > 2 else 0.0
        return d.EngineMs(prompt_ms, token_ms, (times.queue_s + times.first_s) * 1000)
