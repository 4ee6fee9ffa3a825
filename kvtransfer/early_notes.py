"""The notices with which two engines agree on an early leg: a decode leg that D has before P has computed its prompt.
Pure; the parser is total.

D asks P for a name (`Want`) as soon as it has the leg. P answers once the hold of that name is there (`Ready`), at once
if it is there already. While P computes a long prompt in several steps, it says after each of them which blocks are
complete (`Part`): a D that finds it worth while reads these at once. All are JSON objects, and travel between the
scheduler halves of two introduced engines (`engine.vllm.connector.notices`), apart from all transfers of blocks.
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

LEFT_S_MAX: Final = 1e6
"""A prompt that takes longer has no parts, in seconds."""

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
    life: int = 0
    """As `Part.life`: only parts of this life belong to the hold."""

    @property
    def late(self) -> bool:
        """Whether P has answered already, and its answer says that no engine was told. The router may then send another
        leg in place of the one that is told now.
        """
        return self.fields.get(TOLD_EARLY) is False


@dataclass(frozen=True, slots=True)
class Part:
    """P has computed these blocks of a prompt, and goes on. They stay the prompt's until its hold ends, unless P
    computes the prompt again (`life`).
    """

    name: str
    request: str
    """P's name for the request: that of its hold, too."""
    life: int
    """A number that grows when P computes again what it had computed: its request was preempted, or a load of its own
    failed. Blocks of another life are not this prompt's."""
    first: int
    """The index in the prompt of the first of `blocks`."""
    blocks: tuple[int, ...]
    """P's block ids, all of them complete."""
    tokens: int
    """The prompt's tokens."""
    chunk: int
    """The tokens of P's last step."""
    block_tokens: int
    """Tokens in a block of P."""
    left_s: float
    """Seconds until the prompt is computed, at the pace so far."""


Note = Want | Ready | Part


def encode(note: Note) -> bytes:
    """A notice as it travels."""
    if isinstance(note, Want):
        return json.dumps({"want": note.name}).encode()
    told: dict[str, Any]
    if isinstance(note, Part):
        told = {"part": note.name, "request": note.request, "life": note.life, "first": note.first}
        told |= {"blocks": list(note.blocks), "tokens": note.tokens, "chunk": note.chunk, "block": note.block_tokens}
        told["left_s"] = note.left_s
    else:
        told = {"ready": note.name, "fields": dict(note.fields), "token": note.token, "cached": note.cached}
        if note.life:
            told["life"] = note.life
    return json.dumps(told, separators=(",", ":")).encode()


def parse(raw: object) -> Note | None:
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
    if "part" in told:
        return _part(told)
    name, fields, token, cached = (told.get(key) for key in ("ready", "fields", "token", "cached"))
    if not _is_name(name) or not isinstance(fields, dict):
        return None
    if token is not None and (type(token) is not int or token < 0):
        return None
    return Ready(str(name), fields, token, _count(cached, 0), _count(told.get("life", 0), -1))


def _part(told: Mapping[str, Any]) -> Part | None:
    name, request, blocks, left_s = (told.get(key) for key in ("part", "request", "blocks", "left_s"))
    numbers = [_count(told.get(key), -1) for key in ("life", "first", "tokens", "chunk", "block")]
    if not _is_name(name) or not isinstance(request, str) or not isinstance(blocks, list):
        return None
    if min(numbers) < 0 or not blocks or any(_count(each, -1) < 0 for each in blocks):
        return None
    if isinstance(left_s, bool) or not isinstance(left_s, int | float) or not 0 <= left_s <= LEFT_S_MAX:
        return None
    life, first, tokens, chunk, block = numbers
    return Part(str(name), request, life, first, tuple(blocks), tokens, chunk, block, float(left_s))


def _count(value: object, otherwise: int) -> int:
    return value if type(value) is int and value >= 0 else otherwise


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= NAME_CHARS_MAX
