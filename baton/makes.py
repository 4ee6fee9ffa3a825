"""What the cost model says of a fleet's instances, for the router's step model: by pool of the cluster file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton.gpus import as_told
from cluster.ids import engine_of
from cluster.instance import Instance, Role
from cluster.spec import Hardware, Model, Pool, Spec, flags
from cluster.spec.plan import stems
from costs.cost import costs_of
from costs.hardware import find_gpu, kv_dtype_named
from costs.power import cap_of
from costs.shipped import find_model, profiles
from router.predict.step_model import Make, make_of


def makes_of(spec: Spec) -> Callable[[Instance], Make | None]:
    """A function that finds the make of an instance: by its name if `baton up` or the operator gave it (`POOL-3`,
    `CLUSTER-POOL-3`), else by its role if only one pool has that role.

    It gives None if the pool names no known GPU, or the model's sizes do not ship: the router then learns from legs.
    """
    by_stem = stems(spec)
    known = {stem: _make(model, pool, spec.hardware) for stem, (model, _, pool) in by_stem.items()}
    by_role: dict[Role, list[str]] = {}
    for stem, (_, role, _) in by_stem.items():
        by_role.setdefault(role, []).append(stem)

    def make(instance: Instance) -> Make | None:
        stem, _, number = engine_of(instance.id).rpartition("-")
        if number.isdecimal():
            ends = [each for each in known if stem == each or stem.endswith(f"-{each}")]
            if ends:
                return known[max(ends, key=len)]
        alike = by_role.get(instance.role, [])
        return known[alike[0]] if len(alike) == 1 else None

    return make


def _make(model: Model, pool: Pool, hardware: Mapping[str, Hardware]) -> Make | None:
    sizes = find_model(model.name)
    gpu = find_gpu(pool.gpu) if pool.gpu is not None else None
    if sizes is None or gpu is None:
        return None
    gpu = as_told(gpu, hardware)
    budget = _budget(pool.engine_args)
    kv_dtype = kv_dtype_named(flags.given(pool.engine_args, flags.KV_DTYPE)[1])
    costs = costs_of(sizes, gpu, pool.shape, profiles=profiles(), kv_dtype=kv_dtype, batched_tokens=budget or None)
    if pool.power_cap_w is not None:
        costs = costs.capped(cap_of(pool.power_cap_w, gpu.tdp_w))
    return make_of(costs, budget_tokens=budget)


def _budget(engine_args: Mapping[str, Any]) -> int:
    """Tokens of one step; 0: vLLM's default."""
    return int(flags.number_in(engine_args, flags.BUDGET) or 0)
