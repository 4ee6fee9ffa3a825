"""Qwen-Bailian's JSONL: `chat_id`, `parent_chat_id`, `timestamp` s, `input_length`, `output_length`, `type`, `turn`,
`hash_ids` of 16 tokens.

A conversation is the chain of parents; its session is the first chat's id. The reader remembers one id per chat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from loadgen.arrival import Arrival, Row
from loadgen.traces.fields import RowFault, blocks, count, json_row, number, shown, text
from loadgen.traces.ordered import from_zero, rows, spread

BLOCK_TOKENS = 16


def read(lines: Iterable[str], rng: np.random.Generator, tick_s: float | None = None) -> Iterator[Row]:
    """Arrivals of a Qwen-Bailian trace. `tick_s`: as for Mooncake; these stamps are fine, so None spreads nothing."""
    roots: dict[str, str] = {}
    return spread(from_zero(rows(lines, lambda line: _parse(line, roots))), tick_s or 0.0, rng)


def _parse(line: str, roots: dict[str, str]) -> Arrival:
    row = json_row(line)
    tokens = count(row.get("input_length"), "input_length")
    return Arrival(
        at_s=number(row.get("timestamp"), "timestamp"),
        input_tokens=tokens,
        output_tokens=count(row.get("output_length"), "output_length"),
        prefix=blocks(row.get("hash_ids"), "hash_ids", tokens, BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        turn=_turn(row.get("turn")),
        kind=text(row.get("type"), "type"),
        session=_session(row.get("chat_id"), row.get("parent_chat_id"), roots),
    )


def _turn(value: Any) -> int | None:
    turn = None if value is None else count(value, "turn")
    if turn == 0:
        raise RowFault("turn 0 is not one: turns count from 1")
    return turn


def _session(chat: Any, parent: Any, roots: dict[str, str]) -> str:
    """The id of the conversation's first chat. A parent that was not seen (cut off by sampling) counts as the first."""
    if chat is None:
        raise RowFault("chat_id is missing")
    own, before = text(chat, "chat_id"), text(parent, "parent_chat_id")
    if own is None:
        raise RowFault(f"chat_id {shown(chat)} is empty")
    root = own if before in {None, "-1"} else roots.get(str(before), str(before))
    roots[own] = root
    return root
