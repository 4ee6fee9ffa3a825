"""llm-d's two laws, the Horizontal Pod Autoscaler and KEDA on queues, written from their documentation. Pure.

Metrics are averages over the pods that are ready, as their queries have them; windows and policies are those of the
`behavior` that their guides ship.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cluster.instance import Role
from goodput.budget import NO_BUDGET, Budget
from goodput.observation import InstanceSeen, Phase
from goodput.pools import ScalingPool
from loadgen.report import Targets
from sim.baselines.scaling.pods import Pods
from sim.scaling import Sight


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """What every rival is given: its pools, the targets, the budget, and how long an instance may drain."""

    pools: dict[Role, ScalingPool]
    targets: Targets
    budget: Budget = NO_BUDGET
    drain_s: float = 120.0


@dataclass(slots=True, kw_only=True)
class Behavior:
    """`behavior` of a HorizontalPodAutoscaler, for one pool: stabilisation windows and policies."""

    up_window_s: float
    down_window_s: float
    up_pods: int
    up_share: float
    up_period_s: float
    down_pods: float
    down_period_s: float
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)
    _changes: deque[tuple[float, int]] = field(default_factory=deque)

    def allowed(self, now_s: float, have: int, wanted: int) -> int:
        """The replicas that a recommendation allows now. Growth goes up to the least recommendation of the up window,
        shrinking down to the most of the down window; neither changes more in a period than the policies allow. The
        first size counts as the first recommendation (the HPA controller's `recordInitialRecommendation`), so nothing
        ends within the first window.
        """
        if not self._wanted:
            self._wanted.append((now_s, have))
        self._wanted.append((now_s, wanted))
        while self._wanted[0][0] < now_s - max(self.up_window_s, self.down_window_s):
            self._wanted.popleft()
        least = min([wanted, *(each for at_s, each in self._wanted if at_s > now_s - self.up_window_s)])
        most = max(each for at_s, each in self._wanted if at_s >= now_s - self.down_window_s)
        target = least if least > have else min(have, most)
        up = sum(max(0, change) for at_s, change in self._changes if at_s > now_s - self.up_period_s)
        down = sum(max(0, -change) for at_s, change in self._changes if at_s > now_s - self.down_period_s)
        before_up, before_down = have - up, have + down
        ceiling = max(before_up + self.up_pods, math.ceil(before_up * (1 + self.up_share)))
        floor = before_down - self.down_pods
        target = int(min(target, ceiling)) if target > have else int(max(target, floor))
        if target != have:
            self._changes.append((now_s, target - have))
        while self._changes and self._changes[0][0] < now_s - max(self.up_period_s, self.down_period_s):
            self._changes.popleft()
        return target


class _OnPods(ABC):
    """A law for each role's pods, independent of the other roles."""

    every_s = 15.0

    def __init__(self, law: Law) -> None:
        self.law: Final = law
        self.pods: Final = Pods(law.pools, law.budget, law.drain_s)
        self.behavior: Final = {role: self._behavior() for role in law.pools}

    def _behavior(self) -> Behavior:
        """HPA's defaults: up at once, by four pods or to twice the size in 15 s; down after five minutes."""
        return Behavior(
            up_window_s=0.0,
            down_window_s=300.0,
            up_pods=4,
            up_share=1.0,
            up_period_s=15.0,
            down_pods=math.inf,
            down_period_s=15.0,
        )

    def act(self, sight: Sight) -> None:
        """Sync once: set each role's replicas as its law and its `Behavior` allow."""
        for role in self.law.pools:
            there = self.pods.of(sight, role)
            ready = [each for each in there if each.phase is Phase.READY]
            wanted = self.wanted(sight, role, ready, len(there))
            if wanted is not None:
                self.pods.set(sight, role, self.behavior[role].allowed(sight.now_s, len(there), wanted), "law")

    @abstractmethod
    def wanted(self, sight: Sight, role: Role, ready: list[InstanceSeen], have: int) -> int | None:
        """The number of replicas by the law; None: the law gives none now."""


def _ratio(ready: list[InstanceSeen], have: int, value: float, target: float) -> int:
    """HPA's algorithm: pods that are not ready count as 0 when scaling up; within a tenth of the target nothing is
    done.
    """
    if not ready:
        return have
    ratio = value / target / len(ready)
    if abs(ratio - 1) <= 0.1:
        return have
    if ratio > 1:  # pods that are missing count as idle: they may turn the direction, and then nothing is done
        again = value / target / have
        return max(have, math.ceil(again * have)) if again > 1.1 else have
    return math.ceil(ratio * len(ready))


class HpaOnKv(_OnPods):
    """An HPA for each pool: prompts for each prefill pod (target 2), KV use of decode pods (target 0.7).

    Prompts are those without a first token, as the gateway counts them: most wait at the router, where pods cannot see
    them. A pod never has more than the two that it computes or computes next, so an HPA on the pods' own gauge holds
    one pod whatever comes.
    """

    def wanted(self, sight: Sight, role: Role, ready: list[InstanceSeen], have: int) -> int | None:
        """By the ratio of the metric to its target."""
        if role is Role.PREFILL:
            on_pods = sum((each.running or 0) + (each.waiting or 0) for each in ready)
            return _ratio(ready, have, float(max(on_pods, sight.meters.counts().waiting or 0)), 2.0)
        return _ratio(ready, have, sum(each.kv_usage or 0.0 for each in ready), 0.7)


class KedaOnQueues(_OnPods):
    """KEDA's two triggers for each pool: 1 request that waits, 16 that run; the larger answer counts."""

    def wanted(self, sight: Sight, role: Role, ready: list[InstanceSeen], have: int) -> int | None:
        """The larger answer of the two triggers."""
        waiting = float(sum(each.waiting or 0 for each in ready))
        if role is Role.PREFILL:
            waiting = max(waiting, float((sight.meters.counts().waiting or 0) - len(ready)))
        running = float(sum(each.running or 0 for each in ready))
        return max(_ratio(ready, have, waiting, 1.0), _ratio(ready, have, running, 16.0))


class LlmdSlo(_OnPods):
    """llm-d's SLO law with KEDA (guides/workload-autoscaling, README.slo-aware): s = 45 s mean of
    min(max(P90 TTFT / target, P90 TPOT / target), 2).

    It knows one pool. The split is ours: prefill follows TTFT, decode follows TPOT, which is what its terms are about.
    """

    UP, DOWN = 0.55, 0.40

    def __init__(self, law: Law) -> None:
        super().__init__(law)
        self._signals: Final[dict[Role, deque[tuple[float, float]]]] = {role: deque() for role in law.pools}

    def _behavior(self) -> Behavior:
        return Behavior(
            up_window_s=30.0,
            down_window_s=180.0,
            up_pods=4,
            up_share=1.0,
            up_period_s=60.0,
            down_pods=1,
            down_period_s=120.0,
        )

    def wanted(self, sight: Sight, role: Role, ready: list[InstanceSeen], have: int) -> int | None:
        """Grow in proportion to the signal above `UP`, shrink below `DOWN`, else stay; None: no request has ended."""
        ended = sight.meters.since(sight.now_s - 60.0)
        targets = self.law.targets
        values = [each.ttft_ms for each in ended] if role is Role.PREFILL else [each.tpot_ms for each in ended]
        target = targets.ttft_ms if role is Role.PREFILL else targets.tpot_ms
        if role is Role.BOTH:
            values = [
                max(each.ttft_ms / (targets.ttft_ms or math.inf), each.tpot_ms / (targets.tpot_ms or math.inf))
                for each in ended
            ]
            target = 1.0
        if not values or target is None:
            return None
        signals = self._signals[role]
        signals.append((sight.now_s, min(2.0, float(np.quantile(values, 0.9, method="higher")) / target)))
        while signals[0][0] < sight.now_s - 45.0:
            signals.popleft()
        signal, share = sum(each for _, each in signals) / len(signals), len(ready) / max(1, have)
        if signal > self.UP:
            return have + math.ceil(max(0.0, have * (signal * share / self.UP - 1)))
        if signal < self.DOWN:
            return have - math.floor(have * (1 - signal / self.DOWN))
        return have


class LlmdTokens(_OnPods):
    """llm-d's token-aware law for separate pools: P = ⌈(tokens in flight ÷ V_P) ÷ 1.5 s⌉, D = ⌈Σ KV use ÷ 0.8⌉."""

    def _behavior(self) -> Behavior:
        return Behavior(
            up_window_s=0.0,
            down_window_s=300.0,
            up_pods=1,
            up_share=0.0,
            up_period_s=180.0,
            down_pods=1,
            down_period_s=300.0,
        )

    def wanted(self, sight: Sight, role: Role, ready: list[InstanceSeen], have: int) -> int | None:
        """V_P is an instance's prompt tokens a second at the mean length of recent prompts."""
        if role is not Role.PREFILL:
            return math.ceil(sum(each.kv_usage or 0.0 for each in ready) / 0.8)
        recent = [each.input_tokens for each in sight.meters.arrived_since(sight.now_s - 120.0)]
        if not recent:
            return None
        mean = sum(recent) / len(recent)
        speed = mean / (self.law.pools[role].engine.costs.prefill_ms(max(1, round(mean))) / 1000)
        waiting = sight.meters.counts().waiting or 0
        return math.ceil(waiting * mean / speed / 1.5)
