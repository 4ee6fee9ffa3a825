"""A rougher world: engines that stall and whose speed wavers, busy front ends, transfers that wait, prompts whose
tokens the router has to estimate. Pure: all of it follows from the seed.

Without it a simulated engine takes for each step exactly what the router's predictions say. That flatters a router that
predicts. All of it is off unless asked for (`SimSettings.rough`, `baton simulate --rough`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from router.predict.prompt_tokens import START_BYTES_PER_TOKEN, Ratios, TextKind
from sim.kernel import NS

if TYPE_CHECKING:
    from sim.instance import SimInstance
    from sim.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Roughness:
    """How far the world is from the router's predictions. A field of 0 turns its part off."""

    speed_cv: float = 0.0
    """Standard deviation of an engine's speed, as a share of its mean: clocks, memory, other processes' work."""
    speed_s: float = 0.25
    """Mean time, exponential, after which the speed changes: some steps are slow together."""
    stall_every_s: float = 0.0
    """Mean time, exponential, between two stalls of one engine: garbage collection, a compilation, a neighbour."""
    stall_s: float = 0.2
    """A stall's mean length, exponential."""
    front_cores: int = 0
    """Requests that an engine's front end reads and tokenises at once; others wait behind them. 0: any number."""
    pull_wait_ms: float = 0.0
    """The wait of a transfer before its first byte, beside its latency: mean, exponential."""
    ratio_cv: float = 0.0
    """How far prompts of one tenant scatter in their bytes per token. The router knows the bytes, and estimates tokens
    by what it has learned (`router.predict.prompt_tokens`), as it does live."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and its value."""
        for name in ("speed_cv", "stall_every_s", "front_cores", "pull_wait_ms", "ratio_cv"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} is {value}: write 0 or more")
        for name in ("speed_s", "stall_s"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} is {value}: write a time above 0")


SMOOTH: Final = Roughness()

ROUGH: Final = Roughness(speed_cv=0.1, stall_every_s=20.0, front_cores=1, pull_wait_ms=2.0, ratio_cv=0.15)
"""What `--rough` means; chosen before its first run. Steps of one engine within 10 %: vLLM's own runs of one workload
on one GPU scatter by 5 to 10 %. A stall of 0.2 s every 20 s: a hundredth of the time. One core reads prompts, as vLLM's
one API server process does. Ratios of one tenant scatter by 10 to 20 % (`router.predict.prompt_tokens`)."""

STALLED: Final = 1000
"""A stalled engine runs so many times slower: a stall of a second moves it by a millisecond."""

_RATE: Final = 1000
"""Speeds are whole thousandths."""

_PULLS, _RATIOS, _SPEEDS, _STALLS = range(4)
"""Purposes of random numbers."""


class Rough:
    """The roughness of one world."""

    def __init__(self, world: World, rough: Roughness) -> None:
        self._world: Final = world
        self._rough: Final = rough
        self._seed: Final = world.settings.seed
        self._pulls: Final = self._random(_PULLS)
        self._ratios_off: Final = self._random(_RATIOS)
        self._ratios: Final = Ratios()
        self._fronts: Final[dict[int, list[int]]] = {}
        """By instance, when each core of its front end is free."""

    def _random(self, purpose: int, number: int = 0) -> np.random.Generator:
        """A stream of its own for each purpose: more draws of one change nothing of the others."""
        return np.random.default_rng([self._seed, purpose, number])

    # --- engines ------------------------------------------------------------------------------------------------------

    def begin(self, at: SimInstance) -> None:
        """An instance has joined: its speed wavers, and it stalls, from now on."""
        if self._rough.speed_cv:
            self._waver((at, self._random(_SPEEDS, at.index)))
        if self._rough.stall_every_s:
            self._calm((at, self._random(_STALLS, at.index)))

    def _waver(self, word: tuple[SimInstance, np.random.Generator]) -> None:
        at, rng = word
        if at.gone or not self._world.busy:
            return
        speed = math.exp(rng.normal(0.0, self._rough.speed_cv))
        self._world.lives.slow(at, (max(1, round(speed * _RATE)), _RATE), "speed")
        self._after(float(rng.exponential(self._rough.speed_s)), self._waver, word)

    def _calm(self, word: tuple[SimInstance, np.random.Generator]) -> None:
        """End a stall; the next one follows after a while."""
        at, rng = word
        self._world.lives.slow(at, (1, 1), "stall")
        if not at.gone and self._world.busy:
            self._after(float(rng.exponential(self._rough.stall_every_s)), self._stall, word)

    def _stall(self, word: tuple[SimInstance, np.random.Generator]) -> None:
        at, rng = word
        if not at.gone and self._world.busy:
            self._world.counts["stalls"] += 1
            self._world.lives.slow(at, (1, STALLED), "stall")
            self._after(float(rng.exponential(self._rough.stall_s)), self._calm, word)

    def _after(self, seconds: float, call: Any, word: Any) -> None:
        kernel = self._world.kernel
        kernel.at(kernel.now_ns + max(1, round(seconds * NS)), call, word)

    def front_ns(self, at: SimInstance, arrives_ns: int, alone_ns: int) -> int:
        """When a request that arrives at `arrives_ns` has passed the engine's front end; alone it takes `alone_ns`."""
        cores = self._rough.front_cores
        if not cores:
            return arrives_ns + alone_ns
        free = self._fronts.setdefault(at.index, [0] * cores)
        first = min(range(cores), key=free.__getitem__)
        free[first] = max(free[first], arrives_ns) + alone_ns
        return free[first]

    def pull_wait_ns(self) -> int:
        """The wait of the next transfer, in nanoseconds."""
        mean_ms = self._rough.pull_wait_ms
        return round(float(self._pulls.exponential(mean_ms)) * 1e6) if mean_ms else 0

    # --- the router's estimates ---------------------------------------------------------------------------------------

    def text_bytes(self, tokens: int) -> int:
        """The size of a prompt's text; 0: the router is told the tokens."""
        if not self._rough.ratio_cv:
            return 0
        scatter = math.exp(self._ratios_off.normal(0.0, self._rough.ratio_cv))
        return max(1, round(tokens * START_BYTES_PER_TOKEN[TextKind.TEXT] * scatter))

    def estimated(self, model: str, text_bytes: int) -> int:
        """The router's estimate of the tokens of a prompt of this size."""
        return self._ratios.tokens("", model, TextKind.TEXT, text_bytes)

    def counted(self, model: str, text_bytes: int, tokens: int) -> None:
        """An engine has reported the tokens of a prompt."""
        if text_bytes:
            self._ratios.learn("", model, TextKind.TEXT, text_bytes, tokens)
