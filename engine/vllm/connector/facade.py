"""Baton's connector for vLLM: its NixlConnector in pull mode, with confirmed reads, names for holds, and no open port.

Loaded by ``--kv-transfer-config`` with ``"kv_connector": "BatonConnector"`` and ``"kv_connector_module_path":
"engine.vllm.connector.facade"``. Its own settings stand in ``kv_connector_extra_config``: `door` (the path of its agent
socket), `epoch` (the number of the engine's starts, counted by the agent) and `digests` (true: D compares pulled blocks
with P's digests, block by block). All other settings are vLLM's.

vLLM sees this file; its halves are `scheduler` and `worker`. The rules are in `prefill` (holds) and `decode` (pulls),
which the engine twin runs as well. docs/connector.md describes the whole. vLLM gives no promise about the overridden
methods, so the range of versions is pinned and checked.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NIXL_CONNECTOR_VERSION
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from engine.vllm.connector import served
from engine.vllm.connector.metadata import BatonMetadata
from engine.vllm.connector.registered import register
from engine.vllm.connector.scheduler import BatonScheduler
from engine.vllm.connector.worker import BatonWorker
from engine.vllm.connector.written_for import WIRE, is_written_for
from kvtransfer.asks import door_of
from kvtransfer.door import Door, left_to_vllm

logger = logging.getLogger("vllm.baton.connector")


def check_version() -> None:
    """Refuse a vLLM version that this connector was not written for.

    Raises:
        RuntimeError: another version.
    """
    if not is_written_for(vllm.__version__) or NIXL_CONNECTOR_VERSION != WIRE:
        raise RuntimeError(
            f"Baton's connector is written for vLLM 0.32 (its connector's version {WIRE}), and this is vLLM "
            f"{vllm.__version__} (version {NIXL_CONNECTOR_VERSION}). Use vLLM's own connector with "
            "`transfer: {connector: nixl}` in the cluster file, or `--transfer nixl`."
        )


def check_config(vllm_config: Any, left: str | None) -> None:
    """Refuse a configuration with which this connector would hand over wrong blocks, or not do what was asked for.

    Raises:
        RuntimeError: names the setting and the fix (`engine.vllm.connector.served.refused`).
    """
    why = served.refused(vllm_config, left=left, device=current_platform.device_type)
    if why is not None:
        raise RuntimeError(why)


def not_served(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why this engine's KV cache is left to vLLM's own connector; None: Baton's connector serves it
    (`served.left_to_vllm`).
    """
    groups = kv_cache_config.kv_cache_groups
    # Subclasses of full attention may keep other blocks (`RSWASpec`): only classes whose source was read are served.
    full = len(groups) == 1 and type(groups[0].kv_cache_spec) in {FullAttentionSpec, MLAAttentionSpec}
    return served.left_to_vllm(vllm_config, full_attention=full, device=current_platform.device_type)


class _NotDeprecated(logging.Filter):
    """Suppresses vLLM's warning about `kv_both`, which is right for an instance that may change roles."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "kv_role='kv_both'" not in record.getMessage()


class BatonConnector(stock.NixlPullConnector):  # type: ignore[misc]
    """The connector as vLLM sees it; see the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_version()
        why = not_served(vllm_config, kv_cache_config)
        check_config(vllm_config, why)
        stock.logger.addFilter(_NotDeprecated())
        stock.NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        self._door: Door | None = None
        scheduler, worker = stock.NixlPullConnectorScheduler, stock.NixlPullConnectorWorker
        if why is None:
            scheduler, worker = BatonScheduler, BatonWorker
        elif role == KVConnectorRole.SCHEDULER:
            logger.warning("This engine's KV cache is handed over by vLLM's own connector: %s.", why)
            door = vllm_config.kv_transfer_config.get_from_extra_config("door", None)
            dtype = served.number_format(vllm_config, kv_cache_config, device=current_platform.device_type)
            path = None if door is None else Path(door_of(door, served.rank_in(vllm_config)))
            self._door = None if path is None else left_to_vllm(path, why, dtype)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = scheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = worker(vllm_config, self.engine_id, kv_cache_config)
        self._started = False
        # vLLM starts loads after it has launched the forward pass. On a CPU the pass is over by then, so loads start
        # before it here and run beside it. That is safe: the blocks to read into have belonged to their request since
        # it was scheduled, and no earlier step is under way on a CPU.
        self._early = why is None and current_platform.device_type == "cpu"

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take the scheduler half's message: vLLM's first call to a worker in a step."""
        super().bind_connector_metadata(connector_metadata)
        self._started = False
        if isinstance(self.connector_worker, BatonWorker):
            assert isinstance(connector_metadata, BatonMetadata)
            self.connector_worker.step(connector_metadata)
            self.connector_worker.meet(connector_metadata)
            if self._early:
                self.start_load_kv(None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start a step's loads. On a CPU `bind_connector_metadata` has done so, and vLLM's own call does nothing."""
        if not self._started:
            self._started = True
            super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """Write the block digests of a step; vLLM calls this after its forward pass, before it reports any result."""
        super().wait_for_save()
        if isinstance(self.connector_worker, BatonWorker):
            assert isinstance(self._connector_metadata, BatonMetadata)
            self.connector_worker.vouch(self._connector_metadata)

    def build_connector_worker_meta(self) -> Any:
        """The worker half's report to the scheduler half."""
        return self.connector_worker.tell() if isinstance(self.connector_worker, BatonWorker) else None

    def shutdown(self) -> None:
        """Close the agent socket; vLLM calls this when the engine ends."""
        if self._door is not None:
            self._door.close()
        super().shutdown()


register(BatonConnector)
