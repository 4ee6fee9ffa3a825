"""The cluster file that runs a plan: the user's own, with the planned pools. `baton plan --out`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.planning import FleetResults, Task, args_of
from cluster.errors import UsageError
from cluster.spec import Model
from cluster.spec.reader import entries_of, nodes_of
from cluster.spec.tree import Node, Scalar, compose, tree_of
from cluster.spec.writer import written
from costs.hardware import find_gpu

BUDGET = "max-num-batched-tokens"


def text_of(given: str, task: Task, best: FleetResults) -> str:
    """The text of the file to run. What it keeps of the user's file means what it meant there; comments are left out.

    Args:
        given: text of the user's file.
        task: the task of the plan.
        best: the planned fleet.
    """
    tree = entries_of(compose(given))
    tree["models"] = tree_of([_planned(each, task, best) for each in nodes_of(tree["models"])])
    hardware: dict[str, Any] = {**entries_of(tree.get("hardware"))}
    known = {gpu.name for name in hardware if (gpu := find_gpu(name)) is not None}
    for kind in best.arrangement:
        if kind.gpu.name not in known:
            hardware.setdefault(kind.gpu.name, {})
    heading = f"# Planned by `baton plan` for {len(task.arrivals):,} requests: {best}\n"
    if any(kind.power_cap < 1 for kind in best.arrangement):
        heading += "# `power_cap_w` is what the plan counts on: set it on the machines (nvidia-smi --power-limit).\n"
    return heading + written(tree_of({**tree, "hardware": hardware}))


def _planned(model: Node, task: Task, best: FleetResults) -> Node:
    """A model of the file; the planned one with its pools."""
    entries = entries_of(model)
    if _api_name(entries) != task.model.api_name:
        return model
    given = {role: entries_of(pool) for role, pool in entries_of(entries.get("pools")).items()}
    return tree_of({**entries, "pools": pools_of(best, given, task.model)})


def _api_name(model: Mapping[str, Node]) -> object:
    names = (model.get("served_name"), model["name"])
    return next(each.value for each in names if isinstance(each, Scalar) and each.value is not None)


def pools_of(answer: FleetResults, given: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """The `pools` of the file. Other settings of a role in the user's file (`given`) are kept; a role that the file
    does not have gets the flags that all pools of the model share.

    The first kind of a role becomes the role's pool, each further kind one under `extra`.
    """
    pools: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for kind, count in zip(answer.arrangement, answer.counts, strict=True):
        role = kind.role.value
        kept = dict(given.get(role) or {})
        args = {name: value for name, value in args_of(model, kind.role).items() if _plain(name) != BUDGET}
        if kind.batched_tokens is not None:
            args[BUDGET] = kind.batched_tokens
        kept.pop("power_cap_w", None)
        kept.update({"min": count, "max": count, "start": count, "gpu": kind.gpu.name, "shape": {"tp": kind.tp}})
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


def _plain(flag: str) -> str:
    return flag.replace("_", "-")


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
