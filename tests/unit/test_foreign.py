"""Bytes from outside that should be JSON and are not: every reader reports them as the error that it promises."""

from __future__ import annotations

import msgspec
import pytest

from cluster import wire
from cluster.errors import ApiError
from cluster.readable import json_in
from engine.mock.asked import read_body
from engine.vllm.evictions import Evictions
from kvtransfer.asks import parse
from router.admin.peer_words import an_object
from router.fleet.probes import Unreadable, _models
from router.http.upstream import Answer
from router.request import body
from router.request.splice import Seed, seed_of
from router.telemetry.timing import told_in

DEEP = b"[" * 100_000
ODD = [DEEP, b'{"a":' * 100_000, b"\xff", b'"\xff"', b"{", b""]


@pytest.mark.parametrize("raw", ODD, ids=lambda raw: repr(raw[:6]))
def test_bytes_that_are_no_json_are_the_promised_error(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        json_in(raw)
    assert isinstance(an_object(raw), str)
    with pytest.raises(Unreadable):
        _models(Answer(200, "application/json", raw))
    with pytest.raises(ApiError) as caught:
        read_body(raw, "application/json")
    assert caught.value.status == 400
    assert told_in(raw) is None
    assert isinstance(parse(raw), str)


def test_json_is_read() -> None:
    assert json_in(b'{"a": [1]}') == {"a": [1]}


def test_events_that_nest_too_deep_are_left_out() -> None:
    with pytest.raises(msgspec.DecodeError):
        Evictions().hear(b"\x91" * 100_000)


def test_a_text_that_nests_too_deep_is_refused() -> None:
    """Such a text formerly passed unread. An engine with a larger stack would have parsed it."""
    hidden = "[" * 30_000 + '{"kv_transfer_params": {}}' + "]" * 30_000
    with pytest.raises(ApiError, match="64 levels"):
        body.strip({"vllm_xargs": hidden})


def test_json_as_text_has_a_limit_in_all() -> None:
    half = "[" + "[]," * 11_000 + "[]]"
    assert body.strip({"extra_args": half})["extra_args"]
    with pytest.raises(ApiError, match="65,536 characters"):
        body.strip({"extra_args": [half, half]})
    with pytest.raises(ApiError, match="65,536 characters"):
        body.strip({"a": {"vllm_xargs": {"vllm_xargs": " " * 70_000}}})
    words = "no JSON, and as long as it likes " * 10_000
    assert body.strip({"vllm_xargs": words}) == {"vllm_xargs": words}
    assert wire.strip({"vllm_xargs": "  7"}) == {"vllm_xargs": "  7"}


def test_long_stop_strings_cost_no_more_than_the_text() -> None:
    """Formerly, each beginning of a stop string was compared: for a megabyte that takes minutes."""
    said = {"choices": [{"index": 0, "text": " a", "token_ids": [1], "finish_reason": "length"}]}
    found = seed_of(said, "/v1/completions", ["x" * 1_000_000, "ax" * 500_000])
    assert found == "the first token may begin a stop string"
    assert isinstance(seed_of(said, "/v1/completions", ["x" * 1_000_000]), Seed)
