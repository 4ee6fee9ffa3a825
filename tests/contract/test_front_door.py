"""What the router demands of clients and callers: TLS, bounds on heads and open requests, slow clients, logs, keys."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import uvloop
from aiohttp import web
from support.fleet import Fleet, Starter, eventually

from cluster.errors import UsageError
from cluster.keys import digest
from cluster.spec import Tenant
from router.http.tls import HANDSHAKES, server_context

ASK = {"model": "fake", "prompt": "hello", "max_tokens": 5}


# -- TLS --


async def test_clients_speak_tls(start: Starter, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    fleet = await start(tls_cert_file=str(cert), tls_key_file=str(key))
    assert fleet.endpoint.startswith("https://")
    assert fleet.admin.startswith("http://")
    trust = ssl.create_default_context(cafile=str(cert))
    for more in ({}, {"stream": True}):
        async with fleet.client.post(fleet.endpoint + "/v1/completions", json={**ASK, **more}, ssl=trust) as response:
            assert response.status == 200
            text = await response.text()
            assert text.endswith("data: [DONE]\n\n") if more else "one two" in text
    async with fleet.client.get(fleet.endpoint + "/v1/models", ssl=trust) as response:
        assert response.status == 200
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await fleet.client.get(fleet.endpoint + "/health")
    old = ssl.create_default_context(cafile=str(cert))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with fleet.client.get(fleet.endpoint + "/health", ssl=old) as response:
        assert response.status == 200


async def test_plain_http_to_a_port_with_tls_is_cut_off(start: Starter, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    fleet = await start(tls_cert_file=str(cert), tls_key_file=str(key))
    address = urlsplit(fleet.endpoint)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(5):
        assert b"200" not in await reader.read(), "closed, and never an answer in the clear"
    writer.close()
    await writer.wait_closed()


SSL3_HELLO = (
    b"\x16\x03\x00\x00\x2d\x01\x00\x00\x29\x03\x00" + bytes(32) + b"\x00\x00\x02\xc0\x2b\x01\x00"
)  # one record, one hello, 3.0 in both: a time and random bytes, no session, one cipher, no compression
"""What a client sends that knows nothing newer than SSLv3."""


async def _handshakes(host: str, port: int, cert: Path) -> None:
    """One of each kind of `HANDSHAKES`, another with nothing in common, and one that the client gives up."""

    def connect(context: ssl.SSLContext | None, sent: bytes = b"") -> None:
        """On a thread: asyncio's own clients say nothing when they refuse a certificate."""
        with socket.create_connection((host, port), timeout=5) as plain:
            if context is not None:
                context.wrap_socket(plain, server_hostname=host).close()
            elif sent:
                plain.sendall(sent)
                plain.recv(100)

    await asyncio.to_thread(connect, ssl.create_default_context(cafile=str(cert)))
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.to_thread(connect, ssl.create_default_context())
    other = ssl.create_default_context(cafile=str(cert))
    other.maximum_version = ssl.TLSVersion.TLSv1_2
    other.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")  # the certificate has an ECDSA key
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.to_thread(connect, other)
    await asyncio.to_thread(connect, None, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.to_thread(connect, None, b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00")  # a server's record
    await asyncio.to_thread(connect, None, SSL3_HELLO)
    await asyncio.to_thread(connect, None)


COUNTED = {"begun": 7, "done": 1, "not_tls": 1, "nothing_in_common": 2, "alert": 1, "other": 1}


async def test_handshakes_are_counted_by_how_they_end(start: Starter, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    fleet = await start(tls_cert_file=str(cert), tls_key_file=str(key))
    address = urlsplit(fleet.endpoint)

    async def counted() -> dict[str, int]:
        async with fleet.client.get(f"{fleet.admin}/metrics") as response:
            text = await response.text()
        found = re.findall(r'^baton_tls_handshakes_total{outcome="(\w+)"} (\d+)\.0$', text, re.MULTILINE)
        return {outcome: int(count) for outcome, count in found}

    assert await counted() == dict.fromkeys(HANDSHAKES, 0)
    async with asyncio.timeout(10):
        await _handshakes(str(address.hostname), address.port or 0, cert)
        while await counted() != COUNTED:
            await asyncio.sleep(0.01)


def test_handshakes_are_counted_on_the_loop_of_baton_router_too(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    counted: dict[str, int] = {}

    async def serve() -> None:
        context = server_context(str(cert), str(key), counted)
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        try:
            async with asyncio.timeout(10):
                host, port = server.sockets[0].getsockname()
                await _handshakes(host, port, cert)
                await eventually(lambda: counted == COUNTED, "all are counted")
        finally:
            server.close()  # uvloop's `close` would wait for it for ever, and no signal would end that

    uvloop.run(serve())
    assert counted == COUNTED


async def test_a_router_without_tls_counts_no_handshakes(start: Starter) -> None:
    fleet = await start()
    async with fleet.client.get(f"{fleet.admin}/metrics") as response:
        assert "baton_tls_handshakes_total{" not in await response.text()


def test_files_that_are_no_certificate_are_named(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    (tmp_path / "none.pem").write_text("nothing")
    for wrong, words in (
        ((str(tmp_path / "gone.pem"), None), "gone.pem: no such file"),
        ((str(tmp_path / "none.pem"), str(key)), "none.pem"),
        ((str(cert), None), "both PEM"),
        ((str(cert), str(key.with_name("locked.pem"))), "the key unencrypted"),
    ):
        with pytest.raises(UsageError, match=words):
            server_context(*wrong, handshakes={})


# -- bounds --


async def _raw(fleet: Fleet, sent: bytes) -> bytes:
    address = urlsplit(fleet.endpoint)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(sent)
    async with asyncio.timeout(5):
        answer = await reader.read(4096)
    writer.close()
    await writer.wait_closed()
    return answer


HEADS = {
    "a long line": b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 100_000),
    "a long header": b"GET /health HTTP/1.1\r\nHost: x\r\nA: %b\r\n\r\n" % (b"a" * 100_000),
    "a header without an end": b"GET /health HTTP/1.1\r\nHost: x\r\nA: %b" % (b"a" * 300_000),
    "many headers": b"GET /health HTTP/1.1\r\nHost: x\r\n%b\r\n" % (b"A: b\r\n" * 20_000),
    "many headers before a prompt": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%bContent-Length: 2\r\n\r\n{}"
    % (b"A: b\r\n" * 20_000),
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500 + b"\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}a",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
async def test_heads_are_bounded(start: Starter, head: bytes) -> None:
    fleet = await start()
    try:
        answer = await _raw(fleet, head)
    except ConnectionError:
        answer = b""  # closed while we were sending
    assert answer == b"" or answer.split(b" ", 2)[1] in {b"400", b"414", b"431"}, answer
    assert (await fleet.post("/v1/completions", json=ASK))[0] == 200, "nobody else is harmed"


def _tenants(**more: Any) -> dict[str, Any]:
    names = ("acme", "other")
    return {
        "tenants": {"acme": Tenant(**more), "other": Tenant()},
        "tenant_keys": {name: lambda name=name: (digest(f"sk-{name}"),) for name in names},
    }


async def test_a_tenant_has_so_many_requests_open_and_no_more(start: Starter) -> None:
    fleet = await start(**_tenants(open_max=2))
    go_on = asyncio.Event()

    async def wait(_: web.Request, body: dict[str, Any]) -> None:
        await go_on.wait()

    for engine in fleet.engines.values():
        engine.behave = wait

    async def ask(key: str, path: str = "/v1/completions", **more: Any) -> tuple[int, Any, dict[str, str]]:
        headers = {"Authorization": f"Bearer {key}"}
        async with fleet.client.post(fleet.endpoint + path, json={**ASK, **more}, headers=headers) as response:
            return response.status, await response.text(), dict(response.headers)

    first = [asyncio.ensure_future(ask("sk-acme", stream=stream)) for stream in (False, True)]
    await eventually(lambda: sum(len(e.bodies) for e in fleet.engines.values()) == 2, "both are under way")
    for path in ("/v1/completions", "/v1/embeddings"):
        status, text, headers = await ask("sk-acme", path)
        error = json.loads(text)["error"]
        assert (status, error["type"], headers["Retry-After"]) == (429, "RateLimitError", "1")
        assert "2 requests open" in error["message"]
    others = asyncio.ensure_future(ask("sk-other"))
    await eventually(lambda: sum(len(e.bodies) for e in fleet.engines.values()) == 3, "the other tenant has no bound")
    go_on.set()
    assert [(await each)[0] for each in (*first, others)] == [200] * 3
    for _ in range(5):
        assert (await ask("sk-acme"))[0] == 200, "each that ends gives its place back"
        assert (await ask("sk-acme", "/v1/embeddings"))[0] == 200
        assert (await ask("sk-acme", model="nosuch"))[0] == 404


async def test_a_client_that_leaves_gives_its_place_back(start: Starter) -> None:
    fleet = await start(**_tenants(open_max=1))
    headers = {"Authorization": "Bearer sk-acme"}
    hung = asyncio.Event()

    async def hang(_: web.Request, body: dict[str, Any]) -> None:
        await hung.wait()

    fleet.engines["decode-0"].behave = hang
    with pytest.raises(TimeoutError):
        await fleet.post("/v1/completions", json=ASK, headers=headers, timeout=aiohttp.ClientTimeout(total=0.2))
    fleet.engines["decode-0"].behave = None
    async with asyncio.timeout(5):
        while (await fleet.post("/v1/completions", json=ASK, headers=headers))[0] != 200:
            await asyncio.sleep(0.02)
    hung.set()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_client_that_takes_nothing_is_cut_off(start: Starter, path: str) -> None:
    """The router cuts off slow clients that it notices; the kernel cuts off all others (TCP_USER_TIMEOUT)."""
    fleet = await start(client_stall_s=0.5)
    decode = fleet.engines["decode-0"]
    ended: list[BaseException | None] = []

    async def pour(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        event = b'data: {"choices": [{"text": "' + b"x" * 60_000 + b'"}]}\n\n'
        try:
            for _ in range(2000):
                await response.write(event)
        except (ConnectionError, asyncio.CancelledError) as error:
            ended.append(error)
            raise
        return response

    async def generation(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await pour(request)

    async def elsewhere(_: Any, request: web.Request, raw: bytes) -> Any:
        return await pour(request)

    decode.behave, decode.behave_elsewhere = generation, elsewhere
    address = urlsplit(fleet.endpoint)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (address.hostname, address.port))
        body = json.dumps({**ASK, "input": "x", "stream": True, "n": 2}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        await loop.sock_sendall(client, f"{head}\r\n\r\n".encode() + body)
        await eventually(lambda: bool(ended), "the engine's leg ends, although the client closed nothing", 15)
    assert (await fleet.post("/v1/completions", json={**ASK, "model": "nosuch"}))[0] == 404


# -- logs --


MARKER = "the-word-that-nobody-may-read"


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
async def test_no_text_of_a_request_and_no_key_is_logged(
    start: Starter, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(level)
    fleet = await start(classes={}, aliases={"alias": "fake"})
    text = {"prompt": MARKER, "messages": [{"role": "user", "content": MARKER}], "input": MARKER, "query": MARKER}

    async def fail(_: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "boom"}}, status=500)

    for failing in (False, True):
        for engine in fleet.engines.values():
            engine.behave = fail if failing else None
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize"):
            for more in ({}, {"stream": True}, {"max_tokens": "x"}, {"stop": MARKER, "user": MARKER}):
                await fleet.post(
                    path, json={"model": "alias", **text, **more}, headers={"Authorization": f"Bearer {MARKER}"}
                )
        await fleet.post("/v1/completions", data=MARKER.encode(), headers={"Content-Type": "application/json"})
        await fleet.post(
            "/v1/completions", data=f'{{"prompt": "{MARKER}'.encode(), headers={"Content-Type": "application/json"}
        )
    assert caplog.records, "something was logged"
    said = [record for record in caplog.records if MARKER in record.getMessage() or MARKER in str(record.exc_text)]
    assert not said


# -- the admin side --


async def _ask_admin(fleet: Fleet, path: str, key: str = "", *, far: bool = False) -> int:
    """Status of the answer. `far`: from 127.0.0.2, which the router takes for another machine's address."""
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0) if far else None)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession(connector=connector) as client,
        client.get(fleet.admin + path, headers=headers) as response,
    ):
        await response.read()
        return response.status


@pytest.mark.parametrize("path", ["/metrics", "/explain", "/ui/data"])
async def test_the_admin_side_asks_other_machines_for_a_key(start: Starter, path: str) -> None:
    alone = await start()
    assert await _ask_admin(alone, path) == 200
    assert await _ask_admin(alone, path, far=True) == 401
    assert await _ask_admin(alone, "/health", far=True) == 200
    keyed = await start(admin_keys=lambda: (digest("sk-operator"),))
    assert await _ask_admin(keyed, path) == 200
    for key, status in (("", 401), ("sk-other", 401), ("sk-operator", 200)):
        assert await _ask_admin(keyed, path, key, far=True) == status


async def test_a_tenants_key_gets_no_metrics(start: Starter) -> None:
    fleet = await start(**_tenants(), admin_keys=lambda: (digest("sk-operator"),))
    for key, path, status in (
        ("sk-acme", "/metrics", 403),
        ("sk-acme", "/explain", 200),
        ("sk-operator", "/metrics", 200),
        ("", "/metrics", 401),
    ):
        assert await _ask_admin(fleet, path, key, far=True) == status, (key, path)
    assert await _ask_admin(fleet, "/metrics") == 200
