"""Which instance probably holds the beginning of a prompt: an index of text chunks, by hash. Pure.

Two prompts share KV blocks as far as their text agrees from the beginning. So the text, in template order, is cut into
chunks of `CHUNK_BYTES`, and each is named by a keyed hash of everything up to its end (`router.predict.chunks`); the
index keeps for every name who has it, as one bit an instance. It is a guess, kept honest by three things:

- it forgets as the engine does: per instance the chunks used longest ago go first, when more was written than fits its
  KV cache. Answers and the ends of prompts take place there, too, without a name;
- P's `cached_tokens` correct it: what P had not is forgotten, with everything older, and the place it is believed to
  have shrinks; where it had more, it grows again. A new epoch forgets all;
- vLLM's KV events only ever make it forget: their block hashes are vLLM's own and name no text.

What always holds: nothing matches across scopes; an instance matches a chunk only if it matches all before it; entries
of all instances together stay below `entries_max`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router.core.values import Sent
from router.predict.chunks import CHUNK_BYTES

Ints = NDArray[np.int64]

ENTRIES_MAX = 500_000
"""Chunks times instances that hold them; about 160 bytes each (`make bench-prefixes`)."""

TOKENS_PER_CHUNK = CHUNK_BYTES / 4.0
"""Until prompts have told (`PrefixCacheIndex.answered`)."""

_FEW = 16
"""Bits that are written to a column one by one; more, and unpacking all is faster."""

_LEARN = 0.02
"""Share by which one prompt moves an instance's tokens per chunk."""

_SHRINK, _GROW = 0.5, 0.02
"""How far one report moves the believed capacity: half the way down to what was left, 2 % of the stated up. Measured on
an index that is told a wrong size, or half of the traffic (docs/prefixes.md)."""

_CAPACITY_MIN, _CAPACITY_MAX = 0.1, 2.0
"""Of the stated capacity. Lower, the index would know nothing and never hear that it is wrong; what is found beyond
what was expected may also be another router's work, so that it says little about capacity."""


class Match:
    """Who holds how much."""

    __slots__ = ("levels",)

    def __init__(self, levels: Sequence[tuple[int, int]] = ()) -> None:
        """`levels`: rows of bits, longest first. `(chunks, bits)`: these hold exactly the first `chunks`."""
        self.levels: Final = levels

    def chunks_of(self, row: int) -> int:
        """Leading chunks that the instance in this row holds."""
        for chunks, bits in self.levels:
            if bits >> row & 1:
                return chunks
        return 0

    def column(self, rows: int) -> Ints:
        """Leading bytes held, by row: for policies, beside the other columns. `rows`: as many as the columns have."""
        levels = [(chunks * CHUNK_BYTES, bits & (1 << rows) - 1) for chunks, bits in self.levels]
        if sum(bits.bit_count() for _, bits in levels) > _FEW:
            return _unpacked(levels, rows)
        found = np.zeros(rows, dtype=np.int64)
        for size, bits in levels:
            left = bits
            while left:
                row = left.bit_length() - 1
                found[row] = size
                left ^= 1 << row
        return found


def rows_of(bits: int) -> int | Ints:
    """The rows of some bits, one at least: to read and write a column at. Of one bit a number, which is quicker."""
    if not bits & (bits - 1):
        return bits.bit_length() - 1
    if bits.bit_count() > _FEW:
        packed = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), dtype=np.uint8)
        return np.unpackbits(packed, bitorder="little").nonzero()[0]
    found = []
    while bits:
        found.append(bits.bit_length() - 1)
        bits ^= 1 << found[-1]
    return np.array(found)


def _unpacked(levels: list[tuple[int, int]], rows: int) -> Ints:
    """A column from many bits. No two levels have a bit in common, so that a product with the bits as 0 and 1 adds up.

    float32 is exact here: no prompt has 2^24 named bytes.
    """
    width = (rows + 7) // 8
    packed = np.frombuffer(b"".join(bits.to_bytes(width, "little") for _, bits in levels), dtype=np.uint8)
    flags = np.unpackbits(packed.reshape(len(levels), width), axis=1, count=rows, bitorder="little")
    sizes = np.array([size for size, _ in levels], dtype=np.float32)
    return (sizes @ flags.astype(np.float32)).astype(np.int64)


class _Held:
    """What one instance holds. Names stand in order of last use, longest ago first; negative ones are unnamed text."""

    __slots__ = (
        "ahead",
        "capacity_tokens",
        "entries",
        "entries_max",
        "epoch",
        "hears",
        "life",
        "nameless",
        "stated_tokens",
        "tokens_each",
    )

    def __init__(self, capacity_tokens: float, epoch: int, life: int) -> None:
        self.stated_tokens: Final = capacity_tokens
        self.capacity_tokens = capacity_tokens
        self.epoch: Final = epoch
        self.life: Final = life
        self.entries: Final[dict[int, float]] = {}
        """By name: seconds of its last use."""
        self.entries_max = 0
        """Its share of the index."""
        self.nameless = 0.0
        """Tokens written that are less than an entry."""
        self.tokens_each = TOKENS_PER_CHUNK
        self.hears = False
        """KV events come from it."""
        self.ahead = 0
        """Entries forgotten by estimate for which no event has come yet: they are not to be forgotten twice."""

    @property
    def limit(self) -> int:
        """Entries it may have."""
        return min(self.entries_max, int(self.capacity_tokens / self.tokens_each))


class PrefixCacheIndex:
    """The index. Instances are known by the row they have in the view's columns."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max: Final = entries_max
        self._holders: Final[dict[int, int]] = {}
        self._held: Final[dict[int, _Held]] = {}
        self._lives = 0
        self._nameless = 0

    def __len__(self) -> int:
        """Entries of all instances; never more than `entries_max`."""
        return sum(len(held.entries) for held in self._held.values())

    def join(self, row: int, capacity_tokens: int, epoch: int) -> None:
        """An instance is there, with a KV cache of so many tokens. In a new epoch it holds nothing."""
        known = self._held.get(row)
        if known is not None and (known.epoch, known.stated_tokens) == (epoch, capacity_tokens):
            return
        if known is not None:
            self.leave(row)
        self._lives += 1
        self._held[row] = _Held(capacity_tokens, epoch, self._lives)
        self._share_out()

    def leave(self, row: int) -> None:
        """The instance has left; its row may be given to another."""
        self.cleared(row)
        if self._held.pop(row, None) is not None:
            self._share_out()

    def match(self, chunks: Sequence[int]) -> Match:
        """Who holds how much of a prompt. Costs one look-up a chunk that somebody holds, however many they are."""
        levels: list[tuple[int, int]] = []
        alive = -1
        holders = self._holders
        count = 0
        for name in chunks:
            bits = holders.get(name, 0) & alive
            if bits != alive:
                if count:
                    levels.append((count, alive & ~bits))
                alive = bits
                if not bits:
                    break
            count += 1
        if alive > 0:
            levels.append((count, alive))
        levels.reverse()
        return Match(levels)

    def sent(self, row: int, chunks: Sequence[int], now: float) -> Sent | None:
        """A prompt goes to this instance, which will hold all of it. None where the instance is not known."""
        held = self._held.get(row)
        if held is None:
            return None
        entries, former = held.entries, []
        for name in chunks:
            at = entries.get(name)
            if at is None:
                break
            former.append(at)
        self._use(row, held, chunks, now)
        return Sent(row, held.life, chunks, tuple(former))

    def answered(
        self, sent: Sent, now: float, *, prompt_tokens: int, text_bytes: int, cached_tokens: int | None = None
    ) -> None:
        """The prompt was computed: its `usage`, with the cached tokens where vLLM has `--enable-prompt-tokens-details`.

        `text_bytes`: length of the hashed text. Without `cached_tokens` only tokens per chunk are learned.
        """
        held = self._held.get(sent.row)
        if held is None or held.life != sent.life or text_bytes <= 0 or prompt_tokens <= 0:
            return
        each = prompt_tokens * CHUNK_BYTES / text_bytes
        held.tokens_each += _LEARN * (each - held.tokens_each)
        self._wrote(sent.row, held, prompt_tokens - len(sent.chunks) * each, now)
        if cached_tokens is not None:
            self.reported(sent, each, cached_tokens)

    def reported(self, sent: Sent, each: float, cached_tokens: int) -> None:
        """So many of its tokens were in the cache; `each` tokens are one chunk. Once for each prompt, by `answered` or
        later: an engine that serves a request whole says it with the answer's end.
        """
        held = self._held.get(sent.row)
        if held is None or held.life != sent.life or each <= 0:
            return
        had = min(int((cached_tokens + 0.5 * each) / each), len(sent.chunks))
        expected = len(sent.former_s)
        slack = 1 + expected // 8  # text is denser here and there, and the engine counts in blocks
        if had + slack < expected:
            self._had_less(sent, held, had)
        elif had > expected + slack:
            grown = held.capacity_tokens + _GROW * held.stated_tokens
            held.capacity_tokens = min(_CAPACITY_MAX * held.stated_tokens, grown)

    def wrote(self, row: int, tokens: int, now: float) -> None:
        """An answer of so many tokens was generated there: it takes place, and pushes older chunks out."""
        held = self._held.get(row)
        if held is not None:
            self._wrote(row, held, tokens, now)

    def used(self, row: int, chunks: Sequence[int], now: float) -> None:
        """A request ended there: vLLM puts its blocks at the end of the queue of what may be evicted only now."""
        held = self._held.get(row)
        if held is not None:
            self._use(row, held, [name for name in chunks if name in held.entries], now)

    def removed(self, row: int, tokens: int) -> None:
        """KV events: blocks of so many tokens are gone. They do not say whose: those used longest ago."""
        held = self._held.get(row)
        if held is None:
            return
        gone = int(tokens / held.tokens_each)
        known = min(gone, held.ahead)
        held.hears, held.ahead = True, held.ahead - known
        self._trim(row, held, max(0, len(held.entries) - gone + known))

    def cleared(self, row: int) -> None:
        """KV events: everything is gone."""
        held = self._held.get(row)
        if held is not None:
            self._trim(row, held, 0)

    def names(self, row: int) -> Iterator[int]:
        """Chunks it is believed to hold, used longest ago first."""
        return (name for name in self._held[row].entries if name >= 0) if row in self._held else iter(())

    def capacity_tokens(self, row: int) -> float:
        """Tokens of KV it is believed to keep; falls and rises with what P reports."""
        return self._held[row].capacity_tokens

    def _had_less(self, sent: Sent, held: _Held, had: int) -> None:
        """What was expected was not there. The prompt was computed whole, so it is there now; what else was believed is
        not.

        An engine evicts by last use, so whatever was used longer ago than the first missing chunk is gone, too. Not so
        where that was used lately: then the engine had not computed it yet, or its template rewrites old turns.
        """
        missed_s = sent.former_s[had]
        oldest_s = next(iter(held.entries.values()), missed_s)
        newest_s = next(reversed(held.entries.values()), missed_s)
        if missed_s - oldest_s > 0.5 * (newest_s - oldest_s):
            return
        gone = 0
        for used_s in held.entries.values():
            if used_s > missed_s:
                break
            gone += 1
        self._trim(sent.row, held, len(held.entries) - gone)
        left_tokens = len(held.entries) * held.tokens_each
        shrunk = held.capacity_tokens - _SHRINK * max(0.0, held.capacity_tokens - left_tokens)
        held.capacity_tokens = max(_CAPACITY_MIN * held.stated_tokens, shrunk)

    def _use(self, row: int, held: _Held, chunks: Sequence[int], now: float) -> None:
        """The last chunk first: it is the first to go, as in vLLM, which gives blocks back from the end."""
        entries, holders, bit = held.entries, self._holders, 1 << row
        for name in reversed(chunks[: held.limit]):
            if entries.pop(name, None) is None:
                holders[name] = holders.get(name, 0) | bit
            entries[name] = now
        self._fit(row, held)

    def _wrote(self, row: int, held: _Held, tokens: float, now: float) -> None:
        held.nameless += max(0.0, tokens)
        count = int(held.nameless / held.tokens_each)
        held.nameless -= count * held.tokens_each
        for _ in range(min(count, held.limit)):
            self._nameless -= 1
            held.entries[self._nameless] = now
        self._fit(row, held)

    def _fit(self, row: int, held: _Held) -> None:
        """Forget what its KV cache has no place for."""
        over = len(held.entries) - held.limit
        if over > 0:
            held.ahead = min(held.limit, held.ahead + over) if held.hears else 0
            self._trim(row, held, held.limit)

    def _trim(self, row: int, held: _Held, limit: int) -> None:
        """Forget those used longest ago, until so many are left.

        Their names are read at once: a dict's first entry is found past all places of those deleted before it, so that
        asking for it again and again took a full index 2 to 8 ms a prompt of 100 KB.
        """
        entries, holders, others = held.entries, self._holders, ~(1 << row)
        for name in list(islice(entries, max(0, len(entries) - limit))):
            del entries[name]
            if name >= 0:
                left = holders[name] & others
                if left:
                    holders[name] = left
                else:
                    del holders[name]

    def _share_out(self) -> None:
        """Divide the index by stated capacity."""
        whole = sum(held.stated_tokens for held in self._held.values())
        for row, held in self._held.items():
            held.entries_max = int(self._entries_max * held.stated_tokens / whole) if whole > 0 else 0
            self._trim(row, held, held.limit)
