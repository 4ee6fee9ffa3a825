"""What goes into a journey and comes out of it: its states, events and effects. Pure.

They stand apart from the machine (`router.core.journey`) since compiled modules can have no such classes
(docs/compiled.md).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cluster.errors import ApiError
from cluster.ids import InstanceId
from cluster.wire import Transfer


class State(StrEnum):
    """Where a request is."""

    CHOOSING = "choosing"
    PREFILLING = "prefilling"
    OPENING = "opening"
    """The decode leg (or the whole request) is sent, nothing has come back. The client may have a seed."""
    STREAMING = "streaming"
    CANCELLING = "cancelling"
    """The client has its answer or is gone; the prefill leg still has to say whether it holds blocks."""
    RELEASING = "releasing"
    DONE = "done"


# --- events: what happened -------------------------------------------------------------------------------------------


class Chosen(msgspec.Struct, frozen=True):
    """The policy's answer. Both set: hand over. Only `decode`: run whole there. None: nobody can, or `wait`."""

    prefill: InstanceId | None
    decode: InstanceId | None
    because: str
    wait: bool = False
    """Somebody could, but all of them have their hands full: worth asking again when that changes."""
    anew: bool = False
    """The chosen decode instance must not have what is held already: the chosen prefill instance computes it anew."""
    shed_s: int | None = None
    """It is refused, as its class wants it where a promise cannot be kept; worth sending again in so many seconds."""


class FleetChanged(msgspec.Struct, frozen=True):
    """An instance came, recovered, or has a place again."""


class PrefillAnswered(msgspec.Struct, frozen=True):
    """P finished its leg."""

    finish_reason: str | None
    transfer: Transfer | None
    first_token: int | None = None
    """Set where the client may be given this token now, and D be bound to it."""
    first: bool = True
    """P's token is the first of the client's answer. False: it is not, or it cannot be told; then D says everything."""
    by: InstanceId | None = None
    """Whose leg; None: the one that was sent last."""


class Refused(msgspec.Struct, frozen=True):
    """The engine answered with an error status that is the client's to read (4xx)."""

    status: int
    by: InstanceId | None = None
    """Of a prefill leg: whose; None: the one that was sent last."""


class Lost(msgspec.Struct, frozen=True):
    """The leg failed for a reason that is not the client's: no connection, 5xx, stall, a broken stream."""

    because: str
    untouched: bool = False
    """The leg never reached the engine: a hold that it was to pull is as it was."""
    again: bool = False
    """Of a stream: what the client has of it can be taken out of a second one."""
    by: InstanceId | None = None
    """Of a prefill leg: whose; None: the one that was sent last."""


class Opened(msgspec.Struct, frozen=True):
    """The answering engine has begun its answer: the first event of a stream is here, or the whole body."""


class Ended(msgspec.Struct, frozen=True):
    """The answer was relayed to its last byte."""


class ClientLeft(msgspec.Struct, frozen=True):
    """The client closed its connection."""


class Released(msgspec.Struct, frozen=True):
    """The release was carried out, or could not be (then the lease ends the hold)."""

    ok: bool


class Tick(msgspec.Struct, frozen=True):
    """The time `next_wakeup` asked for has come."""


Event = Chosen | FleetChanged | PrefillAnswered | Refused | Lost | Opened | Ended | ClientLeft | Released | Tick


# --- effects: what the driver must do --------------------------------------------------------------------------------


class Choose(msgspec.Struct, frozen=True):
    """Ask the policy; answer with `Chosen`. `excluded` have failed this request already."""

    excluded: frozenset[InstanceId]
    hand_over: bool
    second: bool = False
    """A prefill leg is under way, and D's place is taken: another pair is wanted only if it can begin now. Where there
    is none, all stays as it is."""
    holders: tuple[InstanceId, ...] = ()
    """Instances that hold the prompt's blocks, or may do so soon: a new decode instance is to be one that may have
    them."""


class AwaitFleet(msgspec.Struct, frozen=True):
    """Wait in line; answer with `FleetChanged` when it is worth asking again."""


class SendPrefill(msgspec.Struct, frozen=True):
    """Start the prefill leg; answer with `PrefillAnswered`, `Refused` or `Lost`."""

    instance: InstanceId
    attempt: int


class SendSeed(msgspec.Struct, frozen=True):
    """Give the client P's first token; answer only if he has left."""


class SendDecode(msgspec.Struct, frozen=True):
    """Send the client's request for its answer: with `transfer` as decode leg, without it whole."""

    instance: InstanceId
    transfer: Transfer | None
    first_token: int | None = None
    """The token it must begin with."""


class CancelPrefill(msgspec.Struct, frozen=True):
    """Ask P to abort the leg: it outlasted `PATIENCE_S`. Its answer must still be awaited."""

    instance: InstanceId


class ClosePrefill(msgspec.Struct, frozen=True):
    """Stop waiting for the prefill leg: close its connection."""


class OutlastPrefill(msgspec.Struct, frozen=True):
    """Nobody waits for this prefill leg any more, and no event of its is wanted. It is not cut off: see to its end as
    `CancelPrefill` and `ClosePrefill` would, after the same times, and release what it holds.
    """

    instance: InstanceId


class CloseDecode(msgspec.Struct, frozen=True):
    """Close the connection of the answering leg: its engine aborts, and gives the hold back where there is one."""


class Relay(msgspec.Struct, frozen=True):
    """Pass the open answer on; answer with `Ended`, `Lost` or `ClientLeft`."""


class AnswerFromPrefill(msgspec.Struct, frozen=True):
    """P's answer is the whole answer (it ended at its first token): give it to the client."""


class ForwardRefusal(msgspec.Struct, frozen=True):
    """Give the engine's own error answer to the client."""


class Fail(msgspec.Struct, frozen=True):
    """Answer with an error status; nothing has been sent yet."""

    error: ApiError


class FailStream(msgspec.Struct, frozen=True):
    """End a stream that has begun with an SSE error event."""

    error: ApiError


class Release(msgspec.Struct, frozen=True):
    """Have `via` tell P to free the hold; answer with `Released`."""

    via: InstanceId
    transfer: Transfer


class Finish(msgspec.Struct, frozen=True):
    """The journey is over. `outcome` is one of `OUTCOMES`."""

    outcome: str


Effect = (
    Choose
    | AwaitFleet
    | SendPrefill
    | SendSeed
    | SendDecode
    | CancelPrefill
    | ClosePrefill
    | OutlastPrefill
    | CloseDecode
    | Relay
    | AnswerFromPrefill
    | ForwardRefusal
    | Fail
    | FailStream
    | Release
    | Finish
)

OUTCOMES = ("served", "refused", "failed", "expired", "client_left")
"""How a journey can end: the label of the request counter."""
