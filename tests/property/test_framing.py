"""Chunked bodies, cut into any pieces: their content, and where they end."""

from __future__ import annotations

from itertools import pairwise

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ApiError
from cluster.http.framing import Chunks

PIECES = st.lists(st.binary(min_size=1, max_size=40), max_size=12)
EXTENSIONS = st.sampled_from([b"", b";a", b";a=b", b' ;a="b c"'])
TRAILERS = st.lists(st.sampled_from([b"X-A: 1\r\n", b"Digest:sha\r\n", b"x:\r\n"]), max_size=3)
CUTS = st.lists(st.integers(0, 700), max_size=8)


def framed(pieces: list[bytes], extension: bytes, trailers: list[bytes]) -> bytes:
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(each), extension, each) for each in pieces)
    return chunks + b"0" + extension + b"\r\n" + b"".join(trailers) + b"\r\n"


def fed(data: bytes, cuts: list[int], bytes_max: int = 1 << 20, *, keeps: bool = True) -> tuple[Chunks, int]:
    """The data, fed in pieces; and the number of its bytes that belong to the body."""
    chunks, used = Chunks(bytes_max, keeps=keeps), 0
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        if not chunks.done:
            used += chunks.feed(data[begin:end])
    return chunks, used


@given(PIECES, EXTENSIONS, TRAILERS, CUTS, st.binary(max_size=30))
def test_a_chunked_body_is_read_however_it_is_cut(
    pieces: list[bytes], extension: bytes, trailers: list[bytes], cuts: list[int], after: bytes
) -> None:
    data = framed(pieces, extension, trailers)
    for keeps in (True, False):
        chunks, used = fed(data + after, cuts, keeps=keeps)
        assert chunks.done
        assert used == len(data)
        assert chunks.size == len(b"".join(pieces))
        assert chunks.body.getvalue() == (b"".join(pieces) if keeps else b"")


class Other:
    """The body as httptools reads it."""

    def __init__(self) -> None:
        self.body = b""
        self.done = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.done = True


WORDS = st.sampled_from([b"1", b"a", b"0", b"\r\n", b"\r", b"\n", b";", b" ", b"x: y", b"+", b"_"])


@given(st.lists(WORDS, max_size=14))
def test_an_accepted_body_is_the_same_to_httptools(words: list[bytes]) -> None:
    """A body that is refused here may be valid for other readers. A body that is accepted here must be the same body to
    httptools (llhttp).
    """
    data = b"".join(words)
    try:
        chunks, used = fed(data, [])
    except ApiError:
        return
    if not chunks.done:
        return
    other = Other()
    parser = httptools.HttpRequestParser(other)
    parser.feed_data(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    parser.feed_data(data[:used])
    assert other.done
    assert other.body == chunks.body.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"+2\r\n{}",
        b"0x2\r\n{}",
        b" 2\r\n{}",
        b"2 \r\n{}",
        b"1_0\r\n",
        b"2\n{}",
        b"-1\r\n",
        b"\r\n",
        b"2\r\n{}x\r\n",
        b"2;\0\r\n{}",
        b"2;\n\r\n",
        b"f" * 17 + b"\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\n : x\r\n\r\n",
        b"0\r\na: \0\r\n",
    ],
)
def test_ambiguous_chunks_are_refused(data: bytes) -> None:
    for cuts in ([], list(range(len(data)))):
        with pytest.raises(ApiError) as refused:
            fed(data + b"\n" * 20, cuts)
        assert refused.value.status == 400


@given(CUTS)
def test_a_body_is_refused_at_the_chunk_size_that_exceeds_the_limit(cuts: list[int]) -> None:
    with pytest.raises(ApiError) as refused:
        fed(b"5\r\nhello\r\n6\r\n", cuts, bytes_max=10)
    assert refused.value.status == 413
    assert fed(framed([b"hello", b"hello"], b"", []), cuts, bytes_max=10)[0].done
