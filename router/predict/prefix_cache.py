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
Its answers leave with the KV cache: tiers get prompts alone.
Which tier a chunk is in follows from its last use: an upper tier has the chunks used most recently. A match counts a
chunk in a lower tier as what it saves.

Invariants: no entry matches across scopes; an instance matches a chunk only if it matches all chunks before it; the
entries of all instances together stay below `entries_max`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router.core.values import Sent
from router.predict.chunks import CHUNK_BYTES
from router.predict.held_chunks import HeldChunks

Ints = NDArray[np.int64]

ENTRIES_MAX = 500_000
"""The number of (chunk, instance) entries; about 200 bytes each (`make bench-prefixes`)."""

SIZE_OFF: Final = 0.02
"""A prompt that was counted has its chunks sized anew if they were so much off, as a share."""

_FEW = 16
"""Up to this number, bits are read one by one; above it, unpacking all is faster."""


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


class PrefixCacheIndex:
    """The index. Instances are identified by their row in the view's columns."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max: Final = entries_max
        self._holders: Final[dict[int, int]] = {}
        """By chunk: the rows that hold it, as bits. Each instance writes its own bit."""
        self._held: Final[dict[int, HeldChunks]] = {}
        self._lives = 0
        self._tiered = 0
        """The rows of instances with tiers, as bits."""
        self._due = False
        """An instance has joined or left since the index was divided. It is divided again when it is next used: a
        thousand instances join at once when a router starts."""

    def __len__(self) -> int:
        """The number of entries of all instances, never more than `entries_max`."""
        if self._due:
            self._share_out()
        return sum(len(held.entries) for held in self._held.values())

    def join(self, row: int, capacity_tokens: int, epoch: int) -> None:
        """An instance joins, with a KV cache of `capacity_tokens`. In a new epoch it holds nothing."""
        known = self._held.get(row)
        if known is not None and (known.epoch, known.stated_tokens) == (epoch, capacity_tokens):
            return
        if known is not None:
            self.leave(row)
        self._lives += 1
        self._held[row] = HeldChunks(row, capacity_tokens, epoch, self._lives, self._holders)
        self._due = True

    def leave(self, row: int) -> None:
        """The instance has left; another may get its row."""
        self.cleared(row)
        self._tiered &= ~(1 << row)
        if self._held.pop(row, None) is not None:
            self._due = True

    def match(self, chunks: Sequence[int]) -> Match:
        """Which instances hold how much of a prompt. Costs one look-up for each held chunk, however many instances hold
        it.
        """
        if self._due:
            self._share_out()
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
        held = self._at(row)
        if held is None or not tiers:
            return
        self._tiered |= 1 << row
        held.keep_in(tiers)

    def room(self, row: int) -> int:
        """The number of chunks that an instance may hold; 0: it is unknown."""
        held = self._at(row)
        return 0 if held is None else held.limit

    def held_by(self, row: int, chunks: Sequence[int], count: int) -> tuple[int, float]:
        """How many leading chunks of a prompt an instance holds in its KV cache and the tiers below it, and the time to
        load the latter, in times to compute a chunk there. `count`: the number that `match` gives for the instance,
        which is the first result if it has no tiers.
        """
        held = self._at(row)
        if held is None or not held.upper:
            return count, 0.0
        found = held.beginning(chunks)
        return found, max(0.0, found - held.effective(chunks, found))

    def in_cache(self, row: int, chunks: Sequence[int], count: int) -> int:
        """How many leading chunks of a prompt an instance holds in its KV cache. `count`: as for `held_by`."""
        held = self._at(row)
        return count if held is None or not held.upper else held.upper[0].beginning(chunks, len(chunks))

    def _priced(self, levels: list[tuple[int, int]], chunks: Sequence[int]) -> list[tuple[int, int]]:
        """The same levels, with chunks in lower tiers counted as what they save, to the nearest chunk: rounded down, a
        short prompt in a tier would count as nothing.
        """
        found: dict[int, int] = {}
        for count, bits in levels:
            plain, tiered = bits & ~self._tiered, bits & self._tiered
            if plain:
                found[count] = found.get(count, 0) | plain
            while tiered:
                row = tiered.bit_length() - 1
                tiered ^= 1 << row
                worth = int(self._held[row].effective(chunks, count) + 0.5)
                if worth:
                    found[worth] = found.get(worth, 0) | 1 << row
        return sorted(found.items(), reverse=True)

    def sent(self, row: int, chunks: Sequence[int], now: float, each: float = 0.0) -> Sent | None:
        """A prompt goes to this instance, which will hold all of it. None if the instance is unknown. `each`: the
        tokens of one chunk; 0: unknown.
        """
        if self._due:  # as `_at`, without its call: this is on every request's way
            self._share_out()
        held = self._held.get(row)
        if held is None:
            return None
        entries, former = held.entries, []
        for name in chunks:
            at = entries.get(name)
            if at is None:
                break
            former.append(at)
        held.use(chunks, now, each)
        return Sent(row, held.life, chunks, tuple(former))

    def answered(
        self, sent: Sent, now: float, *, prompt_tokens: int, text_bytes: int, cached_tokens: int | None = None
    ) -> None:
        """The prompt was computed: take its `usage`, with the cached tokens if vLLM has
        `--enable-prompt-tokens-details`.

        `text_bytes`: length of the hashed text. Without `cached_tokens` only tokens per chunk are learned.
        """
        held = self._at(sent.row)
        if held is None or held.life != sent.life or text_bytes <= 0 or prompt_tokens <= 0:
            return
        each = prompt_tokens * CHUNK_BYTES / text_bytes
        held.learn_density(each)
        if sent.chunks and abs(held.sizes.get(sent.chunks[-1], each) - each) > SIZE_OFF * each:
            held.resize(sent.chunks, each)
        held.wrote(prompt_tokens - len(sent.chunks) * each, now)
        if cached_tokens is not None:
            self.reported(sent, each, cached_tokens)

    def reported(self, sent: Sent, each: float, cached_tokens: int) -> None:
        """The engine had `cached_tokens` of the prompt in its cache; one chunk is `each` tokens. Called once for each
        prompt, by `answered` or later: an engine that serves a whole request reports it at the answer's end.
        """
        held = self._at(sent.row)
        if held is not None and held.life == sent.life and each > 0:
            held.reported(len(sent.chunks), sent.former_s, each, cached_tokens)

    def wrote(self, row: int, tokens: int, now: float, *, answer: bool = True) -> None:
        """The instance generated an `answer` of `tokens` tokens, or computed a prompt too short for a name: they take
        space and evict older chunks.
        """
        held = self._at(row)
        if held is not None:
            held.wrote(tokens, now, answer=answer)

    def used(self, row: int, chunks: Sequence[int], now: float) -> None:
        """A request ended on the instance: only now does vLLM put its blocks at the end of the eviction queue."""
        held = self._at(row)
        if held is not None:
            held.used(chunks, now)

    def told(self, row: int, chunks: Sequence[int], each: float, tokens: int, now: float) -> None:
        """The instance was asked what it has of a prompt, and has reported: the first `tokens`; one chunk is `each`
        tokens. Asking is a use of what it has; what it was wrongly expected to have is dropped.
        """
        held = self._at(row)
        if held is not None and each > 0:
            held.told(chunks, each, tokens, now)

    def removed(self, row: int, tokens: int) -> None:
        """KV events: blocks of `tokens` tokens are gone. They do not say which: drop those used longest ago."""
        held = self._at(row)
        if held is not None:
            held.removed(tokens)

    def cleared(self, row: int) -> None:
        """KV events: all blocks are gone."""
        held = self._held.get(row)
        if held is not None:
            held.clear()

    def _at(self, row: int) -> HeldChunks | None:
        """What an instance holds, within its share of the index; None: the instance is unknown."""
        if self._due:
            self._share_out()
        return self._held.get(row)

    def _share_out(self) -> None:
        """Divide the index among instances by their stated capacity."""
        self._due = False
        whole = sum(held.stated_tokens for held in self._held.values())
        for held in self._held.values():
            held.entries_max = int(self._entries_max * held.stated_tokens / whole) if whole > 0 else 0
            held.shrink()
