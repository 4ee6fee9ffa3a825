"""Baton's connector with faults that a test asks for: in blocks, reads and notices. Runs inside vLLM's engines.

A test writes a fault into the file that `faults` in ``kv_connector_extra_config`` names. The engine reads the file at
its next step, so it needs a running request, and then removes the file.

- ``{"flip": [block, byte]}``: flip a bit of that byte of the block, in its first tensor
- ``{"exchange": [block, block]}``: exchange the bytes of two blocks, in all tensors
- ``{"chances": {"cut": 0.1, "drop": 0.1, "blind": 0.1}, "seed": 1}``: from now on, with these probabilities, a finished
  read is reported as failed (`cut`), the notice of a read is lost (`drop`), a slot cannot be read (`blind`)
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from engine.vllm.connector import facade
from engine.vllm.connector.worker import BatonWorker


class FaultyAgent:
    """NIXL's agent with faults, for the thread that follows pulls. No other thread calls it."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.chance = random.Random(0)
        self.chances: dict[str, float] = {}
        self.done: dict[str, int] = {"cut": 0, "drop": 0, "blind": 0}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def strikes(self, fault: str) -> bool:
        struck = self.chance.random() < self.chances.get(fault, 0.0)
        self.done[fault] += struck
        return struck

    def check_xfer_state(self, handle: Any) -> str:
        state: str = self._agent.check_xfer_state(handle)
        return "ERR" if state == "DONE" and self.strikes("cut") else state

    def send_notif(self, agent_name: str, notif_msg: bytes) -> None:
        if not self.strikes("drop"):
            self._agent.send_notif(agent_name, notif_msg=notif_msg)


class FaultyWorker(BatonWorker):
    """Behaves as its parent until a test asks for a fault."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._faults = Path(vllm_config.kv_transfer_config.kv_connector_extra_config["faults"])
        self._faulty = FaultyAgent(self._agent)
        self._reads._agent = self._faulty
        self._prepare = self._slots.prepare
        self._reads._look = self._slots.prepare = self._look  # type: ignore[method-assign]

    def _look(self, agent: str, address: int, landing: int) -> Any:
        if self._faulty.strikes("blind"):
            raise RuntimeError("a fault that a test asked for")
        return self._prepare(agent, address, landing)

    def start_load_kv(self, metadata: Any) -> None:
        super().start_load_kv(metadata)
        if not self._faults.exists():
            return
        asked = json.loads(self._faults.read_text())
        if "flip" in asked:
            block, byte = asked["flip"]
            next(self._regions()[0].pieces(block))[byte] ^= 1
        if "exchange" in asked:
            for region in self._regions():
                for one, other in zip(*(region.pieces(block) for block in asked["exchange"]), strict=True):
                    one[:], other[:] = bytes(other), bytes(one)
        self._faulty.chances = asked.get("chances", self._faulty.chances)
        self._faulty.chance = random.Random(asked.get("seed", 0))
        self._faults.unlink()


class BatonConnector(facade.BatonConnector):
    """Has the name of the connector that it replaces, as vLLM looks it up by name."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        facade.BatonWorker = FaultyWorker  # type: ignore[misc] - the parent makes one of this class, and checks for it
        super().__init__(vllm_config, role, kv_cache_config)
