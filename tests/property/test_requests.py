"""Requests of one connection, cut into any pieces: each is read whole, and an invalid one is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ApiError
from cluster.http.requests import Request, RequestReader

BODIES = st.lists(st.tuples(st.binary(max_size=60), st.booleans()), min_size=1, max_size=5)
CUTS = st.lists(st.integers(0, 900), max_size=8)
HEAD = b"POST /v1/x?a=b HTTP/1.1\r\nHost: y\r\nX-A: 1\r\n"


def written(body: bytes, *, chunked: bool) -> bytes:
    if not chunked:
        return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n"


def read(data: bytes, cuts: list[int], bytes_max: int = 1 << 20) -> list[Request]:
    reader, found = RequestReader(bytes_max), []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        found += reader.feed(data[begin:end])
    return found


@given(BODIES, CUTS)
def test_each_request_is_found_however_it_is_cut(bodies: list[tuple[bytes, bool]], cuts: list[int]) -> None:
    data = b"".join(written(body, chunked=chunked) for body, chunked in bodies)
    found = read(data, cuts)
    assert [each.body for each in found] == [body for body, _ in bodies]
    assert {(each.method, each.path, each.headers["x-a"], each.keep_alive) for each in found} == {
        ("POST", "/v1/x", "1", True)
    }


@given(CUTS)
def test_an_incomplete_request_is_not_returned(cuts: list[int]) -> None:
    assert read(written(b"12345", chunked=False)[:-1], cuts) == []
    assert read(written(b"12345", chunked=True)[:-1], cuts) == []


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"Content-Length: 101\r\n\r\n", 413),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n65\r\n", 413),
        (HEAD + b"Expect: a miracle\r\n\r\n", 417),
        (HEAD + b"X-Long: " + b"a" * 70_000, 431),
        (HEAD + b"X-Long: " + b"a" * 20_000 + b"\r\n\r\n", 431),
    ],
    ids=["nonsense", "two lengths", "long body", "long chunk", "expectation", "endless head", "long header"],
)
def test_invalid_requests_are_refused(data: bytes, status: int) -> None:
    with pytest.raises(ApiError) as refused:
        read(data, [100], bytes_max=100)
    assert refused.value.status == status


@pytest.mark.parametrize("chunked", [True, False])
def test_a_reader_is_midway_only_within_a_request(chunked: bool) -> None:
    reader, data = RequestReader(100), written(b"12345", chunked=chunked)
    assert not reader.midway
    for byte in data[:-1]:
        assert reader.feed(bytes([byte])) == []
        assert reader.midway
    assert len(reader.feed(data[-1:])) == 1
    assert not reader.midway


def test_an_expected_100_continue_is_reported_once() -> None:
    asks = HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    reader = RequestReader(100)
    assert not reader.asked_to_go_on()
    assert reader.feed(asks) == []
    assert [reader.asked_to_go_on(), reader.asked_to_go_on()] == [True, False]
    assert [each.body for each in reader.feed(b"{}" + asks + b"[]")] == [b"{}", b"[]"]
    assert not reader.asked_to_go_on(), "the second request's body came with its head"
