"""Instances that operators have set aside, agreed on by all routers without anybody in charge. Pure.

Each router announces what it knows of every instance: a stamp, whether it is set aside, why, and which router's word
that is. Whoever hears others keeps the word with the highest stamp (ties: the router's name), and announces it in turn.
So all routers come to the same end in whatever order they hear each other, a router that starts later hears it, and
one that is gone takes nothing with it as long as another has heard it. When all have been gone for longer than the
registry keeps announcements, it is forgotten.

Words come from the registry and from callers that may change things here. What no router of ours says (a stamp that
leaves none above it, a text that no announcement holds) is not heard.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from cluster.ids import InstanceId

WORDS_MAX: Final = 32
"""Instances of which something is kept; those that were let in again longest ago go first, then the oldest."""

BECAUSE_MAX: Final = 120
"""Characters of a reason: all of them travel in every announcement."""


STAMP_MAX: Final = 2**52
"""No fleet sets instances aside so often. A higher stamp was made up to have the last word for ever."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
"""As in the registry (`cluster.registry.membership`): others would not be announced on."""


class Word(NamedTuple):
    """What was last said of an instance."""

    stamp: int
    """Higher than all that its author had heard."""
    aside: bool
    because: str
    router: str


class Quarantine:
    """What one router knows."""

    def __init__(self, router: str) -> None:
        self._router: Final = router
        self._words: Final[dict[InstanceId, Word]] = {}

    def say(self, instance: InstanceId, *, aside: bool, because: str = "") -> None:
        """An operator has asked this router."""
        stamp = min(STAMP_MAX, 1 + max((word.stamp for word in self._words.values()), default=0))
        text = "".join(char if char.isprintable() else "?" for char in because)[:BECAUSE_MAX]
        self._words[instance] = Word(stamp, aside, text, self._router)
        self._forget()

    def hear(self, words: Mapping[InstanceId, Word]) -> bool:
        """Another router's; whether anything is new."""
        changed = False
        for instance, word in words.items():
            known = self._words.get(instance)
            if not _sound(instance, word):
                continue
            if known is None or (word.stamp, word.router) > (known.stamp, known.router):
                self._words[instance] = word
                changed = True
        if changed:
            self._forget()
        return changed

    def _forget(self) -> None:
        while len(self._words) > WORDS_MAX:
            del self._words[min(self._words, key=lambda name: (self._words[name].aside, self._words[name].stamp))]

    @property
    def words(self) -> dict[InstanceId, Word]:
        """What to announce."""
        return dict(self._words)

    @property
    def aside(self) -> dict[InstanceId, str]:
        """Who is set aside, and why."""
        return {name: word.because or "no reason given" for name, word in self._words.items() if word.aside}


def _sound(instance: InstanceId, word: Word) -> bool:
    """Whether a router of ours can have said this."""
    short = len(word.because) <= BECAUSE_MAX and word.because.isprintable()
    named = _NAME.fullmatch(instance) is not None and _NAME.fullmatch(word.router) is not None
    return 0 < word.stamp <= STAMP_MAX and short and named
