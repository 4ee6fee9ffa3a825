"""What happens to a twin, and what it says: its events and its effects. All times are nanoseconds on one clock.

They are msgspec's structs: a tenth of a dataclass' time to make, and a simulation makes a dozen for each leg.
"""

from __future__ import annotations

from msgspec import Struct

from cluster.ids import InstanceId, RequestId, TransferId
from cluster.instance import Load
from engine.twin.batch import PullOrder
from engine.twin.request import Request, Source
from kvtransfer.events import Claimed, LinkEnded, PeerLost, PeerSeen, Received
from kvtransfer.messages import Message, Peer, Release

# --- events ----------------------------------------------------------------------------------------------------------


class Start(Struct, frozen=True):
    """The process is started, under an epoch that it never had before. A life before this one ends, as by `Die`."""

    epoch: int


class Die(Struct, frozen=True):
    """The process is gone, with all it had."""


class Submit(Struct, frozen=True):
    """A request has come."""

    request: Request


class Abort(Struct, frozen=True):
    """Nobody wants the answer any more. Takes effect when the step that runs is over. Unknown requests: no-op."""

    request: RequestId


class KvArrived(Struct, frozen=True):
    """A pull has ended well: what the producer's blocks contained as they were read, one for each of ours."""

    request: RequestId
    contents: tuple[int, ...]


class KvFailed(Struct, frozen=True):
    """A pull has ended badly; nothing writes to our blocks any more."""

    request: RequestId


class FromPeer(Struct, frozen=True):
    """Something that the ledger of our holds is to know: a release, a heartbeat, a claim, a lost link."""

    event: Received | Claimed | PeerLost | PeerSeen | LinkEnded


class ReadLoad(Struct, frozen=True):
    """Answer with `LoadIs`."""


class ReadBlocks(Struct, frozen=True):
    """Somebody reads our memory, whether he may or not. Answer with `Contents`."""

    blocks: tuple[int, ...]


class Tick(Struct, frozen=True):
    """The time `next_wakeup` asked for has come."""


Event = Start | Die | Submit | Abort | KvArrived | KvFailed | FromPeer | ReadLoad | ReadBlocks | Tick


def released(transfer: TransferId, by: InstanceId) -> FromPeer:
    """The notice that ends a hold, as stock vLLM's consumer sends it once it has read (or will not read) the blocks."""
    return FromPeer(Received(Peer(by, 0), Release(transfer, 0)))


# --- effects ---------------------------------------------------------------------------------------------------------


class Share(Struct, frozen=True):
    """What a run makes for one request: in its first step token `first` of the answer, then one more in each step.

    `engine.twin.tokens.token(key, index)` is the token.
    """

    request: RequestId
    first: int
    key: int


class Run(Struct, frozen=True):
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


class Cut(Struct, frozen=True):
    """Something has happened: a run ends with the step that is under way, the `steps`-th."""

    number: int
    at_ns: int
    end_ns: int
    steps: int


class Hold(Struct, frozen=True):
    """Blocks kept for another instance."""

    transfer: TransferId
    blocks: tuple[int, ...]
    tokens: int


class Finished(Struct, frozen=True):
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


class Refused(Struct, frozen=True):
    """A request is not taken; 4xx, or no connection."""

    at_ns: int
    request: RequestId
    because: str


class Lost(Struct, frozen=True):
    """A request went down with the engine."""

    at_ns: int
    request: RequestId


class Preempted(Struct, frozen=True):
    """A request has lost its blocks to others and will be computed anew. `outputs` are its tokens so far."""

    at_ns: int
    request: RequestId
    outputs: int


class Pull(Struct, frozen=True):
    """Read the producer's blocks from the prompt's block `first` on. Answer with `KvArrived` or `KvFailed`, always."""

    at_ns: int
    request: RequestId
    source: Source
    remote: tuple[int, ...]
    """The producer's blocks."""


class GiveBack(Struct, frozen=True):
    """Tell the producer that its hold is not wanted any more (see `released`)."""

    at_ns: int
    source: Source


class Tell(Struct, frozen=True):
    """The ledger of our holds has something to say to a peer."""

    at_ns: int
    to: InstanceId
    message: Message


class Ready(Struct, frozen=True):
    """The engine takes requests."""

    at_ns: int
    epoch: int


class LoadIs(Struct, frozen=True):
    """How busy it is."""

    at_ns: int
    load: Load


class Contents(Struct, frozen=True):
    """What blocks contain; None where no engine runs, or where there is no such block."""

    at_ns: int
    contents: tuple[int, ...] | None


Effect = Run | Cut | Finished | Refused | Lost | Preempted | Pull | GiveBack | Tell | Ready | LoadIs | Contents


def pull_effect(order: PullOrder, at_ns: int) -> Pull:
    """The effect of an order of the scheduler's, at the time it is carried out."""
    remote = order.source.blocks[order.first : order.first + len(order.blocks)]
    return Pull(at_ns, order.request.id, order.source, remote)
