"""Who waits for places in a full fleet, and who is to be asked next. Pure: `router.line` has the futures.

First come, first served. Who is called asks for a place again; one who finds none keeps its position and passes the
call on, to the next that wants something *else*: to those that want the same, the same would be said. So a call costs
as many questions as there are kinds of wishes, not as there are requests in line.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Final


class Waiting:
    """The line. `who` is anything that is itself; `kind` says whose wishes are alike (`Wanted.kind`)."""

    def __init__(self) -> None:
        self._kinds: Final[dict[Hashable, dict[object, int]]] = {}
        """Who wants what, each with its number in line; in order."""
        self._of: Final[dict[object, Hashable]] = {}
        self._called: Final[set[object]] = set()
        self._open: Final[set[Hashable]] = set()
        """Kinds for which more than one place may have come: each who finds one lets the next of its kind ask."""
        self._number = 0

    def __len__(self) -> int:
        return len(self._of)

    def everybody(self) -> tuple[object, ...]:
        """All who stand in line, in no order."""
        return tuple(self._of)

    def enter(self, who: object, kind: Hashable) -> None:
        """Stand in line; who stood there before keeps its position, as long as it wants the same."""
        if who in self._of and self._of[who] == kind:
            return
        number = self._kinds[self._of[who]][who] if who in self._of else None
        self._remove(who)
        if number is None:
            self._number += 1
            number = self._number
        line = self._kinds.setdefault(kind, {})
        last = next(reversed(line.values()), 0)
        line[who] = number
        if number < last:  # its wish has changed, not its turn
            self._kinds[kind] = dict(sorted(line.items(), key=lambda each: each[1]))
        self._of[who] = kind

    def found_none(self, who: object) -> tuple[object, ...]:
        """`who` was called and there was no place: whom to ask now. Nobody, if it had not been called."""
        if who not in self._called:
            return ()
        self._called.discard(who)
        kind = self._of.get(who)
        self._open.discard(kind)
        return self._after(self._kinds[kind][who] if kind in self._kinds and who in self._kinds[kind] else 0)

    def leave(self, who: object, *, placed: bool) -> tuple[object, ...]:
        """It found its place, or gave up: whom to ask now."""
        kind = self._of.get(who)
        called = who in self._called
        number = self._kinds[kind][who] if kind in self._kinds and who in self._kinds[kind] else 0
        self._remove(who)
        if placed:
            return self._head(kind) if called and kind in self._open else ()
        return self._after(number - 1) if called else ()  # the call was for a place that is still there

    def call_first(self) -> tuple[object, ...]:
        """One place became free: whom to ask."""
        return self._after(0)

    def call_all(self) -> tuple[object, ...]:
        """The fleet changed: the first of each kind may ask, and as long as they find places, those behind them."""
        self._open.update(self._kinds)
        return tuple(who for kind in list(self._kinds) for who in self._head(kind))

    def _head(self, kind: Hashable) -> tuple[object, ...]:
        """The first of a kind, if it is not asking already."""
        who = next(iter(self._kinds.get(kind, ())), None)
        if who is None or who in self._called:
            return ()
        self._called.add(who)
        return (who,)

    def _after(self, number: int) -> tuple[object, ...]:
        """The earliest head of a kind that stands behind `number`; one that is asking already asks for both places."""
        heads = ((at, who, kind) for kind, line in self._kinds.items() for who, at in _first(line))
        behind = min((head for head in heads if head[0] > number), key=lambda head: head[0], default=None)
        if behind is None:
            return ()
        _, who, kind = behind
        if who in self._called:
            self._open.add(kind)
            return ()
        return self._head(kind)

    def _remove(self, who: object) -> None:
        kind = self._of.pop(who, None)
        self._called.discard(who)
        line = self._kinds.get(kind)
        if line is not None and who in line:
            del line[who]
            if not line:
                del self._kinds[kind]
                self._open.discard(kind)


def _first(line: dict[object, int]) -> Iterable[tuple[object, int]]:
    return islice(line.items(), 1)
