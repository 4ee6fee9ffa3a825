"""What counts as an engine's answer."""

from __future__ import annotations

import json

import pytest

from cluster import wire
from cluster.http.headers import printable
from cluster.instance import MODELS_MAX, models_in
from engine.vllm.metrics import parse_load
from router.core.eligibility import CHAT, COMPLETIONS
from router.core.engine_answers import (
    BEGINNING_BYTES_MAX,
    beginning,
    completion_in,
    json_type,
    object_in,
    prefilled_in,
    refusal,
)
from router.core.timing_parts import EngineTold
from router.predict.predictors import answer_tokens, cached_in
from router.request.splice import EVENT_BYTES_MAX, SaidSoFar, Seed, Splice, SpliceBroken, seed_of

TEXT = b'{"choices":[{"text":"a"}]}'
DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "raw",
    [
        TEXT,
        b'{"choices":[{"text":""}]}',
        b'{"choices":[{"message":{"content":null}}]}',
        b'{"choices":[{"text":"a"},{"text":"b"}],"usage":7,"metrics":[]}',
        '{"choices":[{"text":"é\U0001f600"}]}'.encode(),
        b' \n{"choices":[{"text":"a","message":7}]} ',
    ],
)
def test_completions(raw: bytes) -> None:
    assert isinstance(completion_in(raw), EngineTold)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{}", b"[]", b"null", b"<html>", b"\xff", DEEP, TEXT + b"x", b'{"error":{}}', b'{"choices":[]}',
        b'{"choices":null}', b'{"choices":{}}', b'{"choices":[{}]}', b'{"choices":[7]}', b'{"choices":[{"text":7}]}',
        b'{"choices":[{"text":null}]}', b'{"choices":[{"message":"a"}]}', b'{"choices":[{"text":"a"},{}]}',
        b'{"choices":[{"text":"\xff"}]}', b'{"choices":[{"text":"a"}],"usage":7,"a":"\xff"}',
        b'{"choices":[{"x":' + DEEP + b"}]}",
    ],
)  # fmt: skip
def test_no_completions(raw: bytes) -> None:
    because = completion_in(raw)
    assert isinstance(because, str)
    assert len(because) < 300


def test_no_text_of_a_model_is_repeated() -> None:
    """Messages about an answer go to a log."""
    for raw in (b'{"choices":[{"text":"secret"', b'{"text":"secret"}', b'["secret"]', b'{"choices":[{"a":"secret"}]}'):
        assert "secret" not in str(completion_in(raw))
        assert "secret" not in str(beginning(b"data: " + raw + b"\n\n"))
    assert "boom" in str(completion_in(b'{"error":{"message":"boom"}}'))


def test_no_beginning_of_a_completion_is_one() -> None:
    """So an answer that parses is complete, however the engine marked its end."""
    raw = json.dumps({"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1}}).encode()
    assert all(isinstance(completion_in(raw[:at]), str) for at in range(len(raw)))


def test_usage_and_metrics_beside_the_text_are_read() -> None:
    told = completion_in(b'{"choices":[{"text":"a"}],"usage":{"prompt_tokens":3},"metrics":{"a":1}}')
    assert isinstance(told, EngineTold)
    assert (told.usage, told.metrics, told.choices) == ({"prompt_tokens": 3}, {"a": 1}, None)


EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'


@pytest.mark.parametrize(
    ("raw", "verdict"),
    [
        (EVENT, ""),
        (b'data:{"choices":[{"delta":{}}]}\n\n', ""),
        (b": ping\n\n" + EVENT, ""),
        (b'data: {"choices":[],"x":1}\n\n' + EVENT, ""),
        (b"event: message\n" + EVENT, ""),
        (b'data: {"choices":[{"text":"a"}],"usage":7}\n\n', ""),
        (b"", None),
        (EVENT[:-1], None),
        (b": ping\n\n", None),
        (b'data: {"choices":[]}\n\n', None),
        (b"data: [DONE]\n\n", "ended before"),
        (b'data: {"error":{"message":"boom"}}\n\n', "boom"),
        (b'data: {"error":"boom","usage":7}\n\n', "boom"),
        (b"data: {}\n\n", "no completion"),
        (b'data: {"choices":[{}]}\n\n', "no completion"),
        (b"data: " + DEEP + b"\n\n", "no completion"),
        (b"data: \xff\n\n", "no completion"),
        (b": ping\n\n" * (BEGINNING_BYTES_MAX // 8 + 1), "no token"),
        (b"x" * BEGINNING_BYTES_MAX, "no token"),
        (b'data: {"choices":[{"prompt_token_ids":[' + b"1," * (BEGINNING_BYTES_MAX // 2), ""),
    ],
)
def test_beginnings_of_streams(raw: bytes, verdict: str | None) -> None:
    found = beginning(raw)
    assert found == verdict if not verdict else (found is not None and verdict in found)


def test_objects_and_refusals() -> None:
    assert object_in(b'{"a":1}') == {"a": 1}
    assert [object_in(raw) for raw in (b"[]", b"", b"\xff", DEEP)] == [None] * 4
    assert json_type("application/problem+json") == "application/problem+json"
    assert json_type("text/html") == "application/json"
    error = refusal(413, b"<html>" * 1000)
    assert (error.status, error.kind) == (413, "BadRequestError")
    assert len(error.message) < 400


def test_only_plain_words_stand_in_headers() -> None:
    assert printable("text/event-stream; charset=utf-8") == "text/event-stream; charset=utf-8"
    assert [printable(word) for word in ("a\r\nb", "a\nb", "é", "a\0", "\x7f", "a" * 257)] == [""] * 6


@pytest.mark.parametrize("count", [10**30, 1 << 31, -1, True, 1.5, "7", None, [1], {}])
def test_values_that_are_no_counts(count: object) -> None:
    assert answer_tokens({"completion_tokens": count}) is None
    assert cached_in({"prompt_tokens_details": {"cached_tokens": count}}) is None
    held = wire.TransferFields({"remote_num_tokens": count, "remote_prefill_cached_tokens": count})
    assert (held.tokens, held.cached_tokens) == (0, None)


def test_engines_words_are_kept_short() -> None:
    assert wire.first_finish_reason({"choices": [{"finish_reason": "r" * 50_000}]}) == "r" * wire.REASON_CHARS_MAX
    assert len(wire.TransferFields({"remote_engine_id": "e" * 50_000}).producer) == wire.ENGINE_ID_CHARS_MAX


@pytest.mark.parametrize("token", [True, -1, 1 << 31, 10**30, 1.0, "7", None])
def test_a_value_that_is_no_token_is_no_seed(token: object) -> None:
    answer = {"choices": [{"text": "a", "token_ids": [token]}]}
    assert isinstance(seed_of(answer, COMPLETIONS, ()), str)
    assert isinstance(seed_of({"choices": [{"text": "a", "token_ids": [7]}]}, COMPLETIONS, ()), Seed)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_splice_keeps_no_event_without_an_end(path: str) -> None:
    seam = Splice(path, SaidSoFar("a", role=False))
    assert seam.feed(b"data: " + b"x" * (EVENT_BYTES_MAX - 6)) == b""
    with pytest.raises(SpliceBroken, match="more than"):
        seam.feed(b"x")


def test_a_splice_breaks_at_events_that_are_no_json() -> None:
    for event in (b"data: " + DEEP, b'data: {"choices":[{"text":"\xff"}]}', b"data: \xff"):
        with pytest.raises(SpliceBroken):
            Splice(COMPLETIONS, SaidSoFar("a", role=False)).feed(event + b"\n\n")


def test_an_engines_models_are_those_with_names() -> None:
    good = {"id": "fake", "max_model_len": 9}
    listed = {"data": [{"id": 7}, {"id": None}, {}, 7, None, {"id": ""}, {"id": "x" * 600}, good]}
    assert models_in(listed) == (good,)
    assert [models_in({"data": odd}) for odd in (None, 7, "x", {"id": "a"})] == [()] * 4
    assert len(models_in({"data": [good] * (MODELS_MAX + 1)})) == MODELS_MAX


def test_impossible_loads_are_read_as_0() -> None:
    load = parse_load(
        "vllm:num_requests_running 1e300\nvllm:num_requests_waiting 4294967296\nvllm:prompt_tokens_total 1e16\n"
        'vllm:cache_config_info{block_size="999999999999",num_gpu_blocks="999999999999"} 1\n'
    )
    assert (load.running, load.waiting, load.prompt_tokens, load.kv_tokens) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("blocks", "held"), [(list(range(2000)), True), ("7" * 5000, False), ({"7": [7] * 2000}, False), (7, False)]
)
@pytest.mark.parametrize("reads_blocks", [True, False])
def test_a_hold_has_a_list_of_blocks_read_or_unread(blocks: object, held: bool, reads_blocks: bool) -> None:
    hold = {"do_remote_prefill": True, "remote_block_ids": blocks, "remote_engine_id": "e" * 5000}
    raw = json.dumps({"choices": [{"text": "a"}], "kv_transfer_params": hold}).encode()
    fields = prefilled_in(raw, reads_blocks=reads_blocks)
    assert fields is not None
    assert (wire.read_transfer(fields) is not None) is held
