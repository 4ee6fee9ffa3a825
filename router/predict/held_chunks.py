"""What one instance holds of prompts, as far as a router can tell: names of chunks, in order of last use. Pure.

It evicts as the engine does: the chunks used longest ago go first, once more was written than fits the instance's KV
cache, or the last of its tiers. Answers are in the KV cache alone: tiers get prompts only.
`router.predict.prefix_cache` is the index of all instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

from router.predict.chunks import CHUNK_BYTES

TOKENS_PER_CHUNK = CHUNK_BYTES / 4.0
"""The assumed value until prompts have been counted (`PrefixCacheIndex.answered`)."""

_LEARN = 0.02
"""The weight with which one prompt moves an instance's tokens per chunk."""

_SHRINK, _GROW = 0.5, 0.02
"""How far one report moves the assumed capacity: half the way down to what was left, or up by 2 % of the stated one.
Measured on an index that is given a wrong size, or half of the traffic (docs/prefixes.md)."""

_CAPACITY_MIN, _CAPACITY_MAX = 0.1, 2.0
"""The bounds of the assumed capacity, as shares of the stated one. With a lower bound the index would know nothing, and
never learn that it is wrong. Chunks found beyond those expected may also come from another router's requests, so they
say little about capacity."""


_TINY = 1e-6
"""Tokens that are nothing: sums of sizes are rounded."""


class UpperTier:
    """A tier that is not the last one: its names, in order of last use, with the tokens of each."""

    __slots__ = ("held", "names", "tokens")

    def __init__(self) -> None:
        self.names: Final[dict[int, float]] = {}
        self.held = 0.0
        """The tokens of all names."""
        self.tokens = 0.0
        """Its size. Not used for the KV cache, whose size is `HeldChunks.capacity_tokens`."""

    def put(self, name: int, tokens: float) -> None:
        """It has this name from now on, as the last used."""
        self.held += tokens - self.names.pop(name, 0.0)
        self.names[name] = tokens

    def resize(self, name: int, tokens: float) -> None:
        """If it has this name, the name has so many tokens. Its place in the order stays."""
        if name in self.names:
            self.held += tokens - self.names[name]
            self.names[name] = tokens

    def drop(self, name: int) -> None:
        """It does not have this name any more."""
        self.held -= self.names.pop(name, 0.0)

    def beginning(self, chunks: Sequence[int], count: int) -> int:
        """How many of the first `count` chunks it has, by binary search: it has a beginning of them, without gaps."""
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if chunks[middle] in self.names:
                low = middle + 1
            else:
                high = middle
        return low


class HeldChunks:
    """The chunks of one instance. Names stand in order of last use, longest ago first; negative ones are unnamed
    text, the even ones of them of answers. It has many attributes: the entries, the tiers, and each estimate that
    reports correct. It is long, as everything that adds, uses or drops an entry keeps the same sums.
    """

    __slots__ = (
        "_bit",
        "_holders",
        "_last_unnamed",
        "_unremoved",
        "ahead_tokens",
        "capacity_tokens",
        "entries",
        "entries_max",
        "epoch",
        "hears",
        "life",
        "nameless",
        "sizes",
        "stated_tokens",
        "tokens",
        "tokens_each",
        "upper",
        "worth",
    )

    def __init__(self, row: int, capacity_tokens: float, epoch: int, life: int, holders: dict[int, int]) -> None:
        """`holders`: by name, the rows of all instances that hold the chunk, as bits; this one writes its own bit."""
        self._bit: Final = 1 << row
        self._holders: Final = holders
        self._last_unnamed = 0
        """The name given last to text that has none."""
        self.stated_tokens: Final = capacity_tokens
        self.capacity_tokens = capacity_tokens
        self.epoch: Final = epoch
        self.life: Final = life
        self.entries: Final[dict[int, float]] = {}
        """By name: the time of its last use, in seconds."""
        self.sizes: Final[dict[int, float]] = {}
        """By name: its tokens. They differ by language and by kind of text, from 150 to 1,024 in a chunk; entries that
        all counted as the mean would drift from what events say, until none is left.
        """
        self.tokens = 0.0
        """Those of all entries."""
        self.entries_max = 0
        """The instance's share of the index."""
        self.nameless: Final = [0.0, 0.0]
        """Tokens written that do not fill an entry yet: of prompts, and of answers."""
        self._unremoved = 0.0
        """Tokens reported as gone that do not fill an entry yet."""
        self.tokens_each = TOKENS_PER_CHUNK
        self.hears = False
        """The instance sends KV events."""
        self.ahead_tokens = 0.0
        """Tokens dropped by estimate for which no event has come yet: an event must not drop others in their place."""
        self.upper: Final[list[UpperTier]] = []
        """The KV cache and other tiers above the last one, smallest first; none: the KV cache is the only tier."""
        self.worth: tuple[float, ...] = ()
        """For each tier below the KV cache, the share of a prefill that a token in it saves."""

    @property
    def limit(self) -> int:
        """The number of chunks of a prompt of mean density that the instance may have."""
        return self._fitting(self.tokens_each)

    def _fitting(self, each: float) -> int:
        """The number of chunks of so many tokens each that the instance may have."""
        fits = self.entries_max if self.upper else int(self.capacity_tokens / each)
        return min(self.entries_max, fits)

    def touch(self, name: int) -> None:
        """This name is the last used, so each of the upper tiers has it; of an answer's, the KV cache."""
        for tier in self.upper[:1] if _of_answer(name) else self.upper:
            tier.put(name, self.sizes[name])

    def settle(self) -> None:
        """Drop from the upper tiers what does not fit them: it is in the next one, unless it is of an answer."""
        for number, tier in enumerate(self.upper):
            over = tier.held - (tier.tokens if number else self.capacity_tokens)
            for name in _oldest(tier.names, tier.names, over) if over > _TINY else ():
                if _of_answer(name):
                    self._drop(name)
                else:
                    tier.drop(name)

    def beginning(self, chunks: Sequence[int]) -> int:
        """How many of a prompt's leading chunks it has, in any tier."""
        entries = self.entries
        for number, name in enumerate(chunks):
            if name not in entries:
                return number
        return len(chunks)

    def effective(self, chunks: Sequence[int], count: int) -> float:
        """What the first `count` chunks are worth, in chunks of the KV cache. An upper tier has a beginning of them, as
        ends are evicted first.
        """
        before = self.upper[0].beginning(chunks, count)
        found = float(before)
        for number, worth in enumerate(self.worth):
            last = number + 1 == len(self.upper)
            edge = count if last else self.upper[number + 1].beginning(chunks, count)
            found += worth * max(0, edge - before)
            before = max(before, edge)
        return found

    def keep_in(self, tiers: Sequence[tuple[float, float]]) -> None:
        """There are tiers below the KV cache (`PrefixCacheIndex.keeps`)."""
        while len(self.upper) < len(tiers):
            self.upper.append(UpperTier())
            for name in self.entries:
                self.upper[-1].put(name, self.sizes[name])
        for number, (tokens, _) in enumerate(tiers[:-1], 1):
            self.upper[number].tokens = tokens
        self.worth = tuple(worth for _, worth in tiers)
        self.settle()

    def use(self, chunks: Sequence[int], now: float, each: float = 0.0) -> None:
        """The instance has these from now on. The last chunk is marked first: it is evicted first, as in vLLM, which
        frees blocks from the end. `each`: the tokens of one; 0: as known, else the mean.
        """
        entries, holders, bit, sizes = self.entries, self._holders, self._bit, self.sizes
        size, new = each or self.tokens_each, 0
        for name in reversed(chunks[: self._fitting(size)]):
            if entries.pop(name, None) is None:
                holders[name] = holders.get(name, 0) | bit
                sizes[name] = size
                new += 1
            entries[name] = now
            if self.upper:
                self.touch(name)
        self.tokens += new * size
        self._fit()

    def resize(self, chunks: Sequence[int], each: float) -> None:
        """The prompt with these chunks was counted: one is `each` tokens."""
        for name in chunks:
            former = self.sizes.get(name)
            if former is None:
                return
            self.sizes[name] = each
            self.tokens += each - former
            for tier in self.upper:
                tier.resize(name, each)

    def wrote(self, tokens: float, now: float, *, answer: bool = False) -> None:
        """So many tokens without a name were written, which take space and evict older chunks. `answer`: an answer's,
        not a prompt's.
        """
        answer = answer and bool(self.upper)  # one KV cache treats both alike
        before = self.nameless[answer] + max(0.0, tokens)
        count = int(before / self.tokens_each)
        self.nameless[answer] = before - count * self.tokens_each
        for _ in range(min(count, self.limit)):
            self._last_unnamed -= 1 + ((self._last_unnamed + answer) % 2)
            self.entries[self._last_unnamed] = now
            self.sizes[self._last_unnamed] = self.tokens_each
            self.tokens += self.tokens_each
            self.touch(self._last_unnamed)
        self._fit()

    def learn_density(self, each: float) -> None:
        """A prompt had so many tokens per chunk."""
        self.tokens_each += _LEARN * (each - self.tokens_each)

    def reported(self, chunks: int, former_s: Sequence[float], each: float, cached_tokens: int) -> None:
        """The engine had `cached_tokens` of a prompt of `chunks` chunks, each of `each` tokens. It was expected to have
        the first ones, whose last uses were at `former_s` (seconds).
        """
        had, expected = _chunks_in(cached_tokens, each, chunks), len(former_s)
        slack = _slack(expected)
        if had + slack < expected:
            self._had_less(former_s[had])
        elif had > expected + slack and not self.upper:  # what a tier had says nothing of the KV cache
            grown = self.capacity_tokens + _GROW * self.stated_tokens
            self.capacity_tokens = min(_CAPACITY_MAX * self.stated_tokens, grown)

    def _had_less(self, missed_s: float) -> None:
        """The instance had fewer chunks than expected; the first missing one was used at `missed_s`. The prompt was
        computed, so its chunks are there now; drop the wrong ones.

        An engine evicts by last use, so everything used longer ago than the first missing chunk is gone, too. That does
        not hold if that chunk was used recently: then the engine had not computed it yet, or its template rewrites old
        turns.
        """
        oldest_s = next(iter(self.entries.values()), missed_s)
        newest_s = next(reversed(self.entries.values()), missed_s)
        if missed_s - oldest_s > 0.5 * (newest_s - oldest_s):
            return
        gone = 0
        for used_s in self.entries.values():
            if used_s > missed_s:
                break
            gone += 1
        self.trim(len(self.entries) - gone)
        if self.upper:
            return
        shrunk = self.capacity_tokens - _SHRINK * max(0.0, self.capacity_tokens - self.tokens)
        self.capacity_tokens = max(_CAPACITY_MIN * self.stated_tokens, shrunk)

    def told(self, chunks: Sequence[int], each: float, tokens: int, now: float) -> None:
        """The instance has said that it has the first `tokens` of a prompt."""
        had, expected = _chunks_in(tokens, each, len(chunks)), self.beginning(chunks)
        if had + (_slack(expected) if tokens else 0) < expected:
            for name in chunks[had:]:  # a source leg looks into the tiers, too
                if name in self.entries:
                    self._drop(name)
        self.used(chunks[:had], now)

    def used(self, chunks: Sequence[int], now: float) -> None:
        """Mark those of these chunks that the instance has as used at `now`."""
        self.use([name for name in chunks if name in self.entries], now)

    def removed(self, tokens: int) -> None:
        """Blocks of so many tokens are gone, it is not known which: drop the chunks used longest ago."""
        known = min(tokens, self.ahead_tokens)
        self.hears, self.ahead_tokens = True, self.ahead_tokens - known
        self._unremoved += tokens - known
        for name in _oldest(self.entries, self.sizes, self._unremoved, whole=True):
            self._unremoved -= self.sizes[name]
            self._drop(name)
        if not self.entries:
            self._unremoved = 0.0

    def clear(self) -> None:
        """All blocks are gone."""
        self._unremoved = 0.0
        self.trim(0)

    def _fit(self) -> None:
        """Drop what does not fit the instance's KV cache, or the last of its tiers."""
        self.settle()
        before = self.tokens
        self.shrink()
        if self.tokens < before:
            ahead = self.ahead_tokens + before - self.tokens
            self.ahead_tokens = min(self.capacity_tokens, ahead) if self.hears else 0.0

    def shrink(self) -> None:
        """Drop the entries used longest ago that do not fit."""
        self.trim(self.entries_max)
        over = 0.0 if self.upper else self.tokens - self.capacity_tokens
        for name in _oldest(self.entries, self.sizes, over) if over > _TINY else ():
            self._drop(name)

    def trim(self, limit: int) -> None:
        """Drop the entries used longest ago, until `limit` are left.

        Their names are read at once: finding a dict's first entry passes all places of those deleted before it, so
        reading it again and again took a full index 2 to 8 ms a prompt of 100 KB.
        """
        entries = self.entries
        for name in list(islice(entries, max(0, len(entries) - limit))):
            self._drop(name)

    def _drop(self, name: int) -> None:
        """The instance does not hold this one any more."""
        del self.entries[name]
        self.tokens -= self.sizes.pop(name)
        for tier in self.upper:
            tier.drop(name)
        if name >= 0:
            left = self._holders[name] & ~self._bit
            if left:
                self._holders[name] = left
            else:
                del self._holders[name]


def _oldest(names: Iterable[int], sizes: Mapping[int, float], tokens: float, *, whole: bool = False) -> list[int]:
    """The first names that have so many tokens together, at least. `whole`: at most, so that the next would be cut."""
    found = []
    for name in names:
        if tokens <= _TINY:
            break
        tokens -= sizes[name]
        if whole and tokens < -_TINY:
            break
        found.append(name)
    return found


def _of_answer(name: int) -> bool:
    """Whether an entry is of an answer's text."""
    return name < 0 and not name % 2


def _chunks_in(tokens: int, each: float, most: int) -> int:
    """The number of chunks that so many tokens fill, to the nearest; at most `most`."""
    return min(int((tokens + 0.5 * each) / each), most)


def _slack(expected: int) -> int:
    """How far a report may be off: text is denser in some places, and the engine counts in blocks."""
    return 1 + expected // 8
