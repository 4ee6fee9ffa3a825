"""Quarantine: instances that operators have set aside. All routers agree on it without a leader. Pure.

Each router announces what it knows of every instance: a stamp, whether the instance is set aside, why, and which router
said so. A router keeps the word with the highest stamp that it hears (on a tie: the higher router name), and announces
it in turn. So all routers reach the same state in whatever order they read each other. A router that starts later
learns it, and words that another router has read outlive the router that said them. When all routers have been gone
for longer than the registry keeps announcements, the quarantine is forgotten.

Words come from the registry and from callers with the right to change things here. A word that no Baton router would
announce is ignored (a stamp out of range, a text that no announcement can hold). A forged stamp must not have the last
word for ever, and of a limited range the highest stamp would. So stamps are believed step by step (`STAMPS_AHEAD`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from cluster.ids import InstanceId

WORDS_MAX: Final = 32
"""The number of instances set aside. A router sets no more aside (`Quarantine.refusal`), but several routers that do so
at the same time can have more together. Then words are *displaced*, at all routers the same ones: those with the lowest
stamp, on a tie those of the lowest router name."""

READMITTED_MAX: Final = 32
"""The number of readmitted instances whose words are announced: those that were heard last. They take no room from
instances set aside, else an older word of a router that has not heard of a readmission would undo it."""

DISPLACED_MAX: Final = 128
"""Displaced instances that a router remembers, so that it reports each once, and readmitted ones that it remembers
beyond those it announces; of both the oldest are forgotten first."""

BECAUSE_MAX: Final = 120
"""The longest reason in characters: every announcement carries all reasons."""


STAMP_MAX: Final = 2**52
"""The limit of stamps: all are lower."""

STAMPS_AHEAD: Final = 2**16
"""A router believes stamps up to this number at first, and up to so many more after each time that it hears a higher
one. Operators say one word at a time, so no fleet gets that far. A forger who announces a thousand times a second needs
two years to `STAMP_MAX`; until then an operator's next word has a higher stamp."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
"""The registry's rule for names (`cluster.registry.membership`): other names could not be announced."""

_INSTANCE: Final = re.compile(_NAME.pattern + "(@[0-9]{1,4})?")
"""The registry's rule for instances' names: they may end in a rank."""


class Word(NamedTuple):
    """The last word about an instance."""

    stamp: int
    """Higher than all stamps that its author had heard."""
    aside: bool
    because: str
    router: str


class Quarantine:
    """What one router knows about the quarantine."""

    def __init__(self, router: str) -> None:
        self._router: Final = router
        self._words: Final[dict[InstanceId, Word]] = {}
        self._believed = STAMPS_AHEAD
        """The highest stamp that is believed."""
        self._highest = 0
        """The highest stamp of a word that it has had, also of words that it has not kept."""
        self._readmitted: Final[dict[InstanceId, Word]] = {}
        """Words of readmitted instances that are not announced. Older words of these instances do not count."""
        self._displaced: Final[dict[InstanceId, Word]] = {}
        """Words that set an instance aside and were displaced: a router that has not heard so announces them again."""
        self._unreported: Final[dict[InstanceId, Word]] = {}
        """Those of them that `take_displaced` has not returned."""

    def say(self, instance: InstanceId, *, aside: bool, because: str = "") -> None:
        """An operator has told this router."""
        stamp = min(STAMP_MAX - 1, 1 + self._highest)
        text = "".join(char if char.isprintable() else "?" for char in because)[:BECAUSE_MAX]
        self._keep(instance, Word(stamp, aside, text, self._router))
        self._forget()

    def refusal(self, instance: InstanceId) -> str:
        """Why this instance cannot be set aside, too: one more word would displace another instance's. Empty: it can
        be.
        """
        others = sum(word.aside for name, word in self._words.items() if name != instance)
        if others < WORDS_MAX:
            return ""
        return (
            f"`{instance}` cannot be set aside: {others} instances are, and routers announce no more than {WORDS_MAX}. "
            "Let one in again first: `GET /quarantine` lists them, `DELETE /quarantine/ID` lets one in."
        )

    def hear(self, words: Mapping[InstanceId, Word]) -> bool:
        """Take another router's words; returns whether anything is new: a word here, or one that is displaced.

        Who sets an instance aside that has been readmitted has not heard so: then the newer word is announced again.
        """
        before, believed = dict(self._words), self._believed
        for instance, word in words.items():
            if not _sound(instance, word):
                continue
            if word.stamp > believed:
                self._believed = believed + STAMPS_AHEAD
                continue
            known = self._words.get(instance) or self._readmitted.get(instance)
            if known is None or (word.stamp, word.router) > (known.stamp, known.router):
                self._keep(instance, word)
            elif word.aside and instance in self._readmitted:
                self._keep(instance, known)
        return self._forget() or self._words != before

    def take_displaced(self) -> dict[InstanceId, Word]:
        """The words that set an instance aside and were displaced by those of other routers, each once."""
        taken = dict(self._unreported)
        self._unreported.clear()
        return taken

    def _keep(self, instance: InstanceId, word: Word) -> None:
        """Make it the last of the words."""
        self._words.pop(instance, None)
        self._readmitted.pop(instance, None)
        self._words[instance] = word
        self._highest = max(self._highest, word.stamp)

    def _forget(self) -> bool:
        """Keep the bounds. Returns whether a word is displaced that was not before."""
        readmitted = [name for name, word in self._words.items() if not word.aside]
        for name in readmitted[:-READMITTED_MAX]:
            self._readmitted[name] = self._words.pop(name)
        found = False
        aside = sorted((word.stamp, word.router, name) for name, word in self._words.items() if word.aside)
        for _, _, name in aside[:-WORDS_MAX]:  # the order is total: all routers displace the same
            word, before = self._words.pop(name), self._displaced.pop(name, None)
            self._displaced[name] = word
            if word != before:
                self._unreported[name] = word
                found = True
        for name in self._words.keys() & self._displaced.keys():
            del self._displaced[name]
            self._unreported.pop(name, None)
        for remembered in (self._readmitted, self._displaced):
            for name in list(remembered)[:-DISPLACED_MAX]:
                del remembered[name]
        for name in self._unreported.keys() - self._displaced.keys():
            del self._unreported[name]
        return found

    @property
    def words(self) -> dict[InstanceId, Word]:
        """The words to announce."""
        return dict(self._words)

    @property
    def aside(self) -> dict[InstanceId, str]:
        """The instances that are set aside, and why."""
        return {name: word.because or "no reason given" for name, word in self._words.items() if word.aside}


def _sound(instance: InstanceId, word: Word) -> bool:
    """Whether a Baton router can have announced this word."""
    short = len(word.because) <= BECAUSE_MAX and word.because.isprintable()
    named = _INSTANCE.fullmatch(instance) is not None and _NAME.fullmatch(word.router) is not None
    return 0 < word.stamp < STAMP_MAX and short and named
