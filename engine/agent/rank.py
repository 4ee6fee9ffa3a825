"""One instance that an agent announces: its engine, or one of the engine's data parallel ranks. A shell.

The ranks of an engine live and die together: they start, drain, change roles and end with it. Beside that each rank has
its own state in the fleet: credits, load, epoch, evictions, peers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from cluster.ids import InstanceId, rank_of
from cluster.instance import Load, SettledTokens, Tier
from cluster.registry.membership import SHUNS_BYTES_MAX, SHUNS_MAX
from engine.agent.machine import AgentMachine, AgentState, Effect, Event, Tick
from engine.agent.meetings import with_door
from engine.agent.transfers import Transfers
from engine.vllm.evictions import Evictions
from engine.vllm.tier_speeds import TierSpeeds

logger = logging.getLogger("baton.agent")

_SERVING: Final = frozenset({AgentState.READY, AgentState.DRAINING})
_NEEDING: Final = _SERVING | {AgentState.STARTING, AgentState.RESTARTING}


class Rank:
    """One instance; see the module."""

    __slots__ = ("epoch", "evictions", "id", "machine", "number", "recomputed", "seq", "speeds", "transfers")

    def __init__(self, machine: AgentMachine, *, tiered: bool) -> None:
        """`tiered`: its engine has tiers below its KV cache."""
        self.id = InstanceId(machine.name)
        self.number = rank_of(self.id) or 0
        self.machine = machine
        self.evictions = Evictions(tiered=tiered)
        self.speeds: Final = TierSpeeds()
        self.recomputed: Final = SettledTokens()
        self.transfers: Transfers | None = None
        """The part that introduces it to its peers; None: it meets no peers."""
        self.epoch = 0
        """The number of this start of the engine, among all starts under its name."""
        self.seq = 0
        """The number of its last heartbeat."""

    def read(self, load: Load) -> Load:
        """Its load by vLLM's metrics, corrected where its agent socket counts exactly (`with_door`)."""
        found = load if self.transfers is None else with_door(load, self.transfers.handoffs)
        self.recomputed.hear(found.recomputed_tokens)
        return found

    def restart(self) -> None:
        """Its engine starts anew: what was counted of the former life is dropped."""
        self.evictions.restart()
        self.speeds.restart()
        self.recomputed.restart()

    def shuns(self) -> tuple[InstanceId, ...]:
        """Producers from which it can pull nothing now; if they are very many, the first that fit into a heartbeat."""
        if self.transfers is None:
            return ()
        kept, left = [], SHUNS_BYTES_MAX
        for name in self.transfers.acquainted.shuns[:SHUNS_MAX]:
            left -= len(name)
            if left >= 0:
                kept.append(name)
        return tuple(kept)

    def told(self) -> dict[str, Any]:
        """Its part of the agent's `/state`."""
        machine = self.machine
        return {
            "instance": self.id,
            "state": machine.state.value,
            "epoch": machine.epoch,
            "credits": machine.credits,
            "grants": self.grants(),
            "load": figures(machine.load),
        }

    def grants(self) -> dict[str, int]:
        """The legs that each router may have there now, by the router's name."""
        return {name: router.granted[-1][1] for name, router in self.machine.shared.routers.items()}

    def samples(self) -> dict[str, float]:
        """Its metrics, by name."""
        machine, load = self.machine, self.machine.load
        return {
            "baton_agent_ready": machine.state is AgentState.READY,
            "baton_agent_draining": machine.state is AgentState.DRAINING,
            "baton_agent_epoch": machine.epoch,
            "baton_agent_credits": machine.credits,
            "baton_agent_credits_of_dead_routers": machine.shared.ghosts,
            "baton_agent_running": load.running,
            "baton_agent_waiting": load.waiting,
            "baton_agent_kv_usage": load.kv_usage,
            "baton_agent_kv_evicted_tokens_total": self.evictions.tokens,
            "baton_agent_recomputed_tokens_total": self.recomputed.tokens,
        }


class RankMachines:
    """The machines of an engine's ranks: events go to them, their effects go to `act`, and their timers wake them."""

    __slots__ = ("_act", "_ranks", "_timer")

    def __init__(self, ranks: tuple[Rank, ...], act: Callable[[Effect], None]) -> None:
        self._ranks, self._act = ranks, act
        self._timer: asyncio.TimerHandle | None = None

    @property
    def serving(self) -> bool:
        """Whether any rank may have requests."""
        return any(rank.machine.state in _SERVING for rank in self._ranks)

    @property
    def need_engine(self) -> bool:
        """Whether any rank still needs the engine."""
        return any(rank.machine.state in _NEEDING for rank in self._ranks)

    def feed(self, event: Event) -> None:
        """Feed one event to the machines of all ranks: what happens to an engine happens to each of them."""
        self.feed_each([(rank, event) for rank in self._ranks])

    def feed_each(self, events: Iterable[tuple[Rank, Event]]) -> None:
        """Feed each rank's machine its own event. The effects are carried out once all machines have their events."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for effect in [effect for rank, event in events for effect in rank.machine.handle(event, now)]:
            try:
                self._act(effect)
            except OSError as error:  # a full disk under the log: the engine is stopped all the same
                logger.warning("%s is not carried out: %s", type(effect).__name__, error)
        self.stop()
        due = min((at for rank in self._ranks if (at := rank.machine.next_wakeup()) is not None), default=None)
        if due is not None:
            self._timer = loop.call_at(due, self.feed, Tick())

    def stop(self) -> None:
        """Wake no machine any more, until the next event."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def figures(load: Load) -> dict[str, float]:
    """A load as `/state` shows it; `kv_usage` is a share, 0 to 1."""
    return {"running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage}


def exposition_of(ranks: tuple[Rank, ...]) -> str:
    """The metrics of an engine's ranks as Prometheus text: each name once, with a sample for each rank."""
    lines: list[str] = []
    found = {rank.id: rank.samples() for rank in ranks}
    label = {rank.id: f'instance="{rank.id}",role="{rank.machine.role.value}"' for rank in ranks}
    for name in found[ranks[0].id]:
        lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n")
        lines += [f"{name}{{{label[rank]}}} {samples[name]:.17g}\n" for rank, samples in found.items()]
    lines += _by_tier(
        "# TYPE baton_agent_kv_kept_tokens gauge\n", {label[rank.id]: rank.evictions.kept for rank in ranks}
    )
    lines += _by_tier("# TYPE baton_agent_kv_load_gb_s gauge\n", {label[rank.id]: rank.speeds.gb_s for rank in ranks})
    return "".join(lines)


def _by_tier(head: str, told: Mapping[str, Mapping[Tier, float]]) -> list[str]:
    """The lines of a gauge with a sample for each tier. `head`: its first line; `told`: by the other labels."""
    name, found = head.split()[2], []
    for label, by_tier in told.items():
        found += [f'{name}{{{label},tier="{tier}"}} {value:.17g}\n' for tier, value in by_tier.items()]
    return [head, *found] if found else []
