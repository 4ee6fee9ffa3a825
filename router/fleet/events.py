"""The events of a router's two machines, its view of the fleet and its scheduler (law 2), and the decision log. Pure.

The log is the list of these events, one JSON object a line, in the order in which they happened, so that the choices
can be made again from the log alone (`sim.replay`). What the machines do to each other during an event follows from the
event, and is not written. After an event of the scheduler the log has its results: the policy's decisions (`Decided`),
and the replies to requests (`Came`).

Prompts stand in the log as names of chunks (`router.predict.chunks`: hashes with a key), tenants and models by name. An
event holds the request itself (`context`); the log has its number (`seat`, a name that logs have had from the start).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from cluster.ids import InstanceId
from cluster.instance import Instance, Load
from router.core.journey import Choose, Chosen
from router.core.load_notes import LoadNote
from router.core.values import Promise, Reported, Sent, Wanted
from router.predict.step_model import Make

_LOGGED: Final = {"context": "seat"}

# --- the fleet --------------------------------------------------------------------------------------------------------


class Made(msgspec.Struct, tag="made"):
    """What is known beforehand about an instance's speed; comes before the instance is added."""

    instance: InstanceId
    make: Make | None


class Added(msgspec.Struct, tag="added"):
    """An instance was named at the start."""

    instance: Instance


class Folded(msgspec.Struct, tag="folded"):
    """The registry was read."""

    reported: tuple[Reported, ...]


class ProbeSucceeded(msgspec.Struct, tag="seen"):
    """A probe succeeded."""

    instance: InstanceId
    models: tuple[dict[str, Any], ...] | None
    load: Load | None


class ProbeFailed(msgspec.Struct, tag="probe_failed"):
    """A probe failed."""

    instance: InstanceId


class Unreachable(msgspec.Struct, tag="unreachable"):
    """A leg could not connect."""

    instance: InstanceId


class SetAside(msgspec.Struct, tag="set_aside"):
    """Operators have set these instances aside, and no others: why, by instance."""

    reasons: dict[InstanceId, str]


class Distrusted(msgspec.Struct, tag="distrusted"):
    """These pairs, and no others, have failed their proof: prefill, decode, why."""

    pairs: list[tuple[InstanceId, InstanceId, str]]


class Proven(msgspec.Struct, tag="proven"):
    """These instances, and no others, are proven to be alike: the circle of each as producer, and as consumer."""

    gives: dict[InstanceId, int]
    takes: dict[InstanceId, int]
    doubts: list[tuple[InstanceId, InstanceId, str]] = []
    """Pairs that could not be tried, and why: a choice states it."""
    inexact: list[tuple[InstanceId, InstanceId, str]] = []
    """Pairs whose first tokens differ, or cannot be compared, and why: no choice depends on it."""
    merged: list[tuple[int, int]] = []
    """Numbers of circles that have become part of others, each with that one's number."""


class LegStarted(msgspec.Struct, tag="leg_started"):
    """A prefill leg went to the instance, or a request that does not pass the queue."""

    instance: InstanceId


class Indexed(msgspec.Struct, tag="indexed"):
    """The prefix-cache index is kept from now on."""


class Cached(msgspec.Struct, tag="cached"):
    """An engine has reported with its answer how much of the prompt was in its prefix cache; one chunk is `each`
    tokens.
    """

    sent: Sent
    each: float
    tokens: int


class Sourced(msgspec.Struct, tag="sourced"):
    """A source leg was answered, or its wait has ended, `late_ms` milliseconds later than its price says. `now`:
    seconds.
    """

    late_ms: float
    now: float


class SourceSaid(msgspec.Struct, tag="source_said"):
    """An instance that was asked for a prompt's beginning has said how many tokens of it are in its KV cache; one chunk
    is `each` tokens.
    """

    source: InstanceId
    chunks: tuple[int, ...]
    each: float
    tokens: int
    now: float


class LoadNoted(msgspec.Struct, tag="load_noted"):
    """A router peer has told what its requests do to instances."""

    note: LoadNote
    now: float


class RouterPeerLost(msgspec.Struct, tag="peer_lost"):
    """A router peer has told nothing for a while, or has left."""

    router: str
    now: float


# --- the scheduler ----------------------------------------------------------------------------------------------------


class Began(msgspec.Struct, tag="began"):
    """The scheduler starts, without requests."""

    policy: str
    admission: bool
    foresees: bool


class Shared(msgspec.Struct, tag="shared"):
    """How the fleet is divided from now on: by the number of routers, and among tenants."""

    routers: int
    shares: dict[str, float]
    local_shares: dict[str, float]
    router_number: int = 0
    """Of this router among them, from 0."""


class Seated(msgspec.Struct, tag="seated", rename=_LOGGED):
    """A request comes to the scheduler, or its needs change; from now on it has a number."""

    context: Any
    wanted: Wanted
    promise: Promise


class Counted(msgspec.Struct, tag="counted", rename=_LOGGED):
    """An engine has counted the prompt's tokens."""

    context: Any
    prompt_tokens: int
    prefix_block_tokens: float


class Asked(msgspec.Struct, tag="asked", rename=_LOGGED):
    """The request asks which instances to use."""

    context: Any
    effect: Choose
    now: float


class Picked(msgspec.Struct, tag="picked"):
    """A request outside the queue asks."""

    wanted: Wanted


class PromptOver(msgspec.Struct, tag="prompt_over", rename=_LOGGED):
    """The request's prompt is computed, or will not be."""

    context: Any
    now: float
    done: bool
    cached_tokens: int | None
    """Its tokens that were in the prefix cache, where its engine reports them."""
    presumed: bool = False
    """The prompt counts as computed: its predicted time has passed, and no engine reports when it was computed."""


class AnswerOpened(msgspec.Struct, tag="answer_opened", rename=_LOGGED):
    """The request's first token has arrived."""

    context: Any
    now: float


class EngineMs(msgspec.Struct, array_like=True, frozen=True):
    """An engine's own times of an answer in one piece, in milliseconds; 0: not reported, or not its work."""

    prompt: float
    token: float
    """For each token after the first."""
    first: float = 0.0
    """From the request's arrival to its first token."""


class Finished(msgspec.Struct, tag="finished", rename=_LOGGED):
    """The request is over; its number is not used again."""

    context: Any
    now: float
    tokens: int | None
    """The tokens of its answer; None: they were not counted."""
    cut_off: bool
    """The answer might have become longer: it ended at its limit, or is not `complete`. Its length is a lower bound
    then."""
    engine_ms: EngineMs | None = None
    """The engine's own times, if the router could not see when the answer began."""
    complete: bool = True
    """The answer came to its end, perhaps at its limit. Its times count then, unless it was `paused`."""
    paused: bool = False
    """The client read so slowly that the router stopped reading from the engine for a while."""


class FoundNone(msgspec.Struct, tag="found_none", rename=_LOGGED):
    """The request has found no place and waits."""

    context: Any


class Occupied(msgspec.Struct, tag="occupied", rename=_LOGGED):
    """The request's answering leg is at this instance, and at no other."""

    context: Any
    instance: InstanceId | None


class LegEnded(msgspec.Struct, tag="leg_ended", rename=_LOGGED):
    """A leg that was started at this instance is over."""

    instance: InstanceId


class Roomy(msgspec.Struct, tag="room"):
    """An instance may have room for another prompt."""


class Looked(msgspec.Struct, tag="looked"):
    """The time has come to look for room."""

    now: float


class FleetMoved(msgspec.Struct, tag="fleet_changed"):
    """An instance came, left, or reported a change."""


# --- results ---------------------------------------------------------------------------------------------------------


class Decided(msgspec.Struct, tag="decided"):
    """The policy was asked, and decided. `wanted` is without the prefix, which its context has."""

    policy: str
    wanted: Wanted
    chosen: Chosen


class Came(msgspec.Struct, tag="came"):
    """The scheduler's reply to a request that asked, and the requests that shall ask again. Not written if both are
    empty.
    """

    chosen: Chosen | None
    called: tuple[int, ...]


# --- gaps ------------------------------------------------------------------------------------------------------------


class Missing(msgspec.Struct, tag="missing"):
    """So many entries are missing here: they could not be written (`router.scheduler.log_writer`)."""

    entries: int


class InstanceLost(msgspec.Struct, frozen=True):
    """An effect of the fleet's view: legs at this instance can no longer end well. Never in a log."""

    instance: InstanceId


FleetEvent = (
    Added | Folded | ProbeSucceeded | ProbeFailed | Unreachable | SetAside | Distrusted | Proven | LegStarted | Indexed
    | Cached | Sourced | SourceSaid | LoadNoted | RouterPeerLost
)  # fmt: skip
"""The events of the fleet's view (`router.fleet.view`)."""

SchedulerEvent = (
    Shared | Asked | Picked | PromptOver | AnswerOpened | Finished | FoundNone | Occupied | LegEnded | Roomy | Looked
    | FleetMoved
)  # fmt: skip
"""The events of the scheduler (`router.scheduler.scheduler`)."""

Outcome = Decided | Came

Entry = (
    Made | Added | Folded | ProbeSucceeded | ProbeFailed | Unreachable | SetAside | Distrusted | Proven | LegStarted
    | Indexed | Cached | Sourced | SourceSaid | LoadNoted | RouterPeerLost | Began | Shared | Seated | Counted | Asked
    | Picked | PromptOver | AnswerOpened | Finished | FoundNone | Occupied | LegEnded | Roomy | Looked | FleetMoved
    | Decided | Came | Missing
)  # fmt: skip


def line_of(entry: Entry) -> bytes:
    """An entry as a line of JSON, with its line feed. A request in it must have a number (`entered`)."""
    return _ENCODER.encode(entry) + b"\n"


def _number(context: Any) -> int:
    number: int = context.entered[0]
    return number


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_number, order="deterministic")
"""Sorts sets (`Wanted.excluded`, `Instance.tenants`) and the keys of dictionaries, so that the same events are the same
bytes in every process: the order of a set of texts differs between processes. No reader needs these dictionaries'
order."""

_DECODER: Final[msgspec.json.Decoder[Entry]] = msgspec.json.Decoder(Entry)


def entry_of(line: bytes) -> Entry:
    """The entry in a line.

    Raises:
        msgspec.DecodeError: the line is not an entry.
    """
    return _DECODER.decode(line)
