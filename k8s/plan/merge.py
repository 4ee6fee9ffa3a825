"""Patches pod templates, and compares live objects with what was applied. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

MERGE_KEYS: Final = ("name", "mountPath", "containerPort", "key", "ip", "topologyKey")
"""Merge keys of lists of mappings, in order of preference, as far as pods have such lists."""


def _keyed(items: list[Any]) -> str | None:
    """The merge key of a list of mappings; None: its entries have no common key."""
    if not items or not all(isinstance(each, Mapping) for each in items):
        return None
    return next((key for key in MERGE_KEYS if all(key in each for each in items)), None)


def patched(base: Any, patch: Any) -> Any:
    """`patch` merged into `base` as in Kubernetes' strategic merge of pods: mappings by key, lists by their merge key.

    A null removes a key of a mapping. Of lists without a merge key, entries are added; an empty list removes all.
    """
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        merged = {key: value for key, value in base.items() if key not in patch or patch[key] is not None}
        for key, value in patch.items():
            if value is not None:
                merged[key] = patched(base.get(key), value)
        return merged
    if isinstance(base, list) and isinstance(patch, list | tuple):
        items = list(patch)
        key = _keyed([*base, *items])
        if key is None:
            return [*base, *(each for each in items if each not in base)] if items else []
        by_key = {each[key]: each for each in base}
        for each in items:
            by_key[each[key]] = patched(by_key.get(each[key]), each)
        return list(by_key.values())
    return patch


def contains(live: Any, wanted: Any) -> bool:
    """Whether a live object still has everything that was applied; additions of others do not matter."""
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            key in live and contains(live[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        if not isinstance(live, list):
            return False
        key = _keyed(wanted)
        if key is None or _keyed(live) is None:
            return len(live) == len(wanted) and all(contains(a, b) for a, b in zip(live, wanted, strict=True))
        by_key = {each.get(key): each for each in live}
        return all(each[key] in by_key and contains(by_key[each[key]], each) for each in wanted)
    return bool(live == wanted)


def view(live: Any, wanted: Any) -> Any:
    """The part of a live object that `wanted` has fields for, with the server's values."""
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        return {key: view(live[key], value) for key, value in wanted.items() if key in live}
    if isinstance(wanted, list) and isinstance(live, list):
        key = _keyed(wanted)
        if key is None or _keyed(live) is None:
            return [view(a, b) for a, b in zip(live, wanted, strict=False)] + live[len(wanted) :]
        by_key = {each.get(key): each for each in live}
        return [view(by_key[each[key]], each) for each in wanted if each[key] in by_key]
    return live
