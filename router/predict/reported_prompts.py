"""Times of prompts, as first tokens show them (`EndedPrompts`), or as engines report them (`ReportedPrompts`) with
answers in one piece, of which the router sees no first token. Pure.

Reports tell the whole time from the step that began a prompt to the one that ended it. Prompts that were computed
together are each reported with the time of all of them: taken one by one, eight prompts that clients send at once make
an engine look up to eight times slower than it is.

Reports come when answers end, not when prompts do. So a step is learned from once all prompts are reported that may
have been computed in it; if one of those never is, the step shows nothing.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final

from router.predict.fitted import TOGETHER, TOGETHER_S

STEPS_MAX: Final = 32
"""Steps that wait for reports at a time. More are left out: there are enough to learn from, and one long answer holds
all later steps back."""

LEFT_MAX: Final = 32
"""The number of prompts without a report that are remembered, the last ones."""

Seen = tuple[float, float]
"""The time of the prompts of one step by the costs alone, and the observed time; milliseconds."""


class EndedPrompts:
    """The ended prompts of one instance whose first tokens the router sees."""

    __slots__ = ("_observed_ms", "_plain_ms")

    def __init__(self) -> None:
        self._plain_ms: float = 0.0
        self._observed_ms: float = 0.0
        """`_plain_ms`, `_observed_ms`: as `Seen`, of the prompts that ended together last."""

    def add(self, plain_ms: float, predicted_ms: float, sent_s: float, since_s: float, now: float) -> list[Seen]:
        """A prompt has ended. If the prompts before it did not end together with it, returns what those show.

        Prompts of one step end together, and are one observation. Their first tokens come one after the other, some
        milliseconds apart where a front end is busy.

        Args:
            plain_ms: the prompt's time by the costs alone.
            predicted_ms: its predicted time.
            sent_s: when it could begin, in seconds.
            since_s: when the prompt before it ended, or when this one began if there was none.
            now: when its first token came.
        """
        apart_s = now - since_s
        if apart_s < TOGETHER_S or (
            sent_s < since_s and apart_s * 1000.0 < TOGETHER * min(self._observed_ms, predicted_ms)
        ):
            self._plain_ms += plain_ms
            return []
        seen = [(self._plain_ms, self._observed_ms)] if self._plain_ms > 0 else []
        self._plain_ms = plain_ms
        self._observed_ms = (now - max(since_s, sent_s)) * 1000.0
        return seen


class _Step:
    """The prompts that ended with one step, as far as they are reported."""

    __slots__ = ("ended_ms", "plain_ms", "sent_ms", "took_ms", "whole")

    def __init__(self, took_ms: float, ended_ms: float) -> None:
        self.plain_ms: float = 0.0
        self.took_ms: float = took_ms
        """The longest of their reported times."""
        self.ended_ms: Final = ended_ms
        self.sent_ms: float = 0.0
        """When the last of them was sent."""
        self.whole = True
        """All of them are reported, or may yet be."""


class ReportedPrompts:
    """The reported prompts of one instance, by the steps that they ended with."""

    __slots__ = ("_ended_ms", "_left_ms", "_left_out_ms", "_sent_ms", "_steps", "open")

    def __init__(self) -> None:
        self.open: Final[dict[Any, float]] = {}
        """Prompts that may still be reported, in the order of sending, and when each was sent, in milliseconds.
        `InflightLoad` adds them."""
        self._steps: Final[list[_Step]] = []
        """The steps that are not learned from yet, in the order in which they ended."""
        self._left_ms: Final[deque[tuple[float, float]]] = deque(maxlen=LEFT_MAX)
        """The prompts of which no report came: when each was sent, and when it was over."""
        self._sent_ms: float = -math.inf
        """When the last prompt of all steps learned from was sent. Prompts are computed in order, so no prompt that was
        sent before is in a later step."""
        self._ended_ms: float = -math.inf
        """When the last of these steps ended."""
        self._left_out_ms: float = -math.inf
        """When the last step that was left out ended."""

    def left(self, prompt: object, over_ms: float) -> list[Seen]:
        """No report will come of this prompt: it was seen to end at `over_ms`, or was given up then. Returns what steps
        show whose prompts are all known now.
        """
        sent_ms = self.open.pop(prompt, None)
        if sent_ms is None:
            return []
        self._left_ms.append((sent_ms, over_ms))
        after_ms = self._sent_ms
        for step in self._steps:
            if after_ms < sent_ms < step.ended_ms:
                step.whole = False
            after_ms = max(after_ms, step.sent_ms)
        return self._settled()

    def add(self, prompt: object, plain_ms: float, took_ms: float, ended_ms: float) -> list[Seen]:
        """Take one report. Returns what steps show whose prompts are all known now.

        Args:
            prompt: as in `open`.
            plain_ms: the prompt's time by the costs alone.
            took_ms: its time by the engine's report.
            ended_ms: about when it ended: the delay of the engine's front end, and of the way there, varies.
        """
        sent_ms = self.open.pop(prompt, ended_ms - took_ms)
        step = self._step(took_ms, ended_ms)
        if step is not None:
            step.plain_ms += plain_ms
            step.took_ms = max(step.took_ms, took_ms)
            step.sent_ms = max(step.sent_ms, sent_ms)
        return self._settled()

    def _step(self, took_ms: float, ended_ms: float) -> _Step | None:
        """The step that a report belongs to; None: the report is left out."""
        for step in self._steps:
            if abs(ended_ms - step.ended_ms) < TOGETHER * min(took_ms, step.took_ms):
                return step
        if len(self._steps) >= STEPS_MAX or ended_ms < self._ended_ms or ended_ms - took_ms < self._left_out_ms:
            self._left_out_ms = max(self._left_out_ms, ended_ms)
            return None
        step, at, after_ms = _Step(took_ms, ended_ms), 0, self._sent_ms
        for former in self._steps:
            if former.ended_ms > ended_ms:
                break
            after_ms = max(after_ms, former.sent_ms)
            at += 1
        began_ms = ended_ms - took_ms  # a prompt that was over before this time was in an earlier step
        step.whole = not any(after_ms < sent < ended_ms and over > began_ms for sent, over in self._left_ms)
        self._steps.insert(at, step)
        return step

    def _settled(self) -> list[Seen]:
        """What the first steps show, up to the first step that an open prompt may have been in."""
        found: list[Seen] = []
        while self._steps:
            step = self._steps[0]
            for sent_ms in self.open.values():
                if self._sent_ms < sent_ms < step.ended_ms:
                    return found
            del self._steps[0]
            if step.whole:
                found.append((step.plain_ms, min(step.took_ms, step.ended_ms - self._ended_ms)))
            self._ended_ms, self._sent_ms = step.ended_ms, max(self._sent_ms, step.sent_ms)
        return found
