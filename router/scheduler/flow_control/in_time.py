"""What prompts that are placed in time take of the instances, by what they wait for. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Final

IN_TIME_S: Final = 5.0
"""The time over which the instances that such prompts keep busy are averaged."""

PAUSE_RATE: Final = 0.1
"""The weight of one hand-over in their mean pause."""

PLACES_MAX: Final = 256
"""Places that are remembered. In place of one more, the one that has had no such prompt for longest is forgotten."""


class InTime:
    """The prompts in time of one place: instances that the same requests wait for."""

    __slots__ = ("_at", "_ms", "pause_ms")

    def __init__(self) -> None:
        self._ms = 0.0
        """Milliseconds of prompts placed in time, of the last `IN_TIME_S`: older ones fade."""
        self._at = 0.0
        """When one was placed last, in seconds."""
        self.pause_ms = 0.0
        """The predicted delay of first tokens by hand-overs, in ms: the mean over recent prompts placed in time. 0
        where first tokens come from the instances that compute prompts."""

    def took(self, prompt_ms: float, pause_ms: float, now: float) -> None:
        """A prompt is placed in time. An instance computes it for `prompt_ms`, and its hand-over delays the first token
        by `pause_ms`.
        """
        self.pause_ms += PAUSE_RATE * (pause_ms - self.pause_ms)
        self._ms = self._ms * self._faded(now) + prompt_ms
        self._at = now

    def busy(self, now: float) -> float:
        """The number of instances that such prompts keep busy."""
        return self._ms * self._faded(now) / (1000.0 * IN_TIME_S)

    def _faded(self, now: float) -> float:
        return math.exp(min(0.0, self._at - now) / IN_TIME_S)


class PlacesInTime:
    """The prompts in time of each place."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: Final[dict[Hashable, InTime]] = {}
        """The place of the last prompt comes last."""

    def took(self, place: Hashable, prompt_ms: float, pause_ms: float, now: float) -> None:
        """A prompt is placed in time, with these times (`InTime.took`)."""
        found = self._places.pop(place, None)
        if found is None:
            found = InTime()
            if len(self._places) >= PLACES_MAX:
                del self._places[next(iter(self._places))]
        self._places[place] = found
        found.took(prompt_ms, pause_ms, now)

    def of(self, place: Hashable) -> InTime:
        """The prompts in time of this place."""
        return self._places.get(place) or InTime()
