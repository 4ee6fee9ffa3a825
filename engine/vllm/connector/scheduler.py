"""The connector's scheduler half: passes vLLM's hooks to `prefill.holds` and `decode.pulls`, and opens the agent
socket.

Runs inside vLLM's engine core, in vLLM's own hooks and on vLLM's own thread. Requests at the agent socket wait in a
queue for the next step. They wake the engine, because an engine without work makes no step.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.platforms import current_platform

from cluster.wire import ADAPTER, FIRST_TOKEN, TRANSFER
from decode.peers import ProducerPeers
from decode.pulls import Pulls, worth_pulling
from decode.rank_links import RankLinks
from decode.table import BECAUSE, Reading
from engine.vllm.adapters import Adapters
from engine.vllm.connector import asked
from engine.vllm.connector.agent_socket import AgentSocket, held_state
from engine.vllm.connector.cached import SourceLegs, is_source, only_whole_blocks
from engine.vllm.connector.early import EarlyHandoffs, reads_parts
from engine.vllm.connector.idling import Idling
from engine.vllm.connector.metadata import BatonMetadata, ExpectedHold, WorkerReport
from engine.vllm.connector.served import number_format, rank_in, reads_peers
from engine.vllm.connector.vouched import VouchedPrompts
from engine.vllm.weights import adapter_marks, adapter_of
from kvtransfer.asks import door_of
from kvtransfer.fields import handed_over, held_in, name_in, names_hold, other_adapter, pull_in, sane
from kvtransfer.hold_marks import FIELD, SLOTS, Slots, slot_in
from kvtransfer.span import pull_span
from prefill.holds import Holds

logger = logging.getLogger("vllm.baton.scheduler")


class BatonScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """See the module. Overrides hooks of vLLM 0.32's `NixlBaseConnectorScheduler`. Long, as vLLM calls one object."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        door = options.get("door")
        self._holds = Holds(Slots(SLOTS, secrets.token_bytes(32)))
        self._pulls = Pulls(ProducerPeers(), reads=reads_peers(vllm_config.kv_transfer_config))
        self._links = RankLinks(vllm_config.parallel_config.tensor_parallel_size)
        self._vouched = VouchedPrompts(self.block_size) if options.get("digests") else None  # digests are off
        parts = reads_parts(vllm_config.kv_transfer_config, digests=self._vouched is not None)
        self._early = EarlyHandoffs(self._pulls.peers, self.block_size, reads_parts=parts)
        self._adapters = Adapters(adapter_of, adapter_marks)
        self._counts: Counter[str] = Counter()
        self._idling = Idling(self.engine_id)
        self._sources = SourceLegs(self._idling.core, self.block_size, kv_cache_config, self._counts, self._vouched)
        self._socket = AgentSocket(
            None if door is None else door_of(door, rank_in(vllm_config)),
            self.engine_id,
            int(options.get("epoch", 0)),
            number_format(vllm_config, kv_cache_config, device=current_platform.device_type),
            self._pulls.peers,
            state=self._state,
            wake=self._idling.wake,
        )

    # --- the agent socket ---

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Open the agent socket, where vLLM would open its ZMQ port to all callers."""
        self._socket.open(metadata, self._early.payloads())

    def _state(self) -> dict[str, Any]:
        """The answer to `HeldState`: the engine's holds, pulls and counts. Runs on a thread of the socket."""
        counts = self._holds.counts + self._pulls.counts + self._counts + self._early.counts
        told = held_state(self._holds, self._pulls, self._early.waiting, counts, time.monotonic())
        return {"engine_id": self.engine_id, **told}

    def has_pending_push_work(self) -> bool:
        """Whether a step is needed (vLLM asks): for a queued request of the socket, or for a handshake. A handshake's
        end is reported with the next step, and an engine without requests would not make that step.
        """
        return self._socket.waits or self._pulls.peers.meeting(time.monotonic())

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
        if is_source(request):
            self._sources.arrived(request)
        super().on_new_request(request)
        if _holds(request):
            # Read now, and compared with the files once the prompt is computed.
            self._adapters.asked(request.lora_request)
            self._holds.begin(request.request_id, name_in(request.kv_transfer_params), time.monotonic())
            self._early.prefills(request, name_in(request.kv_transfer_params))
            if self._vouched is not None:
                self._vouched.begin(request)

    def _unpin_others(self, request: Any) -> None:
        if _unpinned(request, self._adapters):
            self._counts["not pinned"] += 1

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many of a prompt's tokens are pulled, and whether any is: those that P holds, if the hold can be
        confirmed, else 0. None: the engine asks again at its next step, and goes on with other requests.
        """
        found = self._matched(request, num_computed_tokens)
        if found[1]:
            self._sources.brings(request)
        return found

    def _matched(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._early.waits(request.request_id):
            self._hear()
            if self._early.waits(request.request_id):
                tokens = self._early.reads(request, num_computed_tokens, self._idling.core)
                return (tokens, True) if tokens else (None, False)
        if is_source(request):
            return (0 if self._sources.looked_up(request, num_computed_tokens) else None), False
        fields = request.kv_transfer_params
        if not fields or not fields.get("do_remote_prefill"):
            return 0, False
        pull, prompt = pull_in(fields), len(request.prompt_token_ids or ())
        because = other_adapter(fields, self._adapters.asked(request.lora_request))
        if not because:
            now = time.monotonic()
            because = pull if isinstance(pull, str) else self._pulls.judge(request.request_id, pull.engine, now)
        if isinstance(pull, str) or because:
            local = max(0, held_in(fields, prompt) - num_computed_tokens)
            if self._pulls.local(request.request_id, local):  # asked again at each step, until there is room
                logger.info("%s is computed here: %s", request.request_id, because)
                self._counts["not pulled"] += 1
            return 0, False
        # Of a hold longer than the prompt, the worker reads only the prompt's blocks (`worker._aligned`).
        tokens = worth_pulling(pull.tokens, prompt, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks to read into, which vLLM has just allocated, if the request needs any."""
        if self._early.reserved(request, blocks, num_external_tokens):
            return
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        now, entry = time.monotonic(), self._reqs_need_recv.get(request.request_id)
        if entry is None or not entry[3]:  # the request waits for no pull
            self._pulls.allocated(request.request_id, "", 0, now)
            return
        engine = request.kv_transfer_params["remote_engine_id"]
        ours = handed_over(request.kv_transfer_params)
        self._pulls.allocated(request.request_id, engine, num_external_tokens, now, handed_over=ours)
        _, (local,), (cached,), _ = entry
        pulled = _pulled(request, list(local), cached, self.block_size)
        self._reqs_need_recv[request.request_id] = (request, (pulled,), (cached,), True)

    # --- a prefill leg ---

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Hold the request's blocks, unless the router has given the hold up already."""
        mine = request.request_id
        self._pulls.finished(mine)
        self._early.finished(mine)
        _tells_nobody(request)
        if not _holds(request):
            passed: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
            return passed
        wanted = self._holds.wanted(mine) and self._sources.ended(request)
        if wanted or request.kv_transfer_params.get("do_remote_prefill"):  # its own pull has not begun: vLLM tells P
            held, fields = super().request_finished(request, block_ids)
        else:
            held, fields = False, None
            self._stop_heartbeat(mine)
        if self._vouched is not None:
            self._vouched.end(mine)
        if not held or fields is None:
            self._early.over(mine)
            self._holds.dropped(mine)  # its blocks are free at once: no rank may use it any more
            self._reqs_need_save.pop(mine, None)
            return held, fields
        slot = self._holds.filled(mine)
        fields[TRANSFER] = name_in(request.kv_transfer_params)
        adapter = self._adapters.asked(request.lora_request)
        if adapter is not None:
            fields[ADAPTER] = adapter
        if slot is not None:
            fields[FIELD] = slot.field()
        if is_source(request):
            only_whole_blocks(fields, self.block_size)
        else:  # also without a slot: the early leg learns that nothing would confirm the pull, and does not wait
            self._ready(self._early.filled(request, fields))
        return held, fields

    # --- a step ---

    def build_connector_meta(self, scheduler_output: Any) -> BatonMetadata:
        """vLLM's metadata, with what has come in since the last step."""
        patient = self._rest(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:  # before a notice may make one of them a pull
            self._early.scheduled(new.req_id)
            if self._holds.wanted(new.req_id):
                self._early.began(new.req_id, new.num_computed_tokens)
        if self._early.speaks or self._holds.any:  # nothing else is spoken of in notices
            self._hear()
        self._early.ask()
        self._early.report_cached()
        for given_back in self._early.take_given_back():  # only a notice, as of an aborted leg
            self._reqs_need_recv[given_back.request_id] = (given_back, [], (), False)
        meets = reads_peers(self.vllm_config.kv_transfer_config)
        introductions, forgotten = asked.apply(
            self._socket.take(), self._pulls.peers, self._early, self._holds, time.monotonic(), shakes_hands=meets
        )
        expected = {
            name: _expected(entry[0], entry[1], self._vouched, tells=not self._early.keeps(name))
            for name, entry in self._reqs_need_recv.items()
        }
        meta = BatonMetadata(super().build_connector_meta(scheduler_output))
        meta.expected = expected
        meta.parts, meta.parts_over = self._early.blocks.take()
        meta.number = self._early.step(scheduler_output)
        meta.vouched = {} if self._vouched is None else self._vouched.step(scheduler_output)
        meta.introductions, meta.forgotten = introductions, forgotten
        meta.orders = self._holds.take_orders()
        meta.patient = patient
        return meta

    def _hear(self) -> bool:
        """Take what has come from other engines. Returns whether that was the hold of an early leg."""
        ready = self._early.hear()
        self._ready(ready)
        return bool(ready) or self._early.has_parts

    def _ready(self, requests: list[Any]) -> None:
        """The holds of these early legs are there."""
        for request in requests:
            self._unpin_others(request)
            super().on_new_request(request)  # from here on P is asked to hold
            if self._early.blocks.has(request.request_id):
                self._go_on(request)

    def _go_on(self, request: Any) -> None:
        """The hold of an early leg that has its blocks is there: pull the rest, if vLLM's question would have that
        answer. Else the leg gives them back, and vLLM asks.
        """
        mine, fields = request.request_id, request.kv_transfer_params
        if not self._matched(request, 0)[1]:
            self._early.blocks.ends(mine)
        place = self._early.place(request)
        if place is not None:
            fields["do_remote_prefill"] = False
            tokens = len(request.prompt_token_ids) - place.cached * self.block_size
            self._pulls.allocated(mine, fields["remote_engine_id"], tokens, time.monotonic())
            self._reqs_need_recv[mine] = (request, (list(place.local),), (place.cached,), True)

    def _rest(self, scheduler_output: Any) -> bool:
        """Pause before a step that has nothing to do. Returns whether it does nothing but wait for pulls."""
        busy = scheduler_output.total_num_scheduled_tokens or self._holds.has_orders or self._socket.waits
        return self._idling.pause(
            busy=bool(busy) or self._early.blocks.busy,
            pulls=self._pulls.under_way,
            awaited=self._pulls.awaited,
            begins=bool(self._reqs_need_recv),
            early=self._early.waiting,
            listens=self._early.listens,
            hear=self._hear,
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers' reports: ended holds, ended pulls, and counts."""
        super().update_connector_output(connector_output)
        now, told = time.monotonic(), connector_output.kv_connector_worker_meta
        if isinstance(told, WorkerReport):
            self._counts += told.counts
            self._early.computed(told.step)
            self._early.timed(told.took)
            for engine, link in self._links.told(told.peers).items():
                self._pulls.peers.stands(engine, link)
            self._idling.reported(len(told.ended))
            for request, because in told.ended.items():
                self._pulls.said(request, because)
            for request in told.refused:
                self._pulls.said(request, BECAUSE[Reading.SPOILT])
        for request in connector_output.finished_recving or ():
            self._pulls.ended(request, now, failed=request in connector_output.failed_recving)
            self._early.blocks.ended(request)
        if connector_output.finished_sending:
            self._idling.news()
        for request in connector_output.finished_sending or ():
            # Every rank cleared its slot before this report, and its blocks are freed after it.
            self._holds.reported(request)
            self._early.over(request)

    def shutdown(self) -> None:
        """Close the agent socket; vLLM calls this when the engine ends."""
        self._socket.close()
        super().shutdown()


def _unpinned(request: Any, adapters: Adapters) -> bool:
    """Whether a first token that was chosen with another adapter is not pinned: the answer is this engine's own."""
    fields = request.kv_transfer_params
    if not fields or FIRST_TOKEN not in fields or not other_adapter(fields, adapters.asked(request.lora_request)):
        return False
    logger.warning("%s: its first token is of another adapter, and is not pinned", request.request_id)
    del fields[FIRST_TOKEN]  # the sampling parameters share this mapping
    return True


def _tells_nobody(request: Any) -> None:
    """A leg that ends before its pull, with fields that name no hold: vLLM shall not tell the producer."""
    fields = request.kv_transfer_params
    if isinstance(fields, dict) and fields.get("do_remote_prefill") and not names_hold(fields):
        fields["do_remote_prefill"] = False


def _pulled(request: Any, local: list[int], cached: int, block_size: int) -> list[int]:
    """The blocks of a request that its pull fills. vLLM may have allocated one more, for the token that D computes
    after the pull. `local` blocks come after the `cached` ones.
    """
    span = pull_span(
        held_tokens=request.kv_transfer_params["remote_num_tokens"],
        prompt_tokens=len(request.prompt_token_ids or ()),
        cached_tokens=cached * block_size,
        block_tokens=block_size,
    )
    return local[: span.blocks]


def _expected(request: Any, local: Any, vouched: VouchedPrompts | None, *, tells: bool) -> ExpectedHold:
    """The hold that a request must find at its producer. Without `local` blocks it reads nothing, and only sends the
    notice. `tells`: the ranks give the hold back when they have read it.
    """
    fields = request.kv_transfer_params or {}
    names = () if vouched is None or not any(local) else vouched.names(request, fields["remote_num_tokens"])
    return ExpectedHold(slot_in(fields), names, tells)


def _holds(request: Any) -> bool:
    fields = request.kv_transfer_params
    return isinstance(fields, dict) and bool(fields.get("do_remote_decode"))
