"""Twins on one virtual clock, with a link between them, and a record of their effects."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cluster.ids import InstanceId, RequestId, TransferId
from costs.step import StepWork
from engine.twin import events as ev
from engine.twin.config import TwinConfig
from engine.twin.life import EngineLife, _Freed
from engine.twin.machine import Twin
from engine.twin.request import HoldSource, TwinRequest
from engine.twin.tokens import Prompt, Segment, answer_key, token
from kvtransfer.hold_marks import Slot

MS = 1_000_000


@dataclass(frozen=True)
class Linear:
    """Step costs in nanoseconds: for each step, prompt token, decoding request and context token."""

    step: int = 1000
    token: int = 10
    request: int = 7
    context: int = 3

    def step_ns(self, work: StepWork) -> int:
        here = self.token * work.new_tokens + self.request * work.batch + self.context * work.sum_context
        return self.step + here

    def decode_run_ns(self, batch: int, sum_context: int, steps: int) -> int:
        first = self.step + self.request * batch + self.context * sum_context
        return steps * first + self.context * batch * (steps * (steps - 1) // 2)

    def decode_steps_for(self, batch: int, sum_context: int, duration_ns: int) -> int:
        low, high = 0, max(0, duration_ns)
        while low < high:
            middle = (low + high) // 2
            if self.decode_run_ns(batch, sum_context, middle) >= duration_ns:
                high = middle
            else:
                low = middle + 1
        return low


def text(*segments: tuple[int, int]) -> Prompt:
    """A prompt of segments, each given as (seed, tokens)."""
    return tuple(Segment(seed, tokens) for seed, tokens in segments)


def ask(name: str, prompt: Prompt, max_tokens: int = 4, **rest: object) -> TwinRequest:
    return TwinRequest(id=RequestId(name), prompt=prompt, max_tokens=max_tokens, **rest)  # type: ignore[arg-type]


def right_tokens(request: TwinRequest, count: int) -> list[int]:
    key = answer_key(request.prompt, request.seed)
    return [token(key, index) for index in range(count)]


@dataclass
class Record:
    """The effects of one twin."""

    effects: list[ev.Effect] = field(default_factory=list)
    """All effects but those of steps."""
    said: list[ev.Effect] = field(default_factory=list, compare=False)
    """All effects."""
    runs: dict[int, tuple[ev.StepRun, int]] = field(default_factory=dict)

    def add(self, effects: Iterable[ev.Effect]) -> None:
        for effect in effects:
            self.said.append(effect)
            if isinstance(effect, ev.StepRun):
                self.runs[effect.number] = (effect, effect.steps)
            elif isinstance(effect, ev.Cut):
                assert effect.steps <= self.runs[effect.number][1]
                self.runs[effect.number] = (self.runs[effect.number][0], effect.steps)
            else:
                self.effects.append(effect)

    def of(self, kind: type) -> list:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def finished(self, name: str) -> ev.RequestFinished:
        (found,) = [effect for effect in self.of(ev.RequestFinished) if effect.request == name]
        return found

    def steps(self, costs: Linear) -> list[tuple[int, int, int, int]]:
        """Of every step: its begin in ns, its batch, its context tokens, its prompt tokens."""
        rows = []
        for run, steps in self.runs.values():
            for at in range(steps):
                begin = run.at_ns + costs.decode_run_ns(run.batch, run.sum_context, at)
                rows.append((begin, run.batch, run.sum_context + at * run.batch, run.prompt_tokens))
        return rows

    def tokens(self, costs: Linear) -> dict[str, dict[int, tuple[int, int]]]:
        """Of each request's tokens, by index: the time in ns, and the answer key from which the token follows."""
        made: dict[str, dict[int, tuple[int, int]]] = {}
        for run, steps in self.runs.values():
            for at in range(steps):
                end = run.at_ns + costs.decode_run_ns(run.batch, run.sum_context, at + 1)
                end = run.end_ns if run.prompt_tokens else end
                for share in run.shares:
                    made.setdefault(share.request, {})[share.first + at] = (end, share.key)
        for over in self.of(ev.RequestFinished):
            mine = made.get(over.request, {})
            made[over.request] = {index: mine[index] for index in sorted(mine) if index < over.outputs}
        return made

    def answer(self, name: str, costs: Linear) -> list[int]:
        return [token(key, index) for index, (_, key) in sorted(self.tokens(costs)[name].items())]


class World:
    """Some twins. `latency_ns`: how long a pull takes. `spoil` may change the contents that a pull reads."""

    def __init__(
        self,
        configs: dict[str, TwinConfig],
        costs: Linear | None = None,
        *,
        fast_forward: bool = True,
        latency_ns: int = 500,
        read_ns: int | None = None,
        spoil: Callable[[tuple[int, ...]], tuple[int, ...] | None] = lambda contents: contents,
    ) -> None:
        self.costs = costs or Linear()
        self.twins = {name: Twin(config, self.costs, fast_forward=fast_forward) for name, config in configs.items()}
        self.records = {name: Record() for name in configs}
        self.latency_ns, self.spoil = latency_ns, spoil
        self.read_ns = latency_ns if read_ns is None else read_ns
        self.checks = False
        self.now = 0
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self.on_finish: Callable[[str, ev.RequestFinished], None] = lambda _name, _effect: None
        for name in configs:
            self.tell(name, ev.StartEngine(1))

    def at(self, when: int, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (when, self._count, what))

    def send(self, when: int, name: str, event: ev.Event) -> None:
        self.at(when, lambda: self.tell(name, event))

    def tell(self, name: str, event: ev.Event) -> tuple[ev.Effect, ...]:
        effects = self.twins[name].handle(event, self.now)
        self.records[name].add(effects)
        for effect in effects:
            self._carry_out(name, effect)
        if self.checks:
            check(self.twins[name])
        return effects

    def _carry_out(self, name: str, effect: ev.Effect) -> None:
        match effect:
            case ev.PullBlocks(at_ns, request, source, remote):
                self.at(at_ns + self.read_ns, lambda: self._read(name, request, source, remote, at_ns))
            case ev.GiveBack(at_ns, source) if source.producer in self.twins:
                self.send(self.now, source.producer, ev.released(source, InstanceId(name)))
            case ev.RequestFinished():
                self.on_finish(name, effect)

    def _read(self, name: str, request: RequestId, source: HoldSource, remote: tuple[int, ...], began: int) -> None:
        read = None
        if source.producer in self.twins:
            (found,) = [e for e in self.tell(source.producer, ev.ReadBlocks(remote)) if isinstance(e, ev.Contents)]
            read = found.contents
        else:
            read = tuple(12345 + block for block in remote)
        read = None if read is None else self.spoil(read)
        self.at(max(self.now, began + self.latency_ns), lambda: self._look(name, request, source, read))

    def _look(self, name: str, request: RequestId, source: HoldSource, read: tuple[int, ...] | None) -> None:
        """All blocks have been read: now read the hold's slot, and report both to the twin."""
        if read is None:
            self.tell(name, ev.KvFailed(request))
            return
        assert source.slot is not None
        said: bytes | None = source.slot.mark
        if source.producer in self.twins:
            told = self.tell(source.producer, ev.ReadSlot(source.slot.index))
            (said,) = [effect.said for effect in told if isinstance(effect, ev.SlotSays)]
        self.tell(name, ev.KvArrived(request, read, said))

    def play(self, until: int | None = None) -> None:
        """Run until nothing is left to do, or until the time `until` in ns."""
        for _ in range(1_000_000):
            due = [(wakeup, name) for name, twin in self.twins.items() if (wakeup := twin.next_wakeup()) is not None]
            first = min(due, default=None)
            if self._queue and (first is None or self._queue[0][0] < first[0]):
                when, _, what = self._queue[0]
                if until is not None and when > until:
                    break
                heapq.heappop(self._queue)
                self.now = when
                what()
            elif first is not None and (until is None or first[0] <= until):
                self.now = first[0]
                self.tell(first[1], ev.Tick())
            else:
                break
        else:
            raise AssertionError("it does not end")
        self.now = max(self.now, until or 0)

    def answer(self, name: str, request: str) -> list[int]:
        return self.records[name].answer(request, self.costs)


def life(twin: Twin) -> EngineLife:
    assert twin._life is not None
    return twin._life


def check(twin: Twin) -> None:
    """Fail unless the users of every block are exactly the requests, holds and deferred frees that name it."""
    if twin._life is None:
        return
    scheduler = twin._life.scheduler
    scheduler.pool.check()
    owned: Counter[int] = Counter()
    for sequence in twin._life._requests.values():
        owned.update(sequence.blocks)
        coming = scheduler.crew.computed(sequence) + 1 if sequence.together else sequence.known + sequence.sampling
        assert len(sequence.blocks) <= twin.config.blocks_for(max(coming, 1))
    for _, blocks in scheduler._deferred:
        owned.update(blocks)
    for blocks in twin._life.holds.blocks():
        owned.update(blocks)
    for item in twin._life._inbox:
        if isinstance(item, _Freed):
            owned.update(item.blocks)
    assert dict(owned) == {block: users for block, users in enumerate(scheduler.pool.users) if users}
    assert len(scheduler.running) <= twin.config.max_num_seqs


def elsewhere(name: str, blocks: Iterable[int], tokens: int) -> HoldSource:
    """A hold at a producer that is not one of the twins."""
    transfer, mark = hold_id(name), name.encode().ljust(16, b".")
    return HoldSource(transfer, InstanceId("elsewhere"), tuple(blocks), tokens, transfer.request, Slot(0, mark))


def hold_id(name: str, epoch: int = 1) -> TransferId:
    return TransferId(RequestId(name), 1, epoch)
