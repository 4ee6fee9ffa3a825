"""The one form of a step's time. Every source of costs ends in these coefficients; no other module computes times.

A step works on `StepWork`: N new prompt tokens, of which attention covers Σ(L² − p²) token pairs, and B decoding
requests with C tokens of context in all. L is a prompt's length after the step, p the tokens of it that were cached
before the step, P the largest p of the step.

    G(T)    = start + token·T                                   for T ≥ 1,024 tokens
            = √(F(T)² + (G(1024)² − F(∞)²)·(T/1024)²)           below: flattens to F(T)
    F(T)    = floor + experts·(1 − miss^T)                      the weights that T tokens read
    D(B)    = decode + request·B + crowd·max(0, B − crowd_from) + experts·(1 − miss^B)

    A       = max(area·Σ(L² − p²), cached·P)                    attention of the prompts
    prefill = G(N) + A                                          B = 0
    decode  = D(B) + context·C                                  N = 0
    mixed   = max(D(B), G(N + B) + request·B) + A + context·C

Each kind of step has coefficients of its own (`ByKind`): `context` may be larger in mixed steps (`profile`).

Why this form: matrix products see N + B tokens at once, and cost the reading of the weights (`floor`, `decode`) until
their arithmetic (`token`) costs more. Attention runs per request on top. A few tokens after a long cached prefix give
the GPU little to do at once: each block of their queries reads the whole prefix in sequence, which takes `cached`
milliseconds a token, however few they are. The prompts of one step are read at the same time. A mixture's step also
reads the experts that its tokens visit. One token misses a given expert with probability `miss` = 1 − k/E, so a step
reads the part 1 − miss^T of the experts. docs/costs.md shows the measurements behind the form and how far it is off.

What always holds: every time grows (or stays) with N, with Σ(L² − p²), with P, with B and with C. Decode time is linear
in C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

KNEE_TOKENS = 1024
"""Below this many new tokens prefill flattens to a floor (data: aiconfigurator grid, 26 combinations)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one engine step (of one data-parallel rank)."""

    new_tokens: int = 0
    """Prompt tokens computed in this step, over all prompts."""
    area: int = 0
    """Σ(L² − p²) over these prompts, in tokens²."""
    batch: int = 0
    """Requests that decode one token."""
    sum_context: int = 0
    """Tokens whose KV these requests read, summed."""
    longest_cached: int = 0
    """Tokens of the longest prefix that one of these prompts has in the KV cache before the step."""

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            new_tokens=self.new_tokens + other.new_tokens,
            area=self.area + other.area,
            batch=self.batch + other.batch,
            sum_context=self.sum_context + other.sum_context,
            longest_cached=max(self.longest_cached, other.longest_cached),
        )


def prompt(new_tokens: int, cached_tokens: int = 0) -> StepWork:
    """`new_tokens` of one prompt, a whole one or a chunk, after `cached_tokens` that are in the KV cache already."""
    return StepWork(
        new_tokens=new_tokens,
        area=new_tokens * (new_tokens + 2 * cached_tokens),
        longest_cached=cached_tokens if new_tokens else 0,
    )


def decoding(batch: int, sum_context: int) -> StepWork:
    """One token for each of `batch` requests."""
    return StepWork(batch=batch, sum_context=sum_context)


class StepKind(StrEnum):
    """The kinds of steps: engines differ between the three."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


def kind_of(work: StepWork) -> StepKind:
    """The kind of this step."""
    if not work.batch:
        return StepKind.PREFILL
    return StepKind.MIXED if work.new_tokens else StepKind.DECODE


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The coefficients, in milliseconds per unit that the name gives. All but `start_ms` are at least 0."""

    floor_ms: float
    """Prefill of few tokens."""
    start_ms: float
    """Prefill's line at 0 tokens, from beyond the knee; may be negative."""
    token_ms: float
    area_ms: float
    """Milliseconds per token² of Σ(L² − p²)."""
    decode_ms: float
    """Decode of few requests with little context."""
    context_ms: float
    """Milliseconds per token of context, summed over the batch."""
    request_ms: float
    cached_ms: float = 0.0
    """Milliseconds per token of the longest cached prefix: the least that attention of the chunk behind it takes.
    Source: `fit.fit_prefill`; 0 where no short chunks after long prefixes were measured."""
    crowd_ms: float = 0.0
    """Milliseconds per request beyond `crowd_from`, where arithmetic begins to cost more than reading weights."""
    crowd_from: float = 0.0
    experts_ms: float = 0.0
    """Reading every routed expert once."""
    expert_miss: float = 1.0
    """Probability that one token does not visit a given expert: 1 − k/E."""

    def __post_init__(self) -> None:
        fixed = (self.floor_ms, self.token_ms, self.area_ms, self.decode_ms, self.context_ms, self.request_ms)
        rest = (self.cached_ms, self.crowd_ms, self.crowd_from, self.experts_ms, self.expert_miss)
        assert all(value >= 0 and math.isfinite(value) for value in (*fixed, *rest)), f"negative or not finite: {self}"
        assert self.expert_miss <= 1, f"a chance: {self}"

    @property
    def knee_ms(self) -> float:
        """G at the knee, but at least all weights' reading: a small model on much hardware would otherwise fall below
        it.
        """
        return max(self.floor_ms + self.experts_ms, self.start_ms + self.token_ms * KNEE_TOKENS)

    def experts_read_ms(self, tokens: int) -> float:
        """Time to read the experts that `tokens` tokens visit."""
        return self.experts_ms * (1 - self.expert_miss**tokens) if self.experts_ms else 0.0

    def matrices_ms(self, tokens: int) -> float:
        """G: the matrix products over `tokens` tokens."""
        if tokens >= KNEE_TOKENS:
            return max(self.knee_ms, self.start_ms + self.token_ms * tokens)
        read, all_read = self.floor_ms + self.experts_read_ms(tokens), self.floor_ms + self.experts_ms
        return math.sqrt(read**2 + (self.knee_ms**2 - all_read**2) * (tokens / KNEE_TOKENS) ** 2)

    def requests_ms(self, batch: int) -> float:
        """D: a decode step without its attention."""
        crowd = self.crowd_ms * max(0.0, batch - self.crowd_from)
        return self.decode_ms + self.request_ms * batch + crowd + self.experts_read_ms(batch)

    def beyond_area_ms(self, new_tokens: int, cached_tokens: float) -> float:
        """How much longer a chunk's attention takes to read its cached prefix than its arithmetic takes."""
        return max(0.0, self.cached_ms * cached_tokens - self.area_ms * new_tokens * (new_tokens + 2 * cached_tokens))

    def parts(self, work: StepWork) -> tuple[float, float]:
        """Matrix products and attention, whose sum is the step's time. `scaled` scales each by itself."""
        prompts_ms = max(self.area_ms * work.area, self.cached_ms * work.longest_cached)
        attention = prompts_ms + self.context_ms * work.sum_context
        if not work.new_tokens:
            return (self.requests_ms(work.batch) if work.batch else 0.0), attention
        if not work.batch:
            return self.matrices_ms(work.new_tokens), attention
        shared = self.matrices_ms(work.new_tokens + work.batch) + self.request_ms * work.batch
        return max(self.requests_ms(work.batch), shared), attention

    def step_ms(self, work: StepWork) -> float:
        """The time of one step; 0 without work."""
        matrices, attention = self.parts(work)
        return matrices + attention

    def scaled(self, matrices: float, attention: float) -> StepCost:
        """The same coefficients with the two parts times these factors."""
        return replace(
            self,
            floor_ms=self.floor_ms * matrices,
            start_ms=self.start_ms * matrices,
            token_ms=self.token_ms * matrices,
            area_ms=self.area_ms * attention,
            decode_ms=self.decode_ms * matrices,
            context_ms=self.context_ms * attention,
            request_ms=self.request_ms * matrices,
            cached_ms=self.cached_ms * attention,
            crowd_ms=self.crowd_ms * matrices,
            experts_ms=self.experts_ms * matrices,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ByKind:
    """The coefficients for each kind of step; equal but for factors on their parts."""

    prefill: StepCost
    decode: StepCost
    mixed: StepCost

    def of(self, kind: StepKind) -> StepCost:
        """The coefficients of one kind."""
        if kind is StepKind.PREFILL:
            return self.prefill
        return self.decode if kind is StepKind.DECODE else self.mixed

    def step_ms(self, work: StepWork) -> float:
        """The time of one step."""
        return self.of(kind_of(work)).step_ms(work)
