"""The worker's part in introductions: which engines vLLM's worker shakes hands with, and which it drops.

`engine.vllm.connector.links` decides what a peer's metadata must say. Runs inside vLLM's workers.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.platforms import current_platform

from engine.vllm.connector.links import Links, described
from engine.vllm.connector.metadata import BatonMetadata
from engine.vllm.connector.served import reads_peers
from kvtransfer.asks import Introduce


class LinksWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """vLLM's worker, with introductions in place of questions to the network."""

    _links: Links

    def meet(self, metadata: BatonMetadata) -> None:
        """Shake hands with introduced engines, in the background; forget engines that are gone. An agent repeats an
        introduction while the link is not well: then the link is tried again.
        """
        for met in metadata.introductions:
            for former in self._links.introduce(met):
                self._forget(former)
            if (
                reads_peers(self.kv_transfer_config)
                and self._ensure_handshake(met.engine_id, met.instance, 0, met.ranks) is None
            ):
                self._keep(met)
                self._look_again(met.engine_id)
        for engine_id in metadata.forgotten:
            self._forget(engine_id)

    def _forget(self, engine_id: str) -> None:
        self._links.forget(engine_id)
        with self._handshake_lock:  # vLLM's `_cleanup_remote_engines`: its state goes once no read uses it
            for address in [each for each, name in self._engine_by_address.items() if name == engine_id]:
                del self._engine_by_address[address]

    def _keep(self, met: Introduce) -> None:
        """An engine that was forgotten during a read, and is introduced again before that has ended, is not replaced:
        vLLM would drop it after the read, although it is met.
        """
        with self._handshake_lock:
            if met.engine_id in self._remote_agents:
                self._engine_by_address[met.instance, 0] = met.engine_id

    def _look_again(self, engine_id: str) -> None:
        """For an engine that has shaken hands with this one before: report how the link stands, or try the first read
        once more, on the handshake thread. vLLM releases no peer while a handshake is under way.
        """
        if self._links.report_met(engine_id):
            return
        with self._handshake_lock:
            if engine_id in self._handshake_futures or engine_id not in self._remote_agents:
                return
            agents = dict(self._remote_agents[engine_id])
            future = self._handshake_initiation_executor.submit(self._links.try_all, engine_id, agents)
            self._handshake_futures[engine_id] = future
        future.add_done_callback(lambda _: self._handshake_futures.pop(engine_id, None))

    def _ensure_handshake(self, engine_id: str, host: str, port: int, tp_size: int, *more: Any, **named: Any) -> Any:
        """vLLM's, but with the introduced instance's name for `host`: no address in a request is ever connected to."""
        instance, ranks = self._links.address(engine_id)
        return super()._ensure_handshake(engine_id, instance, 0, ranks)

    def _nixl_handshake(
        self, host: str, port: int, remote_tp_size: int, expected_engine_id: str, *more: Any, **named: Any
    ) -> tuple[dict[tuple[int, int], str], float]:
        """vLLM's, but with the introduction in place of a question over ZMQ. Runs on the handshake thread; an error is
        a failed handshake.
        """
        met = self._links.introduction(expected_engine_id)
        if not self.use_host_buffer:
            current_platform.set_device(self.device_id)
        ranks = self.transfer_topo.handshake_target_ranks(met.ranks, 1)
        agents = {(0, rank): self._add(met, rank) for rank in ranks}
        self._links.try_all(met.engine_id, agents)
        return agents, 0.0

    def _add(self, met: Introduce, rank: int) -> str:
        metadata, told = described(met, rank, self.compat_hash if self.enforce_compat_hash else None)
        self._validate_remote_parallel_config(metadata)
        slots = self._links.slots(met, rank, told)
        agent: str = self.add_remote_agent(metadata, rank, met.ranks, metadata.dcp_size)
        self._links.reached(met.engine_id, rank, slots)
        return agent

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)
        self._links.released(engine_id)
