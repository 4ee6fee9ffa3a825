"""The prefix-cache index, for KV-aware routing: which instance probably holds the beginning of a prompt, by hashes of
text chunks. Pure.

Two prompts share KV blocks as far as their text agrees from the beginning. So the text, in template order, is cut into
chunks of `CHUNK_BYTES`, and each chunk is named by a keyed hash of all text up to its end (`router.predict.chunks`).
For every name the index keeps the instances that hold the chunk, one bit each. It is an estimate, corrected in three
ways:

- it evicts as the engine does: for each instance the chunks used longest ago go first, once more was written than fits
  its KV cache. Answers and the ends of prompts take space, too, without a name;
- P's `cached_tokens` correct it: a chunk that P did not have is dropped, with everything older, and the assumed
  capacity shrinks; where P had more than expected, the capacity grows again. An instance that is asked to give a
  prompt's beginning to another one corrects what it was expected to have of it. A new epoch drops everything;
- vLLM's KV events only ever remove entries: their block hashes are vLLM's own and name no text.

An instance with tiers below its KV cache (`keeps`) holds a chunk until the last tier has dropped it, as its events say.
Which tier a chunk is in follows from its last use: an upper tier has the chunks used most recently. A match counts a
chunk in a lower tier as what it saves.

Invariants: no entry matches across scopes; an instance matches a chunk only if it matches all chunks before it; the
entries of all instances together stay below `entries_max`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router.core.values import Sent
from router.predict.chunks import CHUNK_BYTES

Ints = NDArray[np.int64]

ENTRIES_MAX = 500_000
"""The number of (chunk, instance) entries; about 160 bytes each (`make bench-prefixes`)."""

TOKENS_PER_CHUNK = CHUNK_BYTES / 4.0
"""The assumed value until prompts have been counted (`PrefixCacheIndex.answered`)."""

_FEW = 16
"""Up to this number, bits are written to a column one by one; above it, unpacking all is faster."""

_LEARN = 0.02
"""The weight with which one prompt moves an instance's tokens per chunk."""

_SHRINK, _GROW = 0.5, 0.02
"""How far one report moves the assumed capacity: half the way down to what was left, or up by 2 % of the stated one.
Measured on an index that is given a wrong size, or half of the traffic (docs/prefixes.md)."""

_CAPACITY_MIN, _CAPACITY_MAX = 0.1, 2.0
"""The bounds of the assumed capacity, as shares of the stated one. With a lower bound the index would know nothing, and
never learn that it is wrong. Chunks found beyond those expected may also come from another router's requests, so they
say little about capacity."""


class Match:
    """Which instance holds how much of a prompt."""

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
        """Leading bytes held, by row: a column for policies, of `rows` rows like their other columns."""
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
    """The rows of some bits, at least one, to index a column with. For one bit it is a number, which is faster."""
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
    """A column from many bits. No two levels share a bit, so products with the bits as 0 and 1 can be summed.

    float32 is exact here: no prompt has 2^24 named bytes.
    """
    width = (rows + 7) // 8
    packed = np.frombuffer(b"".join(bits.to_bytes(width, "little") for _, bits in levels), dtype=np.uint8)
    flags = np.unpackbits(packed.reshape(len(levels), width), axis=1, count=rows, bitorder="little")
    sizes = np.array([size for size, _ in levels], dtype=np.float32)
    return (sizes @ flags.astype(np.float32)).astype(np.int64)


class _UpperTier:
    """A tier that is not the last one: its names, in order of last use."""

    __slots__ = ("names", "tokens")

    def __init__(self, names: Iterable[int]) -> None:
        self.names: Final[dict[int, None]] = dict.fromkeys(names)
        self.tokens = 0.0
        """Its size; not read of the KV cache, whose size is the instance's capacity."""

    def beginning(self, chunks: Sequence[int], count: int) -> int:
        """How many of the first `count` chunks it has, by halving: it has a beginning of them."""
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if chunks[middle] in self.names:
                low = middle + 1
            else:
                high = middle
        return low


class _Held:
    """The chunks of one instance. Names stand in order of last use, longest ago first; negative ones are
    unnamed text.
    """

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
        "upper",
        "worth",
    )

    def __init__(self, capacity_tokens: float, epoch: int, life: int) -> None:
        self.stated_tokens: Final = capacity_tokens
        self.capacity_tokens = capacity_tokens
        self.epoch: Final = epoch
        self.life: Final = life
        self.entries: Final[dict[int, float]] = {}
        """By name: the time of its last use, in seconds."""
        self.entries_max = 0
        """The instance's share of the index."""
        self.nameless = 0.0
        """Tokens written that do not fill an entry yet."""
        self.tokens_each = TOKENS_PER_CHUNK
        self.hears = False
        """The instance sends KV events."""
        self.ahead = 0
        """Entries dropped by estimate for which no event has come yet: an event must not drop others in their place."""
        self.upper: Final[list[_UpperTier]] = []
        """The KV cache and other tiers above the last one, smallest first; none: the KV cache is the only tier."""
        self.worth: tuple[float, ...] = ()
        """For each tier below the KV cache, the share of a prefill that a token in it saves."""

    @property
    def limit(self) -> int:
        """The number of entries that the instance may have."""
        fits = self.entries_max if self.upper else int(self.capacity_tokens / self.tokens_each)
        return min(self.entries_max, fits)

    def touch(self, name: int) -> None:
        """This name is the last used, so each of the upper tiers has it."""
        for tier in self.upper:
            tier.names.pop(name, None)
            tier.names[name] = None

    def settle(self) -> None:
        """Drop from the upper tiers what does not fit them: it is in the next one."""
        for number, tier in enumerate(self.upper):
            tokens = tier.tokens if number else self.capacity_tokens
            over = len(tier.names) - int(tokens / self.tokens_each)
            for name in list(islice(tier.names, max(0, over))):
                del tier.names[name]

    def effective(self, chunks: Sequence[int], count: int) -> int:
        """What the first `count` chunks are worth, in chunks of the KV cache. An upper tier has a beginning of them:
        ends go first.
        """
        before = self.upper[0].beginning(chunks, count)
        found = float(before)
        for number, worth in enumerate(self.worth):
            last = number + 1 == len(self.upper)
            edge = count if last else self.upper[number + 1].beginning(chunks, count)
            found += worth * max(0, edge - before)
            before = max(before, edge)
        return int(found)


class PrefixCacheIndex:
    """The index. Instances are identified by their row in the view's columns.

    The class is long because what each instance holds, its tiers and the names that `match` reads change together.
    """

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max: Final = entries_max
        self._holders: Final[dict[int, int]] = {}
        self._held: Final[dict[int, _Held]] = {}
        self._lives = 0
        self._nameless = 0
        self._tiered = 0
        """The rows of instances with tiers, as bits."""

    def __len__(self) -> int:
        """The number of entries of all instances, never more than `entries_max`."""
        return sum(len(held.entries) for held in self._held.values())

    def join(self, row: int, capacity_tokens: int, epoch: int) -> None:
        """An instance joins, with a KV cache of `capacity_tokens`. In a new epoch it holds nothing."""
        known = self._held.get(row)
        if known is not None and (known.epoch, known.stated_tokens) == (epoch, capacity_tokens):
            return
        if known is not None:
            self.leave(row)
        self._lives += 1
        self._held[row] = _Held(capacity_tokens, epoch, self._lives)
        self._share_out()

    def leave(self, row: int) -> None:
        """The instance has left; another may get its row."""
        self.cleared(row)
        self._tiered &= ~(1 << row)
        if self._held.pop(row, None) is not None:
            self._share_out()

    def match(self, chunks: Sequence[int]) -> Match:
        """Which instances hold how much of a prompt. Costs one look-up for each held chunk, however many instances hold
        it.
        """
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
        return Match(self._priced(levels, chunks) if self._tiered else levels)

    def keeps(self, row: int, tiers: Sequence[tuple[float, float]]) -> None:
        """The instance has tiers below its KV cache, or more in them than before.

        Args:
            row: the instance.
            tiers: tokens in each now, upper ones first, and the share of a prefill that a token there saves.
        """
        held = self._held.get(row)
        if held is None or not tiers:
            return
        while len(held.upper) < len(tiers):
            held.upper.append(_UpperTier(held.entries))
        for number, (tokens, _) in enumerate(tiers[:-1], 1):
            held.upper[number].tokens = tokens
        held.worth = tuple(worth for _, worth in tiers)
        self._tiered |= 1 << row
        held.settle()

    def in_cache(self, row: int, chunks: Sequence[int], count: int) -> int:
        """How many of the `count` leading chunks that an instance holds, or of what they are worth, are in its KV cache
        and not in a tier below it.
        """
        held = self._held.get(row)
        return count if held is None or not held.upper else held.upper[0].beginning(chunks, len(chunks))

    def _priced(self, levels: list[tuple[int, int]], chunks: Sequence[int]) -> list[tuple[int, int]]:
        """The same levels, with what lower tiers hold as what it saves."""
        found: dict[int, int] = {}
        for count, bits in levels:
            plain, tiered = bits & ~self._tiered, bits & self._tiered
            if plain:
                found[count] = found.get(count, 0) | plain
            while tiered:
                row = tiered.bit_length() - 1
                tiered ^= 1 << row
                worth = self._held[row].effective(chunks, count)
                if worth:
                    found[worth] = found.get(worth, 0) | 1 << row
        return sorted(found.items(), reverse=True)

    def sent(self, row: int, chunks: Sequence[int], now: float) -> Sent | None:
        """A prompt goes to this instance, which will hold all of it. None if the instance is unknown."""
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
        """The prompt was computed: take its `usage`, with the cached tokens if vLLM has
        `--enable-prompt-tokens-details`.

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
        """The engine had `cached_tokens` of the prompt in its cache; one chunk is `each` tokens. Called once for each
        prompt, by `answered` or later: an engine that serves a whole request reports it at the answer's end.
        """
        held = self._held.get(sent.row)
        if held is None or held.life != sent.life or each <= 0:
            return
        had = min(int((cached_tokens + 0.5 * each) / each), len(sent.chunks))
        expected = len(sent.former_s)
        slack = 1 + expected // 8  # text is denser in some places, and the engine counts in blocks
        if had + slack < expected:
            self._had_less(sent, held, had)
        elif had > expected + slack:
            grown = held.capacity_tokens + _GROW * held.stated_tokens
            held.capacity_tokens = min(_CAPACITY_MAX * held.stated_tokens, grown)

    def wrote(self, row: int, tokens: int, now: float) -> None:
        """The instance generated an answer of `tokens` tokens, which takes space and evicts older chunks."""
        held = self._held.get(row)
        if held is not None:
            self._wrote(row, held, tokens, now)

    def used(self, row: int, chunks: Sequence[int], now: float) -> None:
        """A request ended on the instance: only now does vLLM put its blocks at the end of the eviction queue."""
        held = self._held.get(row)
        if held is not None:
            self._use(row, held, [name for name in chunks if name in held.entries], now)

    def told(self, row: int, chunks: Sequence[int], each: float, tokens: int, now: float) -> None:
        """The instance was asked what it has of a prompt, and has said: the first `tokens`; one chunk is `each` tokens.
        What it has was used by that; what it was wrongly expected to have is dropped.
        """
        held = self._held.get(row)
        if held is None or each <= 0:
            return
        had, expected = min(int((tokens + 0.5 * each) / each), len(chunks)), 0
        while expected < len(chunks) and chunks[expected] in held.entries:
            expected += 1
        if had + (1 + expected // 8 if tokens else 0) < expected:  # as in `reported`
            for name in chunks[had:]:
                if held.upper:  # it may still be in a lower tier
                    held.upper[0].names.pop(name, None)
                elif name in held.entries:
                    self._drop(row, held, name)
        self.used(row, chunks[:had], now)

    def removed(self, row: int, tokens: int) -> None:
        """KV events: blocks of `tokens` tokens are gone. They do not say which: drop those used longest ago."""
        held = self._held.get(row)
        if held is None:
            return
        gone = int(tokens / held.tokens_each)
        known = min(gone, held.ahead)
        held.hears, held.ahead = True, held.ahead - known
        self._trim(row, held, max(0, len(held.entries) - gone + known))

    def cleared(self, row: int) -> None:
        """KV events: all blocks are gone."""
        held = self._held.get(row)
        if held is not None:
            self._trim(row, held, 0)

    def names(self, row: int) -> Iterator[int]:
        """Chunks that the instance is assumed to hold, used longest ago first."""
        return (name for name in self._held[row].entries if name >= 0) if row in self._held else iter(())

    def capacity_tokens(self, row: int) -> float:
        """Tokens of KV that the instance is assumed to keep; falls and rises with P's reports."""
        return self._held[row].capacity_tokens

    def _had_less(self, sent: Sent, held: _Held, had: int) -> None:
        """The instance had fewer chunks than expected. The prompt was computed, so its chunks are there now; drop the
        wrong ones.

        An engine evicts by last use, so everything used longer ago than the first missing chunk is gone, too. That does
        not hold if that chunk was used recently: then the engine had not computed it yet, or its template rewrites old
        turns.
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
        """Mark the last chunk first: it is evicted first, as in vLLM, which frees blocks from the end."""
        entries, holders, bit = held.entries, self._holders, 1 << row
        for name in reversed(chunks[: held.limit]):
            if entries.pop(name, None) is None:
                holders[name] = holders.get(name, 0) | bit
            entries[name] = now
            held.touch(name)
        self._fit(row, held)

    def _wrote(self, row: int, held: _Held, tokens: float, now: float) -> None:
        held.nameless += max(0.0, tokens)
        count = int(held.nameless / held.tokens_each)
        held.nameless -= count * held.tokens_each
        for _ in range(min(count, held.limit)):
            self._nameless -= 1
            held.entries[self._nameless] = now
            held.touch(self._nameless)
        self._fit(row, held)

    def _fit(self, row: int, held: _Held) -> None:
        """Drop what does not fit the instance's KV cache, or the last of its tiers."""
        held.settle()
        over = len(held.entries) - held.limit
        if over > 0:
            held.ahead = min(held.limit, held.ahead + over) if held.hears else 0
            self._trim(row, held, held.limit)

    def _trim(self, row: int, held: _Held, limit: int) -> None:
        """Drop the entries used longest ago, until `limit` are left.

        Their names are read at once: finding a dict's first entry passes all places of those deleted before it, so
        reading it again and again took a full index 2 to 8 ms a prompt of 100 KB.
        """
        entries = held.entries
        for name in list(islice(entries, max(0, len(entries) - limit))):
            self._drop(row, held, name)

    def _drop(self, row: int, held: _Held, name: int) -> None:
        """The instance does not hold this one any more."""
        del held.entries[name]
        for tier in held.upper:
            tier.names.pop(name, None)
        if name >= 0:
            left = self._holders[name] & ~(1 << row)
            if left:
                self._holders[name] = left
            else:
                del self._holders[name]

    def _share_out(self) -> None:
        """Divide the index among instances by their stated capacity."""
        whole = sum(held.stated_tokens for held in self._held.values())
        for row, held in self._held.items():
            held.entries_max = int(self._entries_max * held.stated_tokens / whole) if whole > 0 else 0
            self._trim(row, held, held.limit)
