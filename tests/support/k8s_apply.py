"""Server-side apply: which manager owns which field, conflicts, and which fields are removed.

After the page "Server-Side Apply" (kubernetes.io). `support.k8s_builtin` lists the lists with keys; all other lists are
atomic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from support.k8s_builtin import list_keys
from support.k8s_json import copied

Path = tuple[Any, ...]
NOT_OWNED = {("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace"), ("metadata", "managedFields")}
SERVERS = {"uid", "resourceVersion", "creationTimestamp", "generation", "deletionTimestamp", "managedFields"}


class Conflict(Exception):
    """Another manager owns a field that has another value."""


@dataclass
class Owners:
    """The owned fields of one object, by manager and operation (`Apply` or `Update`)."""

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


def keyed(name: Any, items: Any) -> tuple[str, ...] | None:
    """The keys that identify the entries of the list `items`; None: it is atomic, or no list of mappings."""
    if not isinstance(items, list) or not items or not all(isinstance(each, dict) for each in items):
        return None
    return list_keys(name, items)


def mark(each: dict[str, Any], keys: tuple[str, ...]) -> tuple[str, str]:
    """The step of a list's entry in a path. A port without a protocol has the schema's default."""
    return ("k", "|".join(f"{key}={each.get(key, 'TCP' if key == 'protocol' else '')}" for key in keys))


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its path; an empty mapping and an atomic list are leaves."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            if path == ("metadata",) and name in SERVERS:
                continue
            yield from leaves(inner, (*path, name))
    elif path and (keys := keyed(path[-1], value)) is not None:
        for each in value:
            yield from leaves(each, (*path, mark(each, keys)))
    elif path not in NOT_OWNED:
        yield path, value


def entry(items: Any, step: tuple[str, str]) -> Any:
    """The entry of a list at a step; `...` if the list has no such entry."""
    keys = tuple(part.partition("=")[0] for part in step[1].split("|"))
    there = items if isinstance(items, list) else ()
    return next((each for each in there if isinstance(each, dict) and mark(each, keys) == step), ...)


def found(thing: Any, path: Path) -> Any:
    """The value at a path; `...` if the object has no such path."""
    for part in path:
        if isinstance(part, tuple):
            thing = entry(thing, part)
        else:
            thing = thing.get(part, ...) if isinstance(thing, dict) else ...
        if thing is ...:
            return ...
    return thing


def merged(base: Any, given: Any, name: Any = None) -> Any:
    if isinstance(base, dict) and isinstance(given, dict):
        return {**base, **{each: merged(base.get(each), inner, each) for each, inner in given.items()}}
    keys = keyed(name, given)
    if isinstance(base, list) and keys is not None:
        by_key = {mark(each, keys): each for each in base}
        for each in given:
            by_key[mark(each, keys)] = merged(by_key.get(mark(each, keys)), each)
        return list(by_key.values())
    return copied(given)


def entry_keys(path: Path) -> set[str]:
    """The keys of the list entry that a leaf is a field of; empty: it is no field of an entry."""
    inner = path[-2] if len(path) > 1 else None
    return {part.partition("=")[0] for part in inner[1].split("|")} if isinstance(inner, tuple) else set()


def removed(thing: Any, path: Path) -> None:
    """Remove one leaf, and the mappings and entries that become empty by that."""
    if not path:
        return
    holder = found(thing, path[:-1])
    last = path[-1]
    if isinstance(last, tuple):
        if isinstance(holder, list):
            holder[:] = [each for each in holder if each is not entry(holder, last)]
    elif isinstance(holder, dict):
        holder.pop(last, None)
        keys = entry_keys(path)
        only_key = bool(keys) and set(holder) <= keys
        if (not holder and len(path) > 2) or only_key:
            removed(thing, path[:-1])


def apply(live: Any, given: dict[str, Any], manager: str, owners: Owners, *, force: bool) -> dict[str, Any]:
    """The object after `manager` has applied `given`; `owners` is changed.

    Raises:
        Conflict: without `force`, if another manager owns a field that has another value.
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
    gone = owners.fields.get(mine, set()) - wanted.keys() - others
    for path in sorted(gone, key=lambda each: (-len(each), each[-1] in entry_keys(each))):  # an entry's keys go last
        if not any(kept[: len(path)] == path for kept in wanted):
            removed(after, path)
    owners.fields[mine] = set(wanted)
    return after


def updated(before: Any, after: dict[str, Any], manager: str, owners: Owners) -> None:
    """Record an update by `manager`: it becomes the only owner of the fields that it has changed."""
    old, new = dict(leaves(before or {})), dict(leaves(after))
    changed = {path for path, value in new.items() if old.get(path, ...) != value}
    gone = old.keys() - new.keys()
    for paths in owners.fields.values():
        paths.difference_update(changed | gone)
    owners.fields.setdefault((manager, "Update"), set()).update(changed)
