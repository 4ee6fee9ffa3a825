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
"""Nanoseconds of a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MockSettings:
    """The settings of one instance. It has many attributes: one for each thing that `baton mock` can set."""

    name: str
    """For a data parallel rank with its number (`cluster.ids`). The ranks of an engine answer at rank 0's port, and die
    together."""
    role: Role
    model: str
    """The name under which the model is served."""
    config: TwinConfig
    costs: StepCosts
    transfer_ms: Callable[[int, int], float]
    """Time of a KV transfer: (bytes, transfers at once) -> milliseconds."""
    kv_bytes_per_token: int
    """Size of one token's KV."""
    first_token_ms: float = 0.0
    """Milliseconds before the engine sees a request: tokenising and the rest of the API server's work."""
    answers: Ends | None = None
    """After how many tokens answers end by themselves; None: they run to ``max_tokens``."""
    tp: int = 1
    """Tensor parallelism, as told to consumers."""
    speed: float = 1.0
    """How many times as fast as real time engine time runs."""
    digests: bool = False
    """Whether pulled blocks are compared with held ones, as Baton's connector does with ``transfer.digests``."""
    seed: int = 0
    """Seed of the faults' random draws."""
    api_key: str | None = None
    """The key that clients must send; None: none."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The number of tokens after which an answer stops, unless the client ignores the end: from `least` to `most`,
    drawn evenly by the prompt.
    """

    least: int
    most: int

    def after(self, prompt: Prompted) -> int:
        """The number for this prompt, the same on every instance."""
        return self.least + mix(prompt.key, 0x0E05) % (self.most - self.least + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleCosts:
    """Step times that a test can calculate by hand: a constant, and a part in proportion to new tokens. `StepCosts`."""

    step_ms: float = 10.0
    """Milliseconds of any step."""
    prefill_ms_per_1k: float = 50.0
    """Milliseconds on top, for each 1,000 tokens of prompts computed in the step."""

    def step_ns(self, work: StepWork) -> int:
        """Nanoseconds of one step."""
        return max(1, round(self.step_ms * MS + self.prefill_ms_per_1k * MS / 1000 * work.new_tokens))

    def decode_run_ns(self, batch: int, sum_context: int, steps: int) -> int:
        """Nanoseconds of so many decode steps."""
        return steps * max(1, round(self.step_ms * MS))

    def decode_steps_for(self, batch: int, sum_context: int, duration_ns: int) -> int:
        """The number of decode steps that take at least so many nanoseconds."""
        return max(0, -(-duration_ns // max(1, round(self.step_ms * MS))))
