"""NVIDIA Dynamo's planner (ai-dynamo 1.6.1), unchanged, on observations of our fleet. Pure: the planner is an argument.

The planner runs in a process of its own (`bench.dynamo_planner`); `Ask` sends it one look and brings its answer. Before
the first look it gets points of our engines' costs, as its profiler would have measured them. Its forward-pass metrics
are made from heartbeats: what an engine runs, has waiting and holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from cluster.instance import Role
from goodput.observation import InstanceSeen, Phase
from sim.baselines.scaling.laws import Law
from sim.baselines.scaling.pods import Pods
from sim.scaling import Sight

Ask = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Sends the planner one observation, and returns its answer."""

PROMPTS: Final = (500, 1000, 2000, 4000, 8000, 12_000, 16_000, 24_000)
BATCHES: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
CONTEXTS: Final = (1000, 4000, 8000, 12_000)
NEVER_S: Final = 1e6
"""The planner gives each tick 30 s of the machine's clock, and time here is virtual. On a busy machine its first
forecast takes longer (it imports and fits ARIMA): the tick was dropped, and all later forecasts were different ones."""
PAIR: Final = (Role.PREFILL, Role.DECODE)


def opening(law: Law, gpus: int, most: int) -> dict[str, Any]:
    """The planner's settings: its defaults (the load loop is off), our targets, points of our costs."""
    able = {role: _able(law, role, gpus) for role in PAIR}
    return {
        "config": {
            "mode": "disagg",
            "optimization_target": "sla",
            "ttft_ms": law.targets.ttft_ms,
            "itl_ms": law.targets.tpot_ms,
            "prefill_engine_num_gpu": gpus,
            "decode_engine_num_gpu": gpus,
            "max_gpu_budget": most * gpus,
            "min_endpoint": 1,
            "environment": "virtual",
            "metric_reporting_prometheus_port": 0,
            "scheduling": {"tick_max_duration_seconds": NEVER_S},
            "plugin_registration": {"transport": {"request_timeout_seconds": NEVER_S}},
        },
        "prefill": able[Role.PREFILL],
        "decode": able[Role.DECODE],
        "benchmarks": {"prefill": _prompts(law), "decode": _answers(law)},
    }


def _able(law: Law, role: Role, gpus: int) -> dict[str, Any]:
    engine = law.pools[role].engine
    return {
        "num_gpu": gpus,
        "max_num_batched_tokens": engine.batched_tokens,
        "max_num_seqs": engine.seqs_max,
        "context_length": 131_072,
        "max_kv_tokens": engine.kv_tokens,
        "kv_cache_block_size": 16,
    }


def _pass(worker: str, seconds: float, **fields: float) -> dict[str, Any]:
    names = (
        "num_prefill_requests", "sum_prefill_tokens", "var_prefill_length", "sum_prefill_kv_tokens",
        "num_decode_requests", "sum_decode_kv_tokens", "var_decode_kv_tokens",
        "num_queued_prefill", "sum_queued_prefill_tokens", "var_queued_prefill_length",
        "num_queued_decode", "sum_queued_decode_kv_tokens", "var_queued_decode_kv_tokens",
    )  # fmt: skip
    return {"worker_id": worker, "wall_time": seconds, **dict.fromkeys(names, 0), **fields}


def _prompts(law: Law) -> list[dict[str, Any]]:
    engine = law.pools[Role.PREFILL].engine
    sizes = [each for each in PROMPTS if each <= engine.batched_tokens] or [engine.batched_tokens]
    sizes += [engine.batched_tokens]
    return [
        _pass("0", engine.costs.prefill_ms(size) / 1000, num_prefill_requests=1, sum_prefill_tokens=size)
        for size in sorted(set(sizes))
    ]


def _answers(law: Law) -> list[dict[str, Any]]:
    engine = law.pools[Role.DECODE].engine
    return [
        _pass(
            "0",
            engine.costs.decode_step_ms(batch, batch * context) / 1000,
            num_decode_requests=batch,
            sum_decode_kv_tokens=batch * context,
        )
        for context in CONTEXTS
        for batch in BATCHES
        if batch * context <= engine.kv_tokens
    ]


class DynamoPlanner:
    """A scaler that asks the planner at the times it wants, and sets the replicas that it answers."""

    every_s = 5.0

    def __init__(self, law: Law, ask: Ask, first: Mapping[str, Any]) -> None:
        """Drive the planner.

        Args:
            law: as for all rivals.
            ask: sends one observation to the planner.
            first: its answer to `opening`.
        """
        self._law: Final = law
        self._ask: Final = ask
        self._pods: Final = Pods(law.pools, law.budget, law.drain_s)
        self._due_s = float(first["next_tick_ms"] or 0.0) / 1000
        self._ticks = 0
        self._told_s = 0.0
        self._tokens = (0, 0)
        """Prompt tokens so far: found in prefix caches, and computed."""
        self.stopped = False

    def act(self, sight: Sight) -> None:
        """Ask the planner, if a tick is due."""
        if self.stopped or sight.now_s + 1e-6 < self._due_s:
            return
        answer = self._ask(self._look(sight))
        self._ticks += 1
        for role, name in ((Role.PREFILL, "target_prefill"), (Role.DECODE, "target_decode")):
            if answer.get(name) is not None:
                self._pods.set(sight, role, int(answer[name]), "the planner")
        following = answer.get("next_tick_ms")
        self.stopped = following is None
        self._due_s = float(following or 0.0) / 1000

    def _look(self, sight: Sight) -> dict[str, Any]:
        found: dict[str, Any] = {"tick_ordinal": self._ticks, "now_ms": sight.now_s * 1000}
        waiting = sight.meters.counts().waiting or 0
        recent = sight.meters.arrived_since(max(0.0, sight.now_s - 120.0))
        mean = sum(each.input_tokens for each in recent) / len(recent) if recent else 0.0
        for role in PAIR:
            there = [each for each in sight.instances() if each.role is role]
            ready = [each for each in there if each.phase is Phase.READY and not each.leaving]
            starting = [each for each in there if each.phase in (Phase.STARTING, Phase.PENDING)]
            draining = [each for each in there if each.leaving]
            passes = [self._passing(each, role, sight.now_s, mean, waiting / max(1, len(ready))) for each in ready]
            name = role.value
            found |= {
                f"active_{name}_ids": [each.id for each in ready],
                f"active_{name}_count": len(ready),
                f"non_draining_{name}_count": len(ready) + len(starting),
                f"starting_{name}_ids": [each.id for each in starting],
                f"draining_{name}_ids": [each.id for each in draining],
                f"{name}_fpm_snapshots": passes,
            }
        found["traffic"] = self._traffic(sight)
        self._told_s = sight.now_s
        return found

    def _passing(self, each: InstanceSeen, role: Role, now_s: float, mean: float, waiting: float) -> dict[str, Any]:
        """An engine's last step, as far as its heartbeat tells it."""
        engine = self._law.pools[role].engine
        running = each.running or 0
        if role is Role.PREFILL:  # an idle engine's last pass was one of a mean prompt with nothing queued
            size = min(engine.batched_tokens, round(mean))
            queued = max(0.0, waiting - 1) if running else 0.0
            return _pass(
                each.id,
                engine.costs.prefill_ms(max(1, size)) / 1000 if size else 0.0,
                num_prefill_requests=int(bool(size)),
                sum_prefill_tokens=size,
                num_queued_prefill=round(queued),
                sum_queued_prefill_tokens=round(queued * mean),
            )
        held = round((each.kv_usage or 0.0) * engine.kv_tokens)
        step_s = engine.costs.decode_step_ms(running, held) / 1000 if running else 0.0
        queued_here = each.waiting or 0
        return _pass(
            each.id,
            step_s,
            num_decode_requests=running,
            sum_decode_kv_tokens=held,
            num_queued_decode=queued_here,
            sum_queued_decode_kv_tokens=round(queued_here * mean),
        )

    def _traffic(self, sight: Sight) -> dict[str, Any]:
        """Since the last tick: requests that came, the lengths of those that ended, and prefix caches' hit rate."""
        arrived, ended = sight.meters.arrived_since(self._told_s), sight.meters.since(self._told_s)
        served = [each for each in ended if each.served]
        count = len(served)
        cached, computed = self._tokens
        self._tokens = self._computed(sight)
        saved, whole = self._tokens[0] - cached, sum(self._tokens) - cached - computed
        return {
            "duration_s": sight.now_s - self._told_s,
            "num_req": len(arrived),
            "shape_count": count,
            "ttft_count": count,
            "itl_count": count,
            "avg_isl": sum(each.input_tokens for each in served) / count if count else 0.0,
            "avg_osl": sum(each.made_tokens for each in served) / count if count else 0.0,
            "avg_ttft_ms": sum(each.ttft_ms for each in served) / count if count else 0.0,
            "avg_itl_ms": sum(each.tpot_ms for each in served) / count if count else 0.0,
            "avg_kv_hit_rate": saved / whole if whole else 0.0,
            "hit_rate_count": count,
            "avg_accept_length": None,
            "accept_length_forward_count": 0,
        }

    @staticmethod
    def _computed(sight: Sight) -> tuple[int, int]:
        classes = sight.meters.counts().classes.values()
        return sum(each.cached_tokens for each in classes), sum(each.computed_tokens for each in classes)
