"""What a heartbeat says of an engine's models, and how it words a state: bounded, as its codec asks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from cluster.registry.membership import BEAT_MODELS_BYTES_MAX, BEAT_MODELS_MAX
from cluster.registry.proofs import printable

DETAIL_CHARS_MAX: Final = 500
"""A heartbeat has this much of the reason for a state."""


def announced(entries: Iterable[Mapping[str, Any]], adapters: Mapping[str, str]) -> tuple[dict[str, Any], ...]:
    """The ``/v1/models`` entries for heartbeats: the first ones that fit, without `permission`, which is long and
    grants nothing.

    `adapters`: the digests that heartbeats have beside the entries, by adapter name.
    """
    kept: list[dict[str, Any]] = []
    left = BEAT_MODELS_BYTES_MAX
    for entry in entries:
        name = str(entry.get("id"))
        said = {field: value for field, value in entry.items() if field != "permission"}
        if not name.isprintable():
            continue
        try:
            left -= len(msgspec.json.encode((said, {name: adapters.get(name, "")})))
        except ValueError:  # half a surrogate pair
            continue
        if left < 0 or len(kept) == BEAT_MODELS_MAX:
            break
        kept.append(said)
    return tuple(kept)


def detail(reason: str) -> str:
    """The reason for a state, from an engine's log perhaps, with a space for each tab and control character."""
    return printable(reason, DETAIL_CHARS_MAX, " ")
