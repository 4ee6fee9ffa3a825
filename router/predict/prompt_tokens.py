"""The number of a prompt's tokens from its bytes: a ratio learned per tenant and kind of text, without a tokenizer.
Pure.

Every answer's `usage` reports its prompt's tokens. Their ratio to the text's bytes is kept as a distribution
(`router.predict.sketches`) per (tenant, model, kind); less specific distributions stand in until the specific one has
seen enough. The median is the estimate. The ratio includes what chat templates add, a few tokens a message.

Kinds are detected by counting bytes in at most three samples of the text. A wrong kind only makes the estimate less
precise.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from enum import StrEnum
from typing import Final

from router.predict.sketches import Backlog, Sketches, between


class TextKind(StrEnum):
    """Kinds of text with different bytes per token. `IDS`: prompts given as token ids, four bytes each; `MEDIA`: with
    pictures, sounds or videos, for each of which a text of one size stands (`router.predict.media`).
    """

    TEXT = "text"
    CODE = "code"
    JSON = "json"
    CJK = "cjk"
    IDS = "ids"
    MEDIA = "media"


START_BYTES_PER_TOKEN: Final = {
    TextKind.TEXT: 4.4,
    TextKind.CODE: 3.4,
    TextKind.JSON: 2.9,
    TextKind.CJK: 3.6,
    TextKind.IDS: 4.0,
    TextKind.MEDIA: 4.0,
}
"""The ratios before anything is learned. They are guesses in the middle of what vocabularies of 100,000 to 200,000
tokens do; they count as 40 prompts of no tenant, so a tenant's own ratios soon outweigh them."""

_CREDIBILITY = 8.0
"""A tenant's ratios scatter by 10 to 20 %, so eight of them are better than the general ratio."""

_MEMORY = 500.0
_KEYS_MAX = 5000
_TOLD_MAX: Final = 1000

_STEP = 1.04
_EDGES: Final = tuple(0.5 * _STEP**at for at in range(84))
"""Bytes per token from 0.5 to 13, in bins 4 % wide, which gives an error of 2 % at most. Values beyond count as the
end."""
_SAMPLE_BYTES = 512


class Ratios:
    """Bytes per token, by tenant, model and kind."""

    def __init__(self) -> None:
        prior = [math.exp(-0.5 * (math.log(edge / 4.0) / 0.35) ** 2) + 1e-6 for edge in _EDGES[:-1]]
        self._sketches: Final = Sketches(_EDGES, prior, keys_max=_KEYS_MAX, memory=_MEMORY)
        for kind, ratio in START_BYTES_PER_TOKEN.items():
            for each in (0.85, 0.95, 1.0, 1.05, 1.15) * 8:
                self._sketches.add([kind], ratio * each)

        self._fresh: list[tuple[str, str, TextKind, float]] = []
        """Ratios that are not learned yet."""
        self._backlog: Final = Backlog()
        self._told: Final[dict[tuple[str, str, TextKind], float]] = {}
        """Median bytes per token, until something is learned."""
        self.learned = 0
        """The number of prompts learned from."""

    def __len__(self) -> int:
        self.settle()
        return len(self._sketches)

    def tokens(self, tenant: str, model: str, kind: TextKind, text_bytes: int) -> int:
        """The tokens of a prompt of `text_bytes` bytes, at least one: as likely too many as too few."""
        if kind is TextKind.IDS:
            return max(1, text_bytes // 4)
        told = self._told.get((tenant, model, kind))
        if told is None:
            told = between(0.5, self._sketches.mixed(_keys(tenant, model, kind), _CREDIBILITY), _EDGES)
            if len(self._told) >= _TOLD_MAX:
                self._told.clear()
            self._told[tenant, model, kind] = told
        return max(1, round(text_bytes / told))

    def learn(self, tenant: str, model: str, kind: TextKind, text_bytes: int, tokens: int) -> None:
        """`usage.prompt_tokens` has come for such a prompt; it counts before long (`Backlog`)."""
        if kind is not TextKind.IDS and tokens > 0 and text_bytes > 0:
            self._fresh.append((tenant, model, kind, text_bytes / tokens))
            if not self._backlog.takes():
                self.settle()

    def settle(self) -> None:
        """Learn from all counts that wait in the backlog."""
        fresh, self._fresh = self._fresh, []
        for tenant, model, kind, ratio in fresh:
            self._sketches.add(_keys(tenant, model, kind), ratio)
        self.learned += len(fresh)
        if fresh:
            self._told.clear()


def _keys(tenant: str, model: str, kind: TextKind) -> tuple[Hashable, ...]:
    return (kind, (model, kind), (tenant, model, kind))


_OTHER, _MARK, _QUOTE, _BOTH, _FOREIGN, _EAST = b"omqbfe"


def _sorts() -> bytes:
    """A table for `bytes.translate`: by byte, the class that it counts for."""
    found = bytearray([_OTHER] * 128 + [_FOREIGN] * 128)
    for byte in range(0xE3, 0xEE):  # begin kana, han and hangul in UTF-8 (U+3000 to U+DFFF), three bytes each
        found[byte] = _EAST
    quotes, marks = b'"{}[]:,', b"(){}[];=<>_/*#\\\t"
    for byte in quotes:
        found[byte] = _BOTH if byte in marks else _QUOTE
    for byte in marks:
        found[byte] = _BOTH if byte in quotes else _MARK
    return bytes(found)


_SORTS: Final = _sorts()


def kind_of(text: bytes) -> TextKind:
    """The kind of a text, from its first, middle and last half kilobyte.

    CJK: more than one character of six. JSON: more than one byte of eight is JSON punctuation, and more than one of
    twenty a quote. Code: more than one byte of twelve is a mark that is rare in prose.
    """
    if len(text) > 3 * _SAMPLE_BYTES:
        middle = len(text) // 2
        text = b"%b%b%b" % (text[:_SAMPLE_BYTES], text[middle : middle + _SAMPLE_BYTES], text[-_SAMPLE_BYTES:])
    size = len(text)
    if not size:
        return TextKind.TEXT
    sorts = text.translate(_SORTS)
    if not text.isascii():
        east = sorts.count(b"e")
        if (sorts.count(b"f") + east) * 6 > size and east * 8 > size:
            return TextKind.CJK
    both = sorts.count(b"b")
    if (sorts.count(b"q") + both) * 8 > size and text.count(b'"') * 20 > size:
        return TextKind.JSON
    if (sorts.count(b"m") + both) * 12 > size:
        return TextKind.CODE
    return TextKind.TEXT
