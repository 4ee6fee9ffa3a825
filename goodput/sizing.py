"""How many instances a load needs so that its targets are met: queues, batches and memory, from costs alone. Pure.

`goodput.bounds` has lower bounds without any queue. This module adds the queues as formulas, because a controller has
no time to simulate every fleet that it considers. Lengths stay distributions (`goodput.sketch`).

*Prefill.* Prompts wait for one of n instances, each of which computes one at a time: a queue M/G/n with offered load
a = rate · E[S]. A prompt that waits longer than its target allows has missed:

    P(wait > t) = C(n, a) · exp(−2 (n − a) t / (E[S] (v + c²)))

C is Erlang's formula, c² the squared coefficient of variation of S, v the dispersion of arrivals (Allen and Cunneen's
correction of M/M/n; exact for exponential S and v = 1).

*Decode.* The requests of an instance share its steps; a step over b requests takes τ(b). Of rate λ for each instance,
b = λ · E[tokens] · τ(b) run at once (Little's law). The number fluctuates around b with variance b · v / n, as n
instances share the load. The step at the wanted quantile must keep the TPOT target, and contexts must fit the memory.

*Both.* An instance that does both spends the share u of its time on prompts: its decode steps take τ(b) / (1 − u).

Costs and memory are those of one data parallel rank. A router chooses ranks, so an instance of r ranks counts as r
servers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from cluster.instance import Role
from goodput.bounds import EngineBounds
from goodput.demand import ClassPromise
from goodput.sketch import EMPTY, Floats, Sketch

MOST: Final = 512
"""Most instances of one role that are considered."""
MEMORY_USED: Final = 0.92
"""Share of the KV cache that may be full at the wanted quantile; beyond it requests wait, or are preempted."""
STEP_ROOM: Final = 0.97
"""Share of the TPOT target that a step may take; hand-overs and the gaps between steps take the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentLengths:
    """Lengths of recent requests of one class, in tokens."""

    prompts: Sketch = EMPTY
    answers: Sketch = EMPTY
    cached: float = 0.0
    """Share of prompt tokens that come out of a prefix cache."""
    share: float = 1.0
    """Share of all arrivals that are of this class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadToServe:
    """What is to be served."""

    rate: float
    """Requests a second."""
    lengths: Mapping[str, RecentLengths]
    """By class."""
    promises: Mapping[str, ClassPromise]
    dispersion: float = 1.0
    """Variance over mean of arrivals in a bin; 1: Poisson."""
    waiting_s: float = 0.0
    """Work of prompts that already wait, in seconds of one rank: it comes on top of what arrives …"""
    clear_s: float = 60.0
    """… and is to be done within so many seconds."""

    def promise(self, name: str) -> ClassPromise:
        """The promise of a class; one without targets for a class without promises."""
        return self.promises.get(name, _NOTHING)


_NOTHING: Final = ClassPromise()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleShare:
    """What one role attains."""

    met: float
    """Share of the requests that keep the targets which this role decides about; decode has 0 or 1."""
    busy: float
    """Share of its capacity in use; above 1: it cannot keep up."""
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompts:
    """Prompt work of one class on one engine."""

    share: float
    """Share of all arrivals that are of this class."""
    seconds: Floats
    """Work of a prompt, by length."""
    shares: Floats
    """Share of the class's prompts that have each length."""
    target_s: float
    """TTFT target; infinite without one."""


class Sizer:
    """Computes sizes for one engine; keeps computed prompt times."""

    def __init__(self, engine: EngineBounds, first_token_ms: float = 0.0, ranks: int = 1) -> None:
        """For one engine.

        Args:
            engine: one rank of it.
            first_token_ms: part of the TTFT beside queue and steps.
            ranks: its data parallel ranks.
        """
        self.engine: Final = engine
        self.ranks: Final = ranks
        self._first_s: Final = first_token_ms / 1000
        self._prompt_s: Final[dict[tuple[int, int], float]] = {}
        self._last: tuple[LoadToServe, list[_Prompts], tuple[float, float]] | None = None
        """Prompts and answers of the last lengths: one look asks for the same lengths at many rates."""

    def prompt_s(self, tokens: float, cached: float = 0.0) -> float:
        """Seconds of one rank for one prompt of `tokens`, in chunks as large as a step takes. `cached`: share of its
        tokens that a prefix cache has.
        """
        total = max(1, round(tokens))
        before = min(total - 1, round(tokens * cached))
        known = self._prompt_s.get((total, before))
        if known is None:
            known, at = 0.0, before
            while at < total:
                size = min(self.engine.batched_tokens, total - at)
                known += self.engine.costs.prefill_ms(size, at) / 1000
                at += size
            if len(self._prompt_s) > 20_000:
                self._prompt_s.clear()
            self._prompt_s[total, before] = known
        return known

    # --- prefill ------------------------------------------------------------------------------------------------------

    def _known(self, load: LoadToServe) -> tuple[list[_Prompts], tuple[float, float]]:
        last = self._last
        if last is None or last[0].lengths is not load.lengths or last[0].promises is not load.promises:
            last = self._last = (load, self._computed(load), _answers(load))
        return last[1], last[2]

    def _prompts(self, load: LoadToServe) -> list[_Prompts]:
        return self._known(load)[0]

    def _computed(self, load: LoadToServe) -> list[_Prompts]:
        found = []
        for name, lengths in load.lengths.items():
            tokens, shares = lengths.prompts.lengths()
            seconds = np.array([self.prompt_s(each, lengths.cached) for each in tokens.tolist()])
            target_ms = load.promise(name).ttft_ms
            found.append(_Prompts(share=lengths.share, seconds=seconds, shares=shares, target_s=_seconds(target_ms)))
        return found

    def prompt_work(self, load: LoadToServe) -> float:
        """Instances that computing this load's prompts keeps busy, without any queue."""
        return (load.rate * _mean_s(self._prompts(load)) + load.waiting_s / load.clear_s) / self.ranks

    def prefill(self, load: LoadToServe, count: float) -> RoleShare:
        """What `count` prefill instances attain."""
        prompts = self._prompts(load)
        mean_s = _mean_s(prompts)
        offered = load.rate * mean_s + load.waiting_s / load.clear_s
        if offered <= 0:
            return RoleShare(met=1.0, busy=0.0, because="nothing arrives")
        servers = count * self.ranks
        busy = offered / max(servers, 1e-9)
        if busy >= 1:
            needed = f"prompts need {offered / self.ranks:.2f} instances, there are {count:g}"
            return RoleShare(met=0.0, busy=busy, because=needed)
        square = sum(each.share * float(each.shares @ each.seconds**2) for each in prompts)
        variation = max(0.0, square / mean_s**2 - 1)
        waits = _erlang_c(servers, offered)
        rate = 2 * (servers - offered) / (mean_s * (load.dispersion + variation))
        late = 0.0
        for each in prompts:
            spare = each.target_s - self._first_s - each.seconds
            missed = np.where(spare > 0, waits * np.exp(-rate * np.maximum(0.0, spare)), 1.0)
            late += each.share * float(each.shares @ missed)
        return RoleShare(met=1 - late, busy=busy, because=f"prefill {busy:.0%} busy, {late:.1%} of first tokens late")

    def reachable(self, load: LoadToServe) -> float:
        """Share of the prompts whose first token is in time on an idle instance; 1 if that share is 0."""
        found = 0.0
        for each in self._prompts(load):
            found += each.share * float(each.shares @ (each.target_s - self._first_s - each.seconds > 0))
        return found or 1.0

    # --- decode -------------------------------------------------------------------------------------------------------

    def batch(self, load: LoadToServe, count: float, *, slower: float = 1.0) -> tuple[float, float]:
        """Requests that each rank of `count` instances runs at once, and their mean context in tokens. Infinite if
        answers are wanted faster than the instances make them. `slower`: factor on the time of a step.
        """
        tokens, context = self._known(load)[1]
        if tokens <= 0:
            return 0.0, context
        cost = self.engine.costs.by_kind.decode
        rate = load.rate * tokens / max(count * self.ranks, 1e-9) / 1000 * slower
        fixed, each = cost.requests_ms(1), cost.context_ms * context
        batch = 1.0
        for _ in range(60):
            size = max(1, round(batch))
            step = cost.requests_ms(size) + each * batch
            slope = (step - fixed) / max(batch, 1e-9)
            following = rate * fixed / (1 - rate * slope) if rate * slope < 1 else math.inf
            if following > 4 * self.engine.seqs_max:
                return math.inf, context
            if abs(following - batch) < 0.01 * max(1.0, batch):
                break
            batch = (batch + following) / 2
        return batch, context

    def decode(self, load: LoadToServe, count: float, aim: float, *, slower: float = 1.0) -> RoleShare:
        """Whether `count` decode instances keep the TPOT and their memory at the quantile `aim`."""
        batch, context = self.batch(load, count, slower=slower)
        if math.isinf(batch):
            return RoleShare(met=0.0, busy=2.0, because=f"answers come faster than {count:g} instances make them")
        z = NormalDist().inv_cdf(min(0.9999, aim))
        high = batch + z * math.sqrt(batch * load.dispersion / max(1.0, count * self.ranks))
        cost = self.engine.costs.by_kind.decode
        step = (cost.requests_ms(max(1, math.ceil(high))) + cost.context_ms * context * high) * slower
        memory = high * context / (self.engine.kv_tokens * MEMORY_USED)
        target = self._step_target_ms(load)
        terms = {
            f"a step takes {step:.1f} ms": step / target,
            f"{high:.0f} contexts of {context:,.0f} tokens fill {memory * MEMORY_USED:.0%} of the memory": memory,
            f"{high:.0f} requests at once": high / self.engine.seqs_max,
        }
        told = max(terms, key=lambda name: terms[name])
        return RoleShare(met=1.0 if terms[told] <= 1 else 0.0, busy=terms[told], because=f"decode: {told}")

    def _step_target_ms(self, load: LoadToServe) -> float:
        """Time that a step may take: of the TPOT targets the least that an instance with one request keeps."""
        out_of_reach = self.out_of_reach(load)
        kept = (load.promise(name).tpot_ms for name in load.lengths if name not in out_of_reach)
        return min((target or math.inf for target in kept), default=math.inf) * STEP_ROOM

    def out_of_reach(self, load: LoadToServe) -> dict[str, str]:
        """The classes whose TPOT target an instance misses even with one request, and why: none is added for them."""
        cost, context = self.engine.costs.by_kind.decode, self._known(load)[1][1]
        alone_ms = cost.requests_ms(1) + cost.context_ms * context
        return {
            name: f"TPOT {target:g} ms of class {name or 'default'} is out of reach: a step takes {alone_ms:.1f} ms"
            for name in load.lengths
            if (target := load.promise(name).tpot_ms) is not None and alone_ms > target * STEP_ROOM
        }

    def answers_a_second(self, load: LoadToServe) -> float:
        """The most that one instance completes while it keeps the TPOT target and its memory."""
        tokens, context = self._known(load)[1]
        cost = self.engine.costs.by_kind.decode
        target = min((load.promise(name).tpot_ms or math.inf for name in load.lengths), default=math.inf) * STEP_ROOM
        fits = max(1, math.floor(self.engine.kv_tokens * MEMORY_USED / max(1.0, context)))
        low, high = 1, max(1, min(self.engine.seqs_max, fits))
        while low < high:
            middle = (low + high + 1) // 2
            step = cost.requests_ms(middle) + cost.context_ms * context * middle
            low, high = (middle, high) if step <= target else (low, middle - 1)
        step = cost.requests_ms(low) + cost.context_ms * context * low
        return self.ranks * low * 1000 / (step * max(1.0, tokens))

    # --- how many -----------------------------------------------------------------------------------------------------

    def both(self, load: LoadToServe, count: float, aim: float) -> RoleShare:
        """What `count` instances that do both attain: the worse of prefill and decode."""
        used = self.prompt_work(load) / max(count, 1e-9)
        if used >= 1:
            return RoleShare(met=0.0, busy=used, because=f"prompts alone need {used * count:.2f} instances")
        decode = self.decode(load, count, aim, slower=1 / (1 - used))
        prefill = self.prefill(load, count)
        return min(decode, prefill, key=lambda each: (each.met, -each.busy))

    def attained(self, role: Role, load: LoadToServe, count: float, aim: float) -> RoleShare:
        """What `count` instances of a role attain."""
        if role is Role.PREFILL:
            return self.prefill(load, count)
        return self.decode(load, count, aim) if role is Role.DECODE else self.both(load, count, aim)

    def need(self, role: Role, load: LoadToServe, aim: float) -> tuple[int, str]:
        """The fewest instances that attain `aim` of what any number of them can attain, and the reason; `MOST` at most.
        A prompt that takes longer than its target alone is late on any fleet: no instance is added for it, and none for
        a TPOT target that is `out_of_reach`.
        """
        goal = aim * (1.0 if role is Role.DECODE else self.reachable(load))
        binds = share = self.attained(role, load, 1, aim)
        low, high = 0, 1
        while share.met < goal and high < MOST:
            binds = share
            low, high = high, high * 2
            share = self.attained(role, load, high, aim)
        while high - low > 1:
            middle = (low + high) // 2
            share = self.attained(role, load, middle, aim)
            if share.met >= goal:
                high = middle
            else:
                low, binds = middle, share
        told = [f"{low} would not do: {binds.because}" if low else binds.because]
        told += [] if role is Role.PREFILL else self.out_of_reach(load).values()
        return high, "; ".join(told)


def _seconds(target_ms: float | None) -> float:
    return math.inf if target_ms is None else target_ms / 1000


def _mean_s(prompts: list[_Prompts]) -> float:
    return sum(each.share * float(each.shares @ each.seconds) for each in prompts)


def _answers(load: LoadToServe) -> tuple[float, float]:
    """Mean tokens of an answer after its first, and their mean context: long answers have more of these tokens."""
    tokens = contexts = 0.0
    for lengths in load.lengths.values():
        outputs, shares = lengths.answers.lengths()
        steps = np.maximum(0.0, outputs - 1)
        mean = float(shares @ steps)
        tokens += lengths.share * mean
        contexts += lengths.share * (mean * lengths.prompts.mean + float(shares @ (steps * outputs)) / 2)
    return tokens, contexts / tokens if tokens else 0.0


def _erlang_c(count: float, offered: float) -> float:
    """Erlang's C: the chance that a request finds all of `count` servers busy. Linear between whole counts."""
    low = math.floor(count)
    part = count - low
    if part > 1e-9:
        lower = _erlang_c(low, offered) if low > offered else 1.0
        return lower * (1 - part) + _erlang_c(low + 1, offered) * part
    blocked = 1.0
    for number in range(1, low + 1):
        blocked = offered * blocked / (number + offered * blocked)
    busy = offered / low
    return blocked / (1 - busy * (1 - blocked))
