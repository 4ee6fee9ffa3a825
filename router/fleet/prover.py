"""Proves pairs (`router.fleet.pair_proofs`) with a few short requests each. A shell: random prompts, a clock.

Instances that are not proven yet come first, several at once and without a pause, as they hand nothing over until then.
All others are proven one after another. A proof's legs are like any others: they have tickets, count against an
instance's places, and are sent only where a place is free, so that no request waits for a proof. Only an instance that
is not proven at all takes one leg beyond its places; otherwise a full fleet would never be proven.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from cluster import wire
from cluster.ids import InstanceId, RequestId, TransferId
from cluster.readable import json_in
from cluster.registry.proofs import printable
from router.core.eligibility import CHAT, COMPLETIONS
from router.core.values import NOTHING_PROVEN, ProofStanding
from router.fleet import events as d
from router.fleet import pair_proofs
from router.fleet.pair_proofs import Pair, PairProofs, ProofAnswer
from router.fleet.view import FleetView
from router.http.engines import Engines
from router.http.upstream import EngineLost

logger = logging.getLogger("baton.router")

EVERY_S = 1.0
"""The pause between two proofs while no instance waits for its first."""
AT_ONCE: Final = 8
"""The number of simultaneous proofs of unproven instances; an instance is in one of them at a time."""
TOLD_AT_ONCE: Final = 64
"""In a fleet up to this size, each proof is reported at once. In a larger one, where a report costs milliseconds,
proofs of unproven instances are reported together, every `TOLD_EVERY_S`."""
TOLD_EVERY_S: Final = 1.0
"""The pause between two such reports while proofs run, in seconds."""
LEG_S: Final = 30.0
"""A leg that takes longer says nothing about its pair."""
SILENT_S: Final = pair_proofs.TRIES * LEG_S + pair_proofs.LATER_S
"""The first pause of a pair whose proof took longer. It is longer than `TRIES` such proofs: an engine that answers no
completion is not tried with one partner after another."""
READY_S: Final = 5.0
"""How long a router that could serve waits for the first proof before it reports ready, so that the first requests can
be handed over, too. The wait is limited, as otherwise a fleet that cannot be proven would never be served."""
SECRET_BYTES: Final = 64
"""Random bytes, written in hex and repeated by half: about 120 tokens of most vocabularies and 192 of letters, so that
several blocks move, and any context can hold it."""

_Stamp = Callable[[Mapping[str, Any], InstanceId], Mapping[str, Any]]
"""Adds the ticket to a leg."""


class _NoWord(Exception):
    """The proof could not be carried out."""


class _Refused(_NoWord):
    """An instance has answered that it does not support the request."""


class Prover:
    """The proofs of one router."""

    def __init__(
        self,
        view: FleetView,
        engines: Engines,
        *,
        fold: Callable[[d.FleetEvent, float], object],
        leg_ended: Callable[[InstanceId], None],
        counted: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        """The prover's surroundings.

        Args:
            view: the router's view of the fleet.
            fold: takes events for the view: a proof's result, or a started leg.
            engines: the engines that get the legs.
            leg_ended: called when a leg is over: its place is free.
            counted: called with the result of each proof: passed, failed or none.
            changed: called when the view has been told something new.
        """
        self._view: Final = view
        self._engines: Final = engines
        self._fold: Final = fold
        self._leg_ended: Final = leg_ended
        self._counted: Final = counted
        self._changed: Final = changed
        self.proofs: Final = PairProofs()
        self.news: Final = asyncio.Event()
        """The fleet has changed, or a proof has ended: there may be a pair to prove."""
        self._complete_at: float | None = None
        """The time of the first call of `settled`, in monotonic seconds."""
        self._under_proof = frozenset[InstanceId]()
        """The instances of the pair that `_prove_all_due` proves now: `_begin_joining` leaves them out."""
        self._joining: Final = set[Pair]()
        """The pairs with unproven instances that are proven now."""
        self._untold = False
        """A proof of them has ended, and the view has not been told yet."""
        self._told_s = -math.inf
        """When the view was told last, in monotonic seconds."""
        self._prove(NOTHING_PROVEN)  # from now on only proven pairs hand over

    def settled(self, now: float) -> bool:
        """Whether a router with an instance for each leg has proven enough to begin: a proof has ended, no pair is left
        to prove, or `READY_S` seconds have passed since the first call.
        """
        if self._complete_at is None:
            self._complete_at = now
        known = all(seen.models for seen in self._view.all() if seen.ready)
        return self.proofs.tried > 0 or now - self._complete_at >= READY_S or (known and not self._due(now))

    def _due(self, now: float) -> bool:
        fleet = self._view.all()
        return any(self.proofs.due(fleet, model, now) is not None for model in pair_proofs.models_of(fleet))

    async def run(self) -> None:
        """Prove pairs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._prove_all_joining())
            group.create_task(self._prove_all_due())

    async def _prove_all_joining(self) -> None:
        """Prove pairs with unproven instances, up to `AT_ONCE` side by side. An engine that does not answer takes
        one of these places, and does not keep the others waiting.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                self._begin_joining(group)
                if self._untold and (not self._joining or time.monotonic() - self._told_s >= TOLD_EVERY_S):
                    self._tell()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        await self.news.wait()
                self.news.clear()

    def _begin_joining(self, group: asyncio.TaskGroup) -> None:
        """Begin as many proofs of unproven instances as there are places for."""
        fleet, now = self._view.all(), time.monotonic()
        busy = self._under_proof.union(*(pair.names for pair in self._joining))
        for model in pair_proofs.models_of(fleet) if len(self._joining) < AT_ONCE else ():
            while len(self._joining) < AT_ONCE and (pair := self.proofs.joining(fleet, model, now, busy)) is not None:
                self._joining.add(pair)
                busy |= {*pair.names}
                group.create_task(self._prove_joining(pair, model))

    async def _prove_joining(self, pair: Pair, model: str) -> None:
        try:
            await self.prove(pair, model, joining=True)
        finally:
            self._joining.discard(pair)
            self.news.set()

    async def _prove_all_due(self) -> None:
        """Prove all other pairs, one after another. An instance that joins meanwhile does not wait for this loop: on a
        full fleet a proof takes seconds.
        """
        while True:
            pair = self._next_due()
            if pair is not None:
                self._under_proof = frozenset(pair[0].names)
                try:
                    await self.prove(*pair)
                finally:
                    self._under_proof = frozenset()
            await asyncio.sleep(EVERY_S)

    def _next_due(self) -> tuple[Pair, str] | None:
        fleet, now = self._view.all(), time.monotonic()
        for model in pair_proofs.models_of(fleet):
            if self.proofs.joining(fleet, model, now) is None:
                pair = self.proofs.due(fleet, model, now)
                if pair is not None:
                    return pair, model
        return None

    async def prove(self, pair: Pair, model: str, *, joining: bool = False) -> None:
        """Prove a pair once, and tell the router's view the result."""
        because: str | None
        inexact, doubt, pause_s = "", "", 0.0
        try:
            because, inexact = await _Proof(
                self._view, self._engines, self._fold, self._leg_ended, pair, model,
                joining=joining, chats=not self.proofs.reads_alike(pair), itself=not self.proofs.agrees(pair),
            ).made()  # fmt: skip
        except (_NoWord, EngineLost, TimeoutError) as none:
            because, doubt = None, str(none) or "it took too long"
            if isinstance(none, TimeoutError) and len(self._view.all()) > 2:  # else no other pair waits for its place
                pause_s = SILENT_S
            logger.log(logging.INFO if joining else logging.DEBUG, "%s to %s: not proven: %s", *pair.names, doubt)
        except Exception:  # a bug of the router's with this pair: continue with the others
            because, doubt = None, "the proof failed for a reason of the router's own"
            logger.exception("%s to %s: not proven", *pair.names)
        self.proofs.ended(pair, because, time.monotonic(), inexact, doubt, pause_s)
        self._counted({None: "none", "": "passed"}.get(because, "failed"))
        if because:
            logger.warning("%s to %s: nothing is handed over for now: %s", *pair.names, because)
        elif inexact:
            logger.warning("%s to %s: handed over, but P's token is not relied on: %s", *pair.names, inexact)
        if not joining or len(self._view.all()) <= TOLD_AT_ONCE:
            self._tell()
        else:
            self._untold = True

    def _tell(self) -> None:
        view = self._view
        self._untold, self._told_s = False, time.monotonic()
        self._prove(self.proofs.standing(view.all()))
        failed = self.proofs.failed()
        if failed != view.distrusted:
            pairs = [(*names, because) for names, because in failed.items()]
            self._fold(d.Distrusted(pairs), time.monotonic())
        self._changed()

    def _prove(self, standing: ProofStanding) -> None:
        doubts = [(*names, because) for names, because in standing.doubts.items()]
        inexact = [(*names, because) for names, because in standing.inexact.items()]
        merged = list(standing.merged.items())
        told = d.Proven(dict(standing.gives), dict(standing.takes), doubts, inexact, merged)
        self._fold(told, time.monotonic())


class _Comparison(NamedTuple):
    """What one prompt has shown."""

    fault: str | None
    """`pair_proofs.fault`."""
    inexact: str = ""
    """`pair_proofs.inexact`."""
    held: str = ""
    """Why P's token cannot be the first, by P's own answer."""
    differs: bool = False
    """D's answers with P's blocks and without are not the same."""


class _Proof:
    """One proof of one pair."""

    def __init__(
        self,
        view: FleetView,
        engines: Engines,
        fold: Callable[[d.FleetEvent, float], object],
        leg_ended: Callable[[InstanceId], None],
        pair: Pair,
        model: str,
        *,
        joining: bool,
        chats: bool,
        itself: bool,
    ) -> None:
        self._view = view
        self._engines = engines
        self._fold = fold
        self._leg_ended = leg_ended
        self._pair = pair
        self._model = model
        self._joining = joining
        self._chats_too = chats
        self._asks_about_itself = itself
        self._request = RequestId(f"proof-{secrets.token_hex(8)}")

    async def made(self) -> tuple[str, str]:
        """What is wrong with the pair, and why P's token may not stand for D's first; empty: nothing."""
        found = await self._disagrees() if self._asks_about_itself else ""
        if found:
            return found, ""
        inexact = ""
        for _ in range(pair_proofs.PROMPTS if found is None else 1):
            found, doubt = await self._seen()
            inexact = inexact or doubt
            if found:
                return found, inexact
        if not self._chats_too:
            return "", inexact
        found, drawn = await self._chats()
        if not found and drawn and not inexact:  # a difference by rounding does not happen twice
            found, drawn = await self._chats()
        return found, inexact or drawn

    async def _disagrees(self) -> str | None:
        """`pair_proofs.disagrees` of D; None also if D refuses to tell logprobs."""
        model, decode = self._model, self._pair.decode
        prompt, seed = pair_proofs.told_by(secrets.token_hex(SECRET_BYTES)), secrets.randbelow(1 << 31)
        try:
            asked = pair_proofs.question_alone(model, prompt, secrets.token_hex(16), seed)
            said = await self._answer(decode, asked)
            scored = await self._answer(decode, pair_proofs.question_again(model, said, secrets.token_hex(16)))
        except _Refused:
            return None
        return pair_proofs.disagrees(said, scored)

    async def _seen(self) -> tuple[str, str]:
        """What one prompt has shown, or up to three where D's answers to the first differ; in the form of `made`."""
        seen = await self._compared(logprobs=False)
        if seen.fault is None or (seen.fault == "" and seen.inexact and not seen.held):  # the difference may be a tie
            with contextlib.suppress(_Refused):  # without logprobs a tie cannot be told: the difference stands
                seen = await self._compared(logprobs=True)
                if seen.fault == "" and seen.differs:  # by chance a difference can look like a tie, and hardly twice
                    seen = await self._compared(logprobs=True)
        found, inexact = seen.fault, seen.inexact
        if found is None:
            found = "with the other's blocks the decode instance answers otherwise than alone"
        return found, inexact

    async def _compared(self, *, logprobs: bool) -> _Comparison:
        """Send one new prompt in all ways, and compare the answers."""
        prompt = pair_proofs.told_by(secrets.token_hex(SECRET_BYTES))
        asked = partial(pair_proofs.question, self._model, prompt, logprobs=logprobs)
        told = await self._handed_over(asked(secrets.token_hex(16)))
        if isinstance(told, str):
            return _Comparison(told)
        first, handed, held = told
        alone = await self._answer(self._pair.decode, asked(secrets.token_hex(16)))
        inexact = pair_proofs.inexact(first, held, handed, alone)
        return _Comparison(pair_proofs.fault(handed, alone), inexact, held, handed.text != alone.text)

    async def _chats(self) -> tuple[str, str]:
        """The fault in how the two tokenize a chat, and the difference in how they answer it; empty: none. Two engines
        without a chat template count as equal.
        """
        prompt, seed = secrets.token_hex(8), secrets.randbelow(1 << 31)
        heard = []
        for name in self._pair.names:
            try:
                body = pair_proofs.chat(self._model, prompt, secrets.token_hex(16), seed)
                heard.append(pair_proofs.chat_read(await self._leg(name, body, CHAT)))
            except _Refused:
                heard.append(pair_proofs.NO_CHATS)
        return pair_proofs.other_chat(*heard), pair_proofs.other_draw(*heard)

    async def _handed_over(self, asked: dict[str, Any]) -> tuple[ProofAnswer, ProofAnswer, str] | str:
        """P's answer, D's answer with P's blocks, and why P's token cannot be the first by P's own answer; or why there
        are none.
        """
        pair, request = self._pair, self._request
        view = self._view
        if not view.knows(pair.prefill):
            raise _NoWord(f"{pair.prefill} has left")
        name = TransferId(request, 1, view.get(pair.prefill).instance.epoch)
        stamp = partial(self._engines.tickets.stamp, transfer=name, producer=pair.prefill)
        self._room(pair.decode)
        formats = [view.get(each).instance.dtype for each in pair.names]
        leg = wire.prefill_body(asked, token_ids=True, transfer=name)
        told = await self._leg(pair.prefill, stamp(leg, pair.prefill))
        try:
            fields = json_in(told)
            transfer = wire.read_transfer(fields)
        except (msgspec.DecodeError, AttributeError):
            raise _NoWord("the prefill leg's answer cannot be read") from None
        if transfer is None:
            return "the prefill instance holds nothing for others"
        held = transfer.stops_short_of(fields)
        first, pulled = pair_proofs.read(told), False
        apart = pair_proofs.computed_otherwise(held, *formats)
        try:
            if apart:
                return apart
            said = await self._answer(pair.decode, stamp(wire.decode_body(asked, transfer.untold()), pair.decode))
            pulled = said.cached_tokens != 0
        finally:
            if not pulled:
                await self._release(transfer, stamp)
        if first is None:
            raise _NoWord("the prefill leg's answer cannot be read")
        return first, said, held

    async def _release(self, transfer: wire.TransferFields, stamp: _Stamp) -> None:
        """Release a hold that no instance has pulled: tell P its name, if it has one, else make D tell P; or leave it
        to its lease.
        """
        name = transfer.fields.get(wire.TRANSFER)
        to, path, body = self._pair.decode, COMPLETIONS, wire.release_body(transfer)
        if isinstance(name, str):
            to, path, body = self._pair.prefill, wire.RELEASE_PATH, wire.release_by_name(name)
        view = self._view
        if view.knows(to):
            with contextlib.suppress(EngineLost):
                sent = msgspec.json.encode(stamp(body, to))
                await self._engines.upstream.say(view.get(to).instance, path, sent, self._headers())

    async def _answer(self, instance: InstanceId, body: Any) -> ProofAnswer:
        said = pair_proofs.read(await self._leg(instance, body))
        if said is None:
            raise _NoWord("an answer that cannot be read")
        return said

    def _room(self, instance: InstanceId) -> None:
        """Check before each leg: an instance may be quarantined, or begin to drain, while its proof is under way."""
        view = self._view
        if not view.knows(instance) or not view.get(instance).ready:
            raise _NoWord(f"{instance} takes no new legs")
        if not self._joining and not view.get(instance).has_place(view.routers):
            raise _NoWord(f"{instance} has no place")

    def _headers(self) -> dict[str, str]:
        return {**self._engines.credentials.own, "X-Request-Id": self._request, "Content-Type": "application/json"}

    async def _leg(self, instance: InstanceId, body: Any, path: str = COMPLETIONS) -> bytes:
        """Send one request of the proof to an instance, and return the answer's body.

        Raises:
            _Refused: the instance has answered with a status from 400 to 499.
            _NoWord: no place is free, or another status has come.
            TimeoutError: no answer within `LEG_S`.
            EngineLost: the connection failed.
        """
        view = self._view
        self._room(instance)
        target = view.get(instance).instance
        self._fold(d.LegStarted(instance), time.monotonic())
        try:
            async with asyncio.timeout(LEG_S):
                answer = await self._engines.upstream.call(
                    target, "POST", path, msgspec.json.encode(body), self._headers()
                )
        finally:
            self._leg_ended(instance)
        if answer.status != 200:
            because = f"{instance}: HTTP {answer.status}: {printable(answer.body[:200].decode(errors='replace'), 200)}"
            raise _Refused(because) if 400 <= answer.status < 500 else _NoWord(because)
        return answer.body
