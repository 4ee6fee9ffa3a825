"""The decision log: everything that changes what a router chooses by, and every choice. Pure: others open the file.

One JSON object a line, in the order in which it happened, so that the choices can be made again from nothing but the
log (`sim.replay`). An entry is a call of the view, the desk or the prefix index as it was made from outside; what those
do to each other in the course of it follows from it, and is not written. After a call of the desk stands what came of
it: what the policy said (`Decided`), and who was told what (`Came`).

Prompts are in it as names of chunks (`router.predict.chunks`: hashes with a key), tenants and models by name.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from cluster.ids import InstanceId
from cluster.instance import Instance, Load
from router.core.journey import Choose, Chosen
from router.core.values import Promise, Reported, Sent, Wanted
from router.predict.step_model import Make

# --- the fleet --------------------------------------------------------------------------------------------------------


class Made(msgspec.Struct, tag="made"):
    """What is known beforehand of an instance's speed; told before it is added."""

    instance: InstanceId
    make: Make | None


class Added(msgspec.Struct, tag="added"):
    """An instance was named at the start."""

    instance: Instance


class Folded(msgspec.Struct, tag="folded"):
    """The registry was read."""

    reported: tuple[Reported, ...]


class Seen(msgspec.Struct, tag="seen"):
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
    """Operators have set these aside, and no others."""

    reasons: dict[InstanceId, str]


class Distrusted(msgspec.Struct, tag="distrusted"):
    """These pairs, and no others, have failed their proof: prefill, decode, why."""

    pairs: list[tuple[InstanceId, InstanceId, str]]


class Proven(msgspec.Struct, tag="proven"):
    """These are proven to be alike, and no others: the circle of each as producer, and as consumer."""

    gives: dict[InstanceId, int]
    takes: dict[InstanceId, int]
    doubts: list[tuple[InstanceId, InstanceId, str]] = []
    """Pairs that could not be tried, and why: a choice says so."""


class LegStarted(msgspec.Struct, tag="leg_started"):
    """A prefill leg went there, or a request that stands in no line."""

    instance: InstanceId


class Indexed(msgspec.Struct, tag="indexed"):
    """Prefixes are kept from here on."""


class Cached(msgspec.Struct, tag="cached"):
    """An engine has said with its answer how much of the prompt it had; `each` tokens are one chunk."""

    sent: Sent
    each: float
    tokens: int


# --- the desk ---------------------------------------------------------------------------------------------------------


class Began(msgspec.Struct, tag="began"):
    """A desk, with nobody at it."""

    policy: str
    admission: bool
    foresees: bool


class Shared(msgspec.Struct, tag="shared"):
    """How the fleet is divided from here on: among so many routers, and among tenants."""

    routers: int
    shares: dict[str, float]
    local_shares: dict[str, float]


class Seated(msgspec.Struct, tag="seated"):
    """A request comes to the desk, or wants something else; it has a number from here on."""

    seat: int
    wanted: Wanted
    promise: Promise


class Counted(msgspec.Struct, tag="counted"):
    """An engine has counted its prompt's tokens."""

    seat: int
    prompt_tokens: int
    prefix_block_tokens: float


class Asked(msgspec.Struct, tag="asked"):
    """It asks where to go."""

    seat: int
    effect: Choose
    now: float


class Picked(msgspec.Struct, tag="picked"):
    """A request that stands in no line asks."""

    wanted: Wanted


class PromptOver(msgspec.Struct, tag="prompt_over"):
    """Its prompt is computed, or will not be."""

    seat: int
    now: float
    done: bool
    cached_tokens: int | None


class AnswerOpened(msgspec.Struct, tag="answer_opened"):
    """Its first token is here."""

    seat: int
    now: float


class Finished(msgspec.Struct, tag="finished"):
    """It is over; its number is of no use after it."""

    seat: int
    now: float
    tokens: int | None
    cut_off: bool
    engine_ms: tuple[float, float] | None = None


class FoundNone(msgspec.Struct, tag="found_none"):
    """It waits."""

    seat: int


class Occupied(msgspec.Struct, tag="occupied"):
    """Its answering leg is there, and nowhere else."""

    seat: int
    instance: InstanceId | None


class LegEnded(msgspec.Struct, tag="leg_ended"):
    """A leg that had been started there is over."""

    instance: InstanceId


class Roomy(msgspec.Struct, tag="room"):
    """There may be room for another prompt."""


class Looked(msgspec.Struct, tag="looked"):
    """The time has come to look for room."""

    now: float


class FleetChanged(msgspec.Struct, tag="fleet_changed"):
    """Somebody came, left, or said something new."""


# --- what came of it --------------------------------------------------------------------------------------------------


class Decided(msgspec.Struct, tag="decided"):
    """The policy was asked, and said. `wanted` is without the prefix, which its seat has."""

    policy: str
    wanted: Wanted
    chosen: Chosen


class Came(msgspec.Struct, tag="came"):
    """What the desk told a request that asked, and who is to ask again. Not written where it is nothing and nobody."""

    chosen: Chosen | None
    called: tuple[int, ...]


# --- what is not in it ------------------------------------------------------------------------------------------------


class Missing(msgspec.Struct, tag="missing"):
    """Here so many entries are missing: they could not be written (`router.scheduler.log_writer`)."""

    entries: int


Outcome = Decided | Came

Entry = (
    Made | Added | Folded | Seen | ProbeFailed | Unreachable | SetAside | Distrusted | Proven | LegStarted | Indexed
    | Cached | Began | Shared | Seated | Counted | Asked | Picked | PromptOver | AnswerOpened | Finished | FoundNone
    | Occupied | LegEnded | Roomy | Looked | FleetChanged | Decided | Came | Missing
)  # fmt: skip


def line_of(entry: Entry) -> bytes:
    """An entry as a line of JSON, with its line feed."""
    return msgspec.json.encode(entry) + b"\n"


_DECODER: Final[msgspec.json.Decoder[Entry]] = msgspec.json.Decoder(Entry)


def entry_of(line: bytes) -> Entry:
    """An entry from its line.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _DECODER.decode(line)
