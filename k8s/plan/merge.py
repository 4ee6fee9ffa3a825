"""Patches pod templates, and compares live objects with what was applied. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from k8s.crd.names import LIST_KEYS

DEFAULTS: Final = {"protocol": "TCP"}
"""Values of such fields that the API server puts in."""


def _ids(items: list[Any], keys: tuple[str, ...]) -> list[tuple[Any, ...]] | None:
    """The identity of each entry by these keys; None: they do not tell the entries apart."""
    if not all(isinstance(each, Mapping) and keys[0] in each for each in items):
        return None
    ids = [tuple(each.get(key, DEFAULTS.get(key)) for key in keys) for each in items]
    return ids if len({*ids}) == len(ids) else None


def _both_ids(field: str, one: list[Any], other: list[Any]) -> tuple[list[Any], list[Any]] | None:
    """The identities of the entries of two lists in a field; None: the list is one value."""
    for keys in LIST_KEYS.get(field, ()):
        first, second = _ids(one, keys), _ids(other, keys)
        if first is not None and second is not None:
            return first, second
    return None


def patched(base: Any, patch: Any, field: str = "") -> Any:
    """`patch` merged into `base` as in Kubernetes' strategic merge of pods: mappings by key, lists by their merge key.

    A null removes a key of a mapping. A list without a merge key replaces the one in `base`: `command`, `args`,
    `tolerations`, `envFrom`. `field`: the key that both stand under.
    """
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        merged = {key: value for key, value in base.items() if key not in patch or patch[key] is not None}
        for key, value in patch.items():
            if value is not None:
                merged[key] = patched(base.get(key), value, key)
        return merged
    if isinstance(base, list) and isinstance(patch, list | tuple):
        items = list(patch)
        ids = _both_ids(field, base, items)
        if ids is None:
            return items
        by_id = dict(zip(ids[0], base, strict=True))
        for name, each in zip(ids[1], items, strict=True):
            by_id[name] = patched(by_id.get(name), each)
        return list(by_id.values())
    return patch


def contains(live: Any, wanted: Any, field: str = "") -> bool:
    """Whether a live object still has everything that was applied; additions of others do not matter.

    `field`: the key that both stand under.
    """
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            key in live and contains(live[key], value, key) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        if not isinstance(live, list):
            return False
        ids = _both_ids(field, live, wanted)
        if ids is None:
            return len(live) == len(wanted) and all(contains(a, b) for a, b in zip(live, wanted, strict=True))
        by_id = dict(zip(ids[0], live, strict=True))
        return all(name in by_id and contains(by_id[name], each) for name, each in zip(ids[1], wanted, strict=True))
    return bool(live == wanted)


def view(live: Any, wanted: Any, field: str = "") -> Any:
    """The part of a live object that `wanted` has fields for, with the server's values.

    `field`: the key that both stand under.
    """
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        return {key: view(live[key], value, key) for key, value in wanted.items() if key in live}
    if isinstance(wanted, list) and isinstance(live, list):
        ids = _both_ids(field, live, wanted)
        if ids is None:
            return [view(a, b) for a, b in zip(live, wanted, strict=False)] + live[len(wanted) :]
        by_id = dict(zip(ids[0], live, strict=True))
        return [view(by_id[name], each) for name, each in zip(ids[1], wanted, strict=True) if name in by_id]
    return live
