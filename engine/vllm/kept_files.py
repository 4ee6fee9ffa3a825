"""Decides which files of a tier on disk are kept: up to a bound, files used longest ago are removed first. Pure.

A file that is being written is not removed: the write would create it again afterwards, and it would never be removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence


class KeptFiles:
    """The files by their keys: never more than the bound plus those that are being written."""

    def __init__(self, files_max: int) -> None:
        self._files_max = files_max
        self._used: dict[Hashable, None] = {}
        self._writing: Counter[Hashable] = Counter()
        self._new: set[Hashable] = set()
        """Those of them that were not there before: a file that is written again is whole until it is replaced."""

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, key: Hashable) -> bool:
        """Whether the file is there, and whole."""
        return key in self._used and key not in self._new

    def lost(self, keys: Iterable[Hashable]) -> tuple[Hashable, ...]:
        """These files could not be written, or not be read. Returns those that are to be removed; one that is being
        written again will be whole.
        """
        gone = tuple(key for key in keys if key in self._used and key not in self._writing)
        for key in gone:
            del self._used[key]
        return gone

    def used(self, key: Hashable) -> None:
        """A file was asked for. An unknown file stays unknown."""
        if key in self._used:
            del self._used[key]
            self._used[key] = None

    def added(self, keys: Sequence[Hashable]) -> tuple[Hashable, ...]:
        """Files are about to be written, of chunks in their prompt's order: of these the last counts as used longest
        ago, because a chunk is of no use without those before it. Returns the files to remove in exchange.
        """
        for key in reversed(keys):
            if key not in self:
                self._new.add(key)
            self._used.pop(key, None)
            self._used[key] = None
            self._writing[key] += 1
        return self._over()

    def written(self, keys: Iterable[Hashable]) -> None:
        """The writing of these files has ended, well or not."""
        for key in keys:
            self._writing[key] -= 1
            if self._writing[key] <= 0:
                del self._writing[key]
                self._new.discard(key)

    def _over(self) -> tuple[Hashable, ...]:
        over = len(self._used) - self._files_max
        gone: list[Hashable] = []
        for key in self._used:
            if len(gone) >= over:
                break
            if key not in self._writing:
                gone.append(key)
        for key in gone:
            del self._used[key]
        return tuple(gone)
