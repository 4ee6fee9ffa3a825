"""The questions at an engine's agent socket, one line each. Pure; the parser is total.

One JSON object a line, one object a line in answer::

    {"ask": "metadata"}                   -> {"engine_id", "epoch", "dtype", "compatibility", "payloads": [...]}
    {"ask": "introduce", "engine_id", "instance", "payloads": [{"rank": 0, "data": BASE64}]}    -> {"ok": true}
    {"ask": "forget", "engine_id"}                       -> {"ok": true}
    {"ask": "release", "transfer_id"}                    -> {"ok": true}
    {"ask": "state"}                                     -> {"holds", "legs", "pulls", "peers", "counts"}

An engine whose KV cache is left to vLLM's own connector answers the first and the last with ``{"left_to_vllm": WHY,
"dtype"}``.
A line that cannot be read is answered with ``{"error": WHY}``. `payloads` are what vLLM's own connector hands out on
its ZMQ port, one for each rank (`stage` is a pipeline stage, 0 where there is only one). A program that knows them can
read and write the engine's KV memory; every program that may open the socket file may know them.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cluster.ids import InstanceId, ranks_of
from kvtransfer.fields import NAME_CHARS_MAX

RANK: Final = "{rank}"
"""In the path of an agent socket: the number of the data parallel rank. Each rank has an agent socket of its own."""
LEFT: Final = "left_to_vllm"
"""In an answer: why vLLM's own connector, and not Baton's, hands this engine's KV cache over."""
DTYPE: Final = "dtype"
"""In an answer: the number format in which the engine computes and keeps KV and states (`Instance.dtype`)."""
LINE_BYTES_MAX: Final = 16 << 20
PAYLOADS_MAX: Final = 512
"""The most ranks that one engine may list."""
DATA_BYTES_MAX: Final = 4 << 20
"""vLLM's metadata of one rank has some kilobytes; a model of 200 layers on several transports has tens."""
TEXT_CHARS_MAX: Final = NAME_CHARS_MAX


def door_of(path: str, rank: int | None) -> str:
    """The path of one data parallel rank's agent socket. `rank` None: the engine has no ranks."""
    return path.replace(RANK, str(rank or 0))


def door_for(path: str, ranks: int) -> str:
    """The path of an engine's agent sockets, with `RANK` in it where the engine has several."""
    return path + RANK if ranks > 1 and RANK not in path else path


def doors_of(engine: InstanceId, path: str, ranks: int) -> tuple[tuple[InstanceId, str], ...]:
    """The instances of one engine, one for each data parallel rank, each with the path of its agent socket."""
    names, door = ranks_of(engine, ranks), door_for(path, ranks)
    return tuple((name, door_of(door, rank)) for rank, name in enumerate(names))


@dataclass(frozen=True, slots=True)
class Metadata:
    """Asks how other engines can read from this one."""


@dataclass(frozen=True, slots=True)
class Payload:
    """The handshake metadata of one rank."""

    stage: int
    rank: int
    data: bytes

    def object(self) -> dict[str, Any]:
        """The payload as it stands in a line."""
        return {"stage": self.stage, "rank": self.rank, "data": base64.b64encode(self.data).decode()}


@dataclass(frozen=True, slots=True)
class Introduce:
    """Says that this engine may read from the named engine."""

    engine_id: str
    instance: str
    payloads: tuple[Payload, ...]

    @property
    def ranks(self) -> int:
        """The named engine's tensor parallelism."""
        return max(each.rank for each in self.payloads) + 1


@dataclass(frozen=True, slots=True)
class Forget:
    """Says that the named engine has gone."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class ReleaseName:
    """Says that the hold of this name, present or future, is not wanted."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class HeldState:
    """Asks which holds exist, and for which consumers."""


Ask = Metadata | Introduce | Forget | ReleaseName | HeldState


def parse(line: bytes) -> Ask | str:
    """The question, or what is wrong with the line. Never raises."""
    if len(line) > LINE_BYTES_MAX:
        return f"a line has at most {LINE_BYTES_MAX} bytes"
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return "not a line of JSON"
    if not isinstance(told, dict):
        return "not an object"
    match told.get("ask"):
        case "metadata":
            return Metadata()
        case "state":
            return HeldState()
        case "introduce":
            return _introduce(told)
        case "forget":
            engine = _text(told, "engine_id")
            return "engine_id is missing" if engine is None else Forget(engine)
        case "release":
            name = _text(told, "transfer_id")
            return "transfer_id is missing" if name is None else ReleaseName(name)
        case _:
            return "nothing that can be asked here"


def _introduce(told: Mapping[str, Any]) -> Introduce | str:
    engine, instance, listed = _text(told, "engine_id"), _text(told, "instance"), told.get("payloads")
    if engine is None or instance is None:
        return "engine_id or instance is missing"
    if not isinstance(listed, list) or not 0 < len(listed) <= PAYLOADS_MAX:
        return f"payloads is a list of 1 to {PAYLOADS_MAX}"
    payloads = tuple(each for each in map(_payload, listed) if each is not None)
    if len(payloads) != len(listed):
        return "a payload has a rank and base64 data"
    if len({(each.stage, each.rank) for each in payloads}) != len(payloads):
        return "two payloads of one rank"
    return Introduce(engine, instance, payloads)


def _payload(item: object) -> Payload | None:
    if not isinstance(item, dict):
        return None
    stage, rank, text = item.get("stage", 0), item.get("rank"), item.get("data")
    if type(stage) is not int or type(rank) is not int or not 0 <= stage < PAYLOADS_MAX or not 0 <= rank < PAYLOADS_MAX:
        return None
    if not isinstance(text, str) or not text or len(text) > DATA_BYTES_MAX * 4 // 3 + 4:
        return None
    try:
        return Payload(stage, rank, base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        return None


def _text(told: Mapping[str, Any], name: str) -> str | None:
    value = told.get(name)
    return value if isinstance(value, str) and 0 < len(value) <= TEXT_CHARS_MAX else None
