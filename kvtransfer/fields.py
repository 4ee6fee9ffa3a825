"""What the transfer fields of a request mean to Baton's connector: the hold they make, or the hold they pull. Pure and
total.

Fields come from a router, with a ticket, where a guard stands; without a guard any client can send them. vLLM's own
connector takes them unchecked, and some values end the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cluster.wire import ADAPTER, FROM_CACHE, TRANSFER
from kvtransfer.hold_marks import Slot, slot_in

NAME_CHARS_MAX: Final = 256
"""A TransferId is a request's id (128 characters), an attempt and an epoch."""

_NAMES_HOLD: Final = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port")


@dataclass(frozen=True, slots=True)
class PullFields:
    """The fields of a decode leg that can be pulled."""

    engine: str
    """The engine that holds the blocks: vLLM's id of one life of an engine."""
    request: str
    """The producer's name for the hold."""
    tokens: int
    """The number of the prompt's tokens that are held."""
    blocks: int
    """The number of blocks held."""
    slot: Slot


def name_in(fields: object) -> str | None:
    """The TransferId that a router gave a leg, as text."""
    name = fields.get(TRANSFER) if isinstance(fields, Mapping) else None
    return name if isinstance(name, str) and 0 < len(name) <= NAME_CHARS_MAX else None


def pull_in(fields: object) -> PullFields | str:
    """What a decode leg's fields permit to pull, or the reason why nothing can be pulled. Never raises."""
    if not isinstance(fields, Mapping):
        return "no transfer fields"
    engine, request, tokens = (
        fields.get(name) for name in ("remote_engine_id", "remote_request_id", "remote_num_tokens")
    )
    if not isinstance(engine, str) or not isinstance(request, str):
        return "they name no hold"
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        return "they do not say how many tokens are held"
    if "remote_host" not in fields or "remote_port" not in fields:
        return (
            "they name no address"  # vLLM takes blocks for such a pull, reads nothing, and waits for its end for ever
        )
    blocks = _blocks(fields.get("remote_block_ids"))
    if blocks is None:
        return "their block ids cannot be read"
    slot = slot_in(fields)
    if slot is None:
        return "nothing would confirm that the hold outlived our read"
    return PullFields(engine, request, tokens, blocks, slot)


def names_hold(fields: Mapping[str, Any]) -> bool:
    """Whether a decode leg's fields name a hold and its address, so that vLLM can tell the producer that it is not
    wanted. vLLM reads these fields without a look, and a missing one would end the engine.
    """
    return all(fields.get(name) is not None for name in _NAMES_HOLD)


def other_adapter(fields: object, mine: str | None) -> str:
    """Why a hold's blocks may be of another LoRA adapter than the request's; empty: both are of the same, or of the
    model itself. Never raises.

    Args:
        fields: the decode leg's.
        mine: the digest of the request's adapter here; empty: unknown; None: the request is for the model itself.
    """
    told = fields.get(ADAPTER) if isinstance(fields, Mapping) else None
    if told is None and mine is None:
        return ""
    if told is None or mine is None:
        return "one side computes with an adapter, the other without"
    if not told or not mine:
        return "it is not known which adapter it is on both sides"
    return "" if told == mine else "its adapter has other weights here"


def handed_over(fields: object) -> bool:
    """Whether the hold was made for this request; False: it holds the prompt's beginning from a peer's prefix cache."""
    return not (isinstance(fields, Mapping) and fields.get(FROM_CACHE))


def held_in(fields: Mapping[str, Any], prompt_tokens: int) -> int:
    """The number of a prompt's tokens that were computed for this request and are held by the decode leg's fields, at
    most all; all if the fields do not say.
    """
    if not handed_over(fields):
        return 0
    tokens = fields.get("remote_num_tokens")
    return min(tokens, prompt_tokens) if type(tokens) is int and tokens > 0 else prompt_tokens


def _blocks(groups: object) -> int | None:
    """The number of blocks in the only group."""
    if not isinstance(groups, list | tuple) or len(groups) != 1 or not isinstance(groups[0], list | tuple):
        return None
    ids = groups[0]
    return len(ids) if ids and all(type(each) is int and each >= 0 for each in ids) else None


def sane(fields: object) -> dict[str, Any] | None:
    """Fields that vLLM's connector can take: those of a hold or a pull, of the types it relies on; else None."""
    if not isinstance(fields, dict):
        return None
    wrong = [
        name
        for name in ("remote_engine_id", "remote_request_id", "remote_host")
        if not isinstance(fields.get(name), str | None)
    ]
    sizes = [fields.get(name, 1) for name in ("tp_size", "dcp_size", "pp_size")]
    if not isinstance(fields.get("remote_block_ids"), list | tuple | None):
        return None  # vLLM 0.32 counts them in `start_load_kv`, even where nothing is pulled
    if wrong or any(size is not None and type(size) is not int for size in sizes):
        return None
    return fields
