"""The settings of one mock: its twin, the costs of steps and transfers, and how its answers end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.instance import Role
from costs.step import StepWork
from engine.mock.prompts import Prompted
from engine.twin.config import StepCosts, TwinConfig
from engine.twin.tokens import mix

MS = 1_000_000
"""Nanoseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MockSettings:
    """One instance."""

    name: str
    """Of a data parallel rank with its number (`cluster.ids`): the ranks of an engine answer at the port of rank 0, and
    die together."""
    role: Role
    model: str
    """The name it is served under."""
    config: TwinConfig
    costs: StepCosts
    transfer_ms: Callable[[int, int], float]
    """(bytes, transfers at once) -> milliseconds."""
    kv_bytes_per_token: int
    first_token_ms: float = 0.0
    """Time before the engine sees a request: tokenising and the rest of the server's work."""
    answers: Ends | None = None
    """How answers end by themselves; None: they run to ``max_tokens``."""
    tp: int = 1
    speed: float = 1.0
    """Engine time over real time."""
    digests: bool = False
    """Whether pulled blocks are compared with held ones, as Baton's connector does with ``transfer.digests``."""
    seed: int = 0
    """Seed of the faults' random draws."""
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """Number of tokens after which an answer stops, unless the client ignores the end: drawn evenly, from the
    prompt.
    """

    least: int
    most: int

    def after(self, prompt: Prompted) -> int:
        """The same for the same prompt, on every instance."""
        return self.least + mix(prompt.key, 0x0E05) % (self.most - self.least + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleCosts:
    """Step times as straight as they can be, for tests that want to know them: milliseconds become nanoseconds."""

    step_ms: float = 10.0
    """Any step."""
    prefill_ms_per_1k: float = 50.0
    """On top, for each 1,000 tokens of prompts computed in it."""

    def step_ns(self, work: StepWork) -> int:
        """One step."""
        return max(1, round(self.step_ms * MS + self.prefill_ms_per_1k * MS / 1000 * work.new_tokens))

    def decode_run_ns(self, batch: int, sum_context: int, steps: int) -> int:
        """Some decode steps."""
        return steps * max(1, round(self.step_ms * MS))

    def decode_steps_for(self, batch: int, sum_context: int, duration_ns: int) -> int:
        """How many of them it takes."""
        return max(0, -(-duration_ns // max(1, round(self.step_ms * MS))))
