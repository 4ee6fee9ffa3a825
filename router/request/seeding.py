"""Whether a client gets P's first token before the hand-over (a seed), and which token (law 8). A shell: it counts,
logs and writes.

Where answers are drawn by lot, P's token binds D also if it cannot be shown. If D drew again in these cases, such
tokens (the end of the text, a part of a character, the beginning of a stop string) would come too seldom: with the
chance p² in place of p.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from cluster.request import Request
from cluster.wire import first_finish_reason
from router.core.eligibility import Verdict, Way, drawn_by_lot, has_room
from router.fleet.view import can_pin
from router.request.parts import Parts
from router.request.reply import Reply
from router.request.splice import Seed, adapter_of, seed_of, stops_of, token_of
from router.request.trace import RequestTrace
from router.scheduler.placements import SchedulingContext

logger = logging.getLogger("baton.router")


class Seeding:
    """The seeding of one request."""

    __slots__ = (
        "_adapters", "_allowed", "_context", "_given_up", "_parts", "_request", "_seed", "_trace",
        "by_lot", "early_unpinned", "sent",
    )  # fmt: skip

    def __init__(
        self, parts: Parts, request: Request, verdict: Verdict, context: SchedulingContext, trace: RequestTrace
    ) -> None:
        self._parts: Final = parts
        self._request: Final = request
        self._context: Final = context
        self._trace: Final = trace
        self._allowed: Final = parts.limits.seeding and verdict.way is Way.SEEDED
        self.by_lot: Final = drawn_by_lot(request.body)
        """Two engines would draw two answers."""
        self._adapters: Final[dict[int, str | None]] = {}
        """By token of a P: the adapter that chose it (`router.request.splice.adapter_of`)."""
        self._seed: Seed | None = None
        """The seed in P's last answer. If the journey has no use for that answer, the seed is not sent."""
        self.sent = False
        """The client has its seed."""
        self.early_unpinned = False
        """An early leg is under way that need not begin with P's token: when it was sent, the pair was not proven."""

        self._given_up = False

    def give_up(self) -> None:
        """No token of a P binds the answer any more, and none is shown: D draws for itself."""
        self._given_up = True

    def may(self) -> bool:
        """Whether a seed is exact, and D can be told to begin with P's token."""
        return self._allowed and not self._given_up and can_pin(self._parts.view, self._context.decode)

    def read(self, answer: dict[str, Any], not_first: str) -> tuple[int | None, int | None]:
        """The token of P's answer: as the seed, or as the token that D must begin with though the client does not get
        it now. None: it is not that. `not_first`: why it is not known to be the first token of the client's answer;
        empty: it is.
        """
        if self.sent or self._given_up:
            return None, None
        if not self.may():
            off = not self._parts.limits.seeding
            self._trace.not_seeded("seeding is off" if off else "D's engine cannot be told its first token")
            return None, None
        if not_first or self.early_unpinned:
            self._trace.not_seeded(not_first or "its early leg is not pinned")
            return None, None
        token = token_of(answer)
        if token is not None:
            self._adapters.setdefault(token, adapter_of(answer))
        seed = self._seed_in(answer)
        if isinstance(seed, str):
            logger.debug("%s: not seeded: %s", self._request.id, seed)
            self._trace.not_seeded(seed)
            return None, token if self.by_lot else None
        self._seed = seed
        return seed.token, None

    def _seed_in(self, answer: dict[str, Any]) -> Seed | str:
        """The seed, or why there is none."""
        if not self._has_room(answer):
            return "D may refuse its length"
        if first_finish_reason(answer) == "stop":
            return "the first token ends the answer"
        return seed_of(answer, self._request.path, stops_of(self._request.body))

    def adapter(self, token: int | None) -> str | None:
        """The digest of the adapter that chose this token; None: the model itself did, or no P has named the token."""
        return None if token is None else self._adapters.get(token)

    def send(self, reply: Reply) -> None:
        """Give the client its seed."""
        seed, meters = self._seed, self._parts.meters
        assert seed is not None
        self.sent = True
        if reply.outlet.gone:
            return  # the client has just left: the connection will report it
        meters.first_byte(time.monotonic() - self._request.arrived)
        meters.seeds.inc()
        self._trace.seeds()
        reply.give(seed)

    def _has_room(self, answer: dict[str, Any]) -> bool:
        assert self._context.decode is not None
        usage = answer.get("usage")
        prompt_tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        context = self._parts.view.get(self._context.decode).context(self._request.model)
        return has_room(self._request.body, prompt_tokens if isinstance(prompt_tokens, int) else None, context)
