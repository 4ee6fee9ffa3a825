"""Runs inside vLLM's API server: lets transfer fields with a router's ticket pass, and refuses them without one.

Loaded by ``--middleware kvtransfer.guard.Guard``, with the engine's key file (`kvtransfer.keys`) in the environment
variable BATON_TICKET_KEYS_FILE. `kvtransfer.screen` has the rules of what is refused and why; ``docs/security.md`` says
what the guard does not protect.

A plain ASGI class: it reads a request whole, judges it, and hands it on unchanged. It does not touch answers, streams,
disconnects, requests without a body (health, metrics) or WebSockets, which carry no transfer fields in vLLM 0.32.
Without keys it refuses every transfer and serves everything else. It imports only the standard library and the modules
beside it, as it shares a process with the versions that vLLM pins.

The guard serves one path itself: ``POST /baton/release`` gives up a hold by the name that the router gave it
(`cluster.wire`), with a ticket as for a leg. The guard asks the engine's agent socket (`kvtransfer.door`), so the path
exists where Baton's connector runs; elsewhere it answers 404.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Final

from cluster.scan import Found, ScanWork, Steps
from cluster.wire import RANK_HEADER, RELEASE_PATH
from kvtransfer.asks import door_of
from kvtransfer.fields import name_in
from kvtransfer.keyfile import KeyFile
from kvtransfer.keys import FILE_VARIABLE, InstanceKeys, read_instance
from kvtransfer.screen import Refusal, Screen, Why, transfer_fields

BODY_BYTES_MAX: Final = 64 << 20
"""Twice the router's limit, for what the router adds."""

BODY_S: Final = 60.0
"""The guard gives up a body that has not arrived by then: the body holds memory until then."""

DOOR_S: Final = 2.0
"""The connector answers from memory, so this is ample."""

LOG_EVERY_S: Final = 1.0
"""The shortest time between two log lines about refusals, each with their number: a stranger must not fill the disk."""

_RANK: Final = re.compile(rb"[0-9]{1,4}")

_BODILESS: Final = frozenset({"GET", "HEAD", "OPTIONS"})

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_UNIX_TIME: Final = time.time  # noqa: TID251 - what two machines have in common; this is a shell

logger = logging.getLogger("baton.guard")


class Guard:
    """ASGI middleware of one API-server process."""

    def __init__(self, app: App, clock: Callable[[], float] = _UNIX_TIME) -> None:
        self._app = app
        self._clock = clock
        self._screen = Screen(clock())
        self._file = _open(os.environ.get(FILE_VARIABLE, ""))
        self._logged = -LOG_EVERY_S
        self._unlogged = 0
        self._as_flagged = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one connection's request."""
        if scope["type"] != "http" or scope["method"] in _BODILESS:
            await self._app(scope, receive, send)
            return
        if not self._as_flagged:
            self._as_flagged = True
            _take_embeddings_as_flagged(getattr(scope.get("app"), "state", None))
        try:
            async with asyncio.timeout(BODY_S):
                body = await _read(receive)
        except TimeoutError:
            body = Refusal(408, Why.SLOW, f"The request body did not arrive within {BODY_S:.0f} s.")
        if body is None:
            return  # the client left before its request was complete
        refusal = body if isinstance(body, Refusal) else await self._judge(scope, body)
        if refusal is not None:
            self._log(scope, refusal)
            await _answer(send, refusal.status, refusal.body())
            return
        assert isinstance(body, bytes)
        if scope.get("path") == RELEASE_PATH:
            await _answer(send, *await _release(scope, body))
            return
        await self._app(scope, _replaying(body, receive), send)

    async def _judge(self, scope: Message, body: bytes) -> Refusal | None:
        types = [value for name, value in scope["headers"] if name.lower() == b"content-type"]
        if len(types) > 1:
            return Refusal(400, Why.UNREADABLE, "The request has more than one Content-Type.")
        content_type = types[0].decode("latin-1") if types else ""
        keys: InstanceKeys | None = None if self._file is None else self._file.get()
        return await _stepwise(self._screen.judge(body, content_type, keys, self._clock()))

    def _log(self, scope: Message, refusal: Refusal) -> None:
        self._unlogged += 1
        now = time.monotonic()
        if now - self._logged < LOG_EVERY_S:
            return
        client = (scope.get("client") or ["?"])[0]
        path = str(scope.get("path"))[:100]
        logger.warning(
            "refused %d: last %r from %s with %d: %s (%s)",
            self._unlogged,
            path,
            client,
            refusal.status,
            refusal.why,
            refusal.message,
        )
        self._logged, self._unlogged = now, 0


def _take_embeddings_as_flagged(state: Any) -> None:
    """Let clients send embeddings in place of pictures only if the engine's flag says so, and never without a tensor.

    vLLM 0.32 turns both on in every engine that may pull (`VllmConfig._resolve_mm_embedding_inputs`), for routers that
    leave the tensors out of a decode leg. Baton's sends what the client sent. A client's part without a tensor would
    pass admission, and an assert in the worker would end the engine.

    Args:
        state: the API server's: its flags (`args`) and `vllm_config`; None in other servers.
    """
    flags, config = getattr(state, "args", None), getattr(state, "vllm_config", None)
    media = getattr(getattr(config, "model_config", None), "multimodal_config", None)
    if flags is None or media is None or getattr(config, "ec_transfer_config", None) is not None:
        return  # its encoder is elsewhere, and sends such parts
    media.enable_mm_embeds = bool(getattr(flags, "enable_mm_embeds", False))
    media.allow_missing_mm_embeddings = False


async def _stepwise(steps: Steps[Found]) -> Found:
    """Run all steps, and let other requests run between them. A usual body has none."""
    work = ScanWork(steps)
    for _ in work:
        await asyncio.sleep(0)
    return work.found


def _open(path: str) -> KeyFile[InstanceKeys] | None:
    """The engine's keys. Without keys the guard stays and refuses all transfers: an unprotected engine is worse than
    one that cannot transfer.
    """
    try:
        return KeyFile(Path(path), read_instance) if path else None
    except (OSError, ValueError) as error:
        logger.warning("%s=%s cannot be used, so every transfer is refused: %s", FILE_VARIABLE, path, error)
        return None


async def _read(receive: Receive) -> bytes | Refusal | None:
    """The whole body, or None if the client has left."""
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        piece = message.get("body", b"")
        size += len(piece)
        if size > BODY_BYTES_MAX:
            return Refusal(413, Why.SIZE, f"The request body is larger than {BODY_BYTES_MAX} bytes.")
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _replaying(body: bytes, receive: Receive) -> Receive:
    """`receive` for the engine: the body in one piece, then the remaining messages (a disconnect)."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _release(scope: Message, body: bytes) -> tuple[int, bytes]:
    """Status and body for a router that gives a hold up. The ticket was checked: without one there are no
    fields here.
    """
    fields = await _stepwise(transfer_fields(body, "application/json"))
    name = name_in(fields)
    if name is None:
        return 400, _error(400, "Send `kv_transfer_params` with a ticket and the name of the transfer.")
    door = _door_of(scope)
    if door is None:
        return 404, _error(404, "This engine does not run Baton's connector.")
    question = json.dumps({"ask": "release", "transfer_id": name}).encode() + b"\n"
    try:
        async with asyncio.timeout(DOOR_S):
            reader, writer = await asyncio.open_unix_connection(door)
            try:
                writer.write(question)
                told = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        return 503, _error(503, f"The engine's agent socket does not answer: {error}")
    return (200, told.strip()) if b'"ok"' in told else (503, _error(503, "The engine's connector refused."))


def _door_of(scope: Message) -> str | None:
    """The path of the agent socket of this server's engine, or of the rank that the request names: vLLM keeps its
    configuration in the application.
    """
    found: Any = scope.get("app")
    for name in ("state", "vllm_config", "kv_transfer_config", "kv_connector_extra_config"):
        found = getattr(found, name, None)
    door = _door_in(found)
    if door is None:
        return None
    said = [value for name, value in scope["headers"] if name.lower() == RANK_HEADER.encode()]
    return door_of(door, int(said[0]) if said and _RANK.fullmatch(said[0]) else 0)


def _door_in(extra: Any) -> str | None:
    """The agent socket in a connector's own settings, or in those of the connectors that it has beside each other:
    with tiers Baton's is one of two (`engine.vllm.tiers.beside`).
    """
    if not isinstance(extra, dict):
        return None
    beside = [each for each in extra.get("connectors") or () if isinstance(each, dict)]
    for settings in (extra, *(each.get("kv_connector_extra_config") for each in beside)):
        door = settings.get("door") if isinstance(settings, dict) else None
        if isinstance(door, str) and door:
            return door
    return None


def _error(status: int, message: str) -> bytes:
    told = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return json.dumps({"error": told}).encode()


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status in {408, 413}:
        headers.append((b"connection", b"close"))  # do not read the rest of the body
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
