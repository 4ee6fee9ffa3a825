"""The settings of one vLLM instance, and the costs of its steps: the twin's two arguments."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from cluster.instance import Role
from costs.step import StepWork


class StepCosts(Protocol):
    """What the twin needs of a cost model; `costs.cost.Costs` and `costs.ticks.Ticks` have it.

    A step takes at least 1 ns. `decode_run_ns` must be exactly the sum of the single steps.
    """

    def step_ns(self, work: StepWork) -> int:
        """Nanoseconds of one step."""

    def decode_run_ns(self, batch: int, sum_context: int, steps: int) -> int:
        """Nanoseconds of `steps` decode steps in a row, each with `batch` more tokens of context than the last."""

    def decode_steps_for(self, batch: int, sum_context: int, duration_ns: int) -> int:
        """The fewest decode steps in a row that take at least `duration_ns`."""


class Policy(StrEnum):
    """vLLM's ``--scheduling-policy``."""

    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What differs between releases of vLLM, or between its switches. The defaults are 0.32's."""

    reserve_full_prompt: bool = True
    """``scheduler_reserve_full_isl``: a prompt starts only when all of it fits, not just its first chunk."""
    async_scheduling: bool = False
    """A step is decided while the one before it runs, so an arrival is seen one step later. 0.32's default on GPUs."""
    pull_after_forward: bool = True
    """A pull starts only after the step in which it was ordered, as on CPUs; on GPUs vLLM starts it once the step is
    launched."""


VLLM_0_32 = Version()


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinConfig:
    """Settings, with vLLM's names where vLLM has them: many attributes, one for each setting that the twin models.

    Raises ValueError if vLLM would not start with them.
    """

    role: Role = Role.BOTH
    block_size: int = 16
    """Tokens."""
    num_blocks: int = 1024
    """Usable blocks: vLLM has one more, which it never gives out."""
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 8192
    """Tokens of prompt and answer together."""
    chunked_prefill: bool = True
    prefix_caching: bool = True
    policy: Policy = Policy.FCFS
    watermark_blocks: int = 0
    """Blocks kept free when a request is admitted beside others: vLLM's ``watermark`` times its blocks."""
    recompute_failed_pulls: bool = True
    """``kv_load_failure_policy``: recompute, as Baton's launcher sets it; else fail, which is vLLM's default."""
    contents: bool = True
    """Keep each block's content, and compare what is read with what should be there. Without it, no content is kept and
    all reads count as right; everything else is the same, and a decode step costs the same for any number of requests.
    """
    every_share: bool = True
    """Whether `Run.shares` names every request that gets a token; else only those that get their first."""
    start_up_ns: int = 0
    lease_s: float = 30.0
    """``kv_lease_duration``."""
    version: Version = VLLM_0_32

    def __post_init__(self) -> None:
        sizes = (self.block_size, self.num_blocks, self.max_num_batched_tokens, self.max_num_seqs)
        if min(sizes) < 1 or self.max_model_len < 2 or min(self.watermark_blocks, self.start_up_ns) < 0:
            raise ValueError("sizes must be positive")
        if self.watermark_blocks + self.blocks_for(self.max_model_len) > self.num_blocks:
            raise ValueError("max_model_len does not fit into the KV cache: vLLM does not start like this")
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError("without chunked prefill, max_num_batched_tokens must be at least max_model_len")

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    @property
    def depth(self) -> int:
        """The number of steps that may be decided and not over: the running one and, with asynchronous scheduling, the
        next.
        """
        return 2 if self.version.async_scheduling else 1

    @property
    def defers_frees(self) -> bool:
        """Whether blocks that a running step may still write to are kept back: a pull into them would be unordered."""
        return self.version.async_scheduling and self.role is not Role.PREFILL

    @property
    def drops_stale_output(self) -> bool:
        """Whether a preempted request drops the token under way: P owes blocks, and these are gone."""
        return self.role is not Role.DECODE
