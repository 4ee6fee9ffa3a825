"""The admin side: what each caller may read and do there, and limits on what strangers can cost it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
import uvloop
from support.fleet import Starter
from support.served import served

from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from cluster.keys import digest
from cluster.readable import SMALL_BYTES_MAX
from cluster.spec import Tenant
from router.api import app
from router.api.config import RouterConfig
from router.api.endpoints import admin_app
from router.api.server import Router
from router.fleet import quarantine

PROMPT = {"model": "fake", "prompt": "hello", "max_tokens": 5}
TENANTS: dict[str, Any] = {
    "tenants": {"acme": Tenant(), "other": Tenant()},
    "tenant_keys": {name: lambda name=name: (digest(f"sk-{name}"),) for name in ("acme", "other")},
}
KEYED: dict[str, Any] = {**TENANTS, "admin_keys": lambda: (digest("sk-operator"),)}

STRANGER, WRONG, TENANT, OPERATOR, HERE = "a stranger", "a wrong key", "a tenant", "an operator", "this machine"
HEADERS = {
    STRANGER: {},
    WRONG: {"Authorization": "Bearer sk-nobody"},
    TENANT: {"Authorization": "Bearer sk-acme"},
    OPERATOR: {"Authorization": "Bearer sk-operator"},
    HERE: {},
}
OPEN = {STRANGER: 200, WRONG: 200, TENANT: 200, OPERATOR: 200, HERE: 200}
READ = {STRANGER: 401, WRONG: 401, TENANT: 200, OPERATOR: 200, HERE: 200}
OPERATE = {STRANGER: 401, WRONG: 401, TENANT: 403, OPERATOR: 200, HERE: 200}

ENDPOINTS: list[tuple[str, str, dict[str, int]]] = [
    ("GET", "/health", OPEN),
    ("GET", "/ready", OPEN),
    ("GET", "/ui", OPEN),
    ("GET", "/ui/", OPEN),
    ("GET", "/ui/ui.js", OPEN),
    ("GET", "/ui/ui.css", OPEN),
    ("GET", "/ui/data", READ),
    ("GET", "/explain", READ),
    ("GET", "/explain/{id}", READ),
    ("GET", "/quarantine", READ),
    ("GET", "/metrics", OPERATE),
    ("GET", "/metrics?all=1", OPERATE),
    ("POST", "/quarantine/{instance}", OPERATE),
    ("DELETE", "/quarantine/{instance}", OPERATE),
    ("POST", "/drain/{instance}", {**OPERATE, OPERATOR: 409, HERE: 409}),
    ("POST", "/resume/{instance}", {**OPERATE, OPERATOR: 409, HERE: 409}),
]


def elsewhere() -> aiohttp.TCPConnector:
    """Connections from 127.0.0.2, which the router takes for another machine's address."""
    return aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))


async def test_every_admin_endpoint_is_in_the_table() -> None:
    routes = admin_app(Router(RouterConfig(instances=NOWHERE)).endpoints).router.routes()
    there = {(each.method, each.resource.canonical) for each in routes if each.resource and each.method != "HEAD"}
    asked = {(method, path.partition("?")[0].replace("{instance}", "{id}")) for method, path, _ in ENDPOINTS}
    assert there == asked


async def test_an_address_of_another_machine_is_named_with_its_field_of_the_file() -> None:
    """`baton up` has no flag for it."""
    config = RouterConfig(instances=NOWHERE, port=0, admin_host="203.0.113.1", admin_port=0)
    with pytest.raises(UsageError, match=r"with --admin-host \(router\.admin_host of the cluster file\)$"):
        await app.serve(config, lambda *_: None, asyncio.Event())


async def test_each_side_listens_at_several_addresses_and_announces_one() -> None:
    config = RouterConfig(
        instances=NOWHERE, host="127.0.0.2", port=0, hosts_beside=("127.0.0.1", "127.0.0.3"),
        admin_host="127.0.0.2", admin_port=0, admin_hosts_beside=("127.0.0.1",),
    )  # fmt: skip
    async with served(config) as (public, admin), aiohttp.ClientSession() as session:
        assert public.startswith("http://127.0.0.2:") and admin.startswith("http://127.0.0.2:")
        for url, last in ((public, "1"), (public, "2"), (public, "3"), (admin, "1"), (admin, "2")):
            async with session.get(url.replace("127.0.0.2", f"127.0.0.{last}") + "/health") as answer:
                assert answer.status == 200
        async with session.get(admin.replace("127.0.0.2", "127.0.0.1") + "/quarantine") as answer:
            assert answer.status == 200, "from this machine no key is asked for"


async def test_all_addresses_of_both_families_or_of_the_one_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Kubernetes: the same command for clusters of IPv4, of IPv6 and of both."""
    config = RouterConfig(instances=NOWHERE, host="0.0.0.0", port=0, hosts_beside=("::",), admin_port=0)
    for lacks in (app._lacks_family_of("::"), True):
        monkeypatch.setattr(app, "_lacks_family_of", lambda _, lacks=lacks: lacks)
        async with served(config) as (public, _), aiohttp.ClientSession() as session:
            port = public.rpartition(":")[2]
            for host in ["127.0.0.1", *([] if lacks else ["[::1]"])]:
                async with session.get(f"http://{host}:{port}/health") as answer:
                    assert answer.status == 200


async def test_a_further_address_of_another_machine_is_named() -> None:
    config = RouterConfig(instances=NOWHERE, port=0, admin_port=0, hosts_beside=("203.0.113.1",))
    with pytest.raises(UsageError, match=r"cannot listen on 203\.0\.113\.1:\d+ .* with --host$"):
        await app.serve(config, lambda *_: None, asyncio.Event())


@pytest.mark.parametrize(
    ("host", "code", "lacks"),
    [
        ("::", errno.EAFNOSUPPORT, True), ("::1", errno.EADDRNOTAVAIL, True), ("::1", errno.EMFILE, False),
        ("127.0.0.1", None, False), ("203.0.113.1", errno.EADDRNOTAVAIL, False), ("localhost", None, False),
    ],
)  # fmt: skip
def test_which_families_a_machine_lacks(
    monkeypatch: pytest.MonkeyPatch, host: str, code: int | None, lacks: bool
) -> None:
    class Socket(contextlib.nullcontext[Any]):
        def bind(self, _: object) -> None:
            if code is not None:
                raise OSError(code, "")

    made = Socket()
    made.enter_result = made
    monkeypatch.setattr(app.socket, "socket", lambda *_: made)
    assert app._lacks_family_of(host) is lacks


async def test_who_may_what(start: Starter) -> None:
    fleet = await start(**KEYED)
    async with fleet.client.post(fleet.endpoint + "/v1/completions", json=PROMPT, headers=HEADERS[TENANT]) as answer:
        names = {"id": answer.headers["X-Baton-Request-Id"], "instance": "prefill-0"}
    said: dict[tuple[str, str], dict[str, int]] = {}
    async with aiohttp.ClientSession(connector=elsewhere()) as far:
        for method, path, _ in ENDPOINTS:
            for who, headers in HEADERS.items():
                client = fleet.client if who == HERE else far
                async with client.request(method, fleet.admin + path.format(**names), headers=headers) as reply:
                    said.setdefault((method, path), {})[who] = reply.status
    assert said == {(method, path): expected for method, path, expected in ENDPOINTS}


async def test_without_keys_this_machine_may_do_all_and_a_stranger_only_reads_open_pages(start: Starter) -> None:
    fleet = await start()
    async with aiohttp.ClientSession(connector=elsewhere()) as far:
        for method, path, expected in ENDPOINTS:
            url = fleet.admin + path.format(id="x", instance="prefill-0")
            async with far.request(method, url) as reply:
                assert reply.status == expected[STRANGER], path
            async with fleet.client.request(method, url) as reply:
                assert reply.status == (404 if "{id}" in path else expected[HERE]), path


async def test_a_tenant_reads_quarantines_only_of_instances_that_serve_it(start: Starter) -> None:
    fleet = await start(decode=2, reserved={"decode-1": frozenset({"other"})}, **KEYED)
    for name in ("decode-0", "decode-1"):
        body = {"because": f"{name} is slow"}
        async with fleet.client.post(f"{fleet.admin}/quarantine/{name}", json=body, headers=HEADERS[OPERATOR]) as reply:
            assert reply.status == 200
    async with fleet.client.get(f"{fleet.admin}/quarantine", headers=HEADERS[OPERATOR]) as reply:
        assert set((await reply.json())["quarantined"]) == {"decode-0", "decode-1"}
    async with fleet.client.get(f"{fleet.admin}/quarantine", headers=HEADERS[TENANT]) as reply:
        assert await reply.json() == {"quarantined": {"decode-0": "decode-0 is slow"}}


async def test_no_more_instances_are_set_aside_than_routers_announce(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more would let another one in again, on every router."""
    monkeypatch.setattr(quarantine, "WORDS_MAX", 1)
    fleet = await start(decode=2)
    asked = []
    for method, name in (("POST", 0), ("POST", 1), ("POST", 0), ("DELETE", 0), ("POST", 1)):
        async with fleet.client.request(method, f"{fleet.admin}/quarantine/decode-{name}") as reply:
            asked.append((reply.status, (await reply.json()).get("error")))
    assert [status for status, _ in asked] == [200, 409, 200, 200, 200]
    error = asked[1][1]
    assert error["type"] == "ConflictError"
    assert "`decode-1`" in error["message"] and "no more than 1." in error["message"]
    assert "DELETE /quarantine/ID" in error["message"]
    async with fleet.client.get(f"{fleet.admin}/quarantine") as reply:
        assert set((await reply.json())["quarantined"]) == {"decode-1"}


# -- bodies --


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"[" * 4000, "nested too deep"),
        (b'{"because": ' + b"[" * 4000, "nested too deep"),
        (b"{", "not JSON"),
        (b'{"because": "\xff"}', "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"deadline": 5}', "There is no field `deadline`"),
    ],
)
@pytest.mark.parametrize("path", ["/drain/prefill-0", "/resume/prefill-0", "/quarantine/prefill-0"])
async def test_a_body_that_cannot_be_read_is_a_400_that_says_what_to_send(
    start: Starter, path: str, body: bytes, named: str
) -> None:
    fleet = await start()
    async with fleet.client.post(fleet.admin + path, data=body) as reply:
        told = (await reply.json())["error"]
    assert (reply.status, told["type"]) == (400, "BadRequestError"), told
    assert named in told["message"]
    assert ("It has no fields" in told["message"]) == ("resume" in path)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/quarantine/prefill-0", {"because": 3}, "because"),
        ("/quarantine/prefill-0", {"because": None}, "because"),
        ("/drain/prefill-0", {"deadline_s": "soon"}, "deadline_s"),
        ("/drain/prefill-0", {"deadline_s": -1}, "deadline_s"),
        ("/drain/prefill-0", {"deadline_s": True}, "deadline_s"),
    ],
)
async def test_a_field_of_another_kind_is_named(start: Starter, path: str, body: Any, param: str) -> None:
    fleet = await start()
    async with fleet.client.post(fleet.admin + path, json=body) as reply:
        told = (await reply.json())["error"]
    assert (reply.status, told["param"]) == (400, param)
    assert f"`{param}` is" in told["message"]


# -- strangers --

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]
HEAD_S = 0.15

NOWHERE = (Instance(id=InstanceId("x"), role=Role.BOTH, url="http://127.0.0.1:9"),)
Said = tuple[int, bytes]
Act = Callable[[str, int], Awaitable[Any]]


def on(loop: Callable[[], asyncio.AbstractEventLoop], act: Act, **settings: Any) -> Any:
    """The result of `act(host, port)` at the admin side of a router that runs on this event loop."""

    async def run() -> Any:
        config = RouterConfig(
            instances=NOWHERE, port=0, admin_port=0, drain_s=0.2, **{"head_timeout_s": HEAD_S, **settings}
        )
        async with served(config) as (_, admin):
            host, _, port = admin.removeprefix("http://").partition(":")
            async with asyncio.timeout(10):
                return await act(host, int(port))

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(run())


async def exchange(host: str, port: int, *sent: bytes) -> Said:
    """First status and all bytes until the router closes the connection; status 0: it closed without an answer."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        for each in sent:
            writer.write(each)
            await writer.drain()
        told = await reader.read()
    except ConnectionResetError:
        return 0, b""
    finally:
        writer.close()
    return (int(told.split()[1]), told) if told else (0, b"")


async def status_of(host: str, port: int, *sent: bytes, local: str = "127.0.0.1") -> int:
    """The first answer's status. Does not wait for the close: a refused client may send on for a while before that."""
    reader, writer = await asyncio.open_connection(host, port, local_addr=(local, 0))
    writer.writelines(sent)
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "sent", [(), (b"GET /health HTTP/1.1\r\nHost: x\r\n",), (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET ")]
)
def test_a_client_that_sends_no_whole_head_is_told_so_and_cut_off(
    loop: Callable[[], asyncio.AbstractEventLoop], sent: tuple[bytes, ...]
) -> None:
    async def act(host: str, port: int) -> Said:
        return await exchange(host, port, *sent)

    status, told = on(loop, act)
    assert status == (408 if len(sent) < 2 else 200)
    assert b"head did not arrive in time" in told


@pytest.mark.parametrize("loop", LOOPS)
def test_heads_and_bodies_are_read_within_bounds(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    post = b"POST /drain/x HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    chunk = b"%x\r\n%b\r\n" % (8192, b" " * 8192)

    async def act(host: str, port: int) -> dict[str, int]:
        async def status(*sent: bytes) -> int:
            return await status_of(host, port, *sent)

        return {
            "many headers": await status(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n"),
            "a long header": await status(b"GET /health HTTP/1.1\r\na: " + b"b" * 40_000 + b"\r\n\r\n"),
            "a large body": await status(post + b"Content-Length: %d\r\n\r\n" % (SMALL_BYTES_MAX + 1)),
            "a body without end": await status(post + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 9),
            "a slow body": await status(post + b"Content-Length: 10\r\n\r\n"),
            "a slow body in chunks": await status(post + b"Transfer-Encoding: chunked\r\n\r\n" + chunk),
            "a completion": await status(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"),
        }

    assert on(loop, act, body_timeout_s=0.15) == {
        "many headers": 431,
        "a long header": 431,
        "a large body": 413,
        "a body without end": 413,
        "a slow body": 408,
        "a slow body in chunks": 408,
        "a completion": 404,
    }


@pytest.mark.parametrize("path", [b"/drain/x", b"/resume/x", b"/quarantine/x"])
def test_a_callers_key_is_checked_before_its_body_is_read(path: bytes) -> None:
    """A stranger that announces a body and sends none is refused at once, not after `body_timeout_s`."""

    async def act(host: str, port: int) -> int:
        head = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\nConnection: close\r\n\r\n" % path
        return await status_of(host, port, head, local="127.0.0.2")

    assert on(asyncio.new_event_loop, act, body_timeout_s=600.0) == 401


def test_connections_beyond_the_maximum_are_refused_until_others_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ADMIN_GUESTS_MAX", 5)

    async def act(host: str, port: int) -> list[int]:
        async with AsyncExitStack() as stack:
            for _ in range(5):
                _, writer = await asyncio.open_connection(host, port)
                stack.callback(writer.close)
            ask = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            beyond = (await exchange(host, port, ask))[0]
        while (status := (await exchange(host, port, ask))[0]) != 200:
            await asyncio.sleep(0.005)
        return [beyond, status]

    assert on(asyncio.new_event_loop, act, head_timeout_s=30.0) == [503, 200]
