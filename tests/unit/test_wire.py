"""Transfer fields: they are built, they are read, and a client's own fields are removed."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import wire

EVIL = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1, "remote_block_ids": [[1]]}

SMUGGLED: list[dict[str, Any]] = [
    {"kv_transfer_params": EVIL},
    {"ec_transfer_params": EVIL},
    {"sampling_params": {"extra_args": {"kv_transfer_params": EVIL}}},
    {"vllm_xargs": {"kv_transfer_params": "x"}},
    {"vllm_xargs": json.dumps({"kv_transfer_params": EVIL})},
    {"extra_args": json.dumps([{"a": {"kv_transfer_params": EVIL}}])},
    {"vllm_xargs": '{"kv\\u005ftransfer_params": {"remote_host": "10.0.0.1"}}'},
    {"messages": [{"role": "user", "content": "x", "kv_transfer_params": EVIL}]},
    {"requests": [[{"kv_transfer_params": EVIL}]]},
    {"a": {"b": {"c": [{"d": {"ec_transfer_params": EVIL}}]}}},
]
"""Bodies by which a client might steer a transfer: nested, stringified, escaped."""


@pytest.mark.parametrize("body", SMUGGLED)
def test_smuggled_transfer_fields_are_removed(body: dict[str, Any]) -> None:
    clean = json.dumps(wire.strip({"model": "m", **body}))
    assert "transfer_params" not in clean.replace("\\u005f", "_")
    assert "10.0.0.1" not in clean


def test_texts_that_mention_transfer_fields_are_left_unchanged() -> None:
    body = {"messages": [{"role": "user", "content": '{"kv_transfer_params": 1}'}], "tools": [{"priority": 3}]}
    assert wire.strip(body) == body


def test_priority_is_removed_at_the_top_level_only() -> None:
    assert wire.strip({"priority": -9, "tools": [{"function": {"parameters": {"priority": {}}}}]}) == {
        "tools": [{"function": {"parameters": {"priority": {}}}}]
    }


def test_uuids_of_media_are_separate_for_each_tenant() -> None:
    """vLLM caches a processed image by its ``uuid``, and gives it to any request that names this ``uuid`` without the
    image.
    """

    def parts(body: dict[str, Any]) -> list[Any]:
        return [part for message in body["messages"] for part in message["content"]]

    media = {"type": "image_url", "image_url": {"url": "http://x/uuid"}, "uuid": "sku-1"}
    names: list[Any] = ["sku-1", "sku-1", 7, ["sku-1"], ""]
    sent = {"messages": [{"role": "user", "content": [{**media, "uuid": name} for name in names]}]}
    one, again, other = (parts(wire.strip(sent, namespace=tenant)) for tenant in ("a", "a", "b"))
    assert one == again
    told = [part["uuid"] for part in one]
    assert told[0] == told[1]
    assert len(set(told)) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", name) for name in told)
    assert not set(told) & {part["uuid"] for part in other}
    assert one[0] == {**media, "uuid": told[0]}
    several = wire.strip({"messages": [sent["messages"]]}, namespace="a")["messages"][0]
    assert parts({"messages": several}) == one, "as in a batch of chats"


def test_other_uuids_stay_as_they_are() -> None:
    tool = {"type": "tool_use", "name": "f", "input": {"uuid": "x", "content": {"uuid": "x"}}}
    listed = {"type": "tool_use", "name": "f", "input": {"content": [{"uuid": "x"}]}}
    messages = [
        {"content": "uuid", "uuid": "x"},
        {"content": [{"uuid": None}]},
        {"role": "assistant", "content": [tool, listed]},
    ]
    mine = {"tools": [{"uuid": "x"}], "messages": messages}
    assert wire.strip(mine, namespace="a") == mine


def test_equal_salts_of_two_tenants_differ() -> None:
    one, other = (wire.strip({"cache_salt": "s"}, namespace=tenant)["cache_salt"] for tenant in ("a", "b"))
    assert one != other
    assert one == wire.strip({"cache_salt": "s"}, namespace="a")["cache_salt"]
    assert wire.strip({"cache_salt": ""}) == {"cache_salt": ""}, "an empty salt stays, so that vLLM refuses it"
    assert wire.strip({"cache_salt": None}) == {}, "so that no body has it twice once the tenant's own is added"


def test_too_deep_a_body_is_refused() -> None:
    body: dict[str, Any] = {}
    for _ in range(wire.DEPTH_MAX + 2):
        body = {"a": body}
    with pytest.raises(wire.NestedTooDeep):
        wire.strip(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["kv_transfer_params", "ec_transfer_params", "vllm_xargs", "extra_args", "a", "priority"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["kv_transfer_params", "vllm_xargs", "b"]), JSON, max_size=4))
def test_no_object_keeps_a_transfer_key(body: dict[str, Any]) -> None:
    clean = wire.strip(body)
    assert not _keys(clean) & wire.TRANSFER_KEYS
    assert wire.strip(clean) == clean


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for inner in value.values() for key in _keys(inner)}
    if isinstance(value, list):
        return {key for inner in value for key in _keys(inner)}
    return set()


def test_prefill_leg() -> None:
    leg = wire.prefill_body(
        {"model": "m", "prompt": "x", "max_tokens": 9, "max_completion_tokens": 9, "min_tokens": 4, "stream": True,
         "stream_options": {"include_usage": True}, "temperature": 0}
    )  # fmt: skip
    assert leg["max_tokens"] == 1
    assert leg["min_tokens"] == 1
    assert leg["stream"] is False
    assert "stream_options" not in leg
    assert "max_completion_tokens" not in leg
    assert leg["temperature"] == 0
    assert leg["kv_transfer_params"]["do_remote_decode"] is True


def test_the_decode_leg_is_the_clients_body_and_the_transfer_fields() -> None:
    body = {"model": "m", "prompt": "x", "stream": True}
    transfer = wire.read_transfer({"kv_transfer_params": {**EVIL, "remote_num_tokens": 5, "remote_engine_id": "e"}})
    assert transfer is not None
    assert (transfer.tokens, transfer.producer) == (5, "e")
    leg = wire.decode_body(body, transfer)
    assert leg.pop("kv_transfer_params")["remote_num_tokens"] == 5
    assert leg == body


@pytest.mark.parametrize(
    "answer",
    [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}, {"kv_transfer_params": "x"},
     {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": []}}],
)  # fmt: skip
def test_an_answer_without_a_hold(answer: dict[str, Any]) -> None:
    assert wire.read_transfer(answer) is None


def test_only_harmless_headers_pass() -> None:
    headers = {"Authorization": "Bearer k", "X-data-parallel-rank": "3", "X-Vllm-Priority": "-1", "Cookie": "c",
               "Connection": "close", "Traceparent": "00-1", "Content-Length": "5", "Host": "h"}  # fmt: skip
    assert wire.forwarded_headers(headers) == {"Authorization": "Bearer k", "Traceparent": "00-1"}


def test_a_second_run_of_a_prompt_does_not_count_as_cached() -> None:
    hold = wire.TransferFields({"remote_engine_id": "e", "remote_prefill_cached_tokens": 48})
    assert hold.cached_tokens == 48
    assert hold.at_most_cached(16).fields == {"remote_engine_id": "e", "remote_prefill_cached_tokens": 16}
    assert hold.untold().fields == {"remote_engine_id": "e"}
    for as_it_is in (None, 48, 64):
        assert hold.at_most_cached(as_it_is) is hold
    silent = wire.TransferFields({"remote_prefill_cached_tokens": None})
    assert silent.cached_tokens is None
    assert silent.at_most_cached(0) is silent
