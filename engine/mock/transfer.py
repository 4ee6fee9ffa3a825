"""The hand-over's fields as vLLM 0.32 has them with Baton's connector, and how mocks name each other's holds.

Two mocks speak over HTTP, on the port where the producer also answers clients. ``remote_host`` and ``remote_port`` name
that port, where a real engine names its side channel. ``remote_engine_id`` is new at each life of an engine. A consumer
that names a former life gets an answer that says so, and nothing is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cluster.ids import InstanceId, RequestId, TransferId
from cluster.wire import CACHED_ONLY, EARLY, FROM_CACHE, TRANSFER
from decode.pins import pinned
from engine.mock.asked import invalid
from engine.twin.events import Hold
from engine.twin.request import HoldSource
from engine.twin.tokens import VOCABULARY
from kvtransfer.fields import handed_over, name_in
from kvtransfer.hold_marks import FIELD, slot_in

ATTEMPT: Final = 1
"""vLLM names a hold by its own id of the request, which it never uses twice: so there is one attempt of each."""
UNKNOWN_EPOCH: Final = 0
"""A consumer does not know the producer's epoch. The producer's ``engine_id`` identifies its life."""


@dataclass(frozen=True, slots=True)
class Producer:
    """One life of the engine that holds the blocks, and the address at which consumers ask it."""

    engine_id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Reference:
    """Another instance's hold, as a decode leg names it."""

    producer: Producer
    source: HoldSource


def hold_fields(
    hold: Hold, here: Producer, *, name: str | None, tp: int, cached_tokens: int, from_cache: bool = False
) -> dict[str, Any]:
    """``kv_transfer_params`` of a prefill leg's answer. `name`: the router's name for the hold. `tp`: tensor
    parallelism here. `cached_tokens`: the prompt's tokens that were in the cache here. `from_cache`: it was a source
    leg.
    """
    vouched = {} if hold.slot is None else {FIELD: hold.slot.field()}
    return {
        **vouched,
        **({FROM_CACHE: True} if from_cache else {}),
        TRANSFER: name,
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(hold.blocks)],
        "remote_engine_id": here.engine_id,
        "remote_request_id": hold.request,
        "remote_host": here.host,
        "remote_port": here.port,
        "tp_size": tp,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": hold.tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": cached_tokens,
    }


def early_name(fields: Mapping[str, Any]) -> str:
    """The name of the hold that an early leg waits for; empty: this is no early leg."""
    return (name_in(fields) or "") if EARLY in fields else ""


def early_producer(fields: Mapping[str, Any]) -> str:
    """The instance that computes an early leg's prompt; empty: the leg does not say."""
    producer = fields.get(EARLY)
    return producer if isinstance(producer, str) else ""


def wants_hold(fields: Mapping[str, Any]) -> bool:
    """Whether a leg asks to hold the prompt's blocks."""
    return bool(fields.get("do_remote_decode"))


def asks_a_source(fields: Mapping[str, Any]) -> bool:
    """Whether a leg is a source leg (`CACHED_ONLY`): it asks to hold only what is in the cache."""
    return wants_hold(fields) and fields.get(CACHED_ONLY) is True and not fields.get("do_remote_prefill")


def read_reference(fields: Mapping[str, Any]) -> Reference | None:
    """The hold that a leg is to pull; None if it names none and the prompt is computed here.

    Raises:
        ApiError: the fields have types that would break an engine.
    """
    if not fields.get("do_remote_prefill") or not fields.get("remote_block_ids"):
        return None
    engine_id, request_id, host = (_text(fields, name) for name in ("engine_id", "request_id", "host"))
    if not (engine_id and request_id and host):
        return None  # vLLM warns, and computes the prompt itself
    groups, port, tokens = fields["remote_block_ids"], fields.get("remote_port"), fields.get("remote_num_tokens") or 0
    blocks = groups[0] if isinstance(groups, list) and isinstance(groups[0], list) else groups
    if not isinstance(blocks, list) or any(type(block) is not int or block < 0 for block in blocks):
        raise invalid("kv_transfer_params.remote_block_ids", "Input should be lists of block ids")
    if type(port) is not int or not 0 < port < 1 << 16 or type(tokens) is not int or tokens < 0:
        raise invalid("kv_transfer_params", "remote_port and remote_num_tokens should be whole numbers")
    transfer = TransferId(RequestId(request_id), ATTEMPT, UNKNOWN_EPOCH)
    slot, ours = slot_in(fields), handed_over(fields)
    source = HoldSource(transfer, InstanceId(engine_id), tuple(blocks), tokens, transfer.request, slot, ours)
    return Reference(Producer(engine_id, host, port), source)


def hold_of(engine_id: str, request_id: RequestId, fields: Mapping[str, Any]) -> HoldSource:
    """A hold of this instance, as a consumer's read names it."""
    transfer = TransferId(request_id, ATTEMPT, UNKNOWN_EPOCH)
    return HoldSource(transfer, InstanceId(engine_id), (), 0, request_id, slot_in(fields))


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(f"remote_{name}")
    if value is not None and not isinstance(value, str):
        raise invalid(f"kv_transfer_params.remote_{name}", "Input should be a valid string")
    return value or ""


def pinned_token(fields: Mapping[str, Any]) -> int | None:
    """The token with which the answer must begin; None: any, also if the named token does not exist."""
    token = pinned(fields)
    return token if token is not None and token < VOCABULARY else None


def cached_at_producer(fields: Mapping[str, Any]) -> int | None:
    """The prompt's tokens that the producer had in its cache, which usage reports to the client; None: not told."""
    cached = fields.get("remote_prefill_cached_tokens")
    return cached if type(cached) is int else None
