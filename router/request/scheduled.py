"""One request at the scheduler: its choices, and what is learned from its results. A shell: it reads the clock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from cluster.ids import InstanceId
from cluster.request import Request
from router.core import journey as j
from router.core.values import Sent
from router.fleet import events as d
from router.predict.predictors import PredictedRequest, answer_tokens, cached_in
from router.request.parts import Parts
from router.request.trace import RequestTrace
from router.scheduler.placements import SchedulingContext

_NO_USAGE: Mapping[str, Any] = {}


class ScheduledRequest:
    """The scheduler's side of one request."""

    __slots__ = (
        "_at_scheduler", "_cached_tokens", "_made_by", "_parts", "_predicted", "_sent", "_trace", "context", "resumed",
    )  # fmt: skip

    def __init__(
        self, parts: Parts, context: SchedulingContext, predicted: PredictedRequest | None, trace: RequestTrace
    ) -> None:
        """`predicted`: None if no predictions are made."""
        self._parts: Final = parts
        self._predicted: Final = predicted
        self._trace: Final = trace
        self.context: Final = context
        self.resumed = False
        """Two engines made the answer: its times say nothing about the speed of either."""
        self._sent: tuple[Sent, ...] = ()
        self._cached_tokens = 0
        """The number of its prompt tokens expected in the cache of the instance that computes it, until the real number
        is known."""
        self._made_by: tuple[str, int, str] | None = None
        """The weights, the circle, and the meaning of the model's name, of the instance that made the client's output
        so far."""
        self._at_scheduler = True
        """The scheduler has not been told of the request's end."""

    @property
    def foretold(self) -> bool:
        """Whether its answer's length and its prompt's size were predicted."""
        return self._predicted is not None

    def choose(self, effect: j.Choose, *, relayed: bool) -> j.Chosen:
        """Ask which instances to use. `relayed`: the client has a part of an answer already."""
        context = self.context
        if self._made_by is not None and effect.excluded:
            weights, circle, meaning = self._made_by
            context.wanted = msgspec.structs.replace(context.wanted, weights=weights, circle=circle, meaning=meaning)
        now, dispatch, former = time.monotonic(), self._parts.dispatch, context.decode
        effects = dispatch.scheduling.handle(d.Asked(context, effect, now), now)
        chosen = effects[0]
        assert type(chosen) is j.Chosen
        if dispatch.outside:
            dispatch.moved(context, former, effects[1:])
        elif len(effects) > 1 or self._parts.scheduler.wakeup_s is not None:  # most often there is nothing
            dispatch.call(effects[1:])
        if effect.second and chosen.decode is None:  # nothing changes
            return chosen
        if chosen.prefill is None and effect.hand_over:
            dispatch.served_aggregated(chosen)
        if effect.excluded and chosen.decode is not None:
            kind = "second" if effect.second else "resumed" if relayed else "again"
            self._parts.meters.retries.labels(kind).inc()
            self.resumed = self.resumed or relayed
        self._trace.chose(effect, chosen, context)
        expected = context.expected
        if expected.booking is not None:
            self._sent, self._cached_tokens = tuple(expected.sent), expected.booking.cached_tokens
            if expected.pulls_beginning:
                self._sent = ()
        return chosen

    def found_none(self) -> None:
        """No instance has a place for the request: it waits in the flow-control queue."""
        self._parts.dispatch.tell(d.FoundNone(self.context), time.monotonic())

    def spoken_by(self, instance: InstanceId) -> None:
        """The answer has a token of this engine, or begins with its token: from now on only an engine like it may
        continue.
        """
        view = self._parts.view
        if view.knows(instance):
            maker = view.get(instance)
            meaning = maker.meaning(self.context.wanted.model)
            self._made_by = maker.instance.weights, view.all().pairing.circle(maker.id), meaning

    def unbind(self) -> None:
        """The client has nothing, and the answer need not begin with a token that was drawn: any engine may answer."""
        self._made_by = None
        self.context.wanted = msgspec.structs.replace(self.context.wanted, weights="", circle=0, meaning="")

    def occupy(self, instance: InstanceId | None) -> None:
        """Count its answering leg at this instance, and at no other."""
        self._parts.dispatch.tell(d.Occupied(self.context, instance), time.monotonic())

    def prompt_over(self, *, done: bool, usage: Mapping[str, Any] = _NO_USAGE) -> None:
        """The instance to which the prompt was last sent has computed it, or will not (`done` false). `usage`: the
        engine's token counts.
        """
        predictor, context = self._parts.predictor, self.context
        if predictor is None or self._predicted is None:
            return
        context.wanted = predictor.told(context.wanted, self._predicted, usage)
        cached = cached_in(usage)
        if done and cached is not None and context.expected.booking is not None:
            self._count_cached(cached)
        self._sent = ()
        self._prompt_over(done=done, cached_tokens=cached)

    def prompt_presumed(self) -> None:
        """Its prompt counts as computed: the predicted time has passed, and its engine will not report it."""
        self._prompt_over(done=False, cached_tokens=None, presumed=True)
        self._look_for_room()

    def _prompt_over(self, *, done: bool, cached_tokens: int | None, presumed: bool = False) -> None:
        if self._parts.scheduler.remembers:
            now = time.monotonic()
            over = d.PromptOver(self.context, now, done, cached_tokens, presumed)
            self._parts.dispatch.scheduling.handle(over, now)

    def _look_for_room(self) -> None:
        """A prompt is computed: if admission has other limits than credits, there may be room for a waiting request."""
        if self._parts.scheduler.admission is not None:
            self._parts.dispatch.tell(d.Roomy(), time.monotonic())

    def opened(self) -> None:
        """The first token of its answer has come from the decoding instance."""
        if self._parts.scheduler.remembers or self.context.trial is not None:
            now = time.monotonic()
            self._parts.dispatch.scheduling.handle(d.AnswerOpened(self.context, now), now)
        self._look_for_room()

    def _count_cached(self, cached_tokens: int) -> None:
        """An engine has reported how much of the prompt it had cached."""
        wanted, meters = self.context.wanted, self._parts.meters
        meters.attainment.prefix(self._cached_tokens, cached_tokens)
        meters.flow.prefilled(wanted.model or "", wanted.slo_class, wanted.prompt_tokens, cached_tokens)

    def count_tokens(self, request: Request, events: int | None) -> int | None:
        """The tokens of one answer, as its engine counted them, else by the `events` that were relayed."""
        predictor, usage = self._parts.predictor, self._trace.usage
        if predictor is None or self._predicted is None:
            return None
        if usage and self._sent:  # no P has reported the prompt: one instance did all, and reports it at its end
            self.context.wanted = predictor.told(self.context.wanted, self._predicted, usage)
            cached_tokens = cached_in(usage)
            if cached_tokens is not None and self._predicted.prompts == 1:  # else it is of several prompts together
                self._count_cached(cached_tokens)
                each = self.context.wanted.prefix_block_tokens
                for sent in self._sent:
                    self._parts.dispatch.fleet.handle(d.Cached(sent, each, cached_tokens), time.monotonic())
        tokens, asked, prompts = answer_tokens(usage) or events, request.body.get("n"), self._predicted.prompts
        if prompts == 0:
            return None
        answers = prompts * asked if isinstance(asked, int) and asked > 1 else prompts
        return tokens // answers if tokens and answers > 1 else tokens

    def finish(
        self,
        now: float,
        tokens: int | None,
        engine_ms: d.EngineMs | None,
        *,
        cut_off: bool,
        complete: bool,
        paused: bool,
    ) -> None:
        """The request is over, after `tokens` tokens; None: not counted, or of two engines. See `Scheduler.finish`."""
        finished = d.Finished(self.context, now, tokens, cut_off, engine_ms, complete, paused)
        self._parts.dispatch.tell(finished, now)
        self._at_scheduler = False

    def leave(self) -> None:
        """A bug of the router's ends the request: give its place back."""
        if self._at_scheduler:
            now = time.monotonic()
            self._parts.dispatch.tell(d.Finished(self.context, now, None, cut_off=False, complete=False), now)
            self._at_scheduler = False
