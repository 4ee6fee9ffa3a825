"""Parses the answers of router peers as strictly as a stranger's: numbers in range, lists and texts bounded. Pure.

A peer may have another version, and the program at an announced address may not be a router. An invalid answer counts
as none: the page shows that router as silent, with the reason, and sums up the others.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

_Text = Annotated[str, msgspec.Meta(max_length=2048)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Number = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
_Bucket = Annotated[str, msgspec.Meta(pattern=r"^-?[0-9]{1,3}\Z")]
_Counts = Annotated[dict[_Name, _Count], msgspec.Meta(max_length=1024)]
_Slots = Annotated[list[dict[_Name, _Amount]], msgspec.Meta(max_length=1024)]
_Buckets = Annotated[dict[_Bucket, _Count], msgspec.Meta(max_length=2048)]


class _Window(msgspec.Struct):
    """A window as `router.telemetry.rolling` sends it."""

    outcomes: _Counts
    results: Annotated[dict[_Name, _Counts], msgspec.Meta(max_length=1024)]
    values: Annotated[dict[_Name, _Buckets], msgspec.Meta(max_length=16)]
    waits: Annotated[dict[_Name, _Amount], msgspec.Meta(max_length=256)]
    line: _Amount


class _Lately(msgspec.Struct):
    now: _Window
    five_minutes: _Window
    history: _Slots


class _Pool(msgspec.Struct):
    in_line: _Amount
    places: _Amount


class _Legs(msgspec.Struct):
    id: _Name
    legs: _Count


class _Pair(msgspec.Struct):
    prefill: _Name
    decode: _Name
    handed_over: _Count
    failed: _Count
    last_failure: _Text
    apart: bool
    unseeded: _Text = ""
    """Routers of earlier versions do not tell it."""


class PeerLine(msgspec.Struct, omit_defaults=True):
    """One request's line in a list (`router.telemetry.explain_store.Story.line`)."""

    id: _Name
    state: _Name
    way: _Name
    model: _Text
    ago_s: _Number
    router: _Name
    ttft_ms: _Number | None
    tt2t_ms: _Number | None
    total_ms: _Number
    client_id: _Name | msgspec.UnsetType = msgspec.UNSET
    tenant: _Name | msgspec.UnsetType = msgspec.UNSET
    slo_class: _Name | msgspec.UnsetType = msgspec.UNSET
    choice: Annotated[dict[_Name, _Text | _Number | bool | None], msgspec.Meta(max_length=16)] | msgspec.UnsetType = (
        msgspec.UNSET
    )


class _OwnTotals(msgspec.Struct):
    """The parts of one router's own data that are summed (`router.admin.overview.Overview.own`)."""

    router: _Name
    line: _Count
    late_s: _Amount
    pools: Annotated[dict[_Name, _Pool], msgspec.Meta(max_length=16)]
    instances: Annotated[list[_Legs], msgspec.Meta(max_length=16384)]
    pairs: Annotated[list[_Pair], msgspec.Meta(max_length=1024)]
    served_whole: Annotated[list[_Name], msgspec.Meta(max_length=1024)]
    lately: _Lately
    requests: Annotated[list[PeerLine], msgspec.Meta(max_length=1024)]
    in_line: _Slots = msgspec.field(default_factory=list)
    """Routers of earlier versions do not tell it: their queues count as empty."""


class _Requests(msgspec.Struct):
    """The lists in `/explain`."""

    requests: Annotated[list[PeerLine], msgspec.Meta(max_length=65536)]


_OWN: Final = msgspec.json.Decoder(_OwnTotals)
_REQUESTS: Final = msgspec.json.Decoder(_Requests)
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])


def own_word(body: bytes) -> dict[str, Any] | str:
    """A router's own data for the page; or what is wrong with the answer."""
    return _read(_OWN, body)


def listed(body: bytes) -> dict[str, Any] | str:
    """A router's list of requests; or what is wrong with the answer."""
    return _read(_REQUESTS, body)


def an_object(body: bytes) -> dict[str, Any] | str:
    """Any JSON object; or what is wrong with the answer."""
    return _read(_OBJECT, body)


def _read(decoder: msgspec.json.Decoder[Any], body: bytes) -> dict[str, Any] | str:
    try:
        said: dict[str, Any] = msgspec.to_builtins(decoder.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        because = "".join(char if char.isprintable() else "?" for char in str(error)[:200])
        return f"its answer is not as this router knows it ({because}): give all routers one version"
    return said
