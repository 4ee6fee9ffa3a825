"""A listener gets the same bytes by the fast path for a token's chunk and by the parser, however they arrive."""

from __future__ import annotations

import asyncio
import random

import pytest

from cluster.http.pool import Pool
from router.http.legs import EngineLeg, Legs
from router.http.upstream import EngineLost

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LETTERS = (b"data: x", b"\n\n", b"\n", b"\r\n", b"0\r\n\r\n", b"5\r\nx", b"\n\n\r\n", b"a" * 300, b"\0\xff")


class Transport(asyncio.Transport):
    """A transport without a peer."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return self.cut

    def abort(self) -> None:
        self.cut = True

    close = abort


class Heard:
    """A leg's listener: it collects the bytes, counts the chunks of the fast path, and keeps how the leg ended."""

    def __init__(self) -> None:
        self.bytes, self.short, self.over = b"", 0, ""

    def opened(self, status: int, content_type: str, cache_control: str) -> None:
        pass

    def body(self, data: bytes) -> None:
        self.bytes += data

    def chunk(self, framed: bytes, begin: int) -> None:
        self.short += 1
        self.bytes += framed[begin:-2]

    def happened(self, found: object) -> None:
        pass

    def ended(self) -> None:
        self.over = "ended"

    def lost(self, lost: EngineLost) -> None:
        self.over = f"lost: {lost}"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def fed(legs: Legs, pieces: list[bytes]) -> Heard:
    """The listener of a leg, after these bytes have arrived."""
    heard, pool = Heard(), Pool("http://engine", legs.connection)
    leg = EngineLeg(legs, pool, (b"",), heard, once=False, silence_s=0.0)
    connection = legs.connection(pool)
    connection.connection_made(Transport())
    leg.ride(connection)
    for piece in pieces:
        if not heard.over:
            connection.data_received(piece)
    return heard


@pytest.fixture
async def legs():
    found = Legs()
    yield found
    found.close()


async def test_the_fast_path_and_the_parser_give_the_same_bytes(legs: Legs) -> None:
    chance, short = random.Random(1), 0
    for _ in range(300):
        bodies = [
            b"".join(chance.choices(LETTERS, k=chance.randrange(1, 5))) + chance.choice((b"\n\n", b"\n\n", b""))
            for _ in range(chance.randrange(1, 8))
        ]
        chunks = [chunk(body) for body in bodies]
        together = fed(legs, [HEAD, *chunks, b"0\r\n\r\n"])
        raw = HEAD + b"".join(chunks) + b"0\r\n\r\n"
        one_by_one = fed(legs, [raw[at : at + 1] for at in range(len(raw))])
        edges = sorted(chance.randrange(len(raw)) for _ in range(4))
        anyhow = fed(legs, [raw[begin:end] for begin, end in zip([0, *edges], [*edges, len(raw)], strict=True)])
        assert together.bytes == one_by_one.bytes == anyhow.bytes == b"".join(bodies)
        assert {together.over, one_by_one.over, anyhow.over} == {"ended"}
        short += together.short
    assert short > 100, "the fast path was taken"


@pytest.mark.parametrize(
    "wrong",
    [
        b"8\r\ndata: x\n\n\r\n",  # a size too small
        b"a\r\ndata: x\n\n\r\n0\r\n\r\n",  # too large
        b"-9\r\ndata: x\n\n\r\n",
        b"ffffffffffffffffff\r\ndata: x\n\n\r\n",
        b"9;a=\n\n\r\n",
        b"9\ndata: x\n\n\r\n",
        b" 9\r\ndata: x\n\n\r\n",
    ],
)
async def test_a_malformed_chunk_loses_the_leg(legs: Legs, wrong: bytes) -> None:
    good = chunk(b"data: x\n\n")
    heard = fed(legs, [HEAD, good, good, wrong])
    assert heard.over.startswith("lost: no HTTP answer")
    assert heard.bytes.startswith(b"data: x\n\n" * 2)
