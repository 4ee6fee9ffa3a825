"""Server-side apply: which manager owns which field, conflicts, and what is taken away. As "Server-Side Apply"
(kubernetes.io) has it, with lists of mappings told apart by the keys below and all other lists atomic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from support.k8s_json import copied

Path = tuple[Any, ...]
LIST_KEYS = ("name", "type", "uid", "mountPath", "containerPort", "topologyKey", "ip")
NOT_OWNED = {("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace"), ("metadata", "managedFields")}
SERVERS = {"uid", "resourceVersion", "creationTimestamp", "generation", "deletionTimestamp", "managedFields"}


class Conflict(Exception):
    """Another manager owns a field and has another value there."""


@dataclass
class Owners:
    """Of one object: fields by manager and operation (`Apply` or `Update`)."""

    fields: dict[tuple[str, str], set[Path]] = field(default_factory=dict)

    def as_managed_fields(self) -> list[dict[str, Any]]:
        return [
            {"manager": manager, "operation": operation, "fieldsType": "FieldsV1", "fieldsV1": nested(paths)}
            for (manager, operation), paths in sorted(self.fields.items())
            if paths
        ]


def nested(paths: set[Path]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path in paths:
        at = tree
        for part in path:
            at = at.setdefault(f"k:{part[1]}" if isinstance(part, tuple) else f"f:{part}", {})
    return tree


def list_key(items: Any) -> str | None:
    if not isinstance(items, list) or not items or not all(isinstance(each, dict) for each in items):
        return None
    return next((key for key in LIST_KEYS if all(key in each for each in items)), None)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its path; an empty mapping and a plain list are leaves."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            if path == ("metadata",) and name in SERVERS:
                continue
            yield from leaves(inner, (*path, name))
    elif (key := list_key(value)) is not None:
        for each in value:
            yield from leaves(each, (*path, ("k", f"{key}={each[key]}")))
    elif path not in NOT_OWNED:
        yield path, value


def found(thing: Any, path: Path) -> Any:
    """The value at a path; `...` where there is none."""
    for part in path:
        if isinstance(part, tuple):
            key, _, name = part[1].partition("=")
            thing = (
                next((each for each in thing or () if str(each.get(key)) == name), ...)
                if isinstance(thing, list)
                else ...
            )
        else:
            thing = thing.get(part, ...) if isinstance(thing, dict) else ...
        if thing is ...:
            return ...
    return thing


def merged(base: Any, given: Any) -> Any:
    if isinstance(base, dict) and isinstance(given, dict):
        return {**base, **{name: merged(base.get(name), inner) for name, inner in given.items()}}
    key = list_key(given)
    if isinstance(base, list) and key is not None and (not base or list_key(base) is not None):
        by_key = {each.get(key): each for each in base}
        for each in given:
            by_key[each[key]] = merged(by_key.get(each[key]), each)
        return list(by_key.values())
    return copied(given)


def removed(thing: Any, path: Path) -> None:
    """Take one leaf away, and what is empty because of it."""
    if not path:
        return
    holder = found(thing, path[:-1])
    last = path[-1]
    if isinstance(last, tuple):
        key, _, name = last[1].partition("=")
        if isinstance(holder, list):
            holder[:] = [each for each in holder if str(each.get(key)) != name]
    elif isinstance(holder, dict):
        holder.pop(last, None)
        inner = path[-2] if len(path) > 1 else None
        only_key = isinstance(inner, tuple) and set(holder) <= {inner[1].partition("=")[0]}
        if (not holder and len(path) > 2) or only_key:
            removed(thing, path[:-1])


def apply(live: Any, given: dict[str, Any], manager: str, owners: Owners, *, force: bool) -> dict[str, Any]:
    """The object after `manager` has applied `given`; `owners` is changed.

    Raises:
        Conflict: without `force`, where another manager has another value.
    """
    wanted = dict(leaves(given))
    mine = (manager, "Apply")
    for other, paths in owners.fields.items():
        if other == mine:
            continue
        clash = {path for path in paths & wanted.keys() if found(live, path) != wanted[path]}
        if clash and not force:
            shown = ", ".join(".".join(map(str, path)) for path in sorted(clash, key=str))
            raise Conflict(f'conflict with "{other[0]}": {shown}')
        paths.difference_update(clash)
    after = merged(live, given)
    others = set().union(*(paths for who, paths in owners.fields.items() if who != mine))
    for path in sorted(owners.fields.get(mine, set()) - wanted.keys() - others, key=len, reverse=True):
        if not any(kept[: len(path)] == path for kept in wanted):
            removed(after, path)
    owners.fields[mine] = set(wanted)
    return after


def updated(before: Any, after: dict[str, Any], manager: str, owners: Owners) -> None:
    """An update by `manager`: it owns what it has changed, and others own that no more."""
    old, new = dict(leaves(before or {})), dict(leaves(after))
    changed = {path for path, value in new.items() if old.get(path, ...) != value}
    gone = old.keys() - new.keys()
    for paths in owners.fields.values():
        paths.difference_update(changed | gone)
    owners.fields.setdefault((manager, "Update"), set()).update(changed)
