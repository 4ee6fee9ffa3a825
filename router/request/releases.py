"""Work that outlives an answer, in tasks of its own: prefill legs that are not awaited any more, and holds to release.

A hold that is not pulled keeps P's blocks until its lease ends. It is given up by its name if P's connector knows
names, else by a leg that D rejects, which makes D tell P; if neither works, the lease ends it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from cluster import wire
from cluster.ids import InstanceId
from cluster.request import Request
from router.core import journey as j
from router.core.eligibility import CHAT
from router.core.engine_answers import object_in
from router.fleet.view import speaks_for
from router.http.upstream import Answer, EngineLost
from router.request.legs import PrefillLeg, PrefillSaid
from router.request.outgoing import Outgoing
from router.request.parts import Parts
from router.scheduler.scheduler import HANDSHAKE_S

logger = logging.getLogger("baton.router")

AGAIN_S = 2.0
"""Seconds until an instance that did not answer is told again what to give up: its lease would end much later."""


class Releases:
    """The releases of one request."""

    def __init__(self, parts: Parts, request: Request, outgoing: Outgoing) -> None:
        self.parts: Final = parts
        self.request: Final = request
        self.outgoing: Final = outgoing
        self.headers: Final = outgoing.headers

    async def outlast(self, leg: PrefillLeg) -> None:
        """Another leg is used: this one may still end by itself (`j.PATIENCE_S`), then P is asked to abort it. A leg
        with a source is cut off instead, as the same P may have the other leg, and an abort would end both.
        """
        done, _ = await asyncio.wait({leg.said()}, timeout=j.PATIENCE_S)
        if not done and leg.source is not None:
            leg.cut()
            return
        if not done and self.parts.view.knows(leg.instance):
            await self.cancel_prefill(leg.instance)
        await self.see_out(leg, j.CANCEL_WAIT_S)

    async def see_out(self, leg: PrefillLeg, wait_s: float) -> None:
        """A leg that is not awaited any more may still do its work, and hold blocks for this request. Cutting it off
        would race with that.
        """
        try:
            done, _ = await asyncio.wait({leg.said()}, timeout=wait_s)
            said = leg.said().result() if done else None
            if not isinstance(said, PrefillSaid) or 400 <= said.answer.status < 500:
                return  # refused; or its owner has given it up (`PrefillOwner.prefill_over`)
            transfer = hold_in(said.answer)
            if transfer is not None:
                await self.release(InstanceId(""), transfer, leg)
            else:
                await self.give_up(leg.instance, leg.attempt)
        finally:
            leg.cut()

    async def cancel_prefill(self, instance: InstanceId) -> None:
        """Ask P to abort the leg, by vLLM's own ids: ``cmpl-ID-0`` for completions, ``chatcmpl-ID`` for chat."""
        engine_id = f"chatcmpl-{self.request.id}" if self.request.path == CHAT else f"cmpl-{self.request.id}-0"
        if not self.parts.view.knows(instance):
            return
        target = self.parts.view.get(instance).instance
        await self.parts.engines.upstream.abort(target, (engine_id,), self.headers)

    async def release(self, via: InstanceId, transfer: wire.TransferFields, holder: PrefillLeg) -> j.Event:
        """Give this hold up by its name; else make D tell P to free it, or, if D does not answer, another instance."""
        name, attempt = holder.instance, holder.attempt
        done = await self._give_up(transfer, holder)
        done = done or await self._reject(via, transfer, name, attempt)
        done = done or await self.reject(transfer, name, attempt, via)
        self.parts.meters.releases.labels(str(done).lower()).inc()
        if not done:
            logger.warning("%s: a hold of %d tokens is left to its lease", self.request.label, transfer.tokens)
        return j.Released(done)

    async def _give_up(self, transfer: wire.TransferFields, holder: PrefillLeg) -> bool:
        """Release by name, if P has reported the name: then P has Baton's connector, and with a guard a path for
        releases. Returns whether P has taken it.
        """
        name = transfer.fields.get(wire.TRANSFER)
        return isinstance(name, str) and bool(await self._say_name(name, holder.instance, holder.attempt))

    async def give_up(self, holder: InstanceId, attempt: int, *, last: bool = True) -> bool:
        """Give up the hold of this instance for the request, made or not, by the name that the router chose. Returns
        whether the instance has taken it. `last`: nothing else is tried then, so an instance that does not answer is
        asked once more.
        """
        name = str(self.outgoing.transfer_id(holder, attempt))
        done = await self._say_name(name, holder, attempt)
        if done is None and last:
            await asyncio.sleep(AGAIN_S)
            done = await self._say_name(name, holder, attempt)
        if done is None and last and not self.parts.view.lost(holder):
            self.parts.meters.releases.labels("false").inc()
            logger.warning("%s: what %s may hold is left to its lease", self.request.label, holder)
        return bool(done)

    async def reject(self, transfer: wire.TransferFields, holder: InstanceId, attempt: int, *not_: InstanceId) -> bool:
        """Give up this hold by a leg that another instance, none of `not_`, rejects. Returns whether it has."""
        other = speaks_for(self.parts.view, holder, *not_)
        return other is not None and await self._reject(other, transfer, holder, attempt)

    async def _say_name(self, name: str, holder: InstanceId, attempt: int) -> bool | None:
        """Returns whether the instance has taken it; None: it did not answer."""
        if not self.parts.view.knows(holder):
            return False
        body = msgspec.json.encode(self.outgoing.stamped(wire.release_by_name(name), holder, holder, attempt))
        target = self.parts.view.get(holder).instance
        try:
            answer = await self.parts.engines.upstream.say(target, wire.RELEASE_PATH, body, self.headers)
        except EngineLost:
            return None
        return None if answer.status >= 500 else answer.status == 200

    async def _reject(self, via: InstanceId, transfer: wire.TransferFields, holder: InstanceId, attempt: int) -> bool:
        """Make the instance `via` reject a leg for this hold, which makes it tell P. Returns whether it has.

        To a producer that the instance has never met, its first message only starts a handshake, and the release leaves
        with the next message (measured on vLLM 0.32, where an idle D polls nothing): so the leg is sent twice.
        """
        done = await self._reject_once(via, transfer, holder, attempt)
        if done and not self.parts.view.pair_warm(transfer.producer, via):
            await asyncio.sleep(HANDSHAKE_S)
            done = await self._reject_once(via, transfer, holder, attempt)
        return done

    async def _reject_once(
        self, via: InstanceId, transfer: wire.TransferFields, holder: InstanceId, attempt: int
    ) -> bool:
        if not self.parts.view.knows(via):
            return False
        body = msgspec.json.encode(self.outgoing.stamped(wire.release_body(transfer), via, holder, attempt))
        target = self.parts.view.get(via).instance
        try:
            answer = await self.parts.engines.upstream.say(target, "/v1/completions", body, self.headers)
        except EngineLost:
            return False
        if wire.is_ticket_refused(answer.status, answer.body):
            return False  # refused by the guard: the engine was not asked
        return 400 <= answer.status < 500  # the rejection is the release


def hold_in(answer: Answer) -> wire.TransferFields | None:
    """The hold in an answer of P's that is not used; None: the answer names none."""
    fields = object_in(answer.body) if answer.status == 200 else None
    return None if fields is None else wire.read_transfer(fields)
