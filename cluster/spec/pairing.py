"""Which shapes vLLM lets hand over to each other. Pure: one rule for `lint` and plans.

The source of vLLM 0.32's NixlConnector (``KC`` = ``vllm/distributed/kv_transfer/kv_connector``) refuses sizes that do
not divide each other (``KC/utils.py``). It also refuses a producer with more ranks than its consumer, if the producer
has more ranks than the model has KV heads (``KC/v1/nixl/base_worker.py``). Several ranks then hold copies of a head,
and the protocol does not say which copy to read. Latent attention (MLA) has no heads to split, and is never refused.
"""

from __future__ import annotations


def refused_pair(prefill_tp: int, decode_tp: int, kv_heads: int | None = None, *, latent: bool = False) -> str:
    """Why a prefill instance cannot hand over to a decode instance; empty: it can.

    Args:
        prefill_tp: tensor parallel size of the instance that computes the prompt.
        decode_tp: tensor parallel size of the instance that generates.
        kv_heads: KV heads of the model; None: unknown.
        latent: whether the model's attention is latent (MLA).
    """
    few, many = sorted((prefill_tp, decode_tp))
    if many % few:
        return f"tp {prefill_tp} and tp {decode_tp} do not divide each other"
    if kv_heads is not None and not latent and prefill_tp > decode_tp and prefill_tp > kv_heads:
        return f"tp {prefill_tp} is more than the decode side's {decode_tp} and than the model's {kv_heads} KV heads"
    return ""
