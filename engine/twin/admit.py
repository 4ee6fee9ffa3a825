"""The waiting requests, their order, and the admission: the second half of vLLM's `Scheduler.schedule` (:900-1400).

Requests that hold blocks already (their KV was pulled) go before all others. The first request that does not fit ends
the admission: no later one overtakes it. A request whose KV is still under way is passed over.
"""

from __future__ import annotations

from bisect import insort
from typing import Final

from engine.twin.batch import Batch, BatchEntry, PullOrder
from engine.twin.blocks import BlockPool
from engine.twin.config import Policy, TwinConfig
from engine.twin.crew import Crew
from engine.twin.pulls import TwinPulls
from engine.twin.request import Sequence, Status


class Admission:
    """The waiting requests of one life of an engine. It appends admitted ones to `running`, the scheduler's list."""

    def __init__(
        self, config: TwinConfig, pool: BlockPool, crew: Crew, running: list[Sequence], pulls: TwinPulls
    ) -> None:
        self._config: Final = config
        self._pool: Final = pool
        self._crew: Final = crew
        self._running: Final = running
        self._pulls: Final = pulls
        self.waiting: list[Sequence] = []
        self.holding: list[Sequence] = []
        """Requests with blocks: pulling, or pulled."""
        self._passed: list[Sequence] = []
        """Those of `holding` that this admission has passed over."""
        self._places = 0
        """The number of admissions so far."""

    def add(self, sequence: Sequence) -> None:
        """Queue a new request: at the end, or under the priority policy behind the requests of its priority."""
        self._insert(self.waiting, sequence, first=False)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a preempted request: at the head, or under the priority policy by its priority and arrival."""
        self._insert(self.waiting, sequence, first=True)

    def remove(self, sequence: Sequence) -> None:
        """Forget a request."""
        for queue in (self.waiting, self.holding):
            if sequence in queue:
                queue.remove(sequence)

    def _insert(self, queue: list[Sequence], sequence: Sequence, *, first: bool) -> None:
        if self._config.policy is Policy.PRIORITY:
            insort(queue, sequence, key=lambda one: one.rank)
        else:
            queue.insert(0 if first else len(queue), sequence)

    def admit(self, batch: Batch) -> None:
        """Start the requests for which there is room."""
        if not (self.holding or self.waiting):
            return
        while batch.left > 0 and len(self._running) < self._config.max_num_seqs:
            queue = self.holding or self.waiting
            if not queue:
                break
            sequence = queue[0]
            if sequence.status is Status.PULLING:
                if not sequence.landed:
                    self._passed.append(queue.pop(0))
                    continue
                self._promote(sequence)
            if not self._start(sequence, batch):
                batch.short = sequence
                break
            queue.pop(0)
            if sequence.status is Status.PULLING:
                self._passed.append(sequence)
        if not self._passed:
            return
        if self._config.policy is Policy.PRIORITY:
            for sequence in self._passed:
                self._insert(self.holding, sequence, first=False)
        else:
            self.holding[:0] = self._passed
        self._passed.clear()

    def _promote(self, sequence: Sequence) -> None:
        """The pulled KV has arrived (:3123). The last token is computed again if no other token is left to compute."""
        sequence.status = Status.PREEMPTED if sequence.preemptions else Status.WAITING
        if sequence.lost_pull:
            blocks, sequence.blocks, sequence.cached_blocks = sequence.blocks, [], 0
            self._pool.give_back(blocks)
            sequence.computed = sequence.remote_tokens = 0
            return
        self.cache_to(sequence, sequence.computed)
        sequence.unread = sequence.computed
        if sequence.computed == sequence.known:
            sequence.computed -= 1

    def _start(self, sequence: Sequence, batch: Batch) -> bool:
        """Give the request blocks and work, or order its pull. False: there is no room, or the step is full."""
        hits, remote = [], 0
        if sequence.computed == 0:
            if self._config.prefix_caching:  # the last token is always computed: its successor follows from it
                hits = self._pool.hits(sequence.text, (sequence.known - 1) // self._config.block_size)
            remote = self._pulls.worth(sequence, len(hits) * self._config.block_size)
        computed = sequence.computed + len(hits) * self._config.block_size + remote
        wanted = 0 if remote else sequence.known - computed
        if wanted > batch.left and not self._config.chunked_prefill:
            return False
        count = min(wanted, batch.left)
        if not self._room(sequence, hits, computed + count, pulls=remote > 0):
            return False
        self._count_first(sequence, hits, remote)
        self._pool.touch(hits)
        sequence.blocks += hits
        sequence.cached_blocks = max(sequence.cached_blocks, len(hits))
        sequence.blocks += self._pool.take(self._config.blocks_for(computed + count) - len(sequence.blocks))
        sequence.unread = max(sequence.unread, len(hits) * self._config.block_size)
        sequence.computed = computed
        self._order(sequence, len(hits), remote, count, batch)
        return True

    def _count_first(self, sequence: Sequence, hits: list[int], remote: int) -> None:
        """Record how much of its prompt a request had when it was first admitted."""
        if sequence.computed == 0 and not sequence.preemptions and not sequence.pulled:
            sequence.local_tokens, sequence.remote_tokens = len(hits) * self._config.block_size, remote

    def _order(self, sequence: Sequence, first: int, remote: int, count: int, batch: Batch) -> None:
        source = sequence.request.pull
        if source is not None and not sequence.pulled:  # one transfer for each request
            sequence.pulled = True
            self._pulls.allocated(sequence, source, remote)
            if not remote:
                batch.full_hits += (source,)
        if remote and source is not None:
            sequence.status = Status.PULLING
            batch.pulls += (PullOrder(sequence.request, source, first, tuple(sequence.blocks[first:])),)
            return
        self.cache_to(sequence, min(sequence.computed + count, sequence.known))
        sequence.status = Status.RUNNING
        self._running.append(sequence)
        self._places += 1
        sequence.place = self._places
        batch.left -= count
        self.put_into(batch, sequence, count)

    def put_into(self, batch: Batch, sequence: Sequence, count: int) -> None:
        """Put the request into a batch: by itself, or with all requests that decode."""
        decodes = count == 1 and sequence.computed + 1 == sequence.known + sequence.sampling
        if decodes and not self._config.contents:
            self._crew.join(sequence, batch.number)
            batch.joined += (sequence,)
        else:
            batch.entries[sequence] = BatchEntry(
                sequence, sequence.computed, count, sequence.blocks, sequence.preemptions, sequence.place
            )

    def _room(self, sequence: Sequence, hits: list[int], tokens: int, *, pulls: bool) -> bool:
        """Whether enough blocks are free: for the first step, and for all of the prompt if `reserve_full_prompt` is set
        (kv_cache_manager).
        """
        blocks_for, free = self._config.blocks_for, self._pool.free_blocks
        here = len(sequence.blocks) + len(hits) - self._pool.unused(hits)
        spare = self._config.watermark_blocks if self._running else 0
        if self._config.version.reserve_full_prompt and blocks_for(sequence.known) - here + spare > free:
            return False
        # A pull holds its blocks without making progress: it must not take those that a started prompt needs.
        kept = self._promised() if pulls else 0
        return blocks_for(tokens) - here + spare <= free - kept

    def _promised(self) -> int:
        """The blocks that started prompts still lack (:3088)."""
        begun = [*self.holding, *self._passed]
        if self._crew.size < len(self._running):  # decoding requests have all blocks for the known tokens
            begun += [one for one in self._running if not one.together and one.computed < one.known + one.sampling]
        return sum(max(0, self._config.blocks_for(one.known) - len(one.blocks)) for one in begun)

    def cache_to(self, sequence: Sequence, tokens: int) -> None:
        """Put the full blocks of a request's first `tokens` tokens into the prefix cache."""
        if not self._config.prefix_caching:
            return
        full, cached = tokens // self._config.block_size, sequence.cached_blocks
        if full == cached + 1:
            self._pool.cache(sequence.blocks[cached], sequence.text.chain(cached))
            sequence.cached_blocks = full
        elif full > cached:
            self._pool.cache_row(sequence.blocks[cached:full], sequence.text.chains(cached, full))
            sequence.cached_blocks = full
