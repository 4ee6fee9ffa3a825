"""The harness of the fuzz tests: its seeds, its strict client, and a router that it watches."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack

import pytest
from support.fuzzing import Case, Fuzzing, NotHttp, Told, post, read_answer, router_beside, told, watched
from support.hostile_engine import TEXT, HostileEngine

from cluster.instance import Role


def test_the_fixed_cases_are_the_same_each_time() -> None:
    once, again = ([(case.seed, case.chance.random()) for case in Fuzzing().cases(5)] for _ in range(2))
    assert once == again
    assert [seed for seed, _ in once] == [0, 1, 2, 3, 4]
    assert [case.seed for case in Fuzzing(seed=7).cases(5)] == [7]
    assert [[case.seed for case in cases] for cases in Fuzzing().rounds(5, together=2)] == [[0, 1], [2, 3], [4]]


def test_time_left_brings_fresh_seeds() -> None:
    cases = Fuzzing(seconds=60).cases(2)
    seeds = [next(cases).seed for _ in range(4)]
    assert seeds[:2] == [0, 1]
    assert seeds[2] != seeds[3]


def test_what_fails_names_its_seed() -> None:
    with pytest.raises(ZeroDivisionError) as failed, Case(17):
        raise ZeroDivisionError
    assert "--fuzz-seed 17" in failed.value.__notes__[0]


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "body", "whole"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"{}", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{", b"{", False),
        (CHUNKED + b"2\r\n{}\r\n0\r\n\r\n", b"{}", True),
        (CHUNKED + b"2\r\n{}\r\n", b"{}", False),
        (CHUNKED + b"2\r\n{", b"{", False),
    ],
)
def test_the_client_tells_whole_from_cut(raw: bytes, body: bytes, whole: bool) -> None:
    answer = read_answer(raw)
    assert (answer.status, answer.body, answer.whole) == (200, body, whole)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}x",
        b"HTTP/1.1 99 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: \xff\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\nA: c\r\n\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"2\r\n{}}\r\n",
        CHUNKED + b"0\r\n\r\nHTTP/1.1",
        b"SMTP\r\n\r\n",
    ],
)
def test_the_client_refuses_what_is_malformed(raw: bytes) -> None:
    with pytest.raises(NotHttp):
        read_answer(raw)


async def test_a_router_beside_the_test_is_watched() -> None:
    async with AsyncExitStack() as stack:
        engines = [HostileEngine("p", Role.PREFILL), HostileEngine("d", Role.DECODE)]
        for engine in engines:
            await stack.enter_async_context(engine.open())
        router = await stack.enter_async_context(router_beside([engine.instance for engine in engines]))
        async with watched(router) as watch:
            request = post("/v1/completions", json.dumps({"model": "fake", "prompt": "x", "max_tokens": 5}).encode())
            answer = await told(router.endpoint, request)
    assert isinstance(answer, Told)
    assert json.loads(answer.body)["choices"][0]["text"] == TEXT
    assert watch.slowest_health_s > 0
    assert [len(engine.asked) for engine in engines] == [1, 1]
