"""Early legs in the connector's scheduler half: passes requests and notices to `decode.early` and `prefill.callers`.

Runs inside vLLM's engine core, on vLLM's own thread.
"""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any, Final

from cluster.wire import EARLY, FIRST_TOKEN, PINS, TOLD_EARLY, TRANSFER
from decode.early import EarlyLegs
from decode.early_reads import Place
from decode.peers import ProducerPeers
from engine.vllm.connector.notices import NoticeChannel, open_channel
from engine.vllm.connector.parts import EarlyBlocks, PartsHere
from engine.vllm.connector.served import reads_peers
from kvtransfer.asks import Introduce, Payload
from kvtransfer.early_notes import CHANNEL_STAGE, Part, Ready, Want, encode, parse
from kvtransfer.fields import name_in, pull_in, sane
from prefill.callers import Callers

_OWN: Final = frozenset({EARLY, PINS, FIRST_TOKEN, TOLD_EARLY, TRANSFER})
"""Fields that no notice may set."""
LISTEN_S: Final = 0.1
"""How long after a hold was made an idle producer listens for its consumer without resting: a leg that was sent early,
but arrived late, asks within the router's own few milliseconds."""


SET_UP_S: Final = 5.0
"""For so many seconds after an introduction each step looks at the channel, which takes the connection's set-up
further. Otherwise the first early leg of a pair would wait for it."""


class EarlyHandoffs:
    """Both sides of early legs in one engine: as D the legs that wait here, as P the engines that ask for holds."""

    def __init__(self, peers: ProducerPeers, block_size: int = 16, *, reads_parts: bool = False) -> None:
        """`reads_parts`: whether blocks may be read while their producer computes the rest."""
        self._channel: NoticeChannel | None = open_channel()
        self._peers: Final = peers
        self._legs: Final = EarlyLegs()
        self._callers: Final = Callers()
        self._parts: Final = PartsHere(block_size)
        self.blocks: Final = EarlyBlocks(block_size, reads=reads_parts)
        self._requests: Final[dict[str, Any]] = {}
        """vLLM's requests of early legs, by their ids."""
        self._cached: Final[dict[str, int]] = {}
        """By prefill leg under way: its prompt's tokens that were in the prefix cache."""
        self._filled_at = 0.0
        """When the last hold was made, in monotonic seconds."""
        self._set_up_at = 0.0
        """When the connection of the engine that was introduced last is set up at the latest, in monotonic seconds."""
        self.has_parts = False
        """Whether blocks of a waiting leg were announced when notices were last taken."""

    @property
    def counts(self) -> Counter[str]:
        """Counts of all events since the start."""
        return self._legs.counts + self.blocks.counts

    @property
    def waiting(self) -> int:
        """The number of early legs that wait for their producers' notices."""
        return self._legs.waiting

    @property
    def speaks(self) -> bool:
        """Whether a notice may come for a leg here, or the channel to another engine is being set up."""
        return self._legs.untold > 0 or time.monotonic() < self._set_up_at

    # --- peers ---

    def payloads(self) -> tuple[Payload, ...]:
        """What other engines need to send notices here, as one of this engine's payloads."""
        return () if self._channel is None else (Payload(CHANNEL_STAGE, 0, self._channel.payload),)

    def meet(self, met: Introduce) -> None:
        """An engine was introduced."""
        if self._channel is None:
            return
        for each in met.payloads:
            if each.stage == CHANNEL_STAGE:
                self._set_up_at = time.monotonic() + SET_UP_S
                self._channel.meet(met.engine_id, each.data)

    def forget(self, engine: str) -> None:
        """An engine has gone, or another life of its instance was introduced."""
        self.blocks.rates.forgotten(engine)
        if self._channel is not None:
            self._channel.part(engine)

    # --- as D ---

    def opened(self, request: Any) -> bool:
        """A request has arrived. Returns whether it is an early leg."""
        fields = request.kv_transfer_params
        if not isinstance(fields, dict) or EARLY not in fields:
            return False
        name, producer = name_in(fields), fields[EARLY]
        engine = self._engine_of(producer) if name is not None and isinstance(producer, str) else ""
        self._requests[request.request_id] = request
        self._legs.opened(request.request_id, name or "", engine, time.monotonic())
        self.ask()
        return True

    def _engine_of(self, instance: str) -> str:
        """The present life of an instance, if notices can be sent to it; else empty."""
        if self._channel is None:
            return ""
        return next((engine for engine in self._peers.lives(instance) if engine in self._channel), "")

    def ask(self) -> None:
        """Ask the producers for the holds of waiting legs, where a question is due."""
        now = time.monotonic()
        self._legs.lost(lambda engine: not self._peers.may_wait(engine, now))
        self._end_reads()
        for engine, name in self._legs.due(now):
            if self._channel is not None:
                self._channel.tell(engine, encode(Want(name)))

    def _end_reads(self) -> None:
        for request in self._legs.take_abandoned():
            self.blocks.ends(request)

    def reads(self, request: Any, cached_tokens: int, core: Any) -> int:
        """A waiting leg: how many of its tokens blocks are wanted for now; 0: it waits on. `core`: vLLM's."""
        engine = self._legs.engine(request.request_id)
        if not self._peers.may_pull(engine, time.monotonic()):
            return 0
        return self.blocks.wants(request, cached_tokens, core)

    def reserved(self, request: Any, blocks: Any, tokens: int) -> bool:
        """vLLM has given a request blocks for so many tokens. Returns whether they are filled while it waits."""
        filled = self.blocks.wanted(request.request_id, tokens) and self._legs.reserved(request.request_id)
        if filled:
            self.blocks.reserved(request, blocks)
        return filled

    def timed(self, took: dict[str, tuple[int, float]]) -> None:
        """By engine: the blocks that were pulled from it, and the seconds on the wire."""
        for engine, (blocks, seconds) in took.items():
            if engine in self._peers:  # else it has gone meanwhile, and nothing would remove it again
                self.blocks.timed(engine, blocks, seconds)

    def place(self, request: Any) -> Place | None:
        """The hold of an early leg is there: the blocks that its pull goes on to fill; None: it has none yet."""
        ready = self._legs.ready(request.request_id)
        return None if ready is None else self.blocks.ready(request, ready.life)

    def waits(self, request: str) -> bool:
        """Whether the request is an early leg that still waits for its producer's notice."""
        return self._legs.waits(request, time.monotonic())

    def report_cached(self) -> None:
        """Let the answers of early legs report how much of the prompt *P* had cached, as other decode legs' answers do.
        The API server reads this number from a leg's own fields, and an early leg arrives there without them.
        """
        for name, request in list(self._requests.items()):
            ready, stats = self._legs.ready(name), request.prefill_stats
            if stats is None:  # its first token is out
                del self._requests[name]
            elif ready is not None:
                stats.num_cached_tokens = min(stats.num_cached_tokens, ready.cached)

    # --- as P ---

    def prefills(self, request: Any, name: str | None) -> None:
        """A prefill leg has arrived."""
        self._parts.begin(request, name if self._channel is not None else None)

    def step(self, output: Any) -> int:
        """A step is planned (`PartsHere.step`)."""
        return self._parts.step(output)

    def computed(self, step: int) -> None:
        """The output of this step is there: tell the consumers which blocks are complete."""
        for caller, part in self._parts.computed(step, self._callers.asking):
            if self._channel is not None and self._channel.tell(caller, encode(part)):
                self._legs.counts["parts told"] += 1

    def began(self, request: str, cached_tokens: int) -> None:
        """A prefill leg is scheduled for the first time."""
        self._cached.setdefault(request, cached_tokens)

    def filled(self, request: Any, fields: dict[str, Any]) -> list[Any]:
        """A prefill leg has left a hold: tell the consumers that asked for it, before its answer is on its way. Adds to
        `fields`, which are that answer's, whether one was told. Takes the notices that have just come first, and so
        returns what `hear` returns.
        """
        name, cached = name_in(fields), self._cached.pop(request.request_id, 0)
        if name is None or self._channel is None:
            return []
        heard = self.hear()
        tokens = list(request.output_token_ids)
        life = self._parts.end(request.request_id)
        ready = Ready(name, fields, int(tokens[0]) if len(tokens) == 1 else None, cached, life)
        note = encode(ready)
        told = [self._channel.tell(caller, note) for caller in self._callers.filled(request.request_id, ready)]
        fields[TOLD_EARLY] = any(told)
        self._filled_at = time.monotonic()
        return heard

    def over(self, request: str) -> None:
        """A hold is over, or its leg left none."""
        self._cached.pop(request, None)
        self._parts.end(request)
        self._callers.over(request)

    # --- both ---

    def finished(self, request: str) -> None:
        """A request is over. If its hold is left to the router, vLLM must not give it back, and asks after this."""
        known = self._requests.pop(request, None)
        if known is not None and self._legs.keeps(request):
            known.kv_transfer_params["do_remote_prefill"] = False
        self._legs.finished(request)
        self._end_reads()
        self.blocks.ends(request)

    def listens(self) -> bool:
        """Whether a notice may come at any moment."""
        return self._legs.waiting > 0 or time.monotonic() - self._filled_at < LISTEN_S

    def hear(self) -> list[Any]:
        """Take the notices that have come. Returns the early legs that have their holds' fields: pulls from now on."""
        self.has_parts = False
        if self._channel is None:
            return []
        requests: list[Any] = []
        for engine, raw in self._channel.heard():
            note = parse(raw)
            if isinstance(note, Want):
                ready = self._callers.wanted(engine, note.name, time.monotonic())
                if ready is not None:
                    self._channel.tell(engine, encode(ready))
            elif isinstance(note, Ready):
                requests += [self._take(request, note) for request in self._legs.told(engine, note)]
            elif isinstance(note, Part):
                for request in self._legs.waiting_for(engine, note.name):
                    self.has_parts |= self.blocks.told(request, engine, note)
            else:
                self._legs.counts["early notices ignored"] += 1
        return requests

    def keeps(self, request: str) -> bool:
        """Whether the request's ranks must not give its hold back (`decode.early`, told late)."""
        return self._legs.keeps(request)

    def scheduled(self, request: str) -> None:
        """The engine computes the request's first step."""
        self._legs.scheduled(request)

    def take_given_back(self) -> list[Any]:
        """Stand-ins for the requests whose holds the scheduler half gives back; each is given once. A stand-in has its
        request's id and the hold's fields: with them the ranks tell the producer that the hold is not wanted. The
        requests themselves keep their fields, so vLLM pulls nothing more for them.
        """
        return [
            SimpleNamespace(request_id=request, kv_transfer_params=dict(ready.fields))
            for request, ready in self._legs.take_given_back()
            if sane(ready.fields) is not None and not isinstance(pull_in(ready.fields), str)
        ]

    def _take(self, name: str, ready: Ready) -> Any:
        """Give the request its hold's fields, as if they had come with it. Returns the request."""
        request = self._requests[name]
        fields = request.kv_transfer_params
        told = {key: value for key, value in ready.fields.items() if key not in _OWN}
        if sane(told) is None:
            told = {"do_remote_prefill": False}
        whole = told.get("remote_num_tokens") == len(request.prompt_token_ids or ())
        if fields.get(PINS) is True and whole and ready.token is not None:
            told[FIRST_TOKEN] = ready.token
        fields.update(told)  # the sampling parameters share this mapping
        return request


def reads_parts(transfer: Any, *, digests: bool) -> bool:
    """Whether an engine may read blocks of prompts that are not complete yet.

    Digests are written when a prompt is complete, and a pull compares all its blocks: no parts. Nor are there any where
    vLLM fails a request if its blocks did not come: a leg that was read early in vain pulls once more.

    Args:
        transfer: vLLM's configuration of KV transfers.
        digests: whether blocks get digests.
    """
    return reads_peers(transfer) and transfer.kv_load_failure_policy == "recompute" and not digests
