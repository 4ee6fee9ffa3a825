"""Counting tokens in a stream whose middle is never parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadgen.stream import TAIL_BYTES, StreamContent, Tally


def event(found: Any) -> bytes:
    return b"data: " + (found if isinstance(found, bytes) else json.dumps(found).encode()) + b"\n\n"


def text(piece: str, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": finish}], **more})


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(completion: int, prompt: int = 5) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


DONE = event(b"[DONE]")


def read(*pieces: bytes) -> StreamContent:
    tally = Tally()
    for at, piece in enumerate(pieces):
        tally.feed(piece, float(at))
    return tally.end()


def test_completions() -> None:
    found = read(text("a"), text("b"), text("c", "length"), usage(3), DONE)
    assert list(found.token_s) == [0, 1, 2]
    assert (found.prompt_tokens, found.completion_tokens, found.error) == (5, 3, None)


def test_chat_role_and_empty_finish_are_no_tokens() -> None:
    found = read(delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta("stop", content=""),
                 usage(2), DONE)  # fmt: skip
    assert list(found.token_s) == [1, 2]


def test_role_with_text_is_a_token() -> None:
    assert list(read(delta(role="assistant", content="a"), delta("length", content="b"), usage(2), DONE).token_s) == [
        0,
        1,
    ]


def test_an_empty_last_piece_counts_where_usage_counts_it() -> None:
    assert len(read(text("a"), text("", "length"), usage(2), DONE).token_s) == 2
    assert len(read(text("a"), text("", "stop"), usage(1), DONE).token_s) == 1
    assert len(read(text("a"), text("", "stop"), DONE).token_s) == 1


def test_reasoning_counts() -> None:
    found = read(delta(role="assistant", content=""), delta(reasoning="hm"), delta(content="a"), delta("stop"), DONE)
    assert list(found.token_s) == [1, 2]


def test_several_events_in_one_piece_came_together() -> None:
    found = read(text("a") + text("b"), text("c", "stop") + DONE)
    assert list(found.token_s) == [0, 0, 1]


@pytest.mark.parametrize("size", [1, 2, 5, 7, 64])
def test_events_cut_anywhere(size: int) -> None:
    whole = text("a") * 200 + text("z", "length") + usage(201) + DONE
    found = read(*(whole[at : at + size] for at in range(0, len(whole), size)))
    assert len(found.token_s) == 201
    assert (found.completion_tokens, found.error) == (201, None)


def test_carriage_returns_comments_and_field_text() -> None:
    stream = b": ping\r\n\r\n" + text("data: not an event") + b": ping\n\n" + text("b", "stop") + usage(2) + DONE
    assert len(read(stream.replace(b"\n", b"\r\n")).token_s) == 2
    assert len(read(*([b": ping\n\n"] * 50), stream).token_s) == 2


def test_long_streams_keep_little() -> None:
    tally = Tally()
    for at in range(20_000):
        tally.feed(text("word"), float(at))
    assert sum(map(len, tally._tail)) < TAIL_BYTES + 200
    tally.feed(text("end", "length") + usage(20_001) + DONE, 20_000.0)
    assert len(tally.end().token_s) == 20_001


@pytest.mark.parametrize(
    ("pieces", "error", "tokens"),
    [
        ((), "no_stream", 0),
        ((b'{"choices": []}',), "no_stream", 0),
        ((text("a"), text("b")), "cut_off", 2),
        ((text("a"), event({"error": {"message": "out of memory"}}), DONE), "stream_error", 1),
        ((event({"error": "no"}), DONE), "stream_error", 0),
        ((b"data: {{{\n\n", DONE), None, 0),
        ((b"data: [1]\n\n" * 4,), "cut_off", 0),
        ((event({"choices": [1]}), event({"choices": [{"delta": 3}]}), DONE), None, 2),
        ((event({"choices": [], "usage": {"completion_tokens": "x"}}), DONE), None, 0),
        ((b"data: " + b"[" * 100_000 + b"\n\n", DONE), None, 0),
    ],
)
def test_any_bytes_give_a_result(pieces: tuple[bytes, ...], error: str | None, tokens: int) -> None:
    found = read(*pieces)
    assert (found.error, len(found.token_s)) == (error, tokens)
