"""Bad input through the router to real engines: status, shape and a message that helps."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from support.cluster import Cluster, within

EVIL = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "x", "remote_request_id": "x",
        "remote_block_ids": [[0, 1]], "remote_host": "127.0.0.1", "remote_port": 9, "tp_size": 1}  # fmt: skip

GOOD: dict[str, Any] = {"prompt": "hello", "max_tokens": 4}

BAD: dict[str, tuple[bytes | dict[str, Any], str | None, int]] = {
    "not JSON": (b"{'a': 1}", "application/json", 400),
    "no content type": (json.dumps(GOOD).encode(), None, 400),
    "prompt of a wrong type": ({**GOOD, "prompt": {"a": 1}}, "application/json", 400),
    "max_tokens of a wrong type": ({**GOOD, "max_tokens": "many"}, "application/json", 400),
    "negative max_tokens": ({**GOOD, "max_tokens": -3}, "application/json", 400),
    "temperature out of range": ({**GOOD, "temperature": -1}, "application/json", 400),
    "prompt too long": ({**GOOD, "prompt": "x" * 3000}, "application/json", 400),
    "answer too long": ({**GOOD, "max_tokens": 5000}, "application/json", 400),
    "unknown model": ({**GOOD, "model": "nosuch"}, "application/json", 404),
    "no prompt": ({"max_tokens": 4}, "application/json", 400),
    "token id out of range": ({**GOOD, "prompt": [5000]}, "application/json", 400),
}


def send(url: str, raw: bytes, content_type: str | None) -> tuple[int, Any]:
    request = urllib.request.Request(url, raw, {"Content-Type": content_type or ""})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "content_type", "status"), BAD.values(), ids=BAD)
def test_bad_input(
    cluster: Cluster, body: bytes | dict[str, Any], content_type: str | None, status: int, stream: bool
) -> None:
    if isinstance(body, dict):
        body = json.dumps({"model": cluster.model, **body, "stream": stream}).encode()
    got, answer = send(f"{cluster.endpoint}/v1/completions", body, content_type)
    assert got == status, answer
    assert answer["error"]["message"]
    assert answer["error"]["code"] == status
    assert answer["error"]["type"]
    within(2.0, cluster.idle, cluster.loads)  # a refused request leaves nothing held


SMUGGLED = {
    "plain": {"kv_transfer_params": EVIL},
    "xargs": {"vllm_xargs": {"kv_transfer_params": json.dumps(EVIL)}},
    "stringified": {"vllm_xargs": json.dumps({"kv_transfer_params": EVIL})},
    "extra args": {"sampling_params": {"extra_args": {"kv_transfer_params": EVIL}}},
    "encoder": {"ec_transfer_params": EVIL},
}


@pytest.mark.parametrize("fields", SMUGGLED.values(), ids=SMUGGLED)
def test_smuggled_fields_do_nothing(cluster: Cluster, fields: dict[str, Any]) -> None:
    """Each of these makes an engine pull from an address the client chose, or fail, when sent to it directly."""
    body = {"model": cluster.model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    raw = json.dumps({**body, **fields}).encode()
    status, answer = send(f"{cluster.endpoint}/v1/completions", raw, "application/json")
    _, clean = send(f"{cluster.endpoint}/v1/completions", json.dumps(body).encode(), "application/json")
    if fields is SMUGGLED["stringified"]:
        assert status == 400, "vLLM takes no text there; it got one without the fields"
    else:
        assert status == 200, answer
        assert answer["choices"][0]["text"] == clean["choices"][0]["text"]
    within(2.0, cluster.idle, cluster.loads)
