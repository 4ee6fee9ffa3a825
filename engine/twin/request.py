"""A request as it comes to the engine, and what the engine keeps about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.ids import InstanceId, RequestId, TransferId
from engine.twin.tokens import Prompt, Text, length, mix
from kvtransfer.slots import Slot


@dataclass(frozen=True, slots=True)
class Source:
    """The hold on another instance that this request is to pull."""

    transfer: TransferId
    producer: InstanceId
    blocks: tuple[int, ...]
    """The producer's blocks of the prompt, from its first token on."""
    tokens: int
    """vLLM's ``remote_num_tokens``: how many tokens' KV they hold."""
    request: RequestId
    """The producer's name of the request that made it: what notices are about."""
    slot: Slot | None
    """Where the hold's mark stands, and which. None: nothing vouches for it, and it is not pulled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be done. Ids are unique among the requests that an engine has."""

    id: RequestId
    prompt: Prompt
    max_tokens: int
    stop_after: int | None = None
    """The model ends its answer with this many tokens, if it may become so long. Known to the world, not to the engine:
    nothing is decided by it before the token is there."""
    seed: int = 0
    """Other seeds, other answers."""
    priority: int = 0
    """Lower goes first, with the priority policy."""
    hold: TransferId | None = None
    """``do_remote_decode``: keep the prompt's blocks for another instance, under this id."""
    name: str = ""
    """By which a router may give the hold up; empty: its id's text."""
    pull: Source | None = None
    """``do_remote_prefill``."""

    def __post_init__(self) -> None:
        if length(self.prompt) < 1 or any(segment.tokens < 0 for segment in self.prompt):
            raise ValueError("a prompt has at least one token")
        if self.max_tokens < 1 or (self.stop_after is not None and self.stop_after < 1):
            raise ValueError("an answer has at least one token")


class Status(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    PULLING = "waiting for remote KV"
    RUNNING = "running"
    PREEMPTED = "preempted"
    OVER = "over"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine."""

    request: Request
    order: int
    """Counts arrivals: what came first."""
    text: Text
    limit: int
    """Tokens of the answer at most."""
    prompt_tokens: int = field(init=False)
    ends_after: int = field(init=False)
    """With how many tokens the answer ends."""
    status: Status = Status.WAITING
    outputs: int = 0
    """Tokens of the answer that are there."""
    computed: int = 0
    """Tokens whose KV is computed, counting the steps that are decided and not over."""
    sampling: int = 0
    """Steps that are decided and not over, and will make a token (vLLM's output placeholders)."""
    last_batch: int = 0
    """Number of the last batch that had it: until that is over, a step may write to its blocks."""
    blocks: list[int] = field(default_factory=list)
    cached_blocks: int = 0
    """How many of them the prefix cache knows."""
    preemptions: int = 0
    unread: int = 0
    """So many tokens' KV came from elsewhere (cache, pull) and no step has read them yet."""
    taint: int = 0
    """0 while everything that was read was right. Otherwise part of all that follows from it, for good."""
    pulled: bool = False
    """The pull was ordered, or needed no order: it is not tried twice."""
    landed: bool = False
    """The pulled KV is here, or will not come."""
    lost_pull: bool = False
    pull_blocks: tuple[int, ...] = ()
    """Its blocks that a pull under way writes to."""
    local_tokens: int = 0
    """Of the prompt, found in the prefix cache when it was first looked at."""
    remote_tokens: int = 0
    """Of the prompt, ordered from the producer."""
    first_run_ns: int | None = None
    place: int = 0
    """Counts admissions: in running order."""

    # While `together` (`crew.py`), `outputs`, `computed`, `sampling` and `last_batch` are those of when it joined.
    together: bool = False
    first: int = 0
    """Number of the first batch that does for it what it does for all."""
    last: int = 0
    """And of the last one, if its answer becomes as long as it may."""
    ends_with: int = 0
    """With which its answer does end."""
    brink: int = 0

    def __post_init__(self) -> None:
        stop = self.request.stop_after
        self.prompt_tokens = self.text.prompt_tokens
        self.ends_after = self.limit if stop is None else min(stop, self.limit)

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def known(self) -> int:
        """Tokens of prompt and answer that are there."""
        return self.prompt_tokens + self.outputs

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first under the priority policy; the highest is preempted first."""
        return (self.request.priority, self.order)

    @property
    def reason(self) -> str:
        """vLLM's finish reason for an answer that came to its end. The end-of-text token is looked for first."""
        stop = self.request.stop_after
        return "stop" if stop is not None and stop <= self.limit else "length"

    @property
    def key(self) -> int:
        """What its tokens follow from, with all that it has read."""
        return mix(self.text.key, self.taint) if self.taint else self.text.key

    def digest(self, block: int, end: int) -> int:
        """What a step writes into its block when it has computed up to `end`."""
        right = self.text.digest(block, end)
        return mix(right, self.taint) if self.taint else right

    def digests(self, first: int, last: int) -> list[int]:
        """The same for the full blocks from `first` up to `last`, without `last`."""
        right = self.text.chains(first, last)
        return [mix(digest, self.taint) for digest in right] if self.taint else right
