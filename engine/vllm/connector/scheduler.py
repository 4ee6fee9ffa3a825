"""The connector's scheduler half: passes vLLM's hooks to `prefill.holds` and `decode.pulls`, and opens the agent
socket.

Runs inside vLLM's engine core. It only ever answers vLLM's own hooks, on vLLM's own thread. Requests at the agent
socket wait in a queue for the next step; the engine is woken for them, as an engine without work makes no step.
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

from cluster.wire import ADAPTER, CACHED_ONLY, FIRST_TOKEN, TRANSFER
from decode.peers import PEERS_MAX, ProducerLife, ProducerPeers
from decode.pulls import Pulls, worth_pulling
from engine.vllm.adapters import Adapters
from engine.vllm.connector.cached import cut_to_cached, only_whole_blocks
from engine.vllm.connector.early import EarlyHandoffs
from engine.vllm.connector.metadata import BatonMetadata, ExpectedHold, WorkerReport
from engine.vllm.connector.served import rank_in
from engine.vllm.weights import adapter_marks, adapter_of
from kvtransfer.asks import Ask, Forget, HeldState, Introduce, Metadata, Payload, ReleaseName, door_of
from kvtransfer.block_digests import Computing, names
from kvtransfer.door import Door
from kvtransfer.fields import handed_over, held_in, name_in, other_adapter, pull_in, sane
from kvtransfer.hold_marks import FIELD, SLOTS, Slots, slot_in
from kvtransfer.span import pull_span
from prefill.holds import Holds
from prefill.rests import Rest

logger = logging.getLogger("vllm.baton.scheduler")

LISTEN_EVERY_S = 0.0005
"""The longest time that an engine without work lets a notice wait, while one is expected."""


class BatonScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """See the module. Overrides hooks of vLLM 0.32's `NixlBaseConnectorScheduler`.

    The class is long because vLLM calls all of these hooks on one object; the rules are in `prefill` and `decode`.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        door = options.get("door")
        self._door_path = None if door is None else door_of(door, rank_in(vllm_config))
        self._epoch = int(options.get("epoch", 0))
        self._door: Door | None = None
        self._payloads: tuple[Payload, ...] = ()
        self._compatibility = ""
        self._holds = Holds(Slots(SLOTS, secrets.token_bytes(32)))
        self._asked: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        self._pulls = Pulls(ProducerPeers())
        self._early = EarlyHandoffs(self._pulls.peers)
        self._computing = Computing() if options.get("digests") else None
        """Legs whose blocks will get digests; None: digests are off."""
        self._adapters = Adapters(adapter_of, adapter_marks)
        self._counts: Counter[str] = Counter()
        self._rests = Rest()
        self._core = _engine_core()
        if self._core is None:
            logger.warning("The engine's core was not found: what comes to an idle engine waits for its next request.")

    # --- the agent socket ---

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Where vLLM would open its ZMQ port to all callers, open the agent socket instead."""
        encoder = msgspec.msgpack.Encoder()
        self._payloads = (
            tuple(
                Payload(stage, rank, encoder.encode(handshake)) for (stage, rank), handshake in sorted(metadata.items())
            )
            + self._early.payloads()
        )
        self._compatibility = next(iter(metadata.values())).compatibility_hash
        if self._door_path is None:
            logger.warning("No `door` in kv_connector_extra_config: no agent can introduce engines to this one.")
        elif self._door is None:
            self._door = Door(Path(self._door_path), self._answer)
            logger.info("The agent socket is at %s", self._door_path)

    def _answer(self, ask: Ask) -> dict[str, Any]:
        """On a thread of the socket: answer from memory, and queue the rest."""
        match ask:
            case Metadata():
                return {
                    "engine_id": self.engine_id,
                    "epoch": self._epoch,
                    "compatibility": self._compatibility,
                    "payloads": [each.object() for each in self._payloads],
                }
            case HeldState():
                return self._state()
            case Introduce(engine_id):
                known = self._pulls.peers
                if engine_id not in known and len(known) + self._asked.qsize() >= PEERS_MAX:
                    return {"error": f"{PEERS_MAX} engines are known already"}
        self._asked.put(ask)
        self._wake()
        return {"ok": True}

    def _state(self) -> dict[str, Any]:
        counts = self._holds.counts + self._pulls.counts + self._counts + self._early.counts
        return {
            "engine_id": self.engine_id,
            "holds": self._holds.held,
            "legs": self._holds.open_legs,
            "pulls": self._pulls.under_way,
            "early": self._early.waiting,
            "slots_free": self._holds.slots.free,
            "recomputed_tokens": self._pulls.recomputed_tokens,
            "peers": {engine: self._told_of(engine, peer) for engine, peer in self._pulls.peers.items()},
            "counts": dict(sorted(counts.items())),
        }

    def _told_of(self, engine: str, peer: ProducerLife) -> dict[str, Any]:
        return {
            "instance": peer.instance,
            "link": peer.link,
            "pulled": peer.pulled,
            "failed": peer.failed,
            "aside": peer.aside,
            "shunned": not self._pulls.peers.may_pull(engine, time.monotonic()),
        }

    def _wake(self) -> None:
        if self._core is not None:
            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def has_pending_push_work(self) -> bool:
        """vLLM asks whether a step is needed: for a queued request of the socket, or for a handshake. A handshake ends
        between two steps and is reported with the second, which an engine without requests would not make.
        """
        return not self._asked.empty() or self._pulls.peers.meeting(time.monotonic())

    # --- a decode leg ---

    def on_new_request(self, request: Any) -> None:
        """Drop fields that vLLM's connector cannot handle; give a prefill leg its slot."""
        fields = request.kv_transfer_params
        if fields is not None and sane(fields) is None:
            logger.warning("%s: transfer fields that cannot be read are left out", request.request_id)
            self._counts["unreadable fields"] += 1
            request.kv_transfer_params = None
            if isinstance(fields, dict) and fields.get("do_remote_prefill"):
                self._pulls.local(request.request_id, held_in(fields, len(request.prompt_token_ids or ())))
        if self._early.opened(request):
            return  # it has no fields of a hold yet
        self._unpin_others(request)
        if _holds(request) and request.kv_transfer_params.get(CACHED_ONLY):
            had = cut_to_cached(request, self._core, self.block_size)
            self._counts["asked as a source" if had else "asked as a source, and had nothing"] += 1
        super().on_new_request(request)
        if _holds(request):
            self._adapter(request)  # read now, and compared with the files once the prompt is computed
            self._holds.begin(request.request_id, name_in(request.kv_transfer_params), time.monotonic())
            if self._computing is not None:
                prompt = request.prompt_token_ids or ()
                self._computing.open(request.request_id, len(prompt), self._names(request, len(prompt)))

    def _adapter(self, request: Any) -> str | None:
        """The digest of the request's LoRA adapter; empty: unknown; None: it has none."""
        asked = request.lora_request
        return None if asked is None else self._adapters.of(asked.lora_name, asked.lora_path, asked.lora_int_id)

    def _unpin_others(self, request: Any) -> None:
        """A first token that was chosen with another adapter is not pinned: the answer is this engine's own."""
        fields = request.kv_transfer_params
        if not fields or FIRST_TOKEN not in fields or not other_adapter(fields, self._adapter(request)):
            return
        logger.warning("%s: its first token is of another adapter, and is not pinned", request.request_id)
        self._counts["not pinned"] += 1
        del fields[FIRST_TOKEN]  # the very mapping that the sampling parameters have

    def _names(self, request: Any, tokens: int) -> tuple[bytes, ...]:
        """The names of a prompt's first blocks, including what else in the request their KV depends on."""
        adapter, seen = request.lora_request, request.mm_features or ()
        if adapter is None and not seen:
            return names((request.prompt_token_ids or ())[:tokens], self.block_size)
        places = [(each.identifier, each.mm_position.offset, each.mm_position.length) for each in seen]
        about = ("" if adapter is None else adapter.lora_name, places)
        return names((request.prompt_token_ids or ())[:tokens], self.block_size, repr(about).encode())

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many of a prompt's tokens are pulled: those that P holds, if the hold can be confirmed; else none. None:
        the engine asks again at its next step, and goes on with other requests.
        """
        if self._early.waits(request.request_id):
            self._hear()
            if self._early.waits(request.request_id):
                return None, False
        fields = request.kv_transfer_params
        if not fields or not fields.get("do_remote_prefill"):
            return 0, False
        pull, prompt = pull_in(fields), len(request.prompt_token_ids or ())
        because = other_adapter(fields, self._adapter(request))
        if not because:
            because = pull if isinstance(pull, str) else self._pulls.judge(pull.engine, time.monotonic())
        if isinstance(pull, str) or because:
            local = max(0, held_in(fields, prompt) - num_computed_tokens)
            if self._pulls.local(request.request_id, local):  # asked again at each step, until there is room
                logger.info("%s is computed here: %s", request.request_id, because)
                self._counts["not pulled"] += 1
            return 0, False
        # Of a hold longer than the prompt, the worker reads only the prompt's blocks (`BatonWorker._aligned`).
        tokens = worth_pulling(pull.tokens, prompt, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The blocks to read into are allocated, if any are needed."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        now, entry = time.monotonic(), self._reqs_need_recv.get(request.request_id)
        if entry is None or not entry[3]:  # the request waits for no pull
            self._pulls.allocated(request.request_id, "", 0, now)
            return
        engine = request.kv_transfer_params["remote_engine_id"]
        ours = handed_over(request.kv_transfer_params)
        self._pulls.allocated(request.request_id, engine, num_external_tokens, now, handed_over=ours)
        _, (local,), (cached,), _ = entry
        held, prompt = request.kv_transfer_params["remote_num_tokens"], len(request.prompt_token_ids or ())
        # vLLM may have taken one block more than the pull fills: for the token that D computes after it.
        span = pull_span(
            held_tokens=held,
            prompt_tokens=prompt,
            cached_tokens=cached * self.block_size,
            block_tokens=self.block_size,
        )
        self._reqs_need_recv[request.request_id] = (request, (list(local)[: span.blocks],), (cached,), True)

    # --- a prefill leg ---

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Hold the request's blocks, unless the router has given the hold up already."""
        mine = request.request_id
        self._pulls.finished(mine)
        self._early.finished(mine)
        if not _holds(request):
            passed: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
            return passed
        held, fields = super().request_finished(request, block_ids) if self._holds.wanted(mine) else (False, None)
        if self._computing is not None:
            self._computing.end(mine)
        if not held or fields is None:
            self._early.over(mine)
            self._holds.dropped(mine)  # its blocks are free at once: no rank may use it any more
            self._reqs_need_save.pop(mine, None)
            return held, fields
        slot = self._holds.filled(mine)
        fields[TRANSFER] = name_in(request.kv_transfer_params)
        adapter = self._adapter(request)
        if adapter is not None:
            fields[ADAPTER] = adapter
        if slot is not None:
            fields[FIELD] = slot.field()
        if request.kv_transfer_params.get(CACHED_ONLY):
            only_whole_blocks(fields, self.block_size)
        else:  # also without a slot: its early leg is told that nothing would confirm the pull, and does not wait
            self._ready(self._early.filled(request, fields))
        return held, fields

    # --- a step ---

    def build_connector_meta(self, scheduler_output: Any) -> BatonMetadata:
        """vLLM's metadata, with what has come in since the last step."""
        self._rest(scheduler_output)
        self._hear()
        self._early.ask()
        for declined in self._early.take_declined():
            self._reqs_need_recv[declined.request_id] = (declined, [], (), False)  # only a notice, as of an aborted leg
        self._early.report_cached()
        for new in scheduler_output.scheduled_new_reqs:
            if self._holds.wanted(new.req_id):
                self._early.began(new.req_id, new.num_computed_tokens)
        introductions, forgotten = self._take_asked()
        expected = {name: self._expected(*entry[:2]) for name, entry in self._reqs_need_recv.items()}
        meta = BatonMetadata(super().build_connector_meta(scheduler_output))
        meta.expected, meta.vouched = expected, self._vouched(scheduler_output)
        meta.introductions, meta.forgotten = introductions, forgotten
        meta.orders = self._holds.take_orders()
        return meta

    def _hear(self) -> bool:
        """Take what has come from other engines. Returns whether that was the hold of an early leg."""
        ready = self._early.hear()
        self._ready(ready)
        return bool(ready)

    def _ready(self, requests: list[Any]) -> None:
        """The holds of these early legs are there."""
        for request in requests:
            self._unpin_others(request)
            super().on_new_request(request)  # from here on P is asked to hold

    def _expected(self, request: Any, local: Any) -> ExpectedHold:
        """What a request must find at its producer. Without `local` blocks it reads nothing, and only sends the
        notice.
        """
        fields = request.kv_transfer_params or {}
        vouched = self._computing is not None and any(local)
        return ExpectedHold(slot_in(fields), self._names(request, fields["remote_num_tokens"]) if vouched else ())

    def _vouched(self, output: Any) -> dict[str, tuple[tuple[int, ...], tuple[bytes, ...]]]:
        """The prompts that this step completes: a connector learns a request's blocks only from vLLM's steps."""
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
        """What was asked since the last step. Of one engine that was forgotten and introduced, or the reverse, the
        workers hear the last word alone: they are told in one batch, without its order.
        """
        introductions: dict[str, Introduce] = {}
        forgotten: set[str] = set()
        while not self._asked.empty():
            match self._asked.get():
                case Introduce() as met:
                    meets = self.vllm_config.kv_transfer_config.kv_role != "kv_producer"  # such a one meets none
                    for former in self._pulls.peers.lives(met.instance, but=met.engine_id):
                        self._early.forget(former)
                    self._early.meet(met)
                    self._pulls.peers.met(met.engine_id, met.instance, time.monotonic(), shakes_hands=meets)
                    introductions[met.engine_id] = met
                    forgotten.discard(met.engine_id)
                case Forget(engine_id):
                    self._pulls.peers.forgotten(engine_id)
                    self._early.forget(engine_id)
                    forgotten.add(engine_id)
                    introductions.pop(engine_id, None)
                case ReleaseName(name):
                    self._holds.release(name, time.monotonic())
        return tuple(introductions.values()), tuple(sorted(forgotten))

    def _rest(self, scheduler_output: Any) -> None:
        """An engine that only holds blocks waits for news here, instead of making a step a millisecond."""
        core, now = self._core, time.monotonic()
        if (
            core is None
            or scheduler_output.total_num_scheduled_tokens
            or self._pulls.under_way
            or self._holds.has_orders
            or self._reqs_need_recv
            or not self._asked.empty()
            or core.scheduler.get_num_unfinished_requests() > self._early.waiting
            or not core.is_running()
        ):
            self._rests.news(now)
            return
        arrived, until = core.input_queue, now + self._rests.pause_s(now)
        while self._early.listens() and (left_s := until - time.monotonic()) > 0:
            with arrived.not_empty:
                if arrived.queue or arrived.not_empty.wait(min(LISTEN_EVERY_S, left_s)):
                    return
            if self._hear():
                return
        with arrived.not_empty:
            if not arrived.queue and (left_s := until - time.monotonic()) > 0:
                arrived.not_empty.wait(left_s)

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers' reports: ended holds, ended pulls, and counts."""
        super().update_connector_output(connector_output)
        now, told = time.monotonic(), connector_output.kv_connector_worker_meta
        if isinstance(told, WorkerReport):
            self._counts += told.counts
            for engine, link in told.peers.items():
                self._pulls.peers.stands(engine, link)
            for request, because in told.ended.items():
                self._pulls.said(request, because)
        for request in connector_output.finished_recving or ():
            self._pulls.ended(request, now, failed=request in connector_output.failed_recving)
        if connector_output.finished_sending:
            self._rests.news(now)
        for request in connector_output.finished_sending or ():
            # Every rank cleared its slot before this report, and its blocks are freed after it.
            self._holds.reported(request)
            self._early.over(request)

    def shutdown(self) -> None:
        """Called when the engine ends."""
        if self._door is not None:
            self._door.close()
        super().shutdown()


def _holds(request: Any) -> bool:
    fields = request.kv_transfer_params
    return isinstance(fields, dict) and bool(fields.get("do_remote_decode"))


def _engine_core() -> Any:
    """The engine core that makes this scheduler: vLLM gives a connector no way to it, nor to a wake-up.

    It is the `self` of one of the callers, recognised by the attributes that are needed. None: there is none (another
    executor).
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to one's callers
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(getattr(caller, "input_queue", None), queue.Queue) and hasattr(caller, "is_running"):
            return caller
        frame = frame.f_back
    return None
