"""HTTP answers as the router's legs and the load generator read them: their end, their faults, bytes behind them."""

from __future__ import annotations

import gc

import pytest

from cluster.http.answers import HEAD_BYTES_MAX, AnswerReader

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
OPEN = b"HTTP/1.1 200 OK\r\n\r\n"


def fed(reader: AnswerReader, *pieces: bytes) -> str:
    """Feed the pieces. The fault that ended the reading, or "". `reader.bodies`: the body's bytes in the last piece."""
    for piece in pieces:
        reader.bodies.clear()
        fault = reader.feed(piece)
        if fault:
            return fault
    return ""


def test_one_answer_after_another_on_one_connection() -> None:
    reader = AnswerReader()
    for _ in range(3):
        reader.reset()
        assert not reader.heard
        assert fed(reader, WHOLE) == ""
        assert (reader.status, reader.bodies, reader.complete, reader.keep) == (200, [b"{}"], True, True)
    reader.reset()
    assert fed(reader, CHUNKED, b"3\r\nabc\r\n") == ""
    assert (reader.content_type, reader.bodies, reader.complete) == ("text/event-stream", [b"abc"], False)
    assert fed(reader, b"0\r\n\r\n") == ""
    assert reader.complete


def test_bytes_behind_an_answer_end_its_connection() -> None:
    for behind in (WHOLE, b"HTTP/1.1 2", b"x"):
        reader = AnswerReader()
        assert fed(reader, WHOLE + behind) == ""
        assert reader.complete
        assert not reader.keep
        assert b"".join(reader.bodies).startswith(b"{}")


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    reader = AnswerReader()
    assert not reader.ends_with_connection
    assert fed(reader, OPEN[:-1]) == ""
    assert not reader.ends_with_connection, "its head is not whole"
    assert fed(reader, OPEN[-1:], b"text") == ""
    assert reader.ends_with_connection
    assert not reader.complete
    reader = AnswerReader()
    fed(reader, CHUNKED)
    assert not reader.ends_with_connection


def test_an_interim_answer_is_skipped() -> None:
    reader = AnswerReader()
    early = b"HTTP/1.1 103 Early Hints\r\nContent-Type: a/b\r\nContent-Encoding: br\r\n\r\n"
    assert fed(reader, early) == ""
    assert not reader.head
    assert fed(reader, WHOLE) == ""
    assert (reader.status, reader.content_type, reader.encoding, reader.keep) == (200, "application/json", "", True)


@pytest.mark.parametrize(
    ("pieces", "fault"),
    [
        ([b"nonsense\r\n\r\n"], "Expected HTTP/"),
        ([b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"], "its status is 101"),
        ([b"HTTP/1.1 999 Odd\r\n\r\n"], "its status is 999"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n"], "its transfer encoding is 'gzip'"),
        ([b"HTTP/1.1 200 OK\r\nX: ", *[b"x" * 4096] * (HEAD_BYTES_MAX // 4096)], "its head has no end"),
        ([CHUNKED, b"0\r\nX: ", *[b"x" * 4096] * (HEAD_BYTES_MAX // 4096)], "its framing has no end"),
        ([CHUNKED, b"zz\r\n"], "Invalid character in chunk size"),
    ],
    ids=["nonsense", "101", "999", "gzip", "endless head", "endless trailer", "no chunk"],
)
def test_what_is_no_answer(pieces: list[bytes], fault: str) -> None:
    reader = AnswerReader()
    assert fault in fed(reader, *pieces)
    assert not reader.complete


def test_a_closed_reader_leaves_nothing_to_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        reader = AnswerReader()
        fed(reader, WHOLE)
        reader.close()
        del reader
        assert gc.collect() == 0
    finally:
        gc.enable()
