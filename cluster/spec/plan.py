"""Turns one cluster file into the flat list of instances that its pools start with. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.spec import flags
from cluster.spec.settings import NO_TIERS, KvTiers, Model, Pool, Shape, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedInstance:
    """One instance to start. It has many fields because it has every setting of the file that concerns one instance."""

    name: InstanceId
    """``prefill-0``; with several models ``qwen3-32b-prefill-0``."""
    role: Role
    model: str
    """Hugging Face name or folder."""
    served_name: str | None
    """Name in the API; None = `model`."""
    shape: Shape
    gpu: str | None
    """Type of its GPUs; None: whatever the machine has."""
    vllm_args: tuple[str, ...]
    """Words after `--`: the shape's flags, then the user's, verbatim."""
    env: Mapping[str, str]
    kv_lease_s: int | None
    """How long the engine keeps blocks that no engine pulls; None: Baton's default."""
    flips: bool = False
    """Whether the instance may take another role while it runs."""
    connector: str = "auto"
    """What moves its KV cache: a value of `Connector`."""
    kv: KvTiers = NO_TIERS
    """The tiers below its KV cache."""
    digests: bool = False
    """Whether pulled blocks are compared with the held ones."""
    peers: bool = True
    """Whether the instance shares prompts' beginnings with others."""
    tenants: tuple[str, ...] = ()
    """The only tenants whose requests the instance serves; none: all tenants."""
    power_cap_w: float | None = None
    """Power cap of each of its GPUs, watts."""

    @property
    def api_name(self) -> str:
        """What clients send as `model`."""
        return self.served_name or self.model

    @property
    def gpus(self) -> int:
        """GPUs of the instance."""
        return self.shape.gpus


def instances(spec: Spec) -> tuple[PlannedInstance, ...]:
    """Every instance that `spec` starts with: models in the file's order; prefill, decode, both; numbered from 0."""
    return tuple(
        _planned(spec, model, role, pool, f"{stem}-{number}")
        for stem, (model, role, pool) in stems(spec).items()
        for number in range(pool.at_start)
    )


def one_of_each(spec: Spec) -> tuple[PlannedInstance, ...]:
    """One instance of every pool, with the pool's name."""
    return tuple(_planned(spec, model, role, pool, stem) for stem, (model, role, pool) in stems(spec).items())


def stems(spec: Spec) -> dict[str, tuple[Model, Role, Pool]]:
    """Every pool by the stem of its instances' names: the part before the number."""
    return {stem: (model, role, pool) for stem, model, role, pool in every_stem(spec)}


def every_stem(spec: Spec) -> Iterator[tuple[str, Model, Role, Pool]]:
    """Each pool with the stem of its instances' names, in the file's order. A rule refuses two equal stems."""
    for model, prefix in zip(spec.models, _prefixes(spec.models), strict=True):
        for name, (role, pool) in model.pools.every().items():
            yield f"{prefix}{name}", model, role, pool


def keeps_both_legs(spec: Spec) -> bool:
    """Whether the pools' `min` keep an instance for each leg at all times, so that routers are always ready."""
    kept = {role for _, role, pool in stems(spec).values() if pool.min > 0}
    return any(role.prefills for role in kept) and any(role.decodes for role in kept)


def _planned(spec: Spec, model: Model, role: Role, pool: Pool, name: str) -> PlannedInstance:
    return PlannedInstance(
        name=InstanceId(name),
        role=role,
        model=model.name,
        served_name=model.served_name,
        shape=pool.shape,
        gpu=pool.gpu,
        vllm_args=(*flags.shape_flags(pool.shape), *flags.words(pool.engine_args)),
        env=pool.env,
        kv_lease_s=spec.transfer.lease_s,
        flips=pool.flips,
        connector=spec.transfer.connector.value,
        kv=spec.kv,
        digests=spec.transfer.digests,
        peers=spec.transfer.peers,
        tenants=model.tenants,
        power_cap_w=pool.power_cap_w,
    )


def _prefixes(models: tuple[Model, ...]) -> list[str]:
    """Prefixes that tell the instances of several models apart: short names, whole names or numbers, whichever
    differ.
    """
    if len(models) == 1:
        return [""]
    short = [_slug(model.api_name.rstrip("/").rpartition("/")[2]) for model in models]
    whole = [_slug(model.api_name) for model in models]
    numbered = [f"model-{number}" for number in range(len(models))]
    chosen = next(names for names in (short, whole, numbered) if len(set(names)) == len(models) and all(names))
    return [f"{name}-" for name in chosen]


def _slug(name: str) -> str:
    """``Qwen/Qwen3-32B`` -> ``qwen-qwen3-32b``: letters, digits and dashes, as names of processes and pods may be."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
