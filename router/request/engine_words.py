"""What engines' refusals, losses and invalid answers mean to a request's journey, and what its client gets. A shell."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from cluster import wire
from cluster.errors import no_room
from cluster.ids import InstanceId
from cluster.request import Request
from router.core import engine_answers
from router.core import journey as j
from router.http.upstream import Answer, EngineLost
from router.request.parts import Parts
from router.request.reply import Reply

logger = logging.getLogger("baton.router")


class EngineWords:
    """Reads the refusals, losses and invalid answers of the engines of one request, and keeps the last refusal."""

    __slots__ = ("_parts", "_refusal", "_request")

    def __init__(self, parts: Parts, request: Request) -> None:
        self._parts: Final = parts
        self._request: Final = request
        self._refusal: Answer | None = None

    def refused(self, by: InstanceId, answer: Answer) -> j.Lost | j.Refused:
        """The journey's event for an answer with another status than 200. A 4xx goes to the client; any other status
        is the engine's fault, and another engine may succeed.
        """
        if wire.is_ticket_refused(answer.status, answer.body):
            logger.error(
                "%s: our ticket was refused: %s", self._request.label, answer.body[:300].decode(errors="replace")
            )
            return j.Lost("the engine's guard refused the router's ticket", untouched=True, no_ticket=True)
        if answer.status >= 500:
            return j.Lost(f"HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}")
        if answer.status < 400:
            return self.unfit(by, f"it answered {answer.status}, which is no completion")
        self._refusal = answer
        return j.Refused(answer.status)

    def lost(self, instance: InstanceId, lost: EngineLost) -> j.Lost | j.Refused:
        """The journey's event for a broken leg. If this router lacks a resource, another instance would not help."""
        if lost.ours:
            logger.warning("%s: %s", self._request.label, lost)
            problem = no_room(str(lost))
            self._refusal = Answer(problem.status, "application/json", msgspec.json.encode(problem.body()))
            return j.Refused(problem.status)
        if lost.unfit:
            self._parts.meters.unfit.labels(lost.unfit).inc()
        if not lost.reached:
            self._parts.dispatch.unreachable(instance)
        logger.warning("%s: %s lost: %s", self._request.label, instance, lost)
        return j.Lost(str(lost), untouched=not lost.reached)

    def unfit(self, by: InstanceId, because: str) -> j.Lost | j.Refused:
        """An engine has answered with status 200 and an invalid answer."""
        return self.lost(by, EngineLost(because, reached=True, unfit="no_completion"))

    def no_stream(self, by: InstanceId, pieces: bytes, because: str) -> j.Lost | j.Refused:
        """The journey's event for an answer that does not begin as a stream (`because`). It may be a refusal with
        status 200 (`engine_answers.refusal_in`).
        """
        refusal = engine_answers.refusal_in(pieces)
        if refusal is None:
            return self.unfit(by, because)
        status, body = refusal
        self._refusal = Answer(status, "application/json", body)
        return j.Refused(status)

    def forward(self, reply: Reply) -> None:
        """Send the last refusal to the client."""
        refusal = self._refusal
        assert refusal is not None
        if engine_answers.object_in(refusal.body) is not None:
            reply.respond(refusal.status, refusal.body, engine_answers.json_type(refusal.content_type))
        else:
            error = engine_answers.refusal(refusal.status, refusal.body)
            reply.respond(error.status, msgspec.json.encode(error.body()))
