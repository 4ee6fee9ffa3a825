"""One life of an engine, from its start to its death: requests, scheduler, holds, and events since the last step.

It knows what happens at the edge of a step and in which order, not when: `machine.py` has the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from cluster.ids import RequestId
from cluster.instance import Load
from engine.twin.batch import Batch, BatchEntry
from engine.twin.config import TwinConfig
from engine.twin.events import (
    AbortRequest,
    Effect,
    GiveBack,
    GiveUpHold,
    HoldEnded,
    KvArrived,
    KvFailed,
    Notice,
    Preempted,
    RequestFinished,
    RequestLost,
    RequestRefused,
    Submit,
    pull_effect,
)
from engine.twin.holds import TwinHolds
from engine.twin.pulls import TwinPulls
from engine.twin.request import Sequence, Status, TwinRequest
from engine.twin.schedule import TwinScheduler
from engine.twin.tokens import Text, beginning, length


@dataclass(frozen=True, slots=True)
class _Landed:
    """A pull has ended, well or badly."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class _Freed:
    """A hold of these blocks has ended."""

    blocks: tuple[int, ...]


class EngineLife:
    """The state of a running engine. Effects go to the list that its machine passed in."""

    def __init__(self, config: TwinConfig, epoch: int, effects: list[Effect]) -> None:
        self.config: Final = config
        self.pulls: Final = TwinPulls()
        self.scheduler: Final = TwinScheduler(config, epoch, self.pulls)
        self.holds: Final = TwinHolds(config, epoch)
        self.batches: Final = self.scheduler.batches
        self._effects: Final = effects
        self._requests: dict[RequestId, Sequence] = {}
        self._aborts: list[RequestId] = []
        self._inbox: list[Sequence | _Landed | _Freed] = []
        self._arrivals = 0

    # --- incoming events ---------------------------------------------------------------------------------------------

    def take(self, event: Submit | AbortRequest | KvArrived | KvFailed | Notice | GiveUpHold, now_ns: int) -> None:
        """Note an event. The scheduler takes it at the next edge of a step."""
        self.pulls.now_ns = now_ns
        match event:
            case Submit(request):
                self._submit(request, now_ns)
            case AbortRequest(request_id):
                self._aborts.append(request_id)
            case KvArrived():
                self._arrived(event)
            case KvFailed(request_id):
                if (sequence := self._pulling(request_id)) is not None:
                    self._land(sequence, read=False, said=None, wrong="")
            case Notice(reader, note):
                self.ended(self.holds.heard(reader, note, now_ns))
            case GiveUpHold(name):
                self.ended(self.holds.release(name, now_ns))

    def _submit(self, request: TwinRequest, now_ns: int) -> None:
        prompt_tokens, longest = length(request.prompt), self.config.max_model_len
        because = None
        if request.id in self._requests:
            because = "there is a request of this name"
        elif prompt_tokens >= longest:
            because = f"its prompt has {prompt_tokens} tokens, and {longest} are the most with its answer"
        elif request.hold is not None and request.max_tokens != 1:
            because = "a hold is of a prompt: max_tokens must be 1"
        if because is not None:
            self._effects.append(RequestRefused(now_ns, request.id, because))
            return
        if request.cached_only:
            request = self._cut_to_cached(request)
            prompt_tokens = length(request.prompt)
        self._arrivals += 1
        sequence = Sequence(
            request=request,
            order=self._arrivals,
            text=Text(request.prompt, request.seed, self.config.block_size),
            limit=min(request.max_tokens, longest - prompt_tokens),
        )
        if request.hold is not None:
            self.holds.begin(request.id, request.name or str(request.hold), now_ns)
        self._requests[request.id] = sequence
        self._inbox.append(sequence)

    def _cut_to_cached(self, request: TwinRequest) -> TwinRequest:
        """A source leg: the cached blocks and the token after them; nothing is held if there are none."""
        size = self.config.block_size
        text = Text(request.prompt, request.seed, size)
        had = len(self.scheduler.pool.hits(text, (text.prompt_tokens - 1) // size)) * size
        return replace(request, prompt=beginning(request.prompt, had + 1), hold=request.hold if had else None)

    def _pulling(self, request_id: RequestId) -> Sequence | None:
        """The request that waits for this pull; None for an event that is late, repeated or unrequested."""
        sequence = self._requests.get(request_id)
        if sequence is None or not sequence.pull_blocks or sequence.landed:
            return None
        return sequence

    def _arrived(self, event: KvArrived) -> None:
        """Bytes have arrived. The rules decide whether they are used."""
        sequence = self._pulling(event.request)
        if sequence is None:
            return
        whole = not self.config.contents or len(event.contents) == len(sequence.pull_blocks)
        if self.config.contents and whole:
            self.scheduler.pool.write(sequence.pull_blocks, event.contents)
        self._land(sequence, read=whole, said=event.said, wrong=event.wrong)

    def _land(self, sequence: Sequence, *, read: bool, said: bytes | None, wrong: str) -> None:
        self._effects.extend(self.pulls.ended(sequence, read=read, said=said, wrong=wrong))
        self._inbox.append(_Landed(sequence))

    def ended(self, holds: list[tuple[HoldEnded, tuple[int, ...]]]) -> None:
        """Holds have ended: their blocks are free at the next edge."""
        for effect, blocks in holds:
            self._effects.append(effect)
            self._inbox.append(_Freed(blocks))

    # --- the edge of a step ------------------------------------------------------------------------------------------

    def edge(self, over: Batch | None, now_ns: int) -> None:
        """A step is over, or none was running: take the events that have come, and decide as many steps as are due.

        Aborts come before the step's tokens, as in vLLM's `step` (v1/engine/core.py), everything else after them.
        """
        self.pulls.now_ns = now_ns
        aborts, self._aborts = self._aborts, []
        for request_id in aborts:
            if (sequence := self._requests.get(request_id)) is not None:
                self._abort(sequence, now_ns)
        if over is not None:
            self._settle(over, now_ns)
        inbox, self._inbox = self._inbox, []
        for item in inbox:
            self._look_at(item, now_ns)
        while len(self.batches) < self.config.depth and self._decide(now_ns):
            pass

    def _decide(self, now_ns: int) -> bool:
        batch = self.scheduler.schedule()
        if not batch.plain:
            for sequence in batch.preempted:
                self._effects.append(Preempted(now_ns, sequence.id, sequence.outputs))
            self._effects.extend([GiveBack(now_ns, source) for source in batch.full_hits])
            for order in batch.pulls:
                self._requests[order.request.id].pull_blocks = order.blocks
            if batch.empty or not self.config.version.pull_after_forward:
                self._start_pulls(batch, now_ns)
        # A preemption may leave no request to run, and none is admitted in the same turn: the engine asks again.
        return not batch.empty or (bool(batch.preempted) and not self.batches)

    def _start_pulls(self, batch: Batch, now_ns: int) -> None:
        if batch.pulls:
            self._effects.extend([pull_effect(order, now_ns) for order in batch.pulls])
            batch.pulls = ()

    def _look_at(self, item: Sequence | _Landed | _Freed, now_ns: int) -> None:
        match item:
            case Sequence():
                if item.status is not Status.OVER:
                    self.scheduler.admission.add(item)
            case _Landed(sequence):
                self._landed(sequence, now_ns)
            case _Freed(blocks):
                self.scheduler.pool.give_back(blocks)

    def _landed(self, sequence: Sequence, now_ns: int) -> None:
        sequence.landed = True
        if sequence.status is Status.OVER:  # aborted during its pull
            self._forget(sequence)
        elif sequence.lost_pull and not self.config.recompute_failed_pulls:
            self._end(sequence, "error", now_ns)

    def _settle(self, batch: Batch, now_ns: int) -> None:
        """A step's tokens are made (scheduler.py:2026)."""
        self.scheduler.over(batch)
        self._start_pulls(batch, now_ns)
        ending = self.scheduler.crew.settle()
        if not ending:
            for entry in batch.entries.values():
                self._count(entry, now_ns)
            return
        rows: list[tuple[int, BatchEntry | Sequence]] = [(entry.place, entry) for entry in batch.entries.values()]
        rows += [(sequence.place, sequence) for sequence in ending]
        for _, row in sorted(rows, key=lambda row: row[0]):
            if isinstance(row, BatchEntry):
                self._count(row, now_ns)
            else:
                self._name_blocks(row)
                self._end(row, row.reason, now_ns)

    def _count(self, entry: BatchEntry, now_ns: int) -> None:
        sequence, stale = entry.sequence, entry.stale
        if not entry.samples or entry.dead or (stale and self.config.drops_stale_output):
            return
        sequence.outputs += 1
        if not stale:
            sequence.sampling -= 1
            self._name_blocks(sequence)
        if sequence.outputs >= sequence.ends_after:
            self._end(sequence, sequence.reason, now_ns)

    def _name_blocks(self, sequence: Sequence) -> None:
        self.scheduler.cache_to(sequence, min(sequence.computed - sequence.sampling, sequence.known))

    # --- how requests end --------------------------------------------------------------------------------------------

    def _abort(self, sequence: Sequence, now_ns: int) -> None:
        if sequence.status is Status.OVER:
            return
        source = sequence.request.pull
        if source is not None and not sequence.pulled:  # the producer would wait in vain
            self._effects.append(GiveBack(now_ns, source))
        self._end(sequence, "abort", now_ns)

    def _end(self, sequence: Sequence, reason: str, now_ns: int) -> None:
        under_way = sequence.status is Status.PULLING and not sequence.landed
        if sequence.request.pull is not None:
            self.pulls.finished(sequence.id)
        self.scheduler.remove(sequence)
        hold = self.holds.left_by(sequence, reason, now_ns)
        if not under_way:  # else a transfer may still write to its blocks
            self._forget(sequence)
        self._effects.append(
            RequestFinished(
                at_ns=now_ns,
                request=sequence.id,
                reason=reason,
                outputs=sequence.outputs,
                hold=hold,
                first_run_ns=sequence.first_run_ns,
                local_tokens=sequence.local_tokens,
                remote_tokens=sequence.remote_tokens,
                preemptions=sequence.preemptions,
            )
        )

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.free(sequence)
        del self._requests[sequence.id]

    def die(self, now_ns: int) -> None:
        """Every request is lost."""
        alive = [sequence for sequence in self._requests.values() if sequence.status is not Status.OVER]
        self._effects.extend(RequestLost(now_ns, sequence.id) for sequence in alive)

    # --- reports -----------------------------------------------------------------------------------------------------

    def load(self) -> Load:
        """The load as ``/metrics`` reports it: requests that came during a step count as waiting."""
        admission, pool = self.scheduler.admission, self.scheduler.pool
        coming = sum(isinstance(item, Sequence) for item in self._inbox)
        return Load(
            running=len(self.scheduler.running),
            waiting=len(admission.waiting) + len(admission.holding) + coming,
            kv_usage=1 - pool.free_blocks / self.config.num_blocks,
            external_kv_tokens=self.pulls.external_tokens,
            deferred=sum(sequence.status is Status.PULLING for sequence in admission.holding),
        )

    def contents(self, blocks: tuple[int, ...]) -> tuple[int, ...] | None:
        """What a reader finds in these blocks now."""
        if any(not 0 <= block < self.config.num_blocks for block in blocks):
            return None
        if not self.config.contents:
            return (0,) * len(blocks)
        return tuple(map(self.scheduler.pool.read, blocks))
