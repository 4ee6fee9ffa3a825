"""The states, events and effects of a journey. Pure.

They are a module of their own because compiled modules cannot contain such classes (docs/compiled.md).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from cluster.errors import ApiError
from cluster.ids import InstanceId
from cluster.wire import TransferFields


class JourneyState(StrEnum):
    """The state of a request."""

    CHOOSING = "choosing"
    PREFILLING = "prefilling"
    OPENING = "opening"
    """The decode leg (or the whole request) is sent; no answer has come yet. The client may have a seed."""
    STREAMING = "streaming"
    CANCELLING = "cancelling"
    """The client has its answer or has left; the prefill leg's answer is still awaited, as it says whether blocks are
    held."""
    RELEASING = "releasing"
    DONE = "done"


class PrefixSource(msgspec.Struct, frozen=True):
    """The instance from whose KV cache the chosen instance is to pull the beginning of the prompt."""

    instance: InstanceId
    tokens: int
    """The prompt's tokens that its KV cache is expected to have."""
    wait_s: float
    """The longest wait for the source's answer, in seconds. Without an answer the prompt is computed as without a
    source."""
    leg_ms: float = 0.0
    """Milliseconds until the source's answer, as its price expects them."""
    cold_s: float = 0.0
    """Seconds in which the chosen instance is expected to answer without a source, with the prompts before this one; 0:
    not known."""


SOURCE_ATTEMPTS: Final = 1000
"""Source legs number their attempts from here: each hold of a request has a name of its own, wherever it is held."""


# --- events: what happened -------------------------------------------------------------------------------------------


class Chosen(msgspec.Struct, frozen=True):
    """The policy's answer. Both set: hand over. Only `decode`: run aggregated there. None: no instance can, or
    `wait`.
    """

    prefill: InstanceId | None
    decode: InstanceId | None
    because: str
    wait: bool = False
    """Some instance could serve the request, but all of them are full: ask again when that changes."""
    anew: bool = False
    """The chosen decode instance must not use the existing hold: the chosen prefill instance computes the
    prompt anew."""
    shed_s: int | None = None
    """The request is shed, as its class asks if a promise cannot be kept; the client should retry after so many
    seconds."""
    early_s: float | None = None
    """The decode leg may be sent so many seconds from now, while P computes (`router.core.early_leg`). None: it is sent
    once P has answered."""
    source: PrefixSource | None = None
    """The instance from which the prompt's beginning is pulled; None: the chosen instance computes what it lacks."""


class FleetChanged(msgspec.Struct, frozen=True):
    """An instance came, recovered, or has a free place again."""


class PrefillAnswered(msgspec.Struct, frozen=True):
    """P finished its leg."""

    finish_reason: str | None
    transfer: TransferFields | None
    first_token: int | None = None
    """Set if the client may receive this token now, and D must begin with it."""
    first: bool = True
    """P's token is the first of the client's answer. False: it is not, or that is unknown, or D draws for itself (the
    answer is drawn by lot); then D generates all tokens."""
    by: InstanceId | None = None
    """The leg's instance; None: the leg that was sent last."""
    pinned: int | None = None
    """Set if D must begin with this token, although the client does not receive it now: P has drawn it by lot. If D
    drew again where P's token cannot be shown, such tokens would come too seldom."""


class SourceHeld(msgspec.Struct, frozen=True):
    """The source of a leg has answered with a hold: the leg was sent, and pulls it. If an aggregated leg answers in
    one piece, this is said only if the answer's longest time is known (`router.core.turns.in_one_piece`).
    """

    source: PrefixSource
    by: InstanceId
    """The leg's instance."""


class Refused(msgspec.Struct, frozen=True):
    """The engine answered with an error status that the client should see (4xx)."""

    status: int
    by: InstanceId | None = None
    """For a prefill leg, its instance; None: the leg that was sent last."""


class Lost(msgspec.Struct, frozen=True):
    """The leg failed for a reason that is not the client's fault: no connection, 5xx, stall, a broken stream."""

    because: str
    untouched: bool = False
    """The leg never reached the engine: the hold that it was to pull is unchanged."""
    again: bool = False
    """For a stream: the router can drop what the client already has from a second stream."""
    by: InstanceId | None = None
    """For a prefill leg, its instance; None: the leg that was sent last."""
    drew: bool = False
    """Nothing is wrong with the engine, but its answer begins with another token than the client has."""
    unpinned: bool = False
    """Nothing was sent: the engine cannot be told the answer's first token, which the client does not have yet."""
    no_ticket: bool = False
    """The engine refused the router's ticket. It serves what is not handed over."""


def not_sent(by: InstanceId | None = None) -> Lost:
    """The loss of a prefill leg that was given up while it waited for its source."""
    return Lost("it was not needed any more, and not sent", untouched=True, by=by)


class EarlyLost(msgspec.Struct, frozen=True):
    """The early leg has failed, or was refused, while P computes: the decode leg is sent once P has answered."""

    because: str


class Opened(msgspec.Struct, frozen=True):
    """The answering engine has begun its answer: the first event of a stream is here, or the whole body."""


class HolderLost(msgspec.Struct, frozen=True):
    """The instance that holds what the answering leg pulls is lost: a read from it may hang."""

    instance: InstanceId
    answer_s: float = 0.0
    """The longest time of an answer in one piece after its first token, in seconds, as that token is not seen."""


class Ended(msgspec.Struct, frozen=True):
    """The answer was relayed to its last byte."""


class ClientLeft(msgspec.Struct, frozen=True):
    """The client closed its connection."""


class Released(msgspec.Struct, frozen=True):
    """The release was carried out, or could not be (then the lease ends the hold)."""

    ok: bool


class Tick(msgspec.Struct, frozen=True):
    """The time that `next_wakeup` gave has come."""


Event = (
    Chosen
    | FleetChanged
    | PrefillAnswered
    | SourceHeld
    | Refused
    | Lost
    | EarlyLost
    | Opened
    | HolderLost
    | Ended
    | ClientLeft
    | Released
    | Tick
)


# --- effects: what the driver must do --------------------------------------------------------------------------------


class Choose(msgspec.Struct, frozen=True):
    """Ask the policy; answer with `Chosen`. `excluded`: instances that have failed this request already."""

    excluded: frozenset[InstanceId]
    hand_over: bool
    second: bool = False
    """A prefill leg is under way, and D's place is taken: another pair is wanted only if it can begin now. If there is
    none, nothing changes. A second leg has no source: it computes what its instance lacks."""
    holders: tuple[InstanceId, ...] = ()
    """Instances that hold the prompt's blocks, or may do so soon: a new decode instance must be able to pull
    from them."""
    unbound: bool = False
    """The drawn first token is given up, as no instance is left that begins with it: any engine may answer, with a draw
    of its own."""
    otherwise: tuple[frozenset[InstanceId], ...] = ()
    """For a second leg: what to exclude in place of `excluded`, one after the other, while no pair is found."""
    lost: bool = False
    """With `second`: there is no doubt that the first leg's source is lost, so no share of second legs limits this."""
    instead: bool = False
    """With `second`: the answering leg is under way, no prefill leg. It is given up for what is chosen, so one instance
    is as good as a pair."""


class AwaitFleet(msgspec.Struct, frozen=True):
    """Wait in the flow-control queue; answer with `FleetChanged` when it is worth asking again."""


class SendPrefill(msgspec.Struct, frozen=True):
    """Start the prefill leg; answer with `PrefillAnswered`, `Refused` or `Lost`."""

    instance: InstanceId
    attempt: int
    source: PrefixSource | None = None
    """Ask this instance first to hold the prompt's beginning, and let the leg pull it."""


class SendSeed(msgspec.Struct, frozen=True):
    """Send P's first token to the client; answer only if the client has left."""


class SendDecode(msgspec.Struct, frozen=True):
    """Send the client's request for its answer: with `transfer` as a decode leg, without it aggregated."""

    instance: InstanceId
    transfer: TransferFields | None
    first_token: int | None = None
    """The token that the answer must begin with. The client may not have it yet."""
    source: PrefixSource | None = None
    """For an aggregated request, as `SendPrefill.source`."""


class SendEarly(msgspec.Struct, frozen=True):
    """Send the decode leg while P computes: it waits at its engine for the hold of P's leg. Answer with `Opened` or
    `EarlyLost`, and after `UseEarly` as for `SendDecode`.
    """

    instance: InstanceId
    producer: InstanceId
    attempt: int
    """The attempt of P's leg."""


class UseEarly(msgspec.Struct, frozen=True):
    """P has answered with this hold, which the early leg pulls: from here on it is the decode leg."""

    transfer: TransferFields


class CloseEarly(msgspec.Struct, frozen=True):
    """Close the early leg's connection: its engine forgets it. Its place at the instance stays taken."""


class CancelPrefill(msgspec.Struct, frozen=True):
    """Ask P to abort the leg, which outlasted `PATIENCE_S`. Its answer must still be awaited."""

    instance: InstanceId


class ForgoPrefill(msgspec.Struct, frozen=True):
    """The client waits no more: if this prefill leg still waits for its source, do not send it, and answer with `Lost`.
    A leg that was sent goes on.
    """

    instance: InstanceId


class ClosePrefill(msgspec.Struct, frozen=True):
    """Stop waiting for the prefill leg: close its connection."""


class OutlastPrefill(msgspec.Struct, frozen=True):
    """This prefill leg is not needed any more, and it shall send no event. Do not cut it off: handle its end as
    `CancelPrefill` and `ClosePrefill` would, after the same times, and release what it holds.
    """

    instance: InstanceId


class CloseDecode(msgspec.Struct, frozen=True):
    """Close the connection of the answering leg: its engine aborts, and releases the hold if there is one."""


class DropDecode(msgspec.Struct, frozen=True):
    """Close the connection of the answering leg, which has not begun its answer: another leg is sent in its place. Its
    engine aborts, and the source's hold that it may pull is given up. The place that was chosen meanwhile stays taken.
    """


class Relay(msgspec.Struct, frozen=True):
    """Pass the open answer on; answer with `Ended`, `Lost` or `ClientLeft`."""


class AnswerFromPrefill(msgspec.Struct, frozen=True):
    """P's answer is the whole answer (it ended at its first token): send it to the client."""


class ForwardRefusal(msgspec.Struct, frozen=True):
    """Send the engine's own error answer to the client."""


class Fail(msgspec.Struct, frozen=True):
    """Answer with an error status; the client has received nothing yet."""

    error: ApiError


class FailStream(msgspec.Struct, frozen=True):
    """End a stream that has begun, with an SSE error event."""

    error: ApiError


class Release(msgspec.Struct, frozen=True):
    """Make `via` tell P to free the hold; answer with `Released`."""

    via: InstanceId
    transfer: TransferFields


class Finish(msgspec.Struct, frozen=True):
    """The journey is over. `outcome` is one of `OUTCOMES`."""

    outcome: str


Effect = (
    Choose
    | AwaitFleet
    | SendPrefill
    | SendSeed
    | SendDecode
    | SendEarly
    | UseEarly
    | CloseEarly
    | ForgoPrefill
    | CancelPrefill
    | ClosePrefill
    | OutlastPrefill
    | CloseDecode
    | DropDecode
    | Relay
    | AnswerFromPrefill
    | ForwardRefusal
    | Fail
    | FailStream
    | Release
    | Finish
)

OUTCOMES = ("served", "refused", "failed", "expired", "client_left")
"""How a journey can end: the label of the request counter, beside `router.core.slo.SHED` and `BROKEN`."""

BROKEN = "broken"
"""How a request ends that a bug of the router's has ended."""
