"""What an agent says of its instance: heartbeats, its state for operators, metrics for Prometheus. A shell."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict
from typing import Any, Final

from cluster.instance import total_load
from cluster.registry.membership import Heartbeat, MemberState
from engine.agent.announced import detail
from engine.agent.config import AgentConfig
from engine.agent.meetings import exposition
from engine.agent.rank import Rank, exposition_of, figures
from engine.agent.readings import EngineReadings
from engine.vllm.child import EngineProcess


class InstanceReport:
    """The report on one engine and its ranks. It only reads, except that it numbers heartbeats and issues grants."""

    def __init__(
        self, agent: str, engine: EngineProcess, config: AgentConfig, ranks: tuple[Rank, ...], readings: EngineReadings
    ) -> None:
        """`agent`: the id of the agent's process. `readings`: what it has read of its engine."""
        self.agent_url = ""
        """Base URL of the agent's own HTTP; empty: it does not answer yet."""
        self._agent: Final = agent
        self._spec: Final = engine.spec
        self._log: Final = str(engine.log_path)
        self._config: Final = config
        self._ranks: Final = ranks
        self._readings: Final = readings

    def heartbeat(self, rank: Rank) -> Heartbeat:
        """The next heartbeat of a rank."""
        rank.seq += 1
        machine = rank.machine
        epoch = max(1, machine.epoch)
        return Heartbeat(
            id=rank.id,
            agent=self._agent,
            where=f"{socket.gethostname()}:{os.getpid()}",
            epoch=epoch,
            seq=rank.seq,
            role=machine.role,
            models=self._readings.announced,
            adapters=self._readings.announced_adapters,
            url=self._spec.url,
            agent_url=self.agent_url,
            state=MemberState(machine.state.value),
            detail=detail(machine.detail),
            load=machine.load,
            credits=machine.credits,
            grants=machine.grants((epoch, rank.seq)),
            shuns=rank.shuns(),
            peers=rank.transfers is not None and rank.transfers.shares,
            evicted=(rank.evictions.tokens, rank.evictions.clears),
            kept=rank.evictions.kept,
            kept_gb_s=dict(rank.speeds.gb_s),
            kv_token_bytes=rank.speeds.token_bytes,
            revision=self._config.revision,
            weights=self._readings.weights,
            node=self._config.node,
            tenants=self._config.tenants,
            pins=self._spec.pins,
            early=rank.transfers is not None and rank.transfers.early,
            dtype="" if rank.transfers is None else rank.transfers.dtype,
            sent_at=time.time(),  # noqa: TID251 - for information only, no decision depends on it
        )

    def state(self) -> dict[str, Any]:
        """Everything that the agent knows of the instance, for `/state` and `/ready`."""
        machine = self._ranks[0].machine
        handoffs = [rank.transfers.handoffs for rank in self._ranks if rank.transfers is not None]
        told = {
            "instance": self._spec.instance,
            "role": machine.role.value,
            "flips": sorted(role.value for role in machine.flips),
            "state": machine.state.value,
            "drained": all(rank.machine.drained for rank in self._ranks),
            "detail": machine.detail,
            "epoch": machine.epoch,
            "engine": self._spec.url,
            "agent": self.agent_url,
            "pid": os.getpid(),
            "models": [entry.get("id") for entry in self._readings.models],
            "weights": self._readings.weights,
            "node": self._config.node,
            "credits": sum(rank.machine.credits for rank in self._ranks),
            "grants": self._ranks[0].grants(),
            "load": figures(total_load([rank.machine.load for rank in self._ranks])),
            "pulls": [asdict(pull) for each in handoffs for pull in each.pulls],
            "log": self._log,
        }
        return told if len(self._ranks) == 1 else {**told, "ranks": [rank.told() for rank in self._ranks]}

    def metrics(self) -> str:
        """The metrics as Prometheus text."""
        handoffs = {rank.id: rank.transfers.handoffs for rank in self._ranks if rank.transfers is not None}
        return exposition_of(self._ranks) + exposition(handoffs)
