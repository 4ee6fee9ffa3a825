"""Conversations in a closed loop: each turn follows the answer before it, and repeats all earlier messages. Pure.

A fixed number of users talk at a time. A user whose conversation is over, or whose turn failed, begins another one, so
that the number stays. A closed loop asks less of a server that slows down. It never has more requests open than users,
so its backlog says nothing of capacity. An open loop (`loadgen.replay`) finds the capacity.

Each conversation draws from a generator of its own, seeded by its number. So a seed gives the same messages in the same
order, whatever the server's answers are and however long they take.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from loadgen.arrival import Arrival
from loadgen.lengths import Lengths
from loadgen.prompts import Fit, text_of

Think = Callable[[np.random.Generator], float]
"""Seconds between an answer and the next message."""

THINK_MAX_S: Final = 86_400.0

FAILED_WAIT_S: Final = 1.0
"""Seconds that a user waits longer after a failed turn, so that a server that refuses is not asked without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """The form of the conversations."""

    sessions: int
    """Users at a time."""
    turns: int
    """Turns of each conversation."""
    think: Think
    inputs: Lengths
    """Tokens of each new message; the earlier messages come on top."""
    outputs: Lengths
    requests: int | None = None
    """Turns in all; None: as many as `until_s` allows."""
    until_s: float = math.inf
    """No turn begins from this second of the load on."""
    seed: int = 0
    salt: str = ""
    """Makes this run's texts unlike another run's."""
    fit: Fit = field(default_factory=Fit)


@dataclass(frozen=True, slots=True)
class Turn:
    """Effect: send this turn."""

    number: int
    """Number of the request, from 0."""
    talk: Talk
    arrival: Arrival
    said: tuple[str, ...]
    """All messages so far: the user's and the answers alternate, the new message is last."""
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Due:
    """Event: a user's next message may be due."""


@dataclass(frozen=True, slots=True)
class TurnAnswered:
    """Event: a turn is over."""

    turn: Turn
    text: str
    tokens: int
    """Tokens of the prompt and the answer together, as the server counts them."""
    well: bool
    """Whether the answer came whole."""


class Talk:
    """One conversation so far: its messages, its tokens by the server's count, its turns, its random generator."""

    __slots__ = ("number", "rng", "said", "tokens", "turns")

    def __init__(self, number: int, seed: int) -> None:
        self.number: Final = number
        self.rng: Final = np.random.default_rng([seed, number])
        self.said: list[str] = []
        self.tokens = 0
        self.turns = 0


class Sessions:
    """All users. `handle` gives the turns to send now; `next_wakeup` gives the time of the next one, in seconds."""

    def __init__(self, plan: SessionPlan) -> None:
        self._plan: Final = plan
        self._waiting: list[tuple[float, int, Talk]] = []
        self._talks = 0
        self._asked = 0
        self._open = 0
        for _ in range(plan.sessions):
            self._begin(0.0)

    @property
    def over(self) -> bool:
        """Whether no further turn will come."""
        return not self._open and (not self._waiting or self._full or self._waiting[0][0] >= self._plan.until_s)

    @property
    def _full(self) -> bool:
        return self._plan.requests is not None and self._asked >= self._plan.requests

    def next_wakeup(self) -> float | None:
        """The moment of the next message; None while every user waits for an answer, or after the last turn."""
        if self._full or not self._waiting or self._waiting[0][0] >= self._plan.until_s:
            return None
        return self._waiting[0][0]

    def handle(self, event: Due | TurnAnswered, now: float) -> tuple[Turn, ...]:
        """The turns to send at once."""
        if isinstance(event, TurnAnswered):
            self._answered(event, now)
            return ()
        turns: list[Turn] = []
        while (due := self.next_wakeup()) is not None and due <= now:
            turns.append(self._ask(*heapq.heappop(self._waiting)))
        return tuple(turns)

    def _begin(self, now: float) -> None:
        """Begin a conversation; its first message is delayed, too, so that users do not begin all at once."""
        talk = Talk(self._talks, self._plan.seed)
        self._talks += 1
        self._wait(talk, now)

    def _wait(self, talk: Talk, now: float) -> None:
        heapq.heappush(self._waiting, (now + self._plan.think(talk.rng), talk.number, talk))

    def _ask(self, due_s: float, _: int, talk: Talk) -> Turn:
        plan = self._plan
        new = plan.inputs.draw(talk.rng)
        answer = plan.outputs.draw(talk.rng)
        talk.turns += 1
        seed = f"turn {plan.salt} {plan.seed} {talk.number} {talk.turns}".encode()
        talk.said.append(text_of(seed, max(1, round(new * plan.fit.chars_per_token))))
        overhead = round(plan.fit.overhead_tokens) if talk.turns == 1 else 0
        arrival = Arrival(
            at_s=due_s,
            input_tokens=talk.tokens + new + overhead,
            output_tokens=answer,
            session=str(talk.number),
            turn=talk.turns,
        )
        turn = Turn(self._asked, talk, arrival, tuple(talk.said), answer)
        self._asked += 1
        self._open += 1
        return turn

    def _answered(self, event: TurnAnswered, now: float) -> None:
        self._open -= 1
        talk = event.turn.talk
        if not event.well or talk.turns >= self._plan.turns:
            self._begin(now if event.well else now + FAILED_WAIT_S)
            return
        talk.said.append(event.text)
        talk.tokens = event.tokens
        self._wait(talk, now)


def think_of(text: str) -> Think:
    """Think time as the command line writes it, in seconds; ValueError says what is wrong.

    `2` · `uniform:1-5` · `exponential:3` (its mean)
    """
    kind, _, rest = text.strip().partition(":")
    if not rest:
        fixed = _seconds(kind)
        return lambda _: fixed
    if kind == "uniform":
        low, high = (_seconds(each) for each in (rest.partition("-")[0], rest.partition("-")[2]))
        if low > high:
            raise ValueError(f"uniform:{rest} runs backwards; write uniform:{high:g}-{low:g}")
        return lambda rng: float(rng.uniform(low, high))
    if kind == "exponential":
        mean = _seconds(rest)
        return lambda rng: min(THINK_MAX_S, float(rng.exponential(mean)))
    raise ValueError(f"{text!r} is no think time; write 2, uniform:1-5 or exponential:3")


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= THINK_MAX_S:
        raise ValueError(f"{text!r} is not a number of seconds (0 to {THINK_MAX_S:g})")
    return found
