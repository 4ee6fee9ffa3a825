"""Proves pairs (`router.proofs`), one after another, with three short requests each. A shell: random prompts, a clock.

Its legs are legs as any others: they have tickets, count against an instance's places, and are sent only where one is
free, so that nobody waits for a proof.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cluster import wire
from cluster.ids import InstanceId, RequestId, TransferId
from cluster.readable import json_in
from router import proofs
from router.proofs import Pair, Proofs, Said
from router.upstream import EngineLost

if TYPE_CHECKING:
    from router.server import Router

logger = logging.getLogger("baton.router")

EVERY_S: Final = 1.0
"""Between two proofs."""
LEG_S: Final = 30.0
"""A leg that takes longer says nothing of its pair."""
PROMPT_BYTES: Final = 192
"""Of chance, in hex: a few hundred tokens, so that several blocks move."""
PATH: Final = "/v1/completions"

_Stamp = Callable[[Mapping[str, Any], InstanceId], Mapping[str, Any]]
"""A leg with its ticket."""


class _NoWord(Exception):
    """The proof could not be made."""


class Prover:
    """The proofs of one router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.proofs: Final = Proofs()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            fleet = self._router.view.all()
            for model in proofs.models_of(fleet):
                pair = self.proofs.due(fleet, model, time.monotonic())
                if pair is not None:
                    await self.prove(pair, model)
                    break

    async def prove(self, pair: Pair, model: str) -> None:
        """Once; the router's view is told what came of it."""
        try:
            because = await self._fault(pair, model)
        except (_NoWord, EngineLost, TimeoutError) as none:
            logger.debug("%s to %s: not proven: %s", *pair.names, none)
            because = None
        self.proofs.ended(pair, because, time.monotonic())
        self._router.meters.proofs.labels({None: "none", "": "passed"}.get(because, "failed")).inc()
        failed = self.proofs.failed()
        if because:
            logger.warning("%s to %s: nothing is handed over for now: %s", *pair.names, because)
        if failed != self._router.view.distrusted:
            self._router.view.distrust(failed)

    async def _fault(self, pair: Pair, model: str) -> str | None:
        found = None
        for logprobs in (False, True):
            prompt = secrets.token_hex(PROMPT_BYTES)
            request = RequestId(f"proof-{secrets.token_hex(8)}")
            handed = await self._handed_over(pair, request, _question(model, prompt, logprobs=logprobs))
            if isinstance(handed, str):
                return handed
            alone = await self._answer(pair.decode, request, _question(model, prompt, logprobs=logprobs))
            found = proofs.fault(handed, alone)
            if found is not None:
                break
        return found

    async def _handed_over(self, pair: Pair, request: RequestId, asked: dict[str, Any]) -> Said | str:
        """What D says with P's blocks, or why there are none."""
        name = TransferId(request, 1, pair.prefill_epoch)
        stamp = partial(self._router.tickets.stamp, transfer=name, producer=pair.prefill)
        self._room(pair.decode)
        told = await self._leg(pair.prefill, request, stamp(wire.prefill_body(asked, transfer=name), pair.prefill))
        try:
            transfer = wire.read_transfer(json_in(told))
        except (msgspec.DecodeError, AttributeError):
            raise _NoWord("the prefill leg's answer cannot be read") from None
        if transfer is None:
            return "the prefill instance holds nothing for others"
        pulled = False
        try:
            said = await self._answer(
                pair.decode, request, stamp(wire.decode_body(asked, transfer.untold()), pair.decode)
            )
            pulled = said.cached_tokens != 0
            return said
        finally:
            if not pulled:
                await self._release(pair, request, transfer, stamp)

    async def _release(self, pair: Pair, request: RequestId, transfer: wire.Transfer, stamp: _Stamp) -> None:
        """Nobody has pulled it: tell P its name, if it has one, else have D tell P; or it is left to its lease."""
        name = transfer.fields.get(wire.TRANSFER)
        to, path, body = pair.decode, PATH, wire.release_body(transfer)
        if isinstance(name, str):
            to, path, body = pair.prefill, wire.RELEASE_PATH, wire.release_by_name(name)
        view = self._router.view
        if view.knows(to):
            with contextlib.suppress(EngineLost):
                sent = msgspec.json.encode(stamp(body, to))
                await self._router.upstream.say(view.get(to).instance, path, sent, self._headers(request))

    async def _answer(self, instance: InstanceId, request: RequestId, body: Any) -> Said:
        said = proofs.read(await self._leg(instance, request, body))
        if said is None:
            raise _NoWord("an answer that cannot be read")
        return said

    def _room(self, instance: InstanceId) -> None:
        """Asked before each leg: an instance may be set aside, or begin to drain, while its proof is under way."""
        view = self._router.view
        if not view.knows(instance) or not view.get(instance).ready:
            raise _NoWord(f"{instance} takes no new legs")
        if not view.get(instance).has_place(view.routers):
            raise _NoWord(f"{instance} has no place")

    def _headers(self, request: RequestId) -> dict[str, str]:
        return {**self._router.engine_headers, "X-Request-Id": request, "Content-Type": "application/json"}

    async def _leg(self, instance: InstanceId, request: RequestId, body: Any) -> bytes:
        """One of its requests, if there is a place for it."""
        view = self._router.view
        self._room(instance)
        target = view.get(instance).instance
        view.leg_started(instance)
        try:
            async with asyncio.timeout(LEG_S):
                sent, headers = msgspec.json.encode(body), self._headers(request)
                answer = await self._router.upstream.call(target, "POST", PATH, sent, headers)
        finally:
            self._router.leg_ended(instance)
        if answer.status != 200:
            raise _NoWord(f"{instance}: HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}")
        return answer.body


def _question(model: str, prompt: str, *, logprobs: bool) -> dict[str, Any]:
    """Under a salt of its own each time."""
    return proofs.question(model, prompt, secrets.token_hex(16), logprobs=logprobs)
