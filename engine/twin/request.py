"""A request as it comes to the engine, and the engine's state of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.ids import InstanceId, RequestId, TransferId
from engine.twin.tokens import Prompt, Text, length, mix
from kvtransfer.hold_marks import Slot


@dataclass(frozen=True, slots=True)
class HoldSource:
    """The hold on another instance that this request pulls."""

    transfer: TransferId
    producer: InstanceId
    blocks: tuple[int, ...]
    """The producer's blocks of the prompt, from its first token on."""
    tokens: int
    """vLLM's ``remote_num_tokens``: the number of tokens whose KV the blocks hold."""
    request: RequestId
    """The producer's id of the request that made the hold, used in notices."""
    slot: Slot | None
    """The slot of the hold's mark, and the mark. None: the hold cannot be confirmed, and is not pulled."""
    handed_over: bool = True
    """Whether it was made for the request that pulls it; False: it is a beginning that was cached
    (`cluster.wire.FROM_CACHE`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinRequest:
    """A request's parameters. Ids are unique among the requests that an engine has."""

    id: RequestId
    prompt: Prompt
    max_tokens: int
    stop_after: int | None = None
    """The model ends its answer with this many tokens, if the answer may become so long. The world knows this, the
    engine does not: no decision depends on it before the token is made."""
    seed: int = 0
    """Other seeds give other answers."""
    priority: int = 0
    """Lower goes first, with the priority policy."""
    hold: TransferId | None = None
    """``do_remote_decode``: keep the prompt's blocks for another instance, under this id."""
    name: str = ""
    """The name by which a router may give the hold up; empty: its id's text."""
    pull: HoldSource | None = None
    """``do_remote_prefill``."""
    cached_only: bool = False
    """Hold as much of the prompt as the KV cache has, in whole blocks, and compute one token after it
    (`cluster.wire.CACHED_ONLY`)."""

    def __post_init__(self) -> None:
        if length(self.prompt) < 1 or any(segment.tokens < 0 for segment in self.prompt):
            raise ValueError("a prompt has at least one token")
        if self.max_tokens < 1 or (self.stop_after is not None and self.stop_after < 1):
            raise ValueError("an answer has at least one token")


class Status(StrEnum):
    """The state of a request."""

    WAITING = "waiting"
    PULLING = "waiting for remote KV"
    RUNNING = "running"
    PREEMPTED = "preempted"
    OVER = "over"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine. It has many attributes: queue, blocks, pull and crew keep their state of it here."""

    request: TwinRequest
    order: int
    """The number of its arrival."""
    text: Text
    limit: int
    """The largest number of tokens of its answer."""
    prompt_tokens: int = field(init=False)
    ends_after: int = field(init=False)
    """The number of tokens with which the answer ends."""
    status: Status = Status.WAITING
    outputs: int = 0
    """The number of its answer's tokens so far."""
    computed: int = 0
    """The number of tokens whose KV is computed, counting the steps that are decided and not over."""
    sampling: int = 0
    """The number of steps that are decided and not over, and will make a token (vLLM's output placeholders)."""
    last_batch: int = 0
    """The number of the last batch with this request: until it is over, a step may write to the request's blocks."""
    blocks: list[int] = field(default_factory=list)
    cached_blocks: int = 0
    """The number of its blocks that are in the prefix cache."""
    preemptions: int = 0
    unread: int = 0
    """The number of tokens whose KV came from elsewhere (cache, pull) and that no step has read yet."""
    taint: int = 0
    """0 while everything that was read was right. Otherwise a number that changes every later digest and token."""
    pulled: bool = False
    """The pull was ordered, or was not needed: it is not tried again."""
    landed: bool = False
    """The pulled KV has arrived, or will not."""
    lost_pull: bool = False
    """The pull has ended, and what it wrote is not used."""
    pull_blocks: tuple[int, ...] = ()
    """The blocks that a pull under way writes to."""
    local_tokens: int = 0
    """Prompt tokens that were found in the prefix cache at the first look."""
    remote_tokens: int = 0
    """Prompt tokens ordered from the producer."""
    first_run_ns: int | None = None
    place: int = 0
    """The number of its admission, for the running order."""

    # While `together` (`crew.py`), `outputs`, `computed`, `sampling` and `last_batch` are those of when it joined.
    together: bool = False
    first: int = 0
    """The number of the first batch that treats it like all members."""
    last: int = 0
    """The number of the last one, if its answer becomes as long as it may."""
    ends_with: int = 0
    """The number of the batch with which its answer really ends."""
    brink: int = 0
    """The number of the last batch before its answer ends, or before it has nothing left to compute."""

    def __post_init__(self) -> None:
        stop = self.request.stop_after
        self.prompt_tokens = self.text.prompt_tokens
        self.ends_after = self.limit if stop is None else min(stop, self.limit)

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def known(self) -> int:
        """The number of known tokens of prompt and answer."""
        return self.prompt_tokens + self.outputs

    @property
    def rank(self) -> tuple[int, int]:
        """The order under the priority policy: the lowest goes first, the highest is preempted first."""
        return (self.request.priority, self.order)

    @property
    def reason(self) -> str:
        """vLLM's finish reason for an answer that has ended properly. The end-of-text token is checked first."""
        stop = self.request.stop_after
        return "stop" if stop is not None and stop <= self.limit else "length"

    @property
    def key(self) -> int:
        """The key from which its tokens follow, with all that it has read."""
        return mix(self.text.key, self.taint) if self.taint else self.text.key

    def digest(self, block: int, end: int) -> int:
        """What a step writes into the request's block number `block` once it has computed up to `end`."""
        right = self.text.digest(block, end)
        return mix(right, self.taint) if self.taint else right

    def digests(self, first: int, last: int) -> list[int]:
        """The same for the full blocks from `first` up to `last`, without `last`."""
        right = self.text.chains(first, last)
        return [mix(digest, self.taint) for digest in right] if self.taint else right
