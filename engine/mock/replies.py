"""Writes the mock's replies: the bytes of an answer's parts, each at its moment. A shell: it writes to connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import ApiError
from cluster.ids import RequestId
from cluster.wire import TOLD_EARLY
from engine.mock.answers import DONE, AnswerHead, Events, MockChoice, encode, event, usage_event, usage_of, whole
from engine.mock.asked import MockRequest
from engine.mock.faults import ON_TOKENS, FaultKind, MockFault, injected
from engine.mock.http import Exchange
from engine.mock.prompts import Prompted
from engine.mock.settings import MockSettings
from engine.mock.transfer import Producer, Reference, asks_a_source, cached_at_producer, hold_fields, wants_hold
from engine.twin.events import RequestFinished
from kvtransfer.fields import name_in


@dataclass(slots=True, eq=False)
class MockAnswer:
    """One client's request and its answer so far. `arrived_ns` in engine time."""

    asked: MockRequest
    exchange: Exchange
    head: AnswerHead
    fault: MockFault | None
    arrived_ns: int
    parts: list[TwinPart] = field(default_factory=list)
    begun: bool = False
    """Whether the head of the stream is sent."""
    cut: bool = False
    """Whether a fault has ended it: nothing more is written."""

    @property
    def running(self) -> bool:
        """Whether any part of it is not over."""
        return any(part.over is None for part in self.parts)


@dataclass(slots=True, eq=False)
class TwinPart:
    """One request of the twin's.

    It has many attributes: what was asked, what the hand-over adds, and how far tokens are made and written.
    """

    id: RequestId
    name: str
    """vLLM's id of it, by which it can be aborted."""
    answer: MockAnswer
    prompt: Prompted
    choice: MockChoice
    events: Events | None
    stop_after: int | None
    reference: Reference | None
    pinned: int | None = None
    """The token with which the answer must begin; None: any."""
    fresh: list[int] = field(default_factory=list)
    """Tokens that are made and not written."""
    made: int = 0
    """The number of tokens that are made, written or not."""
    first_ns: int | None = None
    """When the first token was made, in engine time."""
    over: RequestFinished | None = None
    """How the twin's request ended; None: it has not."""
    not_pulled: int = 0
    """Tokens that were held for it, and whose pull has failed."""
    submitting: asyncio.TimerHandle | None = None
    """The timer that will give it to the engine; None: the engine has it, or it is an early leg that waits."""
    told_early: bool = False
    """An early leg that waited for its hold was told of it."""
    awaits: str = ""
    """For an early leg that waits: the name of its hold-to-be. The engine has not seen it."""

    @property
    def misspeaks(self) -> FaultKind | None:
        """The fault that makes a prefill leg answer with another token than the answer's first, if one struck."""
        fault = self.answer.fault
        if fault is None or fault.fault not in ON_TOKENS or not wants_hold(self.answer.asked.transfer):
            return None
        return fault.fault


class Replies:
    """Writes one instance's answers."""

    def __init__(
        self,
        settings: MockSettings,
        here: Producer,
        abort: Callable[[MockAnswer], None],
        took_s: Callable[[int, int], float],
    ) -> None:
        """`abort` makes the engine end an answer that a fault breaks off. `took_s`: the real seconds between two
        moments of engine time.
        """
        self.here = here
        self._settings = settings
        self._abort = abort
        self._took_s = took_s
        self.touched: dict[TwinPart, None] = {}
        """Parts that have something to write once the moment is over."""

    def flush(self) -> None:
        """Write the tokens of the moment that is over."""
        while self.touched:
            part, _ = self.touched.popitem()
            fresh, part.fresh = part.fresh, []
            if not part.answer.exchange.over and not part.answer.cut:
                self._write(part, fresh)

    def _write(self, part: TwinPart, fresh: list[int]) -> None:
        answer, fault = part.answer, part.answer.fault
        if fault is not None and fault.fault not in ON_TOKENS and part.made >= fault.after_tokens:
            self._break_off(part, fault, fresh)
        elif part.over is not None and part.over.reason == "error":
            self._fail(answer, ApiError(500, "InternalServerError", "Internal server error"))
        elif answer.asked.stream:
            self._events(part, fresh, part.over)
        else:
            part.choice.ids += fresh
            if part.over is not None:
                part.choice.reason = part.over.reason
                self._respond(answer)

    def _break_off(self, part: TwinPart, fault: MockFault, fresh: list[int]) -> None:
        """A fault ends an answer, after the fault's `after_tokens`."""
        answer = part.answer
        kept = fresh[: max(0, len(fresh) - (part.made - fault.after_tokens))]
        if answer.asked.stream and kept:
            self._events(part, kept, None)
        answer.cut = True
        self._abort(answer)
        if fault.fault is FaultKind.BREAK:
            if answer.begun:
                answer.exchange.write(b'18\r\ndata: {"id":"cmpl-')
            answer.exchange.drop()
        elif fault.fault is FaultKind.ERROR:
            self._fail(answer, injected())

    def _events(self, part: TwinPart, fresh: list[int], over: RequestFinished | None) -> None:
        answer, events = part.answer, part.events
        assert events is not None
        data = b""
        if not answer.begun:
            answer.begun = True
            answer.exchange.begin()
            data = b"".join([each.events.opening() for each in answer.parts if each.events is not None])
        if over is None:
            answer.exchange.write(data + events.tokens(fresh))
            return
        data += events.closing(fresh, over.reason)
        if answer.running:
            answer.exchange.write(data)
            return
        if answer.asked.usage:
            data += usage_event(answer.head, self._usage(answer), self._timing(answer))
        answer.exchange.end(data + DONE)

    def _respond(self, answer: MockAnswer) -> None:
        if answer.running:
            return
        hold, transfer = answer.parts[0].over, None
        if hold is not None and hold.hold is not None:
            transfer = hold_fields(
                hold.hold,
                self.here,
                name=name_in(answer.asked.transfer),
                tp=self._settings.tp,
                cached_tokens=hold.local_tokens,
                from_cache=asks_a_source(answer.asked.transfer),
            )
            transfer[TOLD_EARLY] = answer.parts[0].told_early
        choices = [part.choice for part in answer.parts]
        answer.exchange.respond(200, whole(answer.head, choices, self._usage(answer), transfer, self._timing(answer)))

    def _usage(self, answer: MockAnswer) -> dict[str, Any]:
        cached = cached_at_producer(answer.asked.transfer)
        over = [part.over for part in answer.parts if part.over is not None]
        if cached is None:
            cached = over[-1].local_tokens + over[-1].remote_tokens
        prompt_tokens = sum(len(prompt.ids) for prompt in answer.asked.prompts)
        return usage_of(prompt_tokens, sum(each.outputs for each in over), cached)

    def _timing(self, answer: MockAnswer) -> dict[str, Any] | None:
        """``metrics`` as with vLLM's ``--enable-per-request-metrics``. Times are real."""
        part = answer.parts[0]
        if len(answer.parts) > 1 or part.over is None or part.first_ns is None:
            return None
        over, took_s = part.over, self._took_s
        decode_ms = max(0.0, took_s(part.first_ns, over.at_ns)) * 1000
        begun_ns = over.first_run_ns or part.first_ns
        steps = over.outputs - 1
        return {
            "time_to_first_token_ms": took_s(begun_ns, part.first_ns) * 1000,  # from its first step on, as in vLLM
            "generation_time_ms": decode_ms,
            "queue_time_ms": max(0.0, took_s(answer.arrived_ns, begun_ns)) * 1000,
            "mean_itl_ms": decode_ms / steps if steps > 0 else None,
            "tokens_per_second": steps / decode_ms * 1000 if steps > 0 and decode_ms else None,
            "speculative_decoding": None,
        }

    def _fail(self, answer: MockAnswer, error: ApiError) -> None:
        """Answer with an error, as vLLM does: an event in a stream, else a status."""
        if not answer.asked.stream:
            answer.exchange.respond(error.status, encode(error.body()))
            return
        if not answer.begun:
            answer.exchange.begin()
        answer.exchange.end(event(error.body()) + DONE)
