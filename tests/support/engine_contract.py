"""What the router, the agent and the doctor need of an engine, as checks on a running pair of vLLM engines or mocks.

Mocks and vLLM get the same checks, so that a difference between them is seen: tests/contract/test_engine.py runs the
checks on mocks, tests/live/test_engine_contract.py on vLLM. Each check leaves the engines idle.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Callable
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from support.cluster import within
from support.engine_pair import CHAT, COMPLETIONS, IDLE_S, STORY, Open, Pair, ask, get, load, settles, stream
from support.tickets import GuardedUrl

from cluster import wire
from kvtransfer.hold_marks import FIELD

Check = Callable[[Pair], None]
CHECKS: list[Check] = []


def check(one: Check) -> Check:
    """Make a function part of the contract."""
    CHECKS.append(one)
    return one


# -- requests other than generation --


@check
def tells_that_it_is_well(pair: Pair) -> None:
    for url in pair.both:
        assert get(url, "/health") == (200, b"")
        status, raw = get(url, "/version")
        assert status == 200
        assert json.loads(raw)["version"].startswith("0.32")


@check
def lists_its_model(pair: Pair) -> None:
    for url in pair.both:
        status, raw = get(url, "/v1/models")
        listed = json.loads(raw)
        assert (status, listed["object"]) == (200, "list")
        (card,) = listed["data"]
        known = {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"}
        assert set(card) == known
        assert (card["id"], card["object"], card["owned_by"]) == (pair.model, "model", "vllm")
        assert card["max_model_len"] > 1


NAMES = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "num_preemptions_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "external_prefix_cache_queries_total", "external_prefix_cache_hits_total", "time_to_first_token_seconds_count",
    "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
    "e2e_request_latency_seconds_count", "request_time_per_output_token_seconds_sum",
}  # fmt: skip
SOURCES = {"local_compute", "local_cache_hit", "external_kv_transfer"}
REASONS = {"stop", "length", "abort", "error"}
NIXL = {"nixl_xfer_time_seconds_sum", "nixl_bytes_transferred_sum", "nixl_num_failed_transfers_total",
        "nixl_num_failed_notifications_total", "nixl_num_kv_expired_reqs_total",
        "nixl_num_notifications_after_expiry_total"}  # fmt: skip


@check
def counts_in_vllms_words(pair: Pair) -> None:
    pair.hand_over()
    for url in pair.both:
        lines = [line for line in get(url, "/metrics")[1].decode().splitlines() if line.startswith("vllm:")]
        label = f'engine="0",model_name="{pair.model}"'
        mine = {line.partition("{")[0].removeprefix("vllm:") for line in lines if label in line}
        assert mine >= NAMES | NIXL, sorted((NAMES | NIXL) - mine)
        for name, tag, values in (
            ("prompt_tokens_by_source_total", "source", SOURCES),
            ("request_success_total", "finished_reason", REASONS),
        ):
            told = {value for value in values for line in lines if name in line and f'{tag}="{value}"' in line}
            assert told == values
    settles(pair)


@check
def counts_what_it_does(pair: Pair) -> None:
    before = _counts(pair.decode)
    status, answer = ask(pair.decode, COMPLETIONS, pair.body())
    assert status == 200
    within(IDLE_S, lambda: _counts(pair.decode)["request_success_total"] > before["request_success_total"])
    after, usage = _counts(pair.decode), answer["usage"]
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == usage["prompt_tokens"]
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == usage["completion_tokens"] == 6
    settles(pair)


def _counts(url: str) -> dict[str, float]:
    text = get(url, "/metrics")[1].decode()
    wanted = dict.fromkeys(("prompt_tokens_total", "generation_tokens_total", "request_success_total"), 0.0)
    for line in text.splitlines():
        name = line.partition("{")[0].removeprefix("vllm:")
        if name in wanted and (name != "request_success_total" or 'finished_reason="length"' in line):
            wanted[name] += float(line.rpartition(" ")[2])
    return wanted


@check
def counts_tokens(pair: Pair) -> None:
    status, told = ask(pair.decode, "/tokenize", {"model": pair.model, "prompt": STORY})
    assert status == 200
    assert set(told) == {"count", "max_model_len", "tokens", "token_strs"}
    assert told["count"] == len(told["tokens"]) > 0
    _, answer = ask(pair.decode, COMPLETIONS, pair.body(prompt=STORY, max_tokens=1))
    assert answer["usage"]["prompt_tokens"] == told["count"]


@check
def knows_its_paths(pair: Pair) -> None:
    for path, method, status in (("/nowhere", "GET", 404), (COMPLETIONS, "GET", 405), ("/health", "POST", 405)):
        got, raw = get(pair.prefill, path, method)
        assert got == status
        assert json.loads(raw)["detail"]


# -- answers --

ANSWER = {"id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
          "kv_transfer_params", "ec_transfer_params", "metrics"}  # fmt: skip
CHOICE = {"index", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"}
USAGE = {"prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details"}


@check
def answers_a_completion(pair: Pair) -> None:
    for url in pair.both:
        status, answer = ask(url, COMPLETIONS, pair.body())
        assert status == 200
        assert set(answer) == ANSWER
        assert (answer["object"], answer["model"]) == ("text_completion", pair.model)
        (choice,) = answer["choices"]
        assert set(choice) == CHOICE | {"text", "prompt_logprobs", "prompt_token_ids"}
        assert choice["text"]
        assert (choice["index"], choice["finish_reason"], choice["token_ids"]) == (0, "length", None)
        _check_usage(answer["usage"], 6)
        assert answer["kv_transfer_params"] is None
        timing = answer["metrics"]
        assert timing["time_to_first_token_ms"] > 0
        assert timing["queue_time_ms"] >= 0
        assert timing["generation_time_ms"] > 0


def _check_usage(usage: dict[str, Any], completion_tokens: int) -> None:
    assert set(usage) >= USAGE
    assert usage["completion_tokens"] == completion_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + completion_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


@check
def answers_a_chat(pair: Pair) -> None:
    status, answer = ask(pair.decode, CHAT, pair.chat())
    assert status == 200
    assert set(answer) == ANSWER | {"prompt_logprobs", "prompt_token_ids", "prompt_text"}
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert set(choice) == CHOICE | {"message"}
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert set(choice["message"]) == {
        "role",
        "content",
        "refusal",
        "annotations",
        "audio",
        "function_call",
        "reasoning",
    }
    _check_usage(answer["usage"], 6)


@check
def streams_a_completion(pair: Pair) -> None:
    body = pair.body()
    kind, events = stream(pair.decode, COMPLETIONS, body)
    assert kind == "text/event-stream; charset=utf-8"
    assert 1 <= len(events) <= 6, "a server that is late may send several tokens in one event"
    for event in events:
        last = {"system_fingerprint"} if event is events[-1] else set()
        assert set(event) == {"id", "object", "created", "model", "choices"} | last
        (choice,) = event["choices"]
        known = {"index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"}
        assert set(choice) == known
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    _, whole = ask(pair.decode, COMPLETIONS, body)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]


@check
def streams_a_chat(pair: Pair) -> None:
    body = pair.chat()
    _, events = stream(pair.decode, CHAT, body)
    first, *rest = events
    assert set(first) == {"id", "object", "created", "model", "choices", "prompt_token_ids", "prompt_text"}
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    for event in rest:
        known = {"index", "delta", "logprobs", "finish_reason", "token_ids"}
        assert set(event["choices"][0]) - {"stop_reason"} == known
        assert set(event["choices"][0]["delta"]) <= {"content", "reasoning"}
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    _, whole = ask(pair.decode, CHAT, body)
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in rest)
    assert text == whole["choices"][0]["message"]["content"]


@check
def tells_the_usage_of_a_stream(pair: Pair) -> None:
    for path, body in ((COMPLETIONS, pair.body()), (CHAT, pair.chat())):
        _, events = stream(pair.decode, path, {**body, "stream_options": {"include_usage": True}})
        assert events[-1]["choices"] == []
        _check_usage(events[-1]["usage"], 6)
        assert all("usage" not in event for event in events[:-1])
        running = {"include_usage": True, "continuous_usage_stats": True}
        _, events = stream(pair.decode, path, {**body, "stream_options": running, "return_token_ids": True})
        told = [event["usage"]["completion_tokens"] for event in events[:-1]]
        sent = [len(event["choices"][0].get("token_ids") or []) for event in events[:-1]]
        assert told == list(accumulate(sent)), "as many as have come, also where a late server sends two in one event"
        assert sent[0] == 0 if path == CHAT else sent[0] > 0
        assert told[-1] == 6


@check
def gives_token_ids(pair: Pair) -> None:
    body = pair.body(return_token_ids=True)
    _, whole = ask(pair.decode, COMPLETIONS, body)
    (choice,) = whole["choices"]
    assert len(choice["token_ids"]) == 6
    assert len(choice["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    _, events = stream(pair.decode, COMPLETIONS, body)
    choices = [event["choices"][0] for event in events]
    assert [token for each in choices for token in each["token_ids"]] == choice["token_ids"]
    assert choices[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert all(each["prompt_token_ids"] is None for each in choices[1:])
    _, events = stream(pair.decode, CHAT, pair.chat(return_token_ids=True))
    assert events[0]["prompt_token_ids"]
    assert sum(len(event["choices"][0].get("token_ids") or []) for event in events) == 6


@check
def takes_token_ids(pair: Pair) -> None:
    body = pair.body(prompt=list(range(40, 73)), return_token_ids=True)
    status, answer = ask(pair.decode, COMPLETIONS, body)
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 33)
    assert answer["choices"][0]["prompt_token_ids"] == body["prompt"]


@check
def answers_several_choices(pair: Pair) -> None:
    _, answer = ask(pair.decode, COMPLETIONS, pair.body(prompt=["one", "two"]))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    _, answer = ask(pair.decode, COMPLETIONS, pair.body(n=2, temperature=1.0))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 12


@check
def carries_the_clients_id(pair: Pair) -> None:
    name = f"mine-{uuid.uuid4().hex[:8]}"
    assert ask(pair.decode, COMPLETIONS, pair.body(), X_Request_Id=name)[1]["id"] == f"cmpl-{name}"
    assert ask(pair.decode, CHAT, pair.chat(), X_Request_Id=name)[1]["id"] == f"chatcmpl-{name}"


# -- refusals --

BAD: dict[str, tuple[bytes | dict[str, Any], str, int]] = {
    "not JSON": (b"{'a': 1}", "application/json", 400),
    "an array": (b"[1]", "application/json", 400),
    "content type": (b"{}", "text/plain", 400),
    "prompt of a wrong type": ({"prompt": {"a": 1}}, "application/json", 400),
    "max_tokens of a wrong type": ({"max_tokens": "many"}, "application/json", 400),
    "max_tokens 0": ({"max_tokens": 0}, "application/json", 400),
    "negative max_tokens": ({"max_tokens": -3}, "application/json", 400),
    "temperature out of range": ({"temperature": -1}, "application/json", 400),
    "min_tokens over max_tokens": ({"max_tokens": 1, "min_tokens": 2}, "application/json", 400),
    "prompt too long": ({"prompt": "xy z" * 40_000}, "application/json", 400),
    "answer too long": ({"max_tokens": 10_000_000}, "application/json", 400),
    "empty prompt": ({"prompt": ""}, "application/json", 400),
    "stream options of a wrong type": ({"stream_options": 1}, "application/json", 400),
    "transfer fields of a wrong type": ({"kv_transfer_params": "x"}, "application/json", 400),
    "token id out of range": ({"prompt": [100_000_000]}, "application/json", 400),
    "unknown model": ({"model": "nosuch"}, "application/json", 404),
    "no messages": ({"messages": None}, "application/json", 400),
}


LATE = {"token id out of range"}
"""Faults of a request that vLLM detects only after it has sent a stream's status."""


@check
def refuses_with_the_right_status(pair: Pair) -> None:
    for name, (bad, kind, status) in BAD.items():
        path = CHAT if name == "no messages" else COMPLETIONS
        for streamed in (False, True):
            body = bad if isinstance(bad, bytes) else {**pair.body(stream=streamed), **bad}
            if streamed and name in LATE:
                (answer,) = stream(pair.decode, path, body)[1]
            else:
                got, answer = ask(pair.decode, path, body, content_type=kind)
                if "transfer fields" in name and isinstance(pair.decode, GuardedUrl):
                    status = 403  # noqa: PLW2901 - the engine's guard answers before the engine does
                assert got == status, (name, answer)
            assert set(answer["error"]) == {"message", "type", "param", "code"}, name
            assert answer["error"]["message"], name
            assert answer["error"]["code"] == status, name


# -- hand-over --

TRANSFER = {"do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id",
            "remote_host", "remote_port", "tp_size", "remote_num_tokens", "transfer_mode",
            "remote_prefill_cached_tokens"}  # fmt: skip


@check
def holds_the_blocks_of_a_prefill_leg(pair: Pair) -> None:
    for path in (COMPLETIONS, CHAT):
        body, transfer = pair.leg(path)
        fields = transfer.fields
        assert set(fields) >= TRANSFER
        assert (fields["do_remote_prefill"], fields["do_remote_decode"]) == (True, False)
        assert fields["transfer_mode"] == "pull"
        assert isinstance(fields["remote_block_ids"][0], list)
        own = fields["remote_port"] == urlsplit(pair.prefill).port  # a mock has one port for peers and clients
        opens = not own and _listens(fields["remote_host"], fields["remote_port"])
        assert opens is (FIELD not in fields), "Baton's connector opens no port"
        within(IDLE_S, lambda: load(pair.prefill).kv_usage > 0 and load(pair.prefill).running == 0)
        status, answer = ask(pair.decode, path, wire.decode_body(body, transfer))
        assert status == 200
        assert answer["usage"]["prompt_tokens"] == transfer.tokens
        settles(pair)


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except ConnectionRefusedError:
        return False


@check
def says_the_same_after_a_hand_over(pair: Pair) -> None:
    """The same tokens as from one engine alone, and the KV came from the other one."""
    for path in (COMPLETIONS, CHAT):
        for streamed in (False, True):
            before = pair.pulled()
            body, transfer = pair.leg(path, return_token_ids=True)
            leg2 = wire.decode_body(body, transfer)
            ids = _streamed_ids(pair, path, leg2) if streamed else _ids(ask(pair.decode, path, leg2)[1])
            assert pair.pulled() - before == transfer.tokens
            assert ids == _ids(ask(pair.prefill, path, body)[1])
            settles(pair)


def _ids(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def _streamed_ids(pair: Pair, path: str, body: dict[str, Any]) -> list[int]:
    _, events = stream(pair.decode, path, body)
    return [token for event in events for token in event["choices"][0].get("token_ids") or []]


@check
def reports_the_producers_cache_hits(pair: Pair) -> None:
    """D reports to the client how many of the prompt's tokens were in P's prefix cache."""
    prompt = f"[{uuid.uuid4().hex}] " + STORY * 8  # several blocks, also of 128 tokens
    ask(pair.prefill, COMPLETIONS, pair.body(prompt=prompt))
    _, transfer = pair.leg(prompt=prompt)
    cached = transfer.fields["remote_prefill_cached_tokens"]
    assert cached > 0
    _, answer = ask(pair.decode, COMPLETIONS, wire.decode_body(pair.body(prompt=prompt), transfer))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    settles(pair)


@check
def counts_pulled_tokens_as_cached_where_the_producer_says_nothing(pair: Pair) -> None:
    """A router proves by this count that a pair hands over (`router.fleet.pair_proofs`): D pulled all tokens that it
    did not compute.
    """
    prompt = f"[{uuid.uuid4().hex}] " + STORY * 8
    _, transfer = pair.leg(prompt=prompt)
    _, answer = ask(pair.decode, COMPLETIONS, wire.decode_body(pair.body(prompt=prompt), transfer.untold()))
    usage = answer["usage"]
    # D always computes the prompt's end: its last token, or its last block.
    assert transfer.tokens - 128 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    _, alone = ask(pair.decode, COMPLETIONS, pair.body(prompt=f"[{uuid.uuid4().hex}] " + prompt))
    assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    settles(pair)


@check
def tells_of_tokens_that_were_handed_over_and_that_it_computes(pair: Pair) -> None:
    """The fields name a producer that does not exist. The client sees no error; the engine's counters show it.

    Baton's connector does not promise tokens that it cannot pull. It counts them at the agent socket instead
    (`test_connector.py`).
    """
    pair.hand_over()
    settles(pair)
    body, transfer = pair.leg(prompt=f"[{uuid.uuid4().hex}] " + STORY * 4)
    before = load(pair.decode)
    lost = wire.TransferFields({**transfer.fields, "remote_engine_id": "nobody"})
    status, answer = ask(pair.decode, COMPLETIONS, wire.decode_body(body, lost))
    assert status == 200
    prompt = answer["usage"]["prompt_tokens"]
    within(IDLE_S, lambda: load(pair.decode).prompt_tokens - before.prompt_tokens == prompt)
    after = load(pair.decode)
    assert after.external_kv_tokens == before.external_kv_tokens
    if not pair.introduced:
        assert after.recomputed_tokens - before.recomputed_tokens == transfer.tokens
    ask(pair.decode, COMPLETIONS, wire.decode_body(body, transfer))  # this ends the hold
    settles(pair)


@check
def releases_what_a_rejected_leg_names(pair: Pair) -> None:
    pair.hand_over()  # the first message between two engines would only begin a handshake
    _, transfer = pair.leg()
    status, _ = ask(pair.decode, COMPLETIONS, wire.release_body(transfer))
    assert status == 404
    settles(pair)


@check
def releases_when_the_client_leaves(pair: Pair) -> None:
    pair.hand_over()
    body, transfer = pair.leg(max_tokens=400)
    leg2 = Open(pair.decode, COMPLETIONS, {**wire.decode_body(body, transfer), "stream": True})
    assert leg2.first_line().startswith(b"data: ")
    leg2.leave()
    settles(pair)


@check
def stops_when_the_client_leaves(pair: Pair) -> None:
    for streamed in (False, True):
        request = Open(pair.decode, COMPLETIONS, pair.body(max_tokens=1000, stream=streamed))
        within(IDLE_S, lambda: load(pair.decode).running == 1)
        request.leave()
        settles(pair)


@check
def aborts_by_id(pair: Pair) -> None:
    for path, body, name in ((COMPLETIONS, pair.body, "cmpl-{}-0"), (CHAT, pair.chat, "chatcmpl-{}")):
        request_id = uuid.uuid4().hex
        request = Open(pair.decode, path, body(max_tokens=1000), request_id)
        within(IDLE_S, lambda: load(pair.decode).running == 1)
        assert ask(pair.decode, "/inference/v1/abort_requests", {"request_ids": [name.format(request_id)]}) == (
            200,
            None,
        )
        status, told = request.answer()
        assert (status, told["choices"][0]["finish_reason"]) == (200, "abort")
        settles(pair)
    assert ask(pair.decode, "/inference/v1/abort_requests", {"request_ids": []})[0] == 200
    assert ask(pair.decode, "/inference/v1/abort_requests", {})[0] == 400


@check
def an_aborted_prefill_leg_holds_nothing(pair: Pair) -> None:
    request_id = uuid.uuid4().hex
    body = wire.prefill_body(pair.body(prompt=f"[{request_id}] {STORY * 12}"))
    leg = Open(pair.prefill, COMPLETIONS, body, request_id)
    ask(pair.prefill, "/inference/v1/abort_requests", {"request_ids": [f"cmpl-{request_id}-0"]})
    _, answer = leg.answer()
    if answer["choices"][0]["finish_reason"] == "abort":
        assert wire.read_transfer(answer) is None
    else:  # the leg ended before it could be aborted
        transfer = wire.read_transfer(answer)
        assert transfer is not None
        ask(pair.decode, COMPLETIONS, wire.release_body(transfer))
        time.sleep(0.5)
        ask(pair.decode, COMPLETIONS, wire.release_body(transfer))
    settles(pair)


@check
def recomputes_what_it_cannot_pull(pair: Pair) -> None:
    """The producer cannot be reached: D computes the prompt itself, as the launcher configures it."""
    pair.hand_over()
    body, transfer = pair.leg(return_token_ids=True)
    nobody = {**transfer.fields, "remote_port": 9, "remote_engine_id": str(uuid.uuid4())}
    status, answer = ask(pair.decode, COMPLETIONS, wire.decode_body(body, wire.TransferFields(nobody)))
    assert status == 200, answer
    assert _ids(answer) == _ids(ask(pair.prefill, COMPLETIONS, body)[1])
    ask(pair.decode, COMPLETIONS, wire.release_body(transfer))
    settles(pair)
