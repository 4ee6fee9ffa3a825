"""The cluster file that runs a plan: the user's own, with the planned pools. `baton plan --out`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from baton.planning import FleetResults, Task, args_of, engine
from cluster.errors import UsageError
from cluster.spec import Model, flags, parse
from cluster.spec.plan import stems
from cluster.spec.reader import entries_of, nodes_of
from cluster.spec.tree import Node, Scalar, compose, tree_of
from cluster.spec.writer import written
from costs.hardware import find_gpu
from goodput.candidates import InstanceKind
from sim.engine_args import LENGTH_MAX

NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})


def text_of(given: str, task: Task, best: FleetResults) -> str:
    """The text of the file to run. What it keeps of the user's file means what it meant there; comments are left out.

    Args:
        given: text of the user's file.
        task: the task of the plan.
        best: the planned fleet.
    """
    tree = entries_of(compose(given))
    hardware: dict[str, Any] = {**entries_of(tree.get("hardware"))}
    names = {known.name: name for name in hardware if (known := find_gpu(name)) is not None}
    tree["models"] = tree_of([_planned(each, task, best, names) for each in nodes_of(tree["models"])])
    heading = f"# Planned by `baton plan` for {len(task.arrivals):,} requests: {best}\n"
    others = _others_start(given, task)
    for gpu, count in _needed(best).items():
        name, more = names.get(gpu, gpu), others.get(gpu, 0)
        entry = entries_of(hardware.get(name))
        there = entry.get("count")
        if _fewer(there, count + more):
            entry["count"] = tree_of(count + more)
            if more and isinstance(there, Scalar):
                heading += f"# `hardware.{name}.count` was {there.value}: the plan has {count} of these GPUs, "
                heading += f"and other models' pools start with {more}.\n"
        hardware[name] = tree_of(entry)
    if any(kind.power_cap < 1 for kind in best.arrangement):
        heading += "# `power_cap_w` is what the plan counts on: set it on the machines (nvidia-smi --power-limit).\n"
    return heading + written(tree_of({**tree, "hardware": hardware}))


def _needed(best: FleetResults) -> dict[str, int]:
    """GPUs of the fleet by type."""
    found: dict[str, int] = {}
    for kind, count in zip(best.arrangement, best.counts, strict=True):
        found[kind.gpu.name] = found.get(kind.gpu.name, 0) + kind.gpus * count
    return found


def _others_start(given: str, task: Task) -> dict[str, int]:
    """GPUs by type with which the pools of the file's other models start: they run beside the planned fleet."""
    found: dict[str, int] = {}
    for model, _, pool in stems(parse(given, "").usable()).values():
        known = None if pool.gpu is None else find_gpu(pool.gpu)
        if known is not None and model.api_name != task.model.api_name:
            found[known.name] = found.get(known.name, 0) + pool.at_start * pool.shape.gpus
    return found


def _fewer(there: Node | None, needed: int) -> bool:
    """Whether the file's `count` of a GPU type is less than its pools start with: `--gpus` gave the plan more."""
    return isinstance(there, Scalar) and isinstance(there.value, int) and there.value < needed


def _planned(model: Node, task: Task, best: FleetResults, names: Mapping[str, str]) -> Node:
    """A model of the file; the planned one with its pools. `names`: the file's names of GPU types."""
    entries = entries_of(model)
    if _api_name(entries) != task.model.api_name:
        return model
    given = {role: entries_of(pool) for role, pool in entries_of(entries.get("pools")).items()}
    short = {kind for kind in best.arrangement if engine(task, kind)[1].max_model_len < LENGTH_MAX}
    return tree_of({**entries, "pools": pools_of(best, given, task.model, names=names, short=short)})


def _api_name(model: Mapping[str, Node]) -> object:
    names = (model.get("served_name"), model["name"])
    return next(each.value for each in names if isinstance(each, Scalar) and each.value is not None)


def pools_of(
    answer: FleetResults,
    given: Mapping[str, Any],
    model: Model,
    *,
    names: Mapping[str, str] = NO_NAMES,
    short: Collection[InstanceKind] = (),
) -> dict[str, Any]:
    """The `pools` of the file. Other settings of a role in the user's file (`given`) are kept; a role that the file
    does not have gets the flags that all pools of the model share.

    The first kind of a role becomes the role's pool, each further kind one under `extra`.

    Args:
        answer: the planned fleet.
        given: by role, the settings of its pool in the user's file.
        model: the planned model.
        names: the user's names of GPU types, where they are others than ours.
        short: kinds whose memory holds fewer tokens than a model may take: vLLM ends at its start if a request of the
            model's full length does not fit, unless it may choose the length (`max-model-len: auto`).
    """
    pools: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for kind, count in zip(answer.arrangement, answer.counts, strict=True):
        role = kind.role.value
        kept = dict(given.get(role) or {})
        args = {name: value for name, value in args_of(model, kind.role).items() if flags.normal(name) != flags.BUDGET}
        if kind.batched_tokens is not None:
            args[flags.BUDGET] = kind.batched_tokens
        if kind in short and not flags.given(args, flags.LENGTH)[0]:
            args[flags.LENGTH] = "auto"
        kept.pop("power_cap_w", None)
        gpu = names.get(kind.gpu.name, kind.gpu.name)
        kept.update({"min": count, "max": count, "start": count, "gpu": gpu, "shape": {"tp": kind.tp}})
        kept.pop("engine_args", None)
        if args:
            kept["engine_args"] = args
        if kind.power_cap < 1:
            kept["power_cap_w"] = kind.power_cap_w
        if role in pools:
            extra[f"{role}-{_slug(kind.gpu.name)}"] = {"role": role, **kept}
        else:
            pools[role] = kept
    return {**pools, **({"extra": extra} if extra else {})}


def _slug(name: str) -> str:
    return "".join(char if char.isalnum() else "-" for char in name.lower())


def write(path: Path, text: str) -> None:
    """Write a file that does not exist yet.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        with path.open("x") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror or error}") from None
