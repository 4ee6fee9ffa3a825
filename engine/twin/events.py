"""What happens to a twin, and what it says: its events and its effects. All times are nanoseconds on one clock."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.ids import InstanceId, RequestId, TransferId
from cluster.instance import Load
from engine.twin.batch import PullOrder
from engine.twin.request import Request, Source
from kvtransfer.events import Claimed, LinkEnded, PeerLost, PeerSeen, Received
from kvtransfer.messages import Message, Peer, Release

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The process is started, under an epoch that it never had before. A life before this one ends, as by `Die`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Die:
    """The process is gone, with all it had."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A request has come."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody wants the answer any more. Takes effect when the step that runs is over. Unknown requests: no-op."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class KvArrived:
    """A pull has ended well: what the producer's blocks contained as they were read, one for each of ours."""

    request: RequestId
    contents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvFailed:
    """A pull has ended badly; nothing writes to our blocks any more."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class FromPeer:
    """Something that the ledger of our holds is to know: a release, a heartbeat, a claim, a lost link."""

    event: Received | Claimed | PeerLost | PeerSeen | LinkEnded


@dataclass(frozen=True, slots=True)
class ReadLoad:
    """Answer with `LoadIs`."""


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Somebody reads our memory, whether he may or not. Answer with `Contents`."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """The time `next_wakeup` asked for has come."""


Event = Start | Die | Submit | Abort | KvArrived | KvFailed | FromPeer | ReadLoad | ReadBlocks | Tick


def released(transfer: TransferId, by: InstanceId) -> FromPeer:
    """The notice that ends a hold, as stock vLLM's consumer sends it once it has read (or will not read) the blocks."""
    return FromPeer(Received(Peer(by, 0), Release(transfer, 0)))


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """What a run makes for one request: in its first step token `first` of the answer, then one more in each step.

    `engine.twin.tokens.token(key, index)` is the token.
    """

    request: RequestId
    first: int
    key: int


@dataclass(frozen=True, slots=True)
class Run:
    """Steps have begun: `steps` in a row that do the same for the same requests. `Cut` may make it fewer.

    Tokens are there at each step's end. Those of a request that is over at or before that time, with fewer `outputs`,
    never were; nor were those that come after the request was `Lost`.
    """

    number: int
    at_ns: int
    end_ns: int
    steps: int
    batch: int
    """Requests that decode."""
    sum_context: int
    """In the first step; each later one has `batch` more."""
    prompt_tokens: int
    """Of prompts computed. Only where there is one step."""
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Something has happened: a run ends with the step that is under way, the `steps`-th."""

    number: int
    at_ns: int
    end_ns: int
    steps: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Blocks kept for another instance."""

    transfer: TransferId
    blocks: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A request is over. `reason` is vLLM's: stop, length, abort, or error (a failed pull that is not recomputed)."""

    at_ns: int
    request: RequestId
    reason: str
    outputs: int
    """Tokens made."""
    hold: Hold | None
    first_run_ns: int | None
    """When its first step began; before that it was queued. None: never."""
    local_tokens: int
    remote_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A request is not taken; 4xx, or no connection."""

    at_ns: int
    request: RequestId
    because: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A request went down with the engine."""

    at_ns: int
    request: RequestId


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request has lost its blocks to others and will be computed anew. `outputs` are its tokens so far."""

    at_ns: int
    request: RequestId
    outputs: int


@dataclass(frozen=True, slots=True)
class Pull:
    """Read the producer's blocks from the prompt's block `first` on. Answer with `KvArrived` or `KvFailed`, always."""

    at_ns: int
    request: RequestId
    source: Source
    remote: tuple[int, ...]
    """The producer's blocks."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Tell the producer that its hold is not wanted any more (see `released`)."""

    at_ns: int
    source: Source


@dataclass(frozen=True, slots=True)
class Tell:
    """The ledger of our holds has something to say to a peer."""

    at_ns: int
    to: InstanceId
    message: Message


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes requests."""

    at_ns: int
    epoch: int


@dataclass(frozen=True, slots=True)
class LoadIs:
    """How busy it is."""

    at_ns: int
    load: Load


@dataclass(frozen=True, slots=True)
class Contents:
    """What blocks contain; None where no engine runs, or where there is no such block."""

    at_ns: int
    contents: tuple[int, ...] | None


Effect = Run | Cut | Finished | Refused | Lost | Preempted | Pull | GiveBack | Tell | Ready | LoadIs | Contents


def pull_effect(order: PullOrder, at_ns: int) -> Pull:
    """The effect of an order of the scheduler's, at the time it is carried out."""
    remote = order.source.blocks[order.first : order.first + len(order.blocks)]
    return Pull(at_ns, order.request.id, order.source, remote)
