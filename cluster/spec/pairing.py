"""Which instances vLLM lets hand over to each other, as far as their shapes say. Pure: one rule for `lint` and plans.

vLLM 0.32's NixlConnector, seen in its source (``KC`` = ``vllm/distributed/kv_transfer/kv_connector``): sizes that do
not divide each other are refused (``KC/utils.py``), and so is a producer of more ranks than its consumer where it has
more ranks than the model has KV heads (``KC/v1/nixl/base_worker.py``): ranks then hold copies of heads, and nothing
says which to read. Latent attention (MLA) has no heads to split, and is never refused.
"""

from __future__ import annotations


def refused_pair(prefill_tp: int, decode_tp: int, kv_heads: int | None = None, *, latent: bool = False) -> str:
    """Why a prefill instance cannot hand over to a decode instance; empty: it can.

    Args:
        prefill_tp: tensor parallel size of the instance that computes the prompt.
        decode_tp: of the one that generates.
        kv_heads: the model's; None: unknown.
        latent: whether its attention is latent (MLA).
    """
    few, many = sorted((prefill_tp, decode_tp))
    if many % few:
        return f"tp {prefill_tp} and tp {decode_tp} do not divide each other"
    if kv_heads is not None and not latent and prefill_tp > decode_tp and prefill_tp > kv_heads:
        return f"tp {prefill_tp} is more than the decode side's {decode_tp} and than the model's {kv_heads} KV heads"
    return ""
