"""What happens to a ledger, and what it has done: its events and its effects."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.ids import InstanceId, TransferId
from kvtransfer.messages import Blocks, Claim, Message, Peer, Register, ToConsumer, ToProducer
from kvtransfer.table import Side

# --- events: our engine, producing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenHold:
    """Leg 1 is here: its blocks are to be held once computed. Refused holds are answered with `Refused`."""

    id: TransferId
    tenant: str


@dataclass(frozen=True, slots=True)
class Filled:
    """The prompt is computed: the ledger owns its blocks from here.

    `tokens` is how many of the prompt's tokens have their KV in `blocks`; the last block may be partly filled. Comes
    once for every accepted hold, also for an aborted one whose step had already begun; otherwise the engine says
    `Abort`.
    """

    id: TransferId
    blocks: Blocks
    tokens: int


@dataclass(frozen=True, slots=True)
class WritesEnded:
    """Push: every write that `PostWrite` led to has ended, at the far side's memory. `ok`: all of them well."""

    id: TransferId
    ok: bool


# --- events: our engine, consuming -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReservePull:
    """Leg 2 is here, with a hold to pull.

    `remote` are the producer's blocks to read, as `kvtransfer.span.pull_span` cut them: fewer than it holds where a
    prefix is here already or our prompt is shorter, and never more. Nothing to read: the hold is given back at once.
    `tokens` is up to which token the prompt's KV is there once they have come.
    """

    id: TransferId
    producer: InstanceId
    remote: Blocks
    tokens: int
    ticket: str


@dataclass(frozen=True, slots=True)
class Allocated:
    """The engine has blocks for a pull, one for each to be read: the ledger owns them from here."""

    id: TransferId
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class ReadStarted:
    """The endpoint has gone about `PostRead`, in `parts` transfers (one per rank or remote shard, at least one).

    A part that could not be posted counts, and is reported at once as ended badly.
    """

    id: TransferId
    serial: int
    parts: int


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """One part of a read has stopped touching our memory. `ok`: and brought everything."""

    id: TransferId
    serial: int
    part: int
    ok: bool


@dataclass(frozen=True, slots=True)
class ReservePush:
    """Leg 2 is here while the producer still computes: `blocks` of ours are to be written, on `link`.

    They are the prompt's blocks from its `first` on (what is before is here already); `tokens` is the prompt's length.
    """

    id: TransferId
    producer: InstanceId
    first: int
    blocks: Blocks
    tokens: int
    link: int
    ticket: str


# --- events: the peer, checked ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proof:
    """What the check of a ticket left for the ledger to check: see `kvtransfer.ticket.Accepted`."""

    tag: str
    """Names this one ticket."""
    tenant: str
    left_s: float
    """How long this ticket could still be presented: so long is it remembered as spent."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A `Claim` came, with a ticket that is genuine, unexpired, for this producer and this consumer."""

    by: Peer
    claim: Claim
    proof: Proof


@dataclass(frozen=True, slots=True)
class Registered:
    """A `Register` came, with a ticket of the same kind."""

    by: Peer
    register: Register
    proof: Proof


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a peer whose identity the endpoint vouches for."""

    by: Peer
    message: ToProducer | ToConsumer


# --- events: anybody -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Abort:
    """The handoff is given up: the client left, the request was rejected, the leg ended without anything to hold.

    May come at any time, also before the hold exists: a release needs nothing that the producer has yet to answer.
    """

    id: TransferId
    because: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer does not answer, as far as we can tell. It may be alive, and its transfers under way."""

    instance: InstanceId


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """A peer answers, in this life of it. A higher epoch than before means that it restarted."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class LinkEnded:
    """The connection with a peer is torn down on our side.

    From here no transfer ordered before, posted or not, touches memory of ours, in either direction; and before a new
    link with that peer is used, this is said of the old one.
    """

    instance: InstanceId


@dataclass(frozen=True, slots=True)
class Tick:
    """The time `next_wakeup` asked for has come."""


Event = (
    OpenHold
    | Filled
    | WritesEnded
    | ReservePull
    | Allocated
    | ReadStarted
    | ReadEnded
    | ReservePush
    | Claimed
    | Registered
    | Received
    | Abort
    | PeerLost
    | PeerSeen
    | LinkEnded
    | Tick
)


# --- effects: what the driver must do, in order ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offer:
    """Answer leg 1 with this hold. A `Filled` without this effect has nothing to hand over."""

    id: TransferId
    blocks: Blocks
    tokens: int


@dataclass(frozen=True, slots=True)
class PostRead:
    """Read `remote` of `producer` into `local`; answer with `ReadStarted`, then a `ReadEnded` for each part."""

    id: TransferId
    serial: int
    producer: InstanceId
    remote: Blocks
    local: Blocks


@dataclass(frozen=True, slots=True)
class PostWrite:
    """Write the prompt's blocks from `first` on into `remote` of `consumer`, as they are computed.

    Only with the memory keys of `link`; answer with `WritesEnded`. A hold that is not filled yet has no `local`: its
    blocks are still the engine's.
    """

    id: TransferId
    serial: int
    consumer: InstanceId
    first: int
    local: Blocks
    remote: Blocks
    link: int


@dataclass(frozen=True, slots=True)
class Use:
    """These blocks hold the KV of the request's first `tokens` tokens, and are the request's from here."""

    id: TransferId
    blocks: Blocks
    tokens: int


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """The ledger's claim on these blocks has ended: give them back to the engine's pool."""

    side: Side
    id: TransferId
    blocks: Blocks
    because: str


@dataclass(frozen=True, slots=True)
class Recompute:
    """Nothing will come: the request computes its prompt here, in blocks of its own. Said at most once a reservation.

    The reservation's blocks may still be in quarantine then; they come back with `FreeBlocks`.
    """

    id: TransferId
    because: str


@dataclass(frozen=True, slots=True)
class Refused:
    """No entry was made. Producer: run leg 1 without a hold. Consumer: this request computes its prompt itself."""

    side: Side
    id: TransferId
    because: str


@dataclass(frozen=True, slots=True)
class Send:
    """Tell a peer. Best effort: what must arrive is repeated, what does not arrive costs a lease."""

    to: InstanceId
    message: Message


@dataclass(frozen=True, slots=True)
class CutLink:
    """Tear the connection with a peer down; answer with `LinkEnded`.

    Asked for when a transfer into memory of ours has outlived every limit: it ends the pair's other transfers too, and
    is the only way to know that memory safe again. Repeated until answered.
    """

    instance: InstanceId
    because: str


@dataclass(frozen=True, slots=True)
class Report:
    """Worth a line in the log and a span event: an entry took an unhappy turn."""

    side: Side
    id: TransferId
    because: str


Effect = Offer | PostRead | PostWrite | Use | FreeBlocks | Recompute | Refused | Send | CutLink | Report
