"""Baton's connector for vLLM: its NixlConnector in pull mode, with confirmed reads, names for holds, and no open port.

Loaded by ``--kv-transfer-config`` with ``"kv_connector": "BatonConnector"`` and ``"kv_connector_module_path":
"kvtransfer.vllm_connector"``; its own settings stand in ``kv_connector_extra_config``: `door` (path of the socket its
agent speaks to it by), `epoch` (the engine's starts, as the agent counts them) and `digests` (true: what D has pulled
is compared with what P vouches for, block by block). The rest is vLLM's.

This file is the facade that vLLM sees; the halves are `vllm_scheduler` and `vllm_worker`, the rules are pure modules
beside them, and docs/connector.md tells it as a whole. vLLM promises nothing about what is overridden here, so the
range of versions is pinned and checked.
"""

from __future__ import annotations

import logging
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NIXL_CONNECTOR_VERSION
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvtransfer.vllm_metadata import BatonMetadata
from kvtransfer.vllm_scheduler import BatonScheduler
from kvtransfer.vllm_worker import BatonWorker
from kvtransfer.written_for import WIRE, is_written_for

logger = logging.getLogger("vllm.baton.connector")


def check_version() -> None:
    """Refuse a vLLM that this was not written for.

    Raises:
        RuntimeError: it is another one.
    """
    if not is_written_for(vllm.__version__) or NIXL_CONNECTOR_VERSION != WIRE:
        raise RuntimeError(
            f"Baton's connector is written for vLLM 0.32 (its connector's version {WIRE}), and this is vLLM "
            f"{vllm.__version__} (version {NIXL_CONNECTOR_VERSION}). Use vLLM's own connector with "
            "`transfer: {connector: nixl}` in the cluster file, or `--transfer nixl`."
        )


def check_digests(vllm_config: Any, device: str) -> None:
    """Refuse digests where they cannot be made.

    Raises:
        RuntimeError: the KV cache is in a GPU's memory, or the setting is neither true nor false.
    """
    asked = vllm_config.kv_transfer_config.get_from_extra_config("digests", False)
    if not isinstance(asked, bool):
        raise RuntimeError(f"`digests` is {asked!r}: it must be true or false")  # noqa: TRY004 - as vLLM shows it best
    if asked and device != "cpu":
        raise RuntimeError(
            "`digests: true` is for KV caches in host memory: every byte is read once more by a processor, on both "
            "sides. Leave it out on GPUs."
        )


def not_served(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why a model or a layout is left to vLLM's own connector; None: it is served. The same on P and D of a model."""
    parallel = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        return "it has more kinds of KV cache than full attention"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism"
    if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        return "context parallelism"
    if vllm_config.num_prefill_lookahead_tokens > 1:
        return "speculative decoding that needs the prompt's last tokens computed twice"
    if transfer.get_from_extra_config("bidirectional_kv_xfer", False):
        return "bidirectional_kv_xfer"
    if current_platform.device_type != "cpu" and transfer.kv_buffer_device == "cpu":
        return "a KV buffer in host memory"
    return None


class _NotDeprecated(logging.Filter):
    """Keeps vLLM's warning about `kv_both` back: an instance that may change roles is just that."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "kv_role='kv_both'" not in record.getMessage()


class BatonConnector(stock.NixlPullConnector):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_version()
        check_digests(vllm_config, current_platform.device_type)
        stock.logger.addFilter(_NotDeprecated())
        stock.NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        why = not_served(vllm_config, kv_cache_config)
        scheduler, worker = stock.NixlPullConnectorScheduler, stock.NixlPullConnectorWorker
        if why is None:
            scheduler, worker = BatonScheduler, BatonWorker
        elif role == KVConnectorRole.SCHEDULER:
            logger.warning("This engine's KV cache is handed over by vLLM's own connector: %s.", why)
        self._ours = why is None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = scheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = worker(vllm_config, self.engine_id, kv_cache_config)
        self._started = False
        # On a GPU the forward pass is only launched when vLLM starts loads; on a CPU it is over by then, and a load
        # that starts before it runs beside it. Blocks to read into belong to their request since it was scheduled, and
        # no earlier step is under way on a CPU.
        self._early = self._ours and current_platform.device_type == "cpu"

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """The first that a worker hears of a step."""
        super().bind_connector_metadata(connector_metadata)
        self._started = False
        if isinstance(self.connector_worker, BatonWorker):
            assert isinstance(connector_metadata, BatonMetadata)
            self.connector_worker.mark(connector_metadata)
            self.connector_worker.meet(connector_metadata)
            if self._early:
                self.start_load_kv(None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Once a step."""
        if not self._started:
            self._started = True
            super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """After a step's forward pass, before anything of it is reported."""
        super().wait_for_save()
        if isinstance(self.connector_worker, BatonWorker):
            assert isinstance(self._connector_metadata, BatonMetadata)
            self.connector_worker.vouch(self._connector_metadata)

    def build_connector_worker_meta(self) -> Any:
        """What the worker half tells the scheduler half."""
        return self.connector_worker.tell() if isinstance(self.connector_worker, BatonWorker) else None
