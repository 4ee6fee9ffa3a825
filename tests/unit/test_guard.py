"""The guard, called as an ASGI server calls it: requests pass unchanged, and no transfer fields pass unsigned."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tickets import FLEET, HOLD, OLD, PIN, PULL, STRANGERS, form, signed, smuggled, ticket_for

from cluster import wire
from cluster.ids import InstanceId
from cluster.scan import run
from kvtransfer import guard as g
from kvtransfer.keys import FILE_VARIABLE, InstanceKeys, instance_key, instance_text
from kvtransfer.screen import LIFE_S, SPENT_MAX, Refusal, Screen, Why, transfer_fields
from kvtransfer.ticket import SKEW_S, sign

NOW = 1_800_000_000.0
D = InstanceId("decode-1")
KEYS = InstanceKeys(D, (instance_key(FLEET, D), instance_key(OLD, D)))
BODY = {"model": "m", "prompt": "hello", "max_tokens": 4}
JSON = "application/json"
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v2/chat", "/invocations",
         "/inference/v1/generate", "/v1/audio/transcriptions", "/anything"]  # fmt: skip


def body_with(fields: Any) -> bytes:
    return json.dumps({**BODY, "kv_transfer_params": fields}).encode()


def judge(raw: bytes, content_type: str = JSON, *, screen: Screen | None = None, at: float = NOW) -> Refusal | None:
    return run((screen or Screen(NOW - 1000)).judge(raw, content_type, KEYS, at))


def why(raw: bytes, **kwargs: Any) -> Why | None:
    refusal = judge(raw, **kwargs)
    return None if refusal is None else refusal.why


# --- what passes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [HOLD, PULL, PIN, {**PULL, **PIN}], ids=["hold", "pull", "pin", "pull and pin"])
def test_what_a_router_signed_passes(fields: dict[str, Any]) -> None:
    assert judge(body_with(signed(fields, D, at=NOW))) is None


def test_a_ticket_of_the_former_key_passes_while_both_are_known() -> None:
    assert judge(body_with(signed(PULL, D, at=NOW, key=OLD))) is None
    only = InstanceKeys(D, KEYS.keys[:1])
    refusal = run(Screen(0).judge(body_with(signed(PULL, D, at=NOW, key=OLD)), JSON, only, NOW))
    assert refusal is not None
    assert refusal.why is Why.TICKET


@pytest.mark.parametrize(
    "raw",
    [
        json.dumps(BODY).encode(),
        json.dumps({**BODY, "vllm_xargs": {"session_id": "s", "n": [1]}}).encode(),
        json.dumps({**BODY, "prompt": "caf\u00e9 \u4e2d \ud83d\ude00 kv_transfer_params"}).encode(),
        json.dumps(
            {"messages": [{"role": "user", "content": '{"kv_transfer_params": {"remote_host": "h"}}'}]}
        ).encode(),
        body_with(None),
        body_with({}),
        b"",
        b"not JSON",
        b"[1, 2]",
        json.dumps(BODY).encode("utf-16"),
    ],
)
def test_a_body_without_transfer_fields_passes(raw: bytes) -> None:
    """A text that names such fields is the client's own. The engine refuses a body that is no JSON."""
    assert judge(raw) is None


def test_an_ordinary_form_passes() -> None:
    parts = ('form-data; name="file"; filename="a.wav"', "\x00kv_transfer_params"), ('form-data; name="model"', "m")
    xargs = 'form-data; name="vllm_xargs"', '{"session_id": "s"}'
    assert judge(form("b", *parts, xargs), "multipart/form-data; boundary=b") is None


# --- attacks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [HOLD, PULL, PIN], ids=["hold", "pull", "pin"])
@pytest.mark.parametrize("name", smuggled(PULL, BODY))
def test_smuggled_fields_are_refused(name: str, fields: dict[str, Any]) -> None:
    refusal = judge(smuggled(fields, BODY)[name])
    assert refusal is not None, name
    assert (refusal.status, refusal.why) == (403, Why.FIELDS)


@pytest.mark.parametrize("name", [name for name in smuggled(PULL, BODY) if name not in {"plain", "utf-8-sig"} and
                                  not name.startswith(("utf", "escaped"))])  # fmt: skip
def test_a_good_ticket_is_good_in_one_place_of_the_body_only(name: str) -> None:
    assert judge(smuggled(signed(PULL, D, at=NOW), BODY)[name]) is not None


def test_a_good_ticket_carries_nothing_else_along() -> None:
    good = signed(PULL, D, at=NOW)
    for raw in smuggled(HOLD, {**BODY, "kv_transfer_params": good}).values():
        assert judge(raw) is not None, raw


@pytest.mark.parametrize("name", smuggled(PULL, BODY))
def test_a_large_body_is_judged_as_a_small_one_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large body is not built as objects. It must be UTF-8."""
    for fields in (HOLD, signed(PULL, D, at=NOW)):
        raw = smuggled(fields, BODY)[name]
        with monkeypatch.context() as patch:
            small = why(raw)
            patch.setattr("kvtransfer.screen.BUILT_BYTES_MAX", 0)
            assert why(raw) == (Why.UNREADABLE if name.startswith("utf") else small)


LARGE = b'{"prompt": "' + b"x" * (1 << 17) + b'"'


def test_a_large_leg_passes_with_its_ticket_and_not_without() -> None:
    for fields, passes in ((signed(PULL, D, at=NOW), True), (PULL, False), (signed(HOLD, D, at=NOW), True), ({}, True)):
        told = json.dumps(fields).encode()
        raw = LARGE + b', "max_tokens": 1, "kv_transfer_params": ' + told + b', "stream": false}'
        assert (judge(raw) is None) is passes
        assert (judge(LARGE + b', "a": {"kv_transfer_params": ' + told + b"}}") is None) is (fields == {})
        assert (judge(LARGE + b', "vllm_xargs": {"a": "b"}, "extra_args": ["c"]}')) is None


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (LARGE + b', "kv_transfer_params": ' + b"[" * 100_000, "64 levels"),
        (LARGE + b', "a": [' + b"[]," * 1_100_000 + b'1], "kv_transfer_params": {}}', "1,048,576"),
        (LARGE + b', "a": [' + b'{"vllm_xargs": 1},' * 300 + b'"kv_transfer_params"]}', "256 times"),
        (LARGE + b', "vllm_xargs": "' + b"[1]," * 50_000 + b'kv_transfer_params"}', "too large"),
        (LARGE + b', "kv_transfer_params": {"a": nothing}}', "no JSON"),
    ],
    ids=["depth", "values", "names", "text", "syntax"],
)
def test_a_large_body_has_limits(raw: bytes, words: str) -> None:
    """Building such bodies as objects would block the whole API server for seconds."""
    refusal = judge(raw)
    assert refusal is not None
    assert (refusal.status, refusal.why) == (400, Why.UNREADABLE)
    assert words in refusal.message


def test_free_form_fields_of_a_form_have_a_limit() -> None:
    raw = form("b", ('form-data; name="vllm_xargs"', "[1]," * 40_000))
    refusal = judge(raw, "multipart/form-data; boundary=b")
    assert refusal is not None
    assert "131072 bytes" in refusal.message


def under_the_fleet_key() -> dict[str, Any]:
    """A ticket signed with the fleet's secret itself, not with the instance's key."""
    ticket = ticket_for(PULL, D, at=NOW)
    return {**PULL, wire.TICKET: sign(ticket, FLEET)}


WRONG: dict[str, Callable[[], dict[str, Any]]] = {
    "none": lambda: PULL,
    "null": lambda: {**PULL, wire.TICKET: None},
    "junk": lambda: {**PULL, wire.TICKET: "junk"},
    "a number": lambda: {**PULL, wire.TICKET: 7},
    "an object": lambda: {**PULL, wire.TICKET: {}},
    "a megabyte": lambda: {**PULL, wire.TICKET: "A" * (1 << 20)},
    "a stranger's key": lambda: signed(PULL, D, at=NOW, key=STRANGERS),
    "another instance's": lambda: signed(PULL, "decode-2", at=NOW),
    "another instance's, under its name": lambda: signed(PULL, "decode-2", at=NOW, consumer=D),
    "for another consumer, under our key": lambda: signed(PULL, D, at=NOW, consumer="decode-2"),
    "the fleet's own key": under_the_fleet_key,
    "expired": lambda: signed(PULL, D, at=NOW - LIFE_S - SKEW_S - 1),
    "lives too long": lambda: signed(PULL, D, at=NOW, life_s=LIFE_S + 3 * SKEW_S),
    "for a hold": lambda: signed(PULL, D, at=NOW, of=HOLD),
    "another host": lambda: signed({**PULL, "remote_host": "10.0.0.1"}, D, at=NOW, of=PULL),
    "another port": lambda: signed({**PULL, "remote_port": 10}, D, at=NOW, of=PULL),
    "another engine": lambda: signed({**PULL, "remote_engine_id": "e"}, D, at=NOW, of=PULL),
    "another request": lambda: signed({**PULL, "remote_request_id": "r"}, D, at=NOW, of=PULL),
    "another block": lambda: signed({**PULL, "remote_block_ids": [[0, 2]]}, D, at=NOW, of=PULL),
    "a block more": lambda: signed({**PULL, "remote_block_ids": [[0, 1, 2]]}, D, at=NOW, of=PULL),
    "another number": lambda: signed({**PULL, "remote_num_tokens": 257}, D, at=NOW, of=PULL),
    "true for one": lambda: signed({**PULL, "tp_size": True}, D, at=NOW, of=PULL),
    "a float": lambda: signed({**PULL, "tp_size": 1.0}, D, at=NOW, of=PULL),
    "a field more": lambda: signed({**PULL, "prompt_token_ids": [1]}, D, at=NOW, of=PULL),
    "a token more": lambda: signed({**PULL, **PIN}, D, at=NOW, of=PULL),
    "a field less": lambda: signed({k: v for k, v in PULL.items() if k != "tp_size"}, D, at=NOW, of=PULL),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_ticket_that_is_wrong_in_one_way_is_refused(name: str) -> None:
    refusal = judge(body_with(WRONG[name]()))
    assert refusal is not None
    assert refusal.status == 403
    assert json.loads(refusal.body())["error"]["type"] == wire.TICKET_REFUSED


def test_every_flipped_bit_of_a_ticket_is_refused() -> None:
    text = signed(PULL, D, at=NOW)[wire.TICKET]
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    screen = Screen(0)
    for place in range(len(data)):
        for bit in range(8):
            flipped = data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
            other = base64.urlsafe_b64encode(flipped).rstrip(b"=").decode()
            assert judge(body_with({**PULL, wire.TICKET: other}), screen=screen) is not None, (place, bit)
    assert judge(body_with({**PULL, wire.TICKET: text}), screen=screen) is None, "what was refused is not used up"


def test_a_ticket_is_good_once() -> None:
    screen = Screen(NOW - 1000)
    raw = body_with(signed(PULL, D, at=NOW))
    assert why(raw, screen=screen) is None
    for later in (0.0, 1.0, LIFE_S + SKEW_S - 0.01):
        assert why(raw, screen=screen, at=NOW + later) is Why.REPLAYED
    assert why(raw, screen=screen, at=NOW + LIFE_S + SKEW_S) is Why.TICKET, "from here it has expired"
    assert why(body_with(signed(PULL, D, at=NOW, nonce=2)), screen=screen) is None, "another one for the same fields"


def test_a_restart_does_not_make_used_tickets_new() -> None:
    raw = body_with(signed(PULL, D, at=NOW))
    assert why(raw, screen=Screen(NOW + SKEW_S + 1), at=NOW + SKEW_S + 1) is Why.REPLAYED
    assert why(raw, screen=Screen(NOW + SKEW_S - 1), at=NOW + SKEW_S - 1) is None, "clocks may be apart by so much"


def test_a_clock_that_is_set_back_an_hour_stops_no_hand_over() -> None:
    """The server was started while its clock was an hour fast. What was used since then stays used."""
    screen, fast = Screen(NOW + 3600), NOW + 3700
    assert why(body_with(signed(PULL, D, at=fast)), screen=screen, at=fast) is None
    raw = body_with(signed(PULL, D, at=NOW, nonce=2))
    assert why(raw, screen=screen, at=NOW + 1) is None
    assert why(raw, screen=screen, at=NOW + 2) is Why.REPLAYED
    before = body_with(signed(PULL, D, at=NOW - 30, nonce=3))
    assert why(before, screen=screen, at=NOW + 2) is Why.REPLAYED, "it may have been used before the start"


def test_the_memory_of_used_tickets_is_bounded_and_refuses_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SPENT_MAX == 1 << 18
    monkeypatch.setattr("kvtransfer.screen.SPENT_MAX", 2)
    screen = Screen(0)
    found = [why(body_with(signed(PULL, D, at=NOW, nonce=nonce)), screen=screen) for nonce in range(3)]
    assert found == [None, None, Why.REPLAYED]
    later = NOW + LIFE_S + SKEW_S
    assert why(body_with(signed(PULL, D, at=later, nonce=9)), screen=screen, at=later) is None


XARGS = json.dumps({"kv_transfer_params": PULL})
FORMS = {
    "field": form("b", ('form-data; name="kv_transfer_params"', "x")),
    "nested name": form("b", ('form-data; name="kv_transfer_params[remote_host]"', "h")),
    "xargs": form("b", ('form-data; name="vllm_xargs"', XARGS)),
    "escaped xargs": form("b", ('form-data; name="vllm_xargs"', XARGS.replace("kv_", "kv\\u005f"))),
    "unquoted": form("b", ("form-data; name=vllm_xargs", XARGS)),
    "rfc 2231": form("b", ("form-data; name*=utf-8''vllm%5Fxargs", XARGS)),
    "two names": form("b", ('form-data; name="a"; name="vllm_xargs"', XARGS)),
    "behind a boundary in a value": form(
        "b", ('form-data; name="model"', "x--b--y"), ('form-data; name="vllm_xargs"', XARGS)
    ),
    "no boundary": b"x",
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_cannot_smuggle(name: str) -> None:
    assert judge(FORMS[name], "multipart/form-data; boundary=b") is not None


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=b; charset=utf-7",
        "multipart/form-data; boundary=c; boundary=b",
        'Multipart/Form-Data; BOUNDARY="b"; charset*=utf-16',
        "application/x-www-form-urlencoded",
    ],
)
def test_forms_that_two_readers_read_differently_are_refused(content_type: str) -> None:
    raw = form("b", ('form-data; name="vllm_xargs"', XARGS.replace("_", "+AF8-")))
    refusal = judge(raw, content_type)
    assert refusal is not None
    assert refusal.status == 400


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/octet-stream", "application/vnd.api+json"])
def test_fields_are_found_whatever_the_content_type_says(content_type: str) -> None:
    assert judge(body_with(PULL), content_type) is not None


def test_a_body_that_is_nested_too_deep_is_refused() -> None:
    raw = b'{"kv_transfer_params":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    refusal = judge(raw)
    assert refusal is not None
    assert refusal.status == 400
    assert why(b'{"vllm_xargs":"' + b"[" * 200_000 + b'", "\\u0061": 1}') is Why.UNREADABLE


# --- any body --------------------------------------------------------------------------------------------------------


patiently = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""No deadlines: the machine may be busy."""

NAMES = st.sampled_from(["kv_transfer_params", "ec_transfer_params", "vllm_xargs", "extra_args", "a", wire.TICKET])
TEXTS = st.text(max_size=5) | st.just(json.dumps({"kv_transfer_params": 1}))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=20,
)


def holds_fields(value: Any, name: str = "") -> bool:
    """Whether a parsed body has transfer fields: the guard's own question, answered in another way."""
    if isinstance(value, dict):
        return any(
            (key in wire.TRANSFER_KEYS and inner not in (None, {})) or holds_fields(inner, key)
            for key, inner in value.items()
        )
    if isinstance(value, list):
        return any(holds_fields(inner, name if isinstance(inner, str) else "") for inner in value)
    return isinstance(value, str) and name in wire.FREE_FORM_KEYS and "kv_transfer_params" in value


@patiently
@given(st.dictionaries(NAMES, VALUES, max_size=4), st.booleans(), st.sampled_from(["utf-8", "utf-16"]))
def test_nothing_unsigned_passes_and_nothing_else_is_refused(body: dict[str, Any], ascii_: bool, encoding: str) -> None:
    raw = json.dumps(body, ensure_ascii=ascii_).encode(encoding, "surrogatepass")
    assert (judge(raw) is not None) == holds_fields(body)


@patiently
@given(st.binary(max_size=300), st.text(max_size=40) | st.sampled_from([JSON, "multipart/form-data; boundary=b"]))
def test_the_screen_never_raises(raw: bytes, content_type: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtransfer.screen.BUILT_BYTES_MAX", 8)
        for body in (raw + b'"kv_transfer_params":', b'{"vllm_xargs":"\\u0061' + raw + b'"}'):
            assert judge(body, content_type) is None or judge(body, content_type).status in {400, 403}  # type: ignore[union-attr]
    for body in (raw, raw + b'"kv_transfer_params"', b'{"vllm_xargs":"\\u0061' + raw + b'"}'):
        assert judge(body, content_type) is None or judge(body, content_type).status in {400, 403}  # type: ignore[union-attr]


@patiently
@given(st.dictionaries(st.text(max_size=5), VALUES, min_size=1, max_size=5))
def test_any_fields_pass_when_they_are_signed_and_come_back_as_they_were(fields: dict[str, Any]) -> None:
    if holds_fields(fields):
        return  # a router makes no such fields
    body = {"kv_transfer_params": signed(fields, D, at=NOW)}
    assert judge(json.dumps(body).encode()) is None
    found = run(transfer_fields(json.dumps(body).encode(), JSON))
    assert json.dumps(found) == json.dumps(body["kv_transfer_params"])


# --- as an ASGI server calls it --------------------------------------------------------------------------------------


class Engine:
    """An ASGI app that reads its request, streams two chunks, and then waits for the client to leave."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.left = False
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        if scope["type"] != "http":
            return
        message = await receive()
        self.bodies.append(message["body"])
        assert not message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for chunk in (b"one", b"two"):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self.left = (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def guard(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> g.Guard:
    file = tmp_path / "keys"
    file.write_text(instance_text((FLEET,), D))
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    return g.Guard(engine, clock=lambda: NOW)


async def call(
    guard: g.Guard, raw: bytes, path: str = "/v1/completions", method: str = "POST", *, pieces: int = 1, **scope: Any
) -> list[Any]:
    """One request in `pieces` pieces, then the client leaves. The messages that were sent to the client."""
    size = max(1, -(-len(raw) // pieces))
    parts = [raw[at : at + size] for at in range(0, len(raw), size)] or [b""]
    news = [{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts]
    news[-1]["more_body"] = False
    news.append({"type": "http.disconnect"})
    sent: list[Any] = []

    async def receive() -> Any:
        return news.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = scope.pop("headers", [(b"content-type", JSON.encode())])
    await guard({"type": "http", "method": method, "path": path, "headers": headers, **scope}, receive, send)
    return sent


def refused(sent: list[Any]) -> Any:
    """The error of a refusal."""
    start, body = sent
    assert start["type"] == "http.response.start"
    error = json.loads(body["body"])["error"]
    assert error["code"] == start["status"]
    return error


@pytest.mark.parametrize("pieces", [1, 3])
async def test_a_request_passes_byte_for_byte_and_its_stream_and_its_disconnect_too(
    guard: g.Guard, engine: Engine, pieces: int
) -> None:
    for raw in (json.dumps(BODY).encode(), b"", body_with(signed(PULL, D, at=NOW, nonce=pieces))):
        sent = await call(guard, raw, pieces=pieces)
        assert engine.bodies[-1] == raw
        assert [message.get("body") for message in sent] == [None, b"one", b"two", b""]
        assert engine.left


@pytest.mark.parametrize("path", PATHS)
async def test_no_path_is_open(guard: g.Guard, engine: Engine, path: str) -> None:
    error = refused(await call(guard, body_with(PULL), path))
    assert error["code"] == 403
    assert error["type"] == wire.TICKET_REFUSED
    assert "kv_transfer_params" in error["message"]
    assert not engine.scopes


@pytest.mark.parametrize("scope", [{"type": "websocket"}, {"type": "lifespan"}, {"method": "GET"}, {"method": "HEAD"}])
async def test_a_scope_without_a_body_is_not_touched(guard: g.Guard, engine: Engine, scope: dict[str, str]) -> None:
    """The engine gets the server's own `receive`."""
    seen = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(receive)

    guard._app = app
    whole = {"type": "http", "method": "POST", "path": "/health", "headers": [], **scope}
    await guard(whole, receive, engine)
    assert seen == [receive]


async def test_a_client_that_leaves_early_reaches_no_engine(guard: g.Guard, engine: Engine) -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    sent: list[Any] = []
    await guard({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, sent.append)  # type: ignore[arg-type]
    assert not sent
    assert not engine.scopes


async def test_a_body_is_bounded_in_size_and_time(
    guard: g.Guard, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(g, "BODY_BYTES_MAX", 100)
    assert refused(await call(guard, b"x" * 101, pieces=5))["code"] == 413
    monkeypatch.setattr(g, "BODY_S", 0.01)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    never = asyncio.Event()
    await guard({"type": "http", "method": "POST", "path": "/", "headers": []}, never.wait, send)  # type: ignore[arg-type]
    assert refused(sent)["code"] == 408
    assert not engine.scopes


async def test_two_content_types_are_refused(guard: g.Guard) -> None:
    headers = [(b"content-type", b"application/json"), (b"Content-Type", b"multipart/form-data; boundary=b")]
    assert "more than one Content-Type" in refused(await call(guard, FORMS["xargs"], headers=headers))["message"]


async def test_keys_are_read_again_when_their_file_changes(
    guard: g.Guard, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    assert refused(await call(guard, body_with(signed(PULL, D, at=NOW, key=OLD))))["code"] == 403
    file.write_text(instance_text((FLEET, OLD), D))
    await call(guard, body_with(signed(PULL, D, at=NOW, key=OLD)))
    await call(guard, body_with(signed(PULL, D, at=NOW)))
    assert len(engine.bodies) == 2
    for nonce, spoil in enumerate((lambda: file.write_text("nonsense"), file.unlink), 2):
        spoil()
        await call(guard, body_with(signed(PULL, D, at=NOW, nonce=nonce)))
        await call(guard, json.dumps(BODY).encode())
    assert len(engine.bodies) == 6, "its former keys stay"
    assert len([each for each in caplog.records if "former keys stay" in each.message]) == 2
    assert "nonsense" not in caplog.text


@pytest.mark.parametrize("content", [None, "", "nonsense", "k1 " + "ab" * 32])
async def test_without_keys_every_transfer_is_refused_and_all_else_is_served(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    guard = g.Guard(engine, clock=lambda: NOW)
    assert "no ticket keys" in refused(await call(guard, body_with(signed(PULL, D, at=NOW))))["message"]
    await call(guard, json.dumps(BODY).encode())
    assert len(engine.bodies) == 1


async def test_refusals_do_not_fill_the_log(guard: g.Guard, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            await call(guard, body_with(signed(PULL, D, at=NOW, key=STRANGERS)), path="/x\nforged line")
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()


def test_the_guard_is_a_plain_class() -> None:
    """vLLM would wrap a coroutine function in a middleware that buffers streams."""
    assert isinstance(g.Guard, type)
    assert not asyncio.iscoroutinefunction(g.Guard)


# --- what vLLM lets clients send -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flag", "encoder", "accepts"), [(False, None, False), (True, None, True), (False, "x", None)])
async def test_clients_send_embeddings_only_if_the_engines_flag_says_so(
    flag: bool, encoder: str | None, accepts: bool | None
) -> None:
    """vLLM takes them in every engine that may pull, also without a tensor, which an assert in the worker answers with
    the engine's end. An engine whose encoder is elsewhere is left alone.
    """
    media = SimpleNamespace(enable_mm_embeds=True, allow_missing_mm_embeddings=True)
    config = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=media), ec_transfer_config=encoder)
    state = SimpleNamespace(args=SimpleNamespace(enable_mm_embeds=flag), vllm_config=config)
    seen: list[tuple[bool, bool]] = []

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        seen.append((media.enable_mm_embeds, media.allow_missing_mm_embeddings))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [],
             "app": SimpleNamespace(state=state)}  # fmt: skip
    await g.Guard(app)(scope, receive, None)  # type: ignore[arg-type]
    assert seen == [(True, True) if accepts is None else (accepts, False)]
