"""Our connector's scheduler half: names of holds, early releases, slots, and the door. Runs inside vLLM's engine core.

It only ever answers vLLM's own hooks, on vLLM's own thread. What comes in at the door waits in a queue for the next
step; the engine is woken for it, since one without work makes none.
"""

from __future__ import annotations

import logging
import queue
import secrets
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.v1.engine import EngineCoreRequestType

from cluster.wire import TRANSFER
from kvtransfer.asks import Ask, Forget, Introduce, Metadata, Payload, Release, State
from kvtransfer.door import Door
from kvtransfer.fields import held_in, name_in, pull_in, sane
from kvtransfer.holds import Holds
from kvtransfer.rests import Rest
from kvtransfer.slots import FIELD, Slot, Slots, slot_in
from kvtransfer.span import pull_span
from kvtransfer.trust import Trust
from kvtransfer.vllm_metadata import SLOTS, BatonMetadata, Told
from kvtransfer.vouchers import Computing, names

logger = logging.getLogger("vllm.baton.scheduler")

PEERS_MAX = 4096
"""Engines that may be introduced at one time."""

MEETING_S = 15.0
"""So long an engine without requests steps for a handshake to end."""


class BatonScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """See the module. Overrides hooks of vLLM 0.32's `NixlBaseConnectorScheduler`.

    Long, as vLLM calls all of these hooks on one object; the rules that they follow stand in the modules beside
    this one.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._door_path = options.get("door")
        self._epoch = int(options.get("epoch", 0))
        self._door: Door | None = None
        self._payloads: tuple[Payload, ...] = ()
        self._compatibility = ""
        self._holds = Holds(Slots(SLOTS, secrets.token_bytes(32)))
        self._asked: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        self._peers: dict[str, str] = {}
        """Introduced engines -> instance."""
        self._standing: dict[str, str] = {}
        self._meeting: dict[str, float] = {}
        """Engines that were introduced and that the workers have not told of yet, and until when that is waited for."""
        self._marks: dict[str, Slot] = {}
        self._pulling: dict[str, tuple[str, int]] = {}
        """Requests whose blocks are being read: from which engine, and how many tokens they hold."""
        self._refused: dict[str, int] = {}
        """Requests that are not pulled, and the tokens of each that P holds."""
        self._recomputed_tokens = 0
        """Of prompts that were handed over: what was computed here nevertheless."""
        self._ended: dict[str, str] = {}
        """Of these, those that a rank has done with: why their blocks cannot be used, or nothing."""
        self._trust = Trust()
        self._computing = Computing() if options.get("digests") else None
        """Legs whose blocks are to be vouched for; None: digests are off."""
        self._releases: list[str] = []
        self._counts: Counter[str] = Counter()
        self._rests = Rest()
        self._core = _engine_core()
        if self._core is None:
            logger.warning("The engine's core was not found: what comes to an idle engine waits for its next request.")

    # --- the door ---

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Where vLLM opens its ZMQ port for whoever asks, a door is opened for the agent."""
        encoder = msgspec.msgpack.Encoder()
        self._payloads = tuple(
            Payload(stage, rank, encoder.encode(handshake)) for (stage, rank), handshake in sorted(metadata.items())
        )
        self._compatibility = next(iter(metadata.values())).compatibility_hash
        if self._door_path is None:
            logger.warning("No `door` in kv_connector_extra_config: nobody can introduce engines to this one.")
        elif self._door is None:
            self._door = Door(Path(self._door_path), self._answer)
            logger.info("The door is at %s", self._door_path)

    def _answer(self, ask: Ask) -> dict[str, Any]:
        """On a thread of the door's: says what is known, and queues what is to be done."""
        match ask:
            case Metadata():
                return {
                    "engine_id": self.engine_id,
                    "epoch": self._epoch,
                    "compatibility": self._compatibility,
                    "payloads": [each.object() for each in self._payloads],
                }
            case State():
                return self._state()
            case Introduce(engine_id):
                if engine_id not in self._peers and len(self._peers) + self._asked.qsize() >= PEERS_MAX:
                    return {"error": f"{PEERS_MAX} engines are known already"}
        self._asked.put(ask)
        self._wake()
        return {"ok": True}

    def _state(self) -> dict[str, Any]:
        counts = self._holds.counts + self._counts
        return {
            "engine_id": self.engine_id,
            "holds": self._holds.held,
            "legs": self._holds.open_legs,
            "pulls": len(self._pulling),
            "slots_free": self._holds.slots.free,
            "recomputed_tokens": self._recomputed_tokens,
            "peers": {engine: self._told_of(engine, instance) for engine, instance in dict(self._peers).items()},
            "counts": dict(sorted(counts.items())),
        }

    def _told_of(self, engine: str, instance: str) -> dict[str, Any]:
        record = self._trust.of(engine)
        return {
            "instance": instance,
            "link": self._standing.get(engine, "introduced"),
            "pulled": record.pulled,
            "failed": record.failed,
            "aside": record.aside,
            "shunned": not self._trust.may_pull(engine, time.monotonic()),
        }

    def _wake(self) -> None:
        if self._core is not None:
            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def has_pending_push_work(self) -> bool:
        """vLLM asks whether there is something to step for: what was asked, or a handshake. That ends between two
        steps and is told of with the second, which an engine without requests would not make.
        """
        if not self._asked.empty():
            return True
        if self._meeting:
            now = time.monotonic()
            self._meeting = {engine: until for engine, until in self._meeting.items() if until > now}
        return bool(self._meeting)

    # --- a decode leg ---

    def on_new_request(self, request: Any) -> None:
        """Fields that vLLM's connector would stumble over end here; a prefill leg gets its slot."""
        fields = request.kv_transfer_params
        if fields is not None and sane(fields) is None:
            logger.warning("%s: transfer fields that cannot be read are left out", request.request_id)
            self._counts["unreadable fields"] += 1
            request.kv_transfer_params = None
            if isinstance(fields, dict) and fields.get("do_remote_prefill"):
                self._refused[request.request_id] = held_in(fields, len(request.prompt_token_ids or ()))
        super().on_new_request(request)
        if _holds(request):
            slot = self._holds.open(request.request_id, name_in(request.kv_transfer_params))
            if slot is not None:
                self._marks[request.request_id] = slot
            if self._computing is not None:
                prompt = request.prompt_token_ids or ()
                self._computing.open(request.request_id, len(prompt), self._names(request, len(prompt)))

    def _names(self, request: Any, tokens: int) -> tuple[bytes, ...]:
        """What the blocks of a prompt's first tokens are: with what else their KV depends on, of a request."""
        adapter, seen = request.lora_request, request.mm_features or ()
        if adapter is None and not seen:
            return names((request.prompt_token_ids or ())[:tokens], self.block_size)
        places = [(each.identifier, each.mm_position.offset, each.mm_position.length) for each in seen]
        about = ("" if adapter is None else adapter.lora_name, places)
        return names((request.prompt_token_ids or ())[:tokens], self.block_size, repr(about).encode())

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How much of a prompt is pulled: what P holds of it, if that can be confirmed; else nothing of it."""
        fields = request.kv_transfer_params
        if not fields or not fields.get("do_remote_prefill"):
            return 0, False
        pull, prompt = pull_in(fields), len(request.prompt_token_ids or ())
        if not isinstance(pull, str) and pull.engine not in self._peers:
            pull = f"engine {pull.engine} was not introduced"
        elif not isinstance(pull, str) and not self._trust.may_pull(pull.engine, time.monotonic()):
            pull = f"pulls from {self._peers[pull.engine]} have failed, the last {self._trust.of(pull.engine).in_a_row}"
            self._counts["set aside"] += 1
        if isinstance(pull, str):
            if request.request_id not in self._refused:  # it is asked again at each step, until there is room for it
                logger.info("%s is computed here: %s", request.request_id, pull)
                self._counts["not pulled"] += 1
            self._refused[request.request_id] = max(0, held_in(fields, prompt) - num_computed_tokens)
            return 0, False
        # vLLM takes P's prompt to be as long as ours. A prompt longer than what P holds is taken as far as it goes;
        # of a shorter one the worker reads only the blocks that it has (`BatonWorker._aligned`).
        usable = min(pull.tokens, prompt)
        return (usable - num_computed_tokens, True) if usable > num_computed_tokens else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks to read into are there, if any are needed."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._recomputed_tokens += self._refused.pop(request.request_id, 0)
        entry = self._reqs_need_recv.get(request.request_id)
        if entry is None or not entry[3]:
            return  # nothing that it would wait for
        engine = request.kv_transfer_params["remote_engine_id"]
        self._pulling[request.request_id] = engine, num_external_tokens
        self._trust.began(engine, time.monotonic())
        _, (local,), (cached,), _ = entry
        held, prompt = request.kv_transfer_params["remote_num_tokens"], len(request.prompt_token_ids or ())
        # vLLM may have taken a block more than what is pulled fills: for the token that D computes after it.
        span = pull_span(
            held_tokens=held,
            prompt_tokens=prompt,
            cached_tokens=cached * self.block_size,
            block_tokens=self.block_size,
        )
        self._reqs_need_recv[request.request_id] = (request, (list(local)[: span.blocks],), (cached,), True)

    # --- a prefill leg ---

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Hold its blocks, unless the router has given them up already."""
        self._refused.pop(request.request_id, None)
        if not _holds(request):
            passed: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
            return passed
        mine = request.request_id
        if not self._holds.wanted(mine, time.monotonic()):
            self._holds.counts["given up before held"] += 1
            self._not_held(mine)
            return False, None
        held, fields = super().request_finished(request, block_ids)
        if not held or fields is None:
            self._not_held(mine)
            return held, fields
        slot = self._holds.hold(mine)
        if self._computing is not None:
            self._computing.end(mine)
        fields[TRANSFER] = name_in(request.kv_transfer_params)
        if slot is not None:
            fields[FIELD] = slot.field()
        return held, fields

    def _not_held(self, request: str) -> None:
        """Its blocks are free at once: the worker must not think of it any more."""
        self._reqs_not_processed.add(request)
        self._reqs_need_save.pop(request, None)
        self._marks.pop(request, None)
        self._end(request)

    def _end(self, request: str) -> None:
        self._holds.end(request)
        if self._computing is not None:
            self._computing.end(request)

    # --- a step ---

    def build_connector_meta(self, scheduler_output: Any) -> BatonMetadata:
        """vLLM's, and what came in since."""
        self._rest(scheduler_output)
        introductions, forgotten = self._take_asked()
        expected = {name: slot_in(entry[0].kv_transfer_params or {}) for name, entry in self._reqs_need_recv.items()}
        pulled = self._pulled_names()
        meta = BatonMetadata(super().build_connector_meta(scheduler_output))
        meta.names, meta.vouched = pulled, self._vouched(scheduler_output)
        meta.introductions, meta.forgotten = introductions, forgotten
        meta.expected = {name: slot for name, slot in expected.items() if slot is not None}
        meta.marks, self._marks = self._marks, {}
        meta.releases, self._releases = tuple(self._releases), []
        return meta

    def _pulled_names(self) -> dict[str, tuple[bytes, ...]]:
        """What the blocks are that are about to be read."""
        if self._computing is None:
            return {}
        return {
            name: self._names(request, request.kv_transfer_params["remote_num_tokens"])
            for name, (request, local, *_) in self._reqs_need_recv.items()
            if any(local)
        }

    def _vouched(self, output: Any) -> dict[str, tuple[tuple[int, ...], tuple[bytes, ...]]]:
        """The prompts that this step ends: vLLM tells a connector of a request's blocks by its steps alone."""
        if self._computing is None:
            return {}
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._computing.given(new.req_id, new.block_ids[0], anew=True)
            computed[new.req_id] = new.num_computed_tokens
        more = output.scheduled_cached_reqs
        for request, blocks, tokens in zip(more.req_ids, more.new_block_ids, more.num_computed_tokens, strict=True):
            if blocks is not None:
                self._computing.given(request, blocks[0], anew=request in more.resumed_req_ids)
            computed[request] = tokens
        scheduled = output.num_scheduled_tokens
        ended = {name: self._computing.step(name, tokens + scheduled[name]) for name, tokens in computed.items()}
        return {name: done for name, done in ended.items() if done is not None}

    def _take_asked(self) -> tuple[tuple[Introduce, ...], tuple[str, ...]]:
        introductions, forgotten = [], []
        while not self._asked.empty():
            match self._asked.get():
                case Introduce() as met:
                    for engine in [each for each, name in self._peers.items() if name == met.instance]:
                        del self._peers[engine]  # an earlier life of it; the workers see to their half
                        self._trust.forgotten(engine)
                    self._peers[met.engine_id] = met.instance
                    self._trust.met(met.engine_id)
                    if self.vllm_config.kv_transfer_config.kv_role != "kv_producer":  # that one meets nobody
                        self._meeting[met.engine_id] = time.monotonic() + MEETING_S
                    introductions.append(met)
                case Forget(engine_id):
                    self._peers.pop(engine_id, None)
                    self._standing.pop(engine_id, None)
                    self._meeting.pop(engine_id, None)
                    self._trust.forgotten(engine_id)
                    forgotten.append(engine_id)
                case Release(name):
                    self._releases += self._holds.release(name, time.monotonic())
        return tuple(introductions), tuple(forgotten)

    def _rest(self, scheduler_output: Any) -> None:
        """An engine that does nothing but hold waits for news here, and not in a step a millisecond."""
        core, now = self._core, time.monotonic()
        if (
            core is None
            or scheduler_output.total_num_scheduled_tokens
            or self._pulling
            or self._marks
            or self._reqs_need_recv
            or not self._asked.empty()
            or core.scheduler.has_unfinished_requests()
            or not core.is_running()
        ):
            self._rests.news(now)
            return
        arrived = core.input_queue
        with arrived.not_empty:
            if not arrived.queue:
                arrived.not_empty.wait(self._rests.pause_s(now))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report: holds that have ended, pulls that have ended, and what they counted."""
        super().update_connector_output(connector_output)
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, Told):
            self._counts += told.counts
            self._standing |= told.peers
            for engine in told.peers:
                self._meeting.pop(engine, None)
            for request, because in told.ended.items():
                self._ended[request] = self._ended.get(request) or because
        for request in connector_output.finished_recving or ():
            engine, tokens = self._pulling.pop(request, ("", 0))
            if request in self._ended:
                self._trust.ended(engine, self._ended[request], time.monotonic())
            if self._ended.pop(request, "") or request in connector_output.failed_recving:
                self._recomputed_tokens += tokens
        if connector_output.finished_sending:
            self._rests.news(time.monotonic())
        for request in connector_output.finished_sending or ():
            # Its slot was cleared by every rank before this was reported, and its blocks are freed after this.
            self._end(request)

    def shutdown(self) -> None:
        """With the engine."""
        if self._door is not None:
            self._door.close()
        super().shutdown()


def _holds(request: Any) -> bool:
    fields = request.kv_transfer_params
    return isinstance(fields, dict) and bool(fields.get("do_remote_decode"))


def _engine_core() -> Any:
    """The engine core that this scheduler is being made for: vLLM gives a connector no way to it, nor to a wake-up.

    It is the `self` of one of our callers, and known by what we need of it. None: there is none (another executor).
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to one's callers
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(getattr(caller, "input_queue", None), queue.Queue) and hasattr(caller, "is_running"):
            return caller
        frame = frame.f_back
    return None
