"""Which engines Baton's connector serves, which it leaves to vLLM's own connector, and which must not start. Pure.

vLLM's configuration is read by the names of its fields only, so that this is decided, and tested, without vLLM.

- *Left to vLLM*: vLLM's own connector moves the KV cache, inside the same engine, and the log says why.
- *Refused*: for a connector named ``NixlConnector`` vLLM adapts or refuses some settings, and for any other name it
  does neither. An engine with such a setting must not start, as it would hand over wrong blocks.
"""

from __future__ import annotations

import re
from typing import Any, Final

from kvtransfer.asks import RANK

RANKS: Final = "data parallelism"
STAGES: Final = "pipeline parallelism"
CONTEXT: Final = "context parallelism"
SLEEP: Final = "sleep mode"
"""Why `auto` does not choose Baton's connector, which would refuse to start (`refused`)."""

ROUNDED: Final = "tf32"
"""The format to which a GPU rounds the factors of float32 products (10 bits of mantissa) in the scan of a Mamba layer:
``tl.dot`` without `input_precision` in ``model_executor/layers/mamba/ops/ssd_*.py``. The kernel of a single step does
not."""

_RANK: Final = re.compile(r"_dp\d+\Z")
"""The end of an engine's id in each data-parallel rank; a dense model's rank sees `data_parallel_size` 1."""


def left_to_vllm(config: Any, *, full_attention: bool, device: str) -> str | None:
    """Why this engine's KV cache is handed over by vLLM's own connector; None: Baton's connector serves it.

    Args:
        config: vLLM's whole configuration, as a connector gets it.
        full_attention: whether the KV cache has only full attention's kind of block.
        device: the engine's device, in vLLM's words.
    """
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    if not full_attention:
        return "it has more kinds of KV cache than full attention"
    if _shares_its_door(config):
        return f"{RANKS}: each rank needs an agent socket of its own: write `{RANK}` into `door`"
    if parallel.pipeline_parallel_size > 1:
        return STAGES
    if parallel.prefill_context_parallel_size > 1:
        return CONTEXT
    if config.num_prefill_lookahead_tokens > 1:
        return "speculative decoding that needs the prompt's last tokens computed twice"
    if transfer.get_from_extra_config("bidirectional_kv_xfer", False):
        return "bidirectional_kv_xfer"
    if device != "cpu" and transfer.kv_buffer_device == "cpu":
        return "a KV buffer in host memory"
    return None


def number_format(config: Any, kv_cache: Any, *, device: str) -> str:
    """The number formats in which the engine computes and keeps KV and states, in order, with a comma between
    (`cluster.instance.Instance.dtype`).

    vLLM has settled them by now: its own choice for the model, and what the model's configuration says of states.

    Args:
        config: as in `left_to_vllm`.
        kv_cache: vLLM's `KVCacheConfig`, with the layout of each kind of cache.
        device: as in `left_to_vllm`.
    """
    found = {str(config.model_config.dtype).removeprefix("torch.")}
    for group in kv_cache.kv_cache_groups:
        found |= _kept_in(group.kv_cache_spec)
    if config.model_config.quantization is not None:
        found.add(str(config.model_config.quantization))
    if device != "cpu" and "float32" in found:
        found.add(ROUNDED)
    return ", ".join(sorted(found))


def _kept_in(spec: Any) -> set[str]:
    """The number formats of one `KVCacheSpec`: of an attention layer's KV, of a Mamba layer's states, or of several."""
    parts = getattr(spec, "kv_cache_specs", None)  # `UniformTypeKVCacheSpecs`: by layer
    if parts is not None:
        return set().union(*map(_kept_in, parts.values()))
    kept = getattr(spec, "dtypes", None) or (getattr(spec, "dtype", "unknown"),)
    return {str(each).removeprefix("torch.") for each in kept}


def reads_peers(transfer: Any) -> bool:
    """Whether an engine with this `kv_transfer_config` reads from other engines: one that only produces does not."""
    return bool(transfer.kv_role != "kv_producer")


def rank_in(config: Any) -> int | None:
    """The number of the data parallel rank that this engine core is; None: the engine has no ranks.

    vLLM tells a dense model's rank nothing of other ranks: only its engine id shows that it is one.
    """
    parallel, engine_id = config.parallel_config, config.kv_transfer_config.engine_id or ""
    ranked = parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0 or _RANK.search(engine_id)
    return int(parallel.data_parallel_index) if ranked else None


def _shares_its_door(config: Any) -> bool:
    """Whether other ranks have the same path for their agent socket. A rank with a server of its own shares no path."""
    door = config.kv_transfer_config.get_from_extra_config("door", None)
    alone = config.parallel_config.data_parallel_external_lb
    return bool(rank_in(config) is not None and door and RANK not in door and not alone)


def refused(config: Any, *, left: str | None, device: str) -> str | None:
    """Why an engine with this configuration must not start, and the fix; None: it may start.

    Args:
        config: as in `left_to_vllm`.
        left: that function's answer.
        device: the engine's device, in vLLM's words.
    """
    use = "Use vLLM's own connector: `transfer: {connector: nixl}` in the cluster file, or `--transfer nixl`."
    asked = config.kv_transfer_config.get_from_extra_config("digests", False)
    if not isinstance(asked, bool):
        return f"`digests` is {asked!r}: it must be true or false"
    if asked and device != "cpu":
        return (
            "`digests: true` is for KV caches in host memory: every byte is read once more by a processor, on both "
            "sides. Leave it out on GPUs."
        )
    if asked and left is not None:
        return (
            f"`digests: true` is for what Baton's connector hands over, and this engine's KV cache is left to vLLM's "
            f"own ({left}). Leave `digests` out."
        )
    if config.parallel_config.decode_context_parallel_size > 1:
        return (
            "`decode_context_parallel_size` is above 1: vLLM interleaves the KV cache as a hand-over needs it only "
            f"where `kv_connector` is NixlConnector. {use}"
        )
    if config.aux_output_config.enable_return_routed_experts:
        return (
            "`enable_return_routed_experts` is set: no hand-over carries which experts the prompt's tokens went to, "
            "so a decode instance would answer with others. Leave it out."
        )
    if config.model_config.enable_sleep_mode:
        return (
            "`enable_sleep_mode` is set: an engine that wakes has other GPU memory at the addresses that its peers "
            "read, and confirmed holds would have lost their bytes. Leave it out."
        )
    return None
