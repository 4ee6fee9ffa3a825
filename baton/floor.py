"""The least latencies that hardware allows, for `baton lint`: joins the cluster file's pools with the cost model."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.instance import Role
from cluster.spec import Floor, Model, Pool, Spec, flags
from costs.bounds import Least, least
from costs.hardware import find_gpu, kv_dtype_named
from costs.model import ModelShape
from costs.shipped import find_model


def floor_of(_: Spec, model: Model) -> Floor | None:
    """The least latencies of the model's pools, ms, for each target on the pool that is fastest at it.

    They hold for a prompt of one token on an idle instance: a target below them is a mistake whatever the load. None if
    the model's config does not ship. Without targets if a pool names no GPU or an unknown one (None with latent
    attention, which has no heads to report).
    """
    shape, pools = find_model(model.name), list(model.pools.every().values())
    heads = None if shape is None or shape.latent else shape.kv_heads
    first = _fastest(shape, (pool for role, pool in pools if role is not Role.DECODE), "ttft_ms")
    further = _fastest(shape, (pool for role, pool in pools if role is not Role.PREFILL), "tpot_ms")
    if first is None or further is None:
        return None if heads is None else Floor(because="", kv_heads=heads)
    targets = {"ttft_ms": first.ttft_ms, "tpot_ms": further.tpot_ms, "tt2t_ms": further.tpot_ms}
    return Floor(
        because=f"first token: {first.because}; further ones: {further.because}", targets=targets, kv_heads=heads
    )


def _fastest(shape: ModelShape | None, pools: Iterable[Pool], target: str) -> Least | None:
    if shape is None:
        return None
    found = []
    for pool in pools:
        gpu = find_gpu(pool.gpu) if pool.gpu is not None else None
        if gpu is None:
            return None
        kv_dtype = kv_dtype_named(flags.given(pool.engine_args, "kv-cache-dtype")[1])
        found.append(least(shape, gpu, pool.shape, kv_dtype=kv_dtype))
    return min(found, key=lambda each: float(getattr(each, target)), default=None)
