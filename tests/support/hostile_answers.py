"""Malformed and strange answers of an engine, made from a seed: heads, framings, bodies and streams."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

from support.hostile_engine import DONE, FIRST_TOKEN, LAST_CHUNK, Asked, Script, chunk, event, honest, whole

_STATUSES = (
    "200 OK", "200 OK", "200 OK", "200 OK", "200", "201 Created", "204 No Content", "206 Partial Content", "302 Found",
    "304 Not Modified", "400 Bad Request", "404 Not Found", "418 x", "429 Too Many Requests", "500 x", "503 x",
    "599 x", "600 x", "999 x", "099 x", "000 x", "99 x", "1000 x", "-1 x", "100 Continue", "101 Switching Protocols",
    "103 Early Hints", "2OO OK", "", " 200",
)  # fmt: skip
_VERSIONS = ("HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "ICE/1.0", "SMTP", "")
_LINES = (
    "Content-Type: text/html", "Content-Type: text/event-stream", "Content-Type: application/json",
    "Content-Type: application/json\x0bx", "Content-Type: \xff\xfe", "Content-Type: a\r\n folded: b",
    "Content-Type: a\nX-Evil: b", "Content-Type: a\rX-Evil: b", "Content-Type: a\0b", "Content-Type:",
    "Content-Type: " + "a" * 3000, "Cache-Control: no-cache", "Cache-Control: \xe9", "Content-Encoding: gzip",
    "Content-Encoding: identity", "Content-Encoding: br, gzip", "Content-Length: 5", "Content-Length: -1",
    "Content-Length: 99999999999", "Content-Length: 18446744073709551616", "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: gzip", "Transfer-Encoding: chunked, identity",
    "Transfer-Encoding : chunked", "Connection: close", "Connection: upgrade", "Connection: keep-alive",
    "Upgrade: h2c", "Trailer: X", "Set-Cookie: a=b", "X-Request-Id: another", "X: " + "y" * 9000, ": x", "no colon",
    "Content-Disposition: attachment", "Location: http://127.0.0.1:9/",
)  # fmt: skip
_WORDS: tuple[bytes, ...] = (
    b"", b"{}", b"[]", b"null", b"7", b'"x"', b"<html>no</html>", b'{"error":{"message":"x"}}', b'{"choices":[]}',
    b'{"choices":{}}', b'{"choices":[7]}', b'{"choices":[{}]}', b'{"choices":[null],"usage":7}', b"\xff\xfe", b"\0",
    b"[" * 5000, b'{"a":' * 5000, b"9" * 400, b"1e999", b'{"choices":[{"text":"\xff"}]}',
    b'{"choices":[{"text":"\\ud800","finish_reason":"length"}]}',
)  # fmt: skip
_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 10**30, 1.5, 1e308, "", "x", "1" * 300, [], {}, [[]], [None], {"a": {"b": 1}}, "\r\nX: y",
)  # fmt: skip
_EVENTS = (
    b": ping\n\n", b"\n\n", b"data: {}\n\n", b"data:\n\n", b"data: [DONE]\n\n", b"event: x\n\n", b"data: 7\n\n",
    b'data: {"error":{"message":"boom"}}\n\n', b'data: {"choices":[]}\n\n', b'data: {"choices":[{}]}\n\n',
    b'data: {"choices":[{"text":"data: [DONE]"}]}\n\n', b"data: <html>\n\n", b"id: 1\nretry: 5\n\n", b"data: \xff\n\n",
    b'data: {"choices":[{"index":0,"text":7}]}\n\n', b"x" * 5000, b"data: " + b"[" * 3000 + b"\n\n", b"\r\n\r\n",
    b'data: {"choices":[],"usage":{"prompt_tokens":1e300,"completion_tokens":-5}}\n\n', DONE, DONE, DONE,
)  # fmt: skip


def hostile(chance: random.Random, asked: Asked, name: str) -> Script:
    """A malformed or strange answer of the engine `name` to this request."""
    if chance.random() < 0.03:
        return Script(_long(chance), "close")
    make = chance.choice((_mutated, _mutated, _odd_body, _odd_stream, _odd_fields, _odd_head, _cut, _behind, _noise))
    raw = make(chance, asked, name)
    if chance.random() < 0.2:
        raw = raw[: chance.randrange(len(raw) + 1)]
    return Script(_split(chance, raw), chance.choice(("keep", "close", "close", "close", "reset", "reset", "hang")))


def _long(chance: random.Random) -> tuple[bytes, ...]:
    """An answer with a body, an event, a head or a trailer that is larger than a router keeps."""
    piece = chance.choice(
        (b"x" * 65536, b"data: x\n\n" * 6000, b": ping\n\n" * 6000, b"\r\n" * 30000, b"X: y\r\n" * 9000)
    )
    kind = chance.choice((b"application/json", b"text/event-stream"))
    start = b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\n"
    way = chance.randrange(4)
    if way == 0:
        return (start, *[piece] * 20)
    if way == 1:
        return (start + b"\r\n", *[piece] * 20)
    first = chance.choice((b"", chunk(event("one ")), chunk(b'data: {"choices":[{"text":"')))
    if way == 2:
        return (start + b"Transfer-Encoding: chunked\r\n\r\n" + first, *[chunk(piece)] * 20)
    return (start + b"Transfer-Encoding: chunked\r\n\r\n" + first + b"0\r\n", *[piece] * 20)


def _split(chance: random.Random, raw: bytes) -> tuple[bytes, ...]:
    """The bytes in pieces, cut at random places."""
    cuts = sorted(chance.randrange(len(raw) + 1) for _ in range(chance.choice((0, 0, 1, 3, 8))))
    edges = [0, *cuts, len(raw)]
    return tuple(raw[begin:end] for begin, end in pairwise(edges) if end > begin)


def _mutated(chance: random.Random, asked: Asked, name: str) -> bytes:
    """The right answer with some bytes changed."""
    raw = bytearray(honest(asked, name))
    for _ in range(chance.choice((1, 2, 5))):
        at = chance.randrange(len(raw))
        change = chance.randrange(3)
        if change == 0:
            raw[at] = chance.randrange(256)
        elif change == 1:
            del raw[at : at + chance.randrange(1, 20)]
        else:
            raw[at:at] = chance.choice((b"\r\n", b"\n\n", b"\0", b"0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"ffff\r\n"))
        raw = raw or bytearray(b"x")
    return bytes(raw)


def _odd_body(chance: random.Random, asked: Asked, name: str) -> bytes:
    return _framed(chance, chance.choice(_WORDS), "application/json")


def _odd_stream(chance: random.Random, asked: Asked, name: str) -> bytes:
    chat = "chat" in asked.path
    events = [
        event(chance.choice(("one ", "two ", "\U0001f600", "")), chat=chat, end=chance.choice((None, None, "stop")))
        if chance.random() < 0.5
        else chance.choice(_EVENTS)
        for _ in range(chance.randrange(12))
    ]
    if chance.random() < 0.5:
        events.append(DONE)
    return _framed(chance, b"".join(events), "text/event-stream", events)


def _odd_fields(chance: random.Random, asked: Asked, name: str) -> bytes:
    """A completion in which some fields have odd values."""
    fields: dict[str, Any] = {
        "id": "x",
        "choices": [{"index": 0, "text": "one ", "finish_reason": "length", "token_ids": [FIRST_TOKEN],
                     "message": {"role": "assistant", "content": "one "}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
        "metrics": {"queue_time_ms": 1, "time_to_first_token_ms": 2, "generation_time_ms": 3},
        "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": name,
                               "remote_request_id": "r", "remote_num_tokens": 7, "remote_prefill_cached_tokens": 1},
    }  # fmt: skip
    for _ in range(chance.choice((1, 1, 3))):
        place: Any = fields
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and chance.random() < 0.75:
                place = place[key]
                continue
            place[key] = chance.choice(_ODD)
            break
    return _framed(chance, json.dumps(fields).encode(), "application/json")


def _odd_head(chance: random.Random, asked: Asked, name: str) -> bytes:
    lines = [f"{chance.choice(_VERSIONS)} {chance.choice(_STATUSES)}"]
    lines += [chance.choice(_LINES) for _ in range(chance.randrange(5))]
    body = honest(asked, name).partition(b"\r\n\r\n")[2]
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


def _cut(chance: random.Random, asked: Asked, name: str) -> bytes:
    raw = honest(asked, name)
    return raw[: chance.randrange(len(raw))]


def _behind(chance: random.Random, asked: Asked, name: str) -> bytes:
    """The right answer with more bytes after its end."""
    behind = (b"x", b"\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le", whole(b'{"choices":[{"text":"evil"}]}'), LAST_CHUNK)
    return honest(asked, name) + chance.choice(behind)


def _noise(chance: random.Random, asked: Asked, name: str) -> bytes:
    return chance.choice((b"", b"HTTP/1.1 200 OK\r\n\r\n")) + chance.randbytes(chance.randrange(300))


def _framed(chance: random.Random, body: bytes, kind: str, events: list[bytes] | None = None) -> bytes:
    """An answer with a length, with a wrong length, in chunks with or without an end, or ended by the connection."""
    start = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n".encode()
    way = chance.randrange(5)
    if way == 0:
        return start + b"Content-Length: %d\r\n\r\n" % len(body) + body
    if way == 1:
        return start + b"Content-Length: %d\r\n\r\n" % max(0, len(body) + chance.randrange(-9, 10)) + body
    if way == 2:
        return start + b"\r\n" + body
    chunks = b"".join(map(chunk, filter(None, [body] if events is None else events)))
    return start + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + (LAST_CHUNK if way == 3 else b"")
