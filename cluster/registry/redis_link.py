"""One Redis: its address, the connections to it, the time limit of calls, and failures in words. A shell.

A password stands in a file or in the URL; no message, no repr and no log shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import quote, unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, InvalidResponse, NoPermissionError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cluster.errors import UsageError
from cluster.registry.registry import RegistryDown
from cluster.text_file import text_in
from cluster.urls import netloc

CONNECTIONS_MAX = 8
"""Connections of one process. A router reads with one and listens with another; the rest serves concurrent calls."""

RACES_MAX = 5
"""A watched transaction is given up after this many disturbances in a row; each one was another agent's success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """Address and credentials of a Redis. Its text is fit for logs."""

    host: str
    port: int
    db: int = 0
    tls: bool = False
    ca_file: Path | None = None
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        place = netloc(self.host, self.port)
        return f"{'rediss' if self.tls else 'redis'}://{place}" + (f"/{self.db}" if self.db else "")

    def redact(self, text: str) -> str:
        """`text` without the password, in case a server or a library quotes it."""
        for secret in (self.password, quote(self.password, safe="")) if self.password else ():
            text = text.replace(secret, "***")
        return text


def parse_place(url: str, password_file: Path | None = None, ca_file: Path | None = None) -> RedisAddress:
    """Read ``redis://[user[:password]@]host[:port][/db]`` or ``rediss://`` (TLS); the password is better kept in a
    file.

    Raises:
        UsageError: the URL or a file cannot be used. The message holds no password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
        db = int(parts.path.strip("/") or 0)
    except ValueError as error:
        raise UsageError("--registry: not a URL of the form redis://HOST:PORT[/DB]") from error
    if parts.scheme not in {"redis", "rediss"} or not parts.hostname or parts.query or parts.fragment or db < 0:
        raise UsageError("--registry: expected redis://HOST:PORT, or rediss://HOST:PORT for TLS")
    if ca_file is not None and parts.scheme != "rediss":
        raise UsageError("--registry-ca-file is for TLS: the registry's URL must begin with rediss://")
    if ca_file is not None and not ca_file.is_file():
        raise UsageError(f"--registry-ca-file {ca_file}: no such file")
    if password_file is not None and parts.password is not None:
        raise UsageError("--registry-password-file and a password in the registry's URL: give one of them")
    password = read_password(password_file) if password_file is not None else unquote(parts.password or "") or None
    return RedisAddress(
        host=parts.hostname,
        port=port,
        db=db,
        tls=parts.scheme == "rediss",
        ca_file=ca_file,
        username=unquote(parts.username) if parts.username else None,
        password=password,
    )


def read_password(path: Path) -> str:
    """The one line of a password file.

    Raises:
        UsageError: the file cannot be read, or is empty.
    """
    password = text_in(path, "--registry-password-file", "give a file with the password").strip()
    if not password:
        raise UsageError(f"--registry-password-file {path}: the file is empty; write the password into it")
    return password


class RedisLink:
    """Connections to one Redis. Connects at its first call, and again after a connection breaks."""

    def __init__(self, place: RedisAddress, timeout_s: float) -> None:
        """`timeout_s`: the longest time for one call, connecting included, in seconds."""
        self.place: Final = place
        self._timeout_s: Final = timeout_s
        self.client: Final = _connect(place, timeout_s)
        self.takes_writes = True
        """See `Registry.takes_writes`."""

    async def close(self) -> None:
        """Close all connections."""
        with contextlib.suppress(RedisError, OSError):
            await self.client.aclose(close_connection_pool=True)

    @contextlib.asynccontextmanager
    async def asking(self, *, writes: bool = False) -> AsyncIterator[None]:
        """Wrap a call: a time limit, and one kind of failure (`RegistryDown`). `writes`: it tells `takes_writes`."""
        before = cancelled()
        try:
            # The second limit cancels the library's clean-up: after a WATCH it asks the server once more.
            async with asyncio.timeout(2 * self._timeout_s), asyncio.timeout(self._timeout_s):
                yield
            self.takes_writes = self.takes_writes or writes
        except (
            RedisError,
            OSError,
            ValueError,
        ) as error:  # OSError: asyncio's TimeoutError too; ValueError: see `_down`
            if cancelled() > before:
                # The library's clean-up raised in place of the cancellation: the call was to end, and ends.
                raise asyncio.CancelledError from None
            self.takes_writes = self.takes_writes and not writes
            if isinstance(error, ResponseError):
                await self._hang_up()
            self._down(error)

    async def next_message(self, messages: PubSub, wait_s: float) -> dict[str, Any] | None:
        """The next message of a subscription; None: there was none within `wait_s` seconds. A broken connection is made
        again, which may take the time of one call more.

        Raises:
            RedisError, OSError, ValueError: the subscription has to be made anew.
        """
        message: dict[str, Any] | None
        async with asyncio.timeout(wait_s + self._timeout_s):
            message = await messages.get_message(ignore_subscribe_messages=True, timeout=wait_s)
        return message

    async def _hang_up(self) -> None:
        """Close idle connections: the server refuses to work. After a failover the registry's name leads to another
        server, and the former primary may keep its connections open.
        """
        with contextlib.suppress(RedisError, OSError):
            await self.client.connection_pool.disconnect(inuse_connections=False)

    def _down(self, error: Exception) -> NoReturn:
        said = self.place.redact(str(error))
        if isinstance(error, AuthenticationError | NoPermissionError) or said.startswith(("NOAUTH", "WRONGPASS")):
            fix = "check it" if self.place.password else "give one with --registry-password-file"
            because = f"wants another password or user: {fix} (it says: {said})"
        elif isinstance(error, TimeoutError | RedisTimeoutError):
            because = f"did not answer within {self._timeout_s:g} s"
        elif isinstance(error, RedisConnectionError | OSError):
            because = f"cannot be reached: {said}"
        elif isinstance(error, InvalidResponse | ValueError):  # asyncio's error for a line that does not end
            because = f"does not speak Redis' protocol: {said}"
        else:
            because = f"refuses to work: {said}"
        raise RegistryDown(f"the registry at {self.place} {because}") from None  # a chain might quote the password


def _connect(place: RedisAddress, timeout_s: float) -> Redis:
    """A client that is not connected yet. It retries once, at once: a connection closed by a restart is no outage."""
    tls: dict[str, Any] = {}
    if place.tls:
        tls = {"ssl_ca_certs": str(place.ca_file) if place.ca_file else None, "ssl_check_hostname": True}
    pool = BlockingConnectionPool(
        connection_class=SSLConnection if place.tls else Connection,
        max_connections=CONNECTIONS_MAX,
        timeout=timeout_s,
        host=place.host,
        port=place.port,
        db=place.db,
        username=place.username,
        password=place.password,
        protocol=2,  # no HELLO and no CLIENT SETINFO: one round trip less, and older servers and proxies know it
        driver_info=None,
        # No time limit of the library's: before Python 3.12 its `asyncio.wait_for` loses a cancellation that comes
        # while a command is sent, so that an agent or router did not end. `asking` and `next_message` bound every call.
        socket_timeout=None,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        **tls,
    )
    return Redis(connection_pool=pool)


def cancelled() -> int:
    """How often the running task has been asked to end."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def text(value: object) -> str:
    """The text of a value that Redis answered; empty for anything but bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else ""
