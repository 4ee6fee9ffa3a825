"""Malformed and strange heads and framings of a client, from a seed: request lines, headers, lengths, chunks, trailers.

A case knows which bytes are a body by RFC 9112. It hides whole requests in bodies, for a path that no other case has.
A router that serves such a request splits the bytes otherwise than a proxy before it would (request smuggling).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import pairwise

_HIDDEN = (
    b"POST /v1/hidden-000000000 HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 16\r\n\r\n"
)
_HIDDEN += b'{"model":"fake"}'
LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

_TARGETS = (
    b"/v1/completions", b"/v1/completions", b"/v1/completions?x=1", b"/v1/%63ompletions", b"/v1/chat/completions",
    b"/v1/embeddings", b"/tokenize", b"/v1/other", b"/v1/../sleep", b"/v1/%2e%2e/sleep", b"//v1/completions",
    b"http://x/v1/completions", b"*", b"x:443", b"/v1/completions#x", b"/\xff", b"/v1/\x00", b"/v1/ completions", b"",
    b"/v1/" + b"x" * 17_000, b"/health", b"/v1/models", b"/v1/models/%00", b"/ready", b"/metrics", b"/openapi.json",
    b"/v1/responses/x/../y", b"/v1/models/" + b"%2F" * 50,
)  # fmt: skip
_METHODS = (
    b"POST",
    b"POST",
    b"POST",
    b"POST",
    b"GET",
    b"PUT",
    b"OPTIONS",
    b"CONNECT",
    b"TRACE",
    b"post",
    b"P\xc3",
    b"",
)
_VERSIONS = (b"HTTP/1.1",) * 9 + (
    b"HTTP/1.0",
    b"HTTP/0.9",
    b"HTTP/2.0",
    b"HTTP/1.10",
    b"HTTP/1.1 ",
    b"http/1.1",
    b"",
    b"X",
)
_LINES = (
    b"Connection: close", b"Connection: keep-alive", b"Connection: upgrade", b"Upgrade: websocket", b"Upgrade: h2c",
    b"HTTP2-Settings: AAMAAABk", b"Expect: 100-continue", b"Expect: 200-ok", b"Content-Encoding: gzip", b"Trailer: X",
    b"X: " + b"y" * 9_000, b"X: " + b"y" * 17_000, b": x", b"no colon", b"X\x00: y", b"X: \x00", b"X: a\rb", b"X : y",
    b" folded", b"\tfolded", b"X: \xff", b"\xff: x", b"X-Request-Id: " + b"z" * 300, b"X-Request-Id: a b",
    b"TE: trailers", b"Authorization: Bearer x", b"X-SLO-Class: \xc3\xa9", b"traceparent: 00-0-0-00", b"Host: y",
    b"Host:", b"Accept: */*", b"Content-Type: text/plain", b"Content-Type: application/json;charset=utf-16",
    b"Keep-Alive: timeout=99999999999", b"X-data-parallel-rank: 1", b"Cookie: " + b"c=d; " * 500,
    b"Sec-WebSocket-Key: x", b"Max-Forwards: 0",
)  # fmt: skip
_LENGTHS = (  # `%d` is a length
    b"Content-Length: %d", b"Content-Length: +%d", b"Content-Length: 0%d", b"Content-Length: %d, %d",
    b"Content-Length : %d", b"Content-Length:\x0b%d", b"content-length: %d", b"Content-Length: %d\r\n ",
    b"Content-Length: %d;", b"Content-Length: 0x%x", b"\x00Content-Length: %d", b"Content-Length: %d\x00",
    b"X: y\nContent-Length: %d", b"X: y\rContent-Length: %d", b"Content_Length: %d", b"Content-Length: -%d",
    b"Content-Length: %d0000000000000000000",
)  # fmt: skip
_CODINGS = (
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: xchunked", b"Transfer-Encoding : chunked",
    b"transfer-encoding:chunked", b"Transfer-Encoding:\x0bchunked", b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding: identity, chunked", b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x", b'Transfer-Encoding: "chunked"',
    b"X: y\nTransfer-Encoding: chunked", b"Transfer-Encoding:\r\n chunked", b"Transfer-Encoding: CHUNKED",
    b"Transfer_Encoding: chunked", b"Transfer-Encoding: chunked\x00", b"Transfer-Encoding:",
    b"X: y\rTransfer-Encoding: chunked",
)  # fmt: skip
_SIZES = (
    b"%x\r\n", b"%X\r\n", b"0%x\r\n", b"%x;a=b\r\n", b'%x;a="\r\n"\r\n', b"%x \r\n", b" %x\r\n", b"0x%x\r\n",
    b"+%x\r\n", b"-%x\r\n", b"%x\n", b"%x\r", b"%x;" + b"e" * 900 + b"\r\n", b"%x;" + b"e" * 2_000 + b"\r\n",
    b"0000000000000000%x\r\n", b"1000000000000000%x\r\n", b"%x\x00\r\n", b"\r\n%x\r\n", b"%x_0\r\n", b"%x\t;\r\n",
)  # fmt: skip
_TRAILERS = (
    b"", b"X: y\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"X: " + b"y" * 9_000 + b"\r\n",
    b"X: y\r\n" * 3_000, b"X : y\r\n", b"X: y\n", b": y\r\n", b"no colon\r\n", b"X: \x00\r\n", b" folded\r\n",
    b"\xff: x\r\n",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Said:
    """What one client sends on one connection, in these pieces."""

    pieces: tuple[bytes, ...]
    hidden: str
    """The path of the requests that are hidden in the bodies; no other case has it."""
    resets: bool
    """Whether the client resets the connection after the last piece."""

    rude: bool
    """Whether the client itself may cause the loss of answers: it resets the connection, or it sends more after a head
    that ends the connection (`Connection: close`, HTTP/1.0, no HTTP at all).
    """


def said(chance: random.Random) -> Said:
    """Some requests on one connection, cut into pieces. The last request is right."""
    asked = [_request(chance) for _ in range(chance.choice((1, 1, 1, 2, 5)))]
    raw = b"".join(each for each, _ in asked) + LAST
    resets = chance.random() < 0.1
    if resets:
        raw = raw[: chance.randrange(len(raw) + 1)]
    number = b"%09d" % chance.randrange(10**9)
    raw = raw.replace(b"hidden-000000000", b"hidden-" + number)
    cuts = sorted(chance.randrange(len(raw) + 1) for _ in range(chance.choice((0, 0, 1, 3, 40))))
    edges = [0, *cuts, len(raw)]
    return Said(
        tuple(raw[a:b] for a, b in pairwise(edges) if a < b),
        f"/v1/hidden-{number.decode()}",
        resets,
        resets or any(strange for _, strange in asked),
    )


def _request(chance: random.Random) -> tuple[bytes, bool]:
    """A request, and whether its head is strange in more than the framing of its body."""
    strange = chance.random() < 0.5
    method = chance.choice(_METHODS) if strange and chance.random() < 0.3 else b"POST"
    target = chance.choice(_TARGETS) if strange else chance.choice(_TARGETS[:7])
    version = chance.choice(_VERSIONS) if strange and chance.random() < 0.4 else b"HTTP/1.1"
    lines = [b"Host: x", b"Content-Type: application/json"]
    lines += [chance.choice(_LINES) for _ in range(chance.choice((0, 0, 1, 3)))] if strange else []
    if chance.random() < 0.03:
        lines += [b"a:"] * chance.choice((100, 130, 15_000))
    framing, body = chance.choice((_by_length, _in_chunks, _in_both_ways, _in_both_ways))(chance)
    lines += framing
    chance.shuffle(lines)
    head = method + b" " + target + b" " + version + b"\r\n" + b"\r\n".join(lines) + b"\r\n\r\n"
    if chance.random() < 0.05:
        at = chance.randrange(len(head))
        head = head[:at] + chance.choice((b"\n", b"\r", b"\x00", b" ", b"\xff", b"\r\n", b":", b"")) + head[at + 1 :]
        body, strange = body.replace(_HIDDEN, b""), True  # where the body begins is no longer defined
    return head + body, strange


def _content(chance: random.Random) -> bytes:
    return json.dumps({"model": "fake", "prompt": "x" * chance.choice((1, 1, 100, 70_000)), "max_tokens": 2}).encode()


def _by_length(chance: random.Random) -> tuple[list[bytes], bytes]:
    body = _content(chance)
    if chance.random() < 0.4:
        body = b" " * chance.randrange(5) + _HIDDEN
    return [b"Content-Length: %d" % len(body)], body


def _chunk(data: bytes, size: bytes = b"%x\r\n") -> bytes:
    return size.replace(b"%X", b"%x") % len(data) + data + b"\r\n"


def _in_chunks(chance: random.Random) -> tuple[list[bytes], bytes]:
    """A body in chunks. Malformed chunks have no hidden request: readers may split them differently."""
    body, right = _content(chance), chance.random() < 0.5
    pieces = [body[at : at + 40_000] for at in range(0, len(body), 40_000)]
    if chance.random() < 0.05:
        pieces = [body[at : at + 1] for at in range(len(body))]
    if right:
        hidden = _chunk(_HIDDEN) if chance.random() < 0.5 else b""
        raw = b"".join(map(_chunk, pieces)) + hidden + b"0\r\n" + chance.choice(_TRAILERS[:2]) + b"\r\n"
    else:
        raw = b"".join(_chunk(piece, chance.choice((*_SIZES, b"%x\r\n"))) for piece in pieces)
        raw += chance.choice((b"0\r\n", b"00\r\n", b"0;x\r\n", b"0\n", b"", b"-0\r\n")) + chance.choice(_TRAILERS)
        raw += chance.choice((b"\r\n", b"\n", b"", b"\r\r\n"))
    return [b"Transfer-Encoding: chunked"], raw


def _in_both_ways(chance: random.Random) -> tuple[list[bytes], bytes]:
    """A request with both a length and a coding, one of them perhaps malformed. By one of the two, the hidden request
    is part of the body; by the other, it follows the body's end. So the router has to refuse the request, or to ignore
    the malformed line.
    """
    if chance.random() < 0.5:  # the length includes the hidden request, the chunks end before it
        raw = b"0\r\n\r\n" + _HIDDEN
        return [b"Content-Length: %d" % len(raw), chance.choice(_CODINGS)], raw
    raw = _chunk(_content(chance) + _HIDDEN) + b"0\r\n\r\n"  # the chunks include it, the length ends before it
    line = chance.choice(_LENGTHS)
    return [b"Transfer-Encoding: chunked", line % ((raw.index(_HIDDEN),) * line.count(b"%"))], raw
