"""The twin's events and effects. All times are nanoseconds on one clock.

They are msgspec structs, which take a tenth of a dataclass's time to make: a simulation makes a dozen for each leg.
"""

from __future__ import annotations

from msgspec import Struct

from cluster.ids import InstanceId, RequestId, TransferId
from cluster.instance import Load
from engine.twin.batch import PullOrder
from engine.twin.request import HoldSource, TwinRequest
from kvtransfer.hold_marks import Slot
from kvtransfer.notes import Beat, ReadNote

# --- events ----------------------------------------------------------------------------------------------------------


class StartEngine(Struct, frozen=True):
    """The process starts, under a new epoch. A life before this one ends, as by `Die`."""

    epoch: int


class Die(Struct, frozen=True):
    """The process is gone, with all its state."""


class Submit(Struct, frozen=True):
    """A request has arrived."""

    request: TwinRequest


class AbortRequest(Struct, frozen=True):
    """The answer is not wanted any more. Takes effect when the running step is over. Unknown requests: no-op."""

    request: RequestId


class KvArrived(Struct, frozen=True):
    """A pull has ended well: the contents of the producer's blocks as they were read, one for each of the engine's
    blocks.
    """

    request: RequestId
    contents: tuple[int, ...]
    said: bytes | None
    """The content of the hold's slot *after* the last block had been read; None: it could not be read."""
    wrong: str = ""
    """Why the digests of the blocks do not match; empty: they match, or digests are off."""


class KvFailed(Struct, frozen=True):
    """A pull has ended badly; no transfer writes to the engine's blocks any more."""

    request: RequestId


class Notice(Struct, frozen=True):
    """A consumer's notice about one of the engine's holds."""

    reader: InstanceId
    note: ReadNote | Beat


class GiveUpHold(Struct, frozen=True):
    """A router gives up what is, or will be, held under a name (`TransferId` as text)."""

    name: str


class ReadLoad(Struct, frozen=True):
    """Answer with `LoadIs`."""


class ReadBlocks(Struct, frozen=True):
    """A program reads the engine's memory, with or without permission. Answer with `Contents`."""

    blocks: tuple[int, ...]


class ReadSlot(Struct, frozen=True):
    """A consumer reads a slot of the engine. Answer with `SlotSays`."""

    slot: int


class Tick(Struct, frozen=True):
    """The time that `next_wakeup` gave has come."""


Event = (
    StartEngine
    | Die
    | Submit
    | AbortRequest
    | KvArrived
    | KvFailed
    | Notice
    | GiveUpHold
    | ReadLoad
    | ReadBlocks
    | ReadSlot
    | Tick
)


def released(source: HoldSource, by: InstanceId) -> Notice:
    """The notice that ends a hold, as a consumer sends it once it has read (or will not read) the blocks."""
    return Notice(by, ReadNote(source.request, 1, None if source.slot is None else source.slot.mark))


def wanted(source: HoldSource, by: InstanceId) -> Notice:
    """A consumer's heartbeat: it waits for room."""
    return Notice(by, Beat((source.request,)))


# --- effects ---------------------------------------------------------------------------------------------------------


class RunShare(Struct, frozen=True):
    """A run's tokens for one request: in its first step token `first` of the answer, then one more in each step.

    `engine.twin.tokens.token(key, index)` is the token.
    """

    request: RequestId
    first: int
    key: int


class StepRun(Struct, frozen=True):
    """Steps have begun: `steps` in a row that do the same for the same requests. `Cut` may shorten them.

    Tokens are made at each step's end. A request that is over at or before that time, with fewer `outputs`, never got
    the later ones; nor did a request that was `RequestLost` before.
    """

    number: int
    at_ns: int
    end_ns: int
    steps: int
    batch: int
    """The number of requests that decode."""
    sum_context: int
    """The context tokens of the first step; each later one has `batch` more."""
    prompt_tokens: int
    """Computed tokens of prompts. Only with a single step."""
    shares: tuple[RunShare, ...]


class Cut(Struct, frozen=True):
    """An event has come: a run ends with the step under way, the `steps`-th."""

    number: int
    at_ns: int
    end_ns: int
    steps: int


class Hold(Struct, frozen=True):
    """Blocks kept for another instance."""

    transfer: TransferId
    """The hold's name."""
    blocks: tuple[int, ...]
    tokens: int
    request: RequestId
    """The request with the prompt, by the engine's own id."""
    slot: Slot | None

    def source(self, producer: InstanceId) -> HoldSource:
        """The hold as a decode leg names it."""
        return HoldSource(self.transfer, producer, self.blocks, self.tokens, self.request, self.slot)


class RequestFinished(Struct, frozen=True):
    """A request is over. `reason` is vLLM's: stop, length, abort, or error (a failed pull that is not recomputed)."""

    at_ns: int
    request: RequestId
    reason: str
    outputs: int
    """The number of tokens made."""
    hold: Hold | None
    first_run_ns: int | None
    """When its first step began; it was queued before. None: never."""
    local_tokens: int
    remote_tokens: int
    preemptions: int


class RequestRefused(Struct, frozen=True):
    """A request is refused: 4xx, or no connection."""

    at_ns: int
    request: RequestId
    because: str


class RequestLost(Struct, frozen=True):
    """A request was lost with the engine."""

    at_ns: int
    request: RequestId


class Preempted(Struct, frozen=True):
    """A request has lost its blocks to others and will be computed anew. `outputs` are its tokens so far."""

    at_ns: int
    request: RequestId
    outputs: int


class PullBlocks(Struct, frozen=True):
    """Read the producer's blocks from the prompt's block `first` on. Answer with `KvArrived` or `KvFailed`, always."""

    at_ns: int
    request: RequestId
    source: HoldSource
    remote: tuple[int, ...]
    """The producer's blocks."""


class GiveBack(Struct, frozen=True):
    """Tell the producer that its hold is not wanted any more (see `released`)."""

    at_ns: int
    source: HoldSource


class NotUsed(Struct, frozen=True):
    """A request does not use what was pulled for it: this engine computes its prompt, or the request fails."""

    at_ns: int
    request: RequestId
    because: str


class HoldEnded(Struct, frozen=True):
    """A hold of this engine has ended: its slot is clear, and its blocks are free at the next edge of a step."""

    at_ns: int
    request: RequestId
    because: str


class EngineReady(Struct, frozen=True):
    """The engine takes requests."""

    at_ns: int
    epoch: int


class LoadIs(Struct, frozen=True):
    """The engine's load."""

    at_ns: int
    load: Load


class Contents(Struct, frozen=True):
    """The contents of blocks; None if no engine runs, or if there is no such block."""

    at_ns: int
    contents: tuple[int, ...] | None


class SlotSays(Struct, frozen=True):
    """The content of a slot; None if no engine runs."""

    at_ns: int
    said: bytes | None


Effect = (
    StepRun
    | Cut
    | RequestFinished
    | RequestRefused
    | RequestLost
    | Preempted
    | PullBlocks
    | GiveBack
    | NotUsed
    | HoldEnded
    | EngineReady
    | LoadIs
    | Contents
    | SlotSays
)


def pull_effect(order: PullOrder, at_ns: int) -> PullBlocks:
    """The effect of a scheduler's pull order, at the time it is carried out."""
    remote = order.source.blocks[order.first : order.first + len(order.blocks)]
    return PullBlocks(at_ns, order.request.id, order.source, remote)
