"""Attacks on live engines, past the router: nothing unsigned gets in, no engine dies, other requests are served."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from support.cluster import Cluster, within
from support.tickets import HOLD, PIN, PULL, STRANGERS, fleet_keys, form, signed, smuggled

from cluster import wire
from kvtransfer.screen import LIFE_S
from kvtransfer.ticket import SKEW_S, SigningKey

ENGINES = ["prefill-0", "decode-0"]
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"]


@pytest.fixture(scope="module")
def keys(cluster: Cluster) -> tuple[SigningKey, ...]:
    return fleet_keys(cluster)


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    """A listening socket: an engine would connect to it if an attack worked."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def pull_from(stranger: socket.socket) -> dict[str, Any]:
    return {**PULL, "remote_port": stranger.getsockname()[1]}


def send(url: str, raw: bytes, content_type: str = "application/json") -> tuple[int, Any]:
    request = urllib.request.Request(url, raw, {"Content-Type": content_type})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def body_of(cluster: Cluster, **more: Any) -> dict[str, Any]:
    words = "Once upon a time there was a guard"
    messages = [{"role": "user", "content": words}]
    return {"model": cluster.model, "prompt": words, "messages": messages, "input": words, "max_tokens": 4, **more}


def completion(cluster: Cluster, fields: dict[str, Any]) -> bytes:
    body = {"model": cluster.model, "prompt": "Once upon a time there was a guard", "max_tokens": 1}
    return json.dumps({**body, "kv_transfer_params": fields}).encode()


def assert_unharmed(cluster: Cluster, stranger: socket.socket) -> None:
    """No engine connected out, nothing is held, all engines are ready, and requests are handed over."""
    with pytest.raises(BlockingIOError):
        stranger.accept()
    within(5.0, cluster.idle, cluster.loads)
    before = cluster.pulled()
    prompt = f"[{time.monotonic_ns()}] A fresh prompt, unknown to any cache."
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    status, answer = send(f"{cluster.endpoint}/v1/completions", json.dumps(body).encode())
    assert status == 200, answer
    assert cluster.pulled() > before, "a request is handed over, not computed twice"
    assert cluster.all_ready()


@pytest.mark.parametrize("engine", ENGINES)
def test_smuggled_fields_get_nowhere(cluster: Cluster, stranger: socket.socket, engine: str) -> None:
    for path in PATHS:
        for fields in (HOLD, pull_from(stranger), PIN):
            for name, raw in smuggled(fields, body_of(cluster)).items():
                status, answer = send(cluster.urls[engine] + path, raw)
                assert (status, answer["error"]["type"]) == (403, wire.TICKET_REFUSED), (path, name, answer)
    raw = form("b", ('form-data; name="vllm_xargs"', json.dumps({"kv_transfer_params": pull_from(stranger)})))
    status, _ = send(f"{cluster.urls[engine]}/v1/audio/transcriptions", raw, "multipart/form-data; boundary=b")
    assert status == 403
    assert_unharmed(cluster, stranger)


@pytest.mark.parametrize("engine", ENGINES)
def test_wrong_tickets_get_nowhere(
    cluster: Cluster, stranger: socket.socket, keys: tuple[SigningKey, ...], engine: str
) -> None:
    other = next(name for name in ENGINES if name != engine)
    now, key = time.time(), keys[0]
    for fields in (HOLD, pull_from(stranger)):
        good = signed(fields, engine, at=now, key=key)[wire.TICKET]
        wrong = {
            "a stranger's key": signed(fields, engine, at=now, key=STRANGERS),
            "another instance's": signed(fields, other, at=now, key=key),
            "another consumer's": signed(fields, engine, at=now, key=key, consumer=other),
            "expired": signed(fields, engine, at=now - LIFE_S - SKEW_S - 1, key=key),
            "lives too long": signed(fields, engine, at=now, key=key, life_s=LIFE_S * 3),
            "other fields": signed({**fields, "remote_host": "127.0.0.2"}, engine, at=now, key=key, of=fields),
            "another pin": signed({**fields, **PIN}, engine, at=now, key=key, of=fields),
            "junk": {**fields, wire.TICKET: "x" * 100_000},
        }
        for place in range(0, len(good), 7):
            flipped = good[:place] + ("A" if good[place] != "A" else "B") + good[place + 1 :]
            wrong[f"character {place}"] = {**fields, wire.TICKET: flipped}
        for name, spoilt in wrong.items():
            status, answer = send(f"{cluster.urls[engine]}/v1/completions", completion(cluster, spoilt))
            assert (status, answer["error"]["type"]) == (403, wire.TICKET_REFUSED), (name, answer)
    assert_unharmed(cluster, stranger)


def test_a_signed_leg_gets_in_once_and_its_hold_is_released_once(
    cluster: Cluster, stranger: socket.socket, keys: tuple[SigningKey, ...]
) -> None:
    """The same engines let the same fields in with a good ticket: so the guard is what refuses them above."""
    prefill, decode = (f"{cluster.urls[name]}/v1/completions" for name in ENGINES)
    leg = completion(cluster, signed(HOLD, "prefill-0", at=time.time(), key=keys[0], nonce=7))
    status, answer = send(prefill, leg)
    assert status == 200, answer
    transfer = wire.read_transfer(answer)
    assert transfer is not None, "P holds the blocks"
    assert send(prefill, leg)[0] == 403, "P refuses the same ticket a second time"
    release = wire.release_body(transfer)
    ticketed = signed(transfer.fields, "decode-0", at=time.time(), key=keys[0], nonce=8)
    for fields, expected in ((transfer.fields, 403), (ticketed, 404), (ticketed, 403)):
        status, answer = send(decode, json.dumps({**release, "kv_transfer_params": fields}).encode())
        assert status == expected, answer
    assert_unharmed(cluster, stranger)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_request_without_transfer_fields_is_served_by_a_guarded_engine(cluster: Cluster, engine: str) -> None:
    body = {"model": cluster.model, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
    texts = [
        send(f"{cluster.urls[engine]}/v1/completions", json.dumps({**body, **more}).encode())[1]["choices"][0]["text"]
        for more in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}, {"vllm_xargs": {"session_id": "s"}})
    ]
    assert len(set(texts)) == 1
    assert texts[0]
