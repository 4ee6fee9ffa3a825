"""The two legs of a request, once sent: they collect the bytes of their connections until those make sense, then
report.

A leg decides nothing: it tells its owner, the part of the request that sent it, which asks the journey.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from cluster.ids import InstanceId
from router.core import engine_answers
from router.core import journey as j
from router.http.collected import CollectedAnswer
from router.http.legs import EngineLeg
from router.http.outlet import Outlet
from router.http.upstream import Answer, EngineLost, too_long


class EventSink(ABC):
    """Takes the events of the parts of one request to its journey."""

    __slots__ = ()

    @abstractmethod
    def feed(self, event: j.Event) -> None:
        """Take an event."""

    @abstractmethod
    def run(self, step: Callable[..., j.Event | None], *given: Any) -> None:
        """Run a step of a part, and take the event that it returns, if any. A bug in it ends this request and no
        other.
        """


class _OverSink(EventSink):
    """The sink of a request that is over: it ignores all events."""

    def feed(self, event: j.Event) -> None:
        pass

    def run(self, step: Callable[..., j.Event | None], *given: Any) -> None:
        pass


OVER: Final[EventSink] = _OverSink()
"""Given to parts whose request is over, so that they do not refer to its driver."""


class PrefillOwner(ABC):
    """The sender of prefill legs, which gets their events."""

    __slots__ = ()

    @abstractmethod
    def engine_lost(self, instance: InstanceId, lost: EngineLost) -> j.Lost | j.Refused:
        """The journey's event for a broken leg."""

    @abstractmethod
    def prefill_over(self, leg: PrefillLeg, *, unclear: bool) -> None:
        """The leg's place is free again, however the leg ended. `unclear`: the engine had it, and nothing says whether
        it holds blocks.
        """

    @abstractmethod
    def prefill_said(self, leg: PrefillLeg, said: PrefillSaid | j.Lost | j.Refused) -> None:
        """The leg has ended by itself."""

    @abstractmethod
    def prefill_left(self, leg: PrefillLeg) -> None:
        """The leg's instance is lost; the leg may still do its work and hold blocks for this request."""


class AnswerOwner(ABC):
    """The sender of an answering leg, which gets its events."""

    __slots__ = ()

    @abstractmethod
    def answer_began(self, leg: AnswerLeg, because: str) -> None:
        """The beginning of a stream with a good status has arrived. `because`: why it is not valid; empty: it is."""

    @abstractmethod
    def answer_ended(self, leg: AnswerLeg) -> None:
        """The whole answer has arrived."""

    @abstractmethod
    def answer_lost(self, leg: AnswerLeg, lost: EngineLost) -> None:
        """The leg broke off."""

    @abstractmethod
    def answer_left(self, leg: AnswerLeg) -> None:
        """The leg's instance is lost."""

    @abstractmethod
    def producer_left(self, leg: AnswerLeg) -> None:
        """The instance with the hold that the leg pulls is lost."""

    @abstractmethod
    def passed_on(self, event: object) -> None:
        """A chunk has led to this event."""

    @abstractmethod
    def answer_more(self, data: bytes) -> None:
        """More bytes of the stream have arrived."""


class AwaitedSource(CollectedAnswer, ABC):
    """Another instance's hold of the prompt's beginning: a leg waits for it before it is sent, and then pulls it."""

    __slots__ = ()

    @abstractmethod
    def take(self, said: Answer | EngineLost | None) -> j.Event | None:
        """Send the leg that waits, with the hold that this answer describes, or without one. Returns what the journey
        is told.
        """

    @abstractmethod
    def close(self) -> None:
        """The leg will not pull: give the hold up."""


class PrefillSaid:
    """An engine's answer to a prefill leg, and the time of its end in monotonic seconds (`at`)."""

    __slots__ = ("answer", "at")

    def __init__(self, answer: Answer, at: float) -> None:
        self.answer: Final = answer
        self.at: Final = at


class PrefillLeg(CollectedAnswer):
    """A prefill leg. It is sent at once, or, with a source, once the source leg is over. If the client leaves, a leg
    that was sent is not cut off at once: its answer says what it holds.
    """

    __slots__ = ("_owner", "_said", "_told", "attempt", "instance", "placed", "source", "started")

    def __init__(self, owner: PrefillOwner, instance: InstanceId, attempt: int, bytes_max: int) -> None:
        """`bytes_max`: the most bytes of its answer that are kept."""
        super().__init__(bytes_max)
        self._owner = owner
        self.instance = instance
        self.attempt = attempt
        self.started = 0.0
        self.placed = False
        """It counts at its instance: `PrefillOwner.prefill_over` ends that."""
        self.source: AwaitedSource | None = None
        self._said: asyncio.Future[PrefillSaid | j.Lost | j.Refused] | None = None
        """Made by `said`, for work that outlives the request."""
        self._told: PrefillSaid | j.Lost | j.Refused | None = None

    def said(self) -> asyncio.Future[PrefillSaid | j.Lost | j.Refused]:
        """A future with the leg's end."""
        if self._said is None:
            self._said = asyncio.get_running_loop().create_future()
            if self._told is not None:
                self._said.set_result(self._told)
        return self._said

    def cut(self) -> None:
        """The leg's answer is not wanted any more."""
        http, self.http = self.http, None
        source, self.source = self.source, None
        if source is not None:
            source.close()
        if http is not None:
            http.close()
        if self.placed:
            self._owner.prefill_over(self, unclear=http is not None)

    def leave_source(self) -> None:
        """A leg that was sent is not wanted any more: give up the hold that it may pull."""
        source, self.source = self.source, None
        if source is not None:
            source.close()

    def forgo(self) -> bool:
        """The leg is not wanted any more: end it if it still waits for its source. Returns whether it was ended so."""
        waits = self.source is not None and self.http is None
        if waits:
            self._over(j.not_sent(), unclear=False)
        return waits

    def ended(self) -> None:
        self._over(PrefillSaid(self.answer, time.monotonic()), unclear=False)

    def lost(self, lost: EngineLost) -> None:
        self._over(self._owner.engine_lost(self.instance, lost), unclear=lost.reached)

    def _over(self, told: PrefillSaid | j.Lost | j.Refused, *, unclear: bool) -> None:
        self.http = None
        source, self.source = self.source, None
        if source is not None and not (isinstance(told, PrefillSaid) and told.answer.status == 200):
            source.close()  # the hold may not have been pulled; a pull that has ended has released it already
        self._owner.prefill_over(self, unclear=unclear)
        self._told = told
        if self._said is not None:
            self._said.set_result(told)
        self._owner.prefill_said(self, told)

    def left(self) -> None:
        """The leg's instance is lost."""
        self._owner.prefill_left(self)

    @property
    def producer(self) -> None:
        """It pulls no hold of a prefill leg. (A source that is lost costs it a turn: `router.core.turns`.)"""

    def producer_left(self) -> None:
        """Never called."""


class AnswerLeg:
    """The answering leg, once sent. It has many attributes: what was sent, and what has come of its answer so far."""

    __slots__ = (
        "_bytes",
        "_bytes_max",
        "_outlet",
        "_pieces",
        "_streams",
        "cache_control",
        "content_type",
        "http",
        "instance",
        "opening",
        "owner",
        "producer",
        "pulled",
        "relays",
        "source",
        "started",
        "status",
    )

    def __init__(
        self, owner: AnswerOwner, instance: InstanceId, outlet: Outlet, *, streams: bool, bytes_max: int
    ) -> None:
        """A leg that is about to be sent.

        Args:
            owner: gets its events.
            instance: where it goes.
            outlet: the way to its client.
            streams: the client wants a stream.
            bytes_max: the most bytes of an answer that are kept.
        """
        self.owner = owner
        self._outlet = outlet
        self._streams = streams
        self._bytes_max = bytes_max
        self.instance = instance
        self.producer: InstanceId | None = None
        """The instance with the hold that it pulls, if known."""
        self.pulled = ""
        """The engine whose hold it pulls; empty: it pulls none."""
        self.http: EngineLeg | None = None
        self.source: AwaitedSource | None = None
        self.started = time.monotonic()
        self.opening = True
        """Nothing has arrived that tells its status."""
        self.relays = False
        """Its bytes go to the client as they arrive."""
        self.status, self.content_type, self.cache_control = 0, "", ""
        self._pieces: list[bytes] = []
        self._bytes = 0

    @property
    def pieces(self) -> bytes:
        """The bytes that have arrived and are not relayed."""
        return b"".join(self._pieces)

    def opened(self, status: int, content_type: str, cache_control: str) -> None:
        self.status, self.content_type, self.cache_control = status, content_type, cache_control

    def body(self, data: bytes) -> None:
        http = self.http
        if http is None or not http.complete:
            self._body(data)
            return
        outlet = self._outlet
        outlet.cork()
        self._body(data)
        if self.http is not http:  # something was wrong with it: ignore its end
            outlet.uncork()

    def _body(self, data: bytes) -> None:
        if self.relays:
            self.owner.answer_more(data)
            return
        self._pieces.append(data)
        self._bytes += len(data)
        if self.status == 200 and self._streams:
            self._begin(data)
        elif self._bytes > self._bytes_max and self.http is not None:
            self._pieces.clear()
            self.http.refuse(too_long(self._bytes_max))

    def _begin(self, data: bytes) -> None:
        """A stream's first bytes: report them once they show whether the stream is valid."""
        if not self.content_type.startswith("text/event-stream"):
            self.owner.answer_began(self, f"it answered a stream with {self.content_type!r}")
        elif b"\n" in data or self._bytes >= engine_answers.BEGINNING_BYTES_MAX:
            because = engine_answers.beginning(self.pieces)
            if because is not None:
                self.owner.answer_began(self, because)

    def chunk(self, framed: bytes, begin: int) -> None:
        self.body(framed[begin:-2])

    def happened(self, found: object) -> None:
        self.owner.passed_on(found)

    def ended(self) -> None:
        self.http = None
        self.owner.answer_ended(self)
        self._outlet.uncork()

    def lost(self, lost: EngineLost) -> None:
        self.http = None
        self.owner.answer_lost(self, lost)

    def left(self) -> None:
        """The leg's instance is lost."""
        self.owner.answer_left(self)

    def producer_left(self) -> None:
        """The instance with the hold that it pulls is lost."""
        self.owner.producer_left(self)

    def relay(self, chunk: Callable[[bytes, int], object], silence_s: float) -> None:
        """Relay the bytes to the client from now on. `chunk` takes whole chunks, framed as they came, and the position
        at which their bytes begin. `silence_s`: see `limit_silence`.
        """
        self.relays = True
        self.limit_silence(silence_s)
        if self.http is not None:
            self.http.chunk = chunk

    def limit_silence(self, silence_s: float) -> None:
        """Set how many seconds the engine may be silent; 0: as many as before."""
        if self.http is not None and silence_s > 0:
            self.http.limit_silence(silence_s)

    def pause(self) -> bool:
        """Stop reading from the engine. Returns whether there is anything to read."""
        if self.http is not None:
            self.http.pause()
        return self.http is not None

    def resume(self) -> None:
        """Read from the engine again."""
        if self.http is not None:
            self.http.resume()

    def close(self) -> None:
        """Break the leg off."""
        http, self.http = self.http, None
        source, self.source = self.source, None
        if source is not None:
            source.close()
        if http is not None:
            http.close()
