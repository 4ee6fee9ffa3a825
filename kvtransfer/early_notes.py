"""The notices with which two engines agree on an early leg: a decode leg that D has before P has computed its prompt.
Pure; the parser is total.

D asks P for a name (`Want`) as soon as it has the leg. P answers once the hold of that name is there (`Ready`), at once
if it is there already. Both are JSON objects, and travel between the scheduler halves of two introduced engines
(`engine.vllm.connector.notices`), apart from all transfers of blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cluster.wire import TOLD_EARLY
from kvtransfer.fields import NAME_CHARS_MAX

NOTE_BYTES_MAX: Final = 1 << 20
"""The block ids of a prompt of a million tokens take half of it."""

CHANNEL_STAGE: Final = 511
"""The pipeline stage under which an engine's handshake payloads list its notice channel: the last number that an agent
takes (`kvtransfer.asks.PAYLOADS_MAX`), never a real stage. A connector without such a channel reads stage 0 only."""


@dataclass(frozen=True, slots=True)
class Want:
    """D has a leg for the hold of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The hold of this name is there."""

    name: str
    fields: Mapping[str, Any]
    """The hold's transfer fields, as in P's answer."""
    token: int | None
    """The token that P has chosen."""
    cached: int = 0
    """The prompt's tokens that P had in its prefix cache."""

    @property
    def late(self) -> bool:
        """Whether P has answered already, and its answer says that no engine was told. The router may then send another
        leg in place of the one that is told now.
        """
        return self.fields.get(TOLD_EARLY) is False


def encode(note: Want | Ready) -> bytes:
    """A notice as it travels."""
    if isinstance(note, Want):
        return json.dumps({"want": note.name}).encode()
    told = {"ready": note.name, "fields": dict(note.fields), "token": note.token, "cached": note.cached}
    return json.dumps(told, separators=(",", ":")).encode()


def parse(raw: object) -> Want | Ready | None:
    """The notice in these bytes; None: they hold no notice. Never raises."""
    if not isinstance(raw, bytes) or len(raw) > NOTE_BYTES_MAX:
        return None
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    if _is_name(told.get("want")):
        return Want(told["want"])
    name, fields, token, cached = (told.get(key) for key in ("ready", "fields", "token", "cached"))
    if not _is_name(name) or not isinstance(fields, dict):
        return None
    if token is not None and (type(token) is not int or token < 0):
        return None
    return Ready(str(name), fields, token, cached if type(cached) is int and cached >= 0 else 0)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= NAME_CHARS_MAX
