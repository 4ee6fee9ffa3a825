"""Generation requests in one instance's engine, until they are over. A shell: timers, and connections that break.

One request has one or more parts (its prompts times ``n``); each part is a request of the twin's. The tokens of a
moment are written together when the moment is over, because the last token's event also says why the answer ended.
"""

from __future__ import annotations

import asyncio
import time

from cluster.errors import bad_request
from cluster.ids import RequestId
from cluster.wire import PINS
from engine.mock.answers import AnswerHead, Events, MockChoice, encode
from engine.mock.asked import MockRequest
from engine.mock.clock import Clock
from engine.mock.faults import FaultKind, MockFault
from engine.mock.handoffs import MockHandoffs
from engine.mock.http import Exchange
from engine.mock.metrics import Metrics
from engine.mock.prompts import Prompted, said_tokens
from engine.mock.replies import MockAnswer, Replies, TwinPart
from engine.mock.settings import MockSettings
from engine.mock.transfer import (
    Producer,
    Reference,
    asks_a_source,
    early_name,
    early_producer,
    hold_fields,
    pinned_token,
    read_reference,
    wants_hold,
)
from engine.mock.words import END
from engine.twin.events import AbortRequest, Hold, RequestFinished, Submit
from engine.twin.request import TwinRequest
from engine.twin.tokens import VOCABULARY, Prompt, Segment
from kvtransfer.early_notes import Ready
from kvtransfer.fields import name_in


class Serving:
    """All requests of one instance. `here`: how consumers reach this instance."""

    def __init__(
        self,
        settings: MockSettings,
        clock: Clock,
        handoffs: MockHandoffs,
        metrics: Metrics,
        here: Producer,
    ) -> None:
        self.replies = Replies(settings, here, self._abort, clock.took_s)
        self._settings = settings
        self._clock = clock
        self._handoffs = handoffs
        self.metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._parts: dict[RequestId, TwinPart] = {}
        self._count = 0

    @property
    def open_requests(self) -> int:
        """The number of requests' parts that the engine has, or will have soon."""
        return len(self._parts)

    # -- a request comes --

    def start(
        self, asked: MockRequest, reference: Reference | None, exchange: Exchange, name: str, fault: MockFault | None
    ) -> None:
        """Give a request to the engine. `reference`: the hold that it pulls; `name`: vLLM's id of it; `fault`: one that
        strikes while it is served.
        """
        head = AnswerHead(
            id=name,
            model=self._settings.model,
            created=int(time.time()),  # noqa: TID251 - told to the client
            chat=asked.chat,
            token_ids=asked.token_ids,
            usage=asked.usage,
            running_usage=asked.running_usage,
        )
        answer = MockAnswer(asked, exchange, head, fault, self._clock.now_ns())
        exchange.on_lost = lambda: self._abort(answer)
        single = len(asked.prompts) == asked.n == 1
        if reference is not None and single:
            self._handoffs.want(reference)
        for number, prompt in enumerate(asked.prompts):
            for copy in range(asked.n):
                index = number * asked.n + copy
                part = self._part(answer, prompt, index, name if asked.chat else f"{name}-{number}")
                part.reference = reference if single else None
                part.pinned = pinned_token(asked.transfer) if single else None
                answer.parts.append(part)
        awaited = early_name(asked.transfer) if single else ""
        if awaited:
            part = answer.parts[0]
            part.awaits = awaited
            producer = early_producer(asked.transfer)
            self._handoffs.early(
                awaited, producer, lambda ready: self._ready(part, ready), lambda: self._producer_lost(part)
            )
            return
        delay_s = self._clock.real_s(self._settings.first_token_ms)
        for copy, part in enumerate(answer.parts):
            twin_request = self._twin_request(part, copy % asked.n)
            if delay_s > 0:
                part.submitting = self._loop.call_later(delay_s, self._submit, part, twin_request)
            else:
                self._submit(part, twin_request)

    def _ready(self, part: TwinPart, ready: Ready) -> None:
        """The hold of an early leg is there: from here on the leg is a decode leg."""
        if self._parts.get(part.id) is not part:
            return
        part.awaits = ""
        asked = part.answer.asked
        assert isinstance(asked.transfer, dict), "read from JSON"
        fields = ready.fields
        asked.transfer.update(fields)
        part.reference = read_reference(fields)
        if part.reference is not None:
            self._handoffs.want(part.reference)
        whole = fields.get("remote_num_tokens") == len(part.prompt.ids)
        part.pinned = ready.token if asked.transfer.get(PINS) is True and whole else None
        self._submit(part, self._twin_request(part, 0))

    def _producer_lost(self, part: TwinPart) -> None:
        """An early leg's producer has died: the prompt is computed here, and the first token is this engine's own."""
        if self._parts.get(part.id) is part and part.awaits:
            part.awaits = ""
            self._submit(part, self._twin_request(part, 0))

    def _part(self, answer: MockAnswer, prompt: Prompted, index: int, name: str) -> TwinPart:
        self._count += 1
        asked = answer.asked
        choice = MockChoice(index, prompt.ids.tolist() if asked.token_ids else range(len(prompt.ids)))
        stop_after = None
        if self._settings.answers is not None and not asked.ignore_eos:
            stop_after = max(self._settings.answers.after(prompt), asked.min_tokens + 1)
        part = TwinPart(
            id=RequestId(f"{name}-{self._count:08x}"),
            name=name,
            answer=answer,
            prompt=prompt,
            choice=choice,
            events=Events(answer.head, choice) if asked.stream else None,
            stop_after=stop_after,
            reference=None,
        )
        self._parts[part.id] = part
        return part

    def _twin_request(self, part: TwinPart, copy: int) -> TwinRequest:
        asked = part.answer.asked
        holds = wants_hold(asked.transfer) and len(part.answer.parts) == 1
        return TwinRequest(
            id=part.id,
            prompt=_without_last(part.prompt.segments)
            if part.misspeaks is FaultKind.KEEP_BACK
            else part.prompt.segments,
            max_tokens=asked.max_tokens or self._settings.config.max_model_len,
            stop_after=part.stop_after,
            seed=copy,
            priority=asked.priority,
            hold=self._handoffs.hold_id(part.id) if holds else None,
            name=name_in(asked.transfer) or "",
            pull=part.reference.source if part.reference is not None else None,
            cached_only=holds and asks_a_source(asked.transfer),
        )

    def _submit(self, part: TwinPart, request: TwinRequest) -> None:
        part.submitting = None
        self._clock.tell(Submit(request))

    # -- the twin's effects --

    def made(self, request: RequestId, key: int, first: int, count: int) -> None:
        """Take `count` tokens of a request, from index `first` on, under the twin's `key`."""
        part = self._parts.get(request)
        if part is None or part.answer.exchange.over or part.answer.cut:
            return
        if part.first_ns is None:
            part.first_ns = self._clock.now_ns()
        ids = said_tokens(part.prompt, key, first, count, part.pinned)
        if part.misspeaks is FaultKind.WRONG_TOKEN:
            ids = [(each + 1) % VOCABULARY for each in ids]
        part.made = first + count
        if part.stop_after is not None and part.made >= part.stop_after:
            ids[part.stop_after - first - 1] = END
        part.fresh += ids
        self.replies.touched[part] = None

    def finished(self, effect: RequestFinished) -> None:
        """A part is over."""
        part = self._parts.pop(effect.request, None)
        if part is None:
            return
        part.over = effect
        if effect.hold is not None:
            self._handoffs.held(effect.hold)
            self._tell_early(part, effect.hold, effect.local_tokens)
        if part.reference is not None and effect.reason == "abort":
            self._handoffs.forget(part.reference.source)
        self.metrics.over(
            effect,
            prompt_tokens=len(part.prompt.ids),
            not_pulled=part.not_pulled,
            arrived_ns=part.answer.arrived_ns,
            first_ns=part.first_ns,
            took_s=self._clock.took_s,
        )
        self.replies.touched[part] = None

    def _tell_early(self, part: TwinPart, hold: Hold, cached_tokens: int) -> None:
        """Tell the early leg that may wait for this hold, before the answer is written. The hold of a source has the
        same name, since a name is one of the request's, and a consumer asks one producer: it is for no early leg.
        """
        name = name_in(part.answer.asked.transfer)
        if name is None or asks_a_source(part.answer.asked.transfer):
            return
        fields = hold_fields(hold, self.replies.here, name=name, tp=self._settings.tp, cached_tokens=cached_tokens)
        made = [*part.choice.ids, *part.fresh] if part.made else []
        part.told_early = self._handoffs.ready(part.id, Ready(name, fields, made[-1] if made else None))

    def refused(self, request: RequestId, because: str) -> None:
        """The twin does not take this request."""
        part = self._parts.pop(request, None)
        if part is None:
            return
        error = bad_request(f"The mock does not take this request: {because}.")
        part.answer.exchange.respond(error.status, encode(error.body()))

    def lost(self, request: RequestId) -> None:
        """The engine died with this request."""
        part = self._parts.pop(request, None)
        if part is not None:
            self.replies.touched.pop(part, None)
            part.answer.exchange.drop()

    def not_used(self, request: RequestId) -> None:
        """The request's pull is not used: its prompt is computed here."""
        part = self._parts.get(request)
        if part is not None and part.reference is not None:
            part.not_pulled = part.reference.source.tokens

    # -- ends by faults and by clients --

    def _abort(self, answer: MockAnswer) -> None:
        for part in answer.parts:
            if part.over is None:
                self._abort_part(part)

    def _abort_part(self, part: TwinPart) -> None:
        if part.submitting is None and not part.awaits:
            self._clock.tell(AbortRequest(part.id))
            return
        if part.awaits:
            self._handoffs.early_over(part.awaits)
            part.awaits = ""
        elif part.submitting is not None:
            part.submitting.cancel()
            part.submitting = None
        if part.reference is not None:
            self._handoffs.give_back(part.reference.source)
        over = RequestFinished(
            at_ns=self._clock.now_ns(),
            request=part.id,
            reason="abort",
            outputs=0,
            hold=None,
            first_run_ns=None,
            local_tokens=0,
            remote_tokens=0,
            preemptions=0,
        )
        self.finished(over)
        self.replies.flush()

    def abort_named(self, names: list[str]) -> None:
        """End requests by vLLM's ids, as ``/inference/v1/abort_requests`` does: the tokens so far are the answer."""
        for part in [part for part in self._parts.values() if part.name in names]:
            self._abort_part(part)


def _without_last(prompt: Prompt) -> Prompt:
    """A prompt without its last token, unless it has no other token."""
    *others, last = prompt
    if last.tokens > 1:
        return (*others, Segment(last.seed, last.tokens - 1, last.first))
    return tuple(others) or prompt
