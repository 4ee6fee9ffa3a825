"""HTTP to engines other than legs and probes (`router.http.legs`): short messages, requests that are passed through."""

from __future__ import annotations

import asyncio
import io
import traceback
from collections.abc import Mapping

import aiohttp
import msgspec

from cluster.bounded import PLAIN, Unfit, no_descriptors, whole_body
from cluster.http.answers import HEAD_BYTES_MAX
from cluster.http.pool import KEEPALIVE_S
from cluster.instance import Instance
from cluster.wire import RANK_HEADER

CONNECT_S = 5.0
"""An engine that does not accept a connection within so many seconds counts as lost."""


WORD_S = 1.0
"""Seconds until the answer to a short message (a release, an abort). After that the message counts as failed: an engine
that accepts connections and does not answer would keep the request, and its places, for ever. If a release is only
late, another engine sends it a second time: that does no harm."""

PIECE_BYTES = 1 << 20
"""Bodies over this are sent in pieces."""


class EngineLost(Exception):
    """An engine could not be reached, broke off, or sent an invalid answer.

    Attributes:
        reached: whether a connection was made.
        unfit: what was wrong with the answer, as a label of the counter of unfit answers (``too_long``, ``encoded``,
            ``malformed``, ``no_completion``); empty: the loss has another cause.
        ours: this process lacks a resource (file descriptors); the engine may be healthy.
        silent: the engine sent nothing for as long as it may.
    """

    def __init__(
        self, because: str, *, reached: bool, unfit: str = "", ours: bool = False, silent: bool = False
    ) -> None:
        super().__init__(because)
        self.silent = silent
        self.reached = reached
        self.unfit = unfit
        self.ours = ours


def too_long(bytes_max: int, flag: str = "--answer-bytes-max") -> EngineLost:
    """The loss for an answer of more bytes than are kept. `flag`: the router's flag for that; empty: there is none."""
    because = f"its answer is longer than {bytes_max} bytes" + (f" ({flag})" if flag else "")
    return EngineLost(because, reached=True, unfit="too_long")


def not_connected(error: OSError, because: str) -> EngineLost:
    """The loss of a request for which no connection was made, for this reason."""
    if no_descriptors(error):
        return EngineLost("the router is out of file descriptors (`ulimit -n`)", reached=False, ours=True)
    return EngineLost(because, reached=False)


class Answer(msgspec.Struct, frozen=True):
    """A complete answer of an engine."""

    status: int
    content_type: str
    body: bytes


class Upstream:
    """A pool of connections to engines. One per process, closed with the server."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the pool (must run inside the loop)."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, use_dns_cache=True, ttl_dns_cache=60)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            headers=PLAIN,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            max_field_size=HEAD_BYTES_MAX,  # aiohttp's own 8,190 are too few for the description of 100 embeddings
        )

    async def close(self) -> None:
        """Close every connection: engines abort what still runs for us."""
        if self._session is not None:
            await self._session.close()

    async def open(
        self,
        instance: Instance,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> aiohttp.ClientResponse:
        """Send a request to an instance (with its rank's header, if it is a rank), and wait for the answer's headers.
        The caller must read or close the answer.

        If the connection closes before the headers, the engine probably closed an idle one: the request is sent again.

        Raises:
            EngineLost: no connection, or it broke before the headers.
        """
        assert self._session is not None, "start() comes first"
        if instance.rank is not None:
            headers = {**headers, RANK_HEADER: str(instance.rank)}
        for last in (False, True):
            # A large body goes out in pieces: in one piece it would hold up every other request of this process.
            data = io.BytesIO(body) if body is not None and len(body) > PIECE_BYTES else body
            try:
                return await self._session.request(
                    method, instance.url + path, data=data, headers=headers, allow_redirects=False
                )
            except aiohttp.ServerDisconnectedError as error:
                # An idle connection that the engine closed at this very moment: once more, on a new one.
                if last:
                    raise EngineLost(last_words(error), reached=True) from None
            except aiohttp.ClientConnectorError as error:
                cause = error.os_error
                raise not_connected(cause, last_words(error)) from None
            except UnicodeError as error:  # getaddrinfo's, for an empty label or one that is too long
                raise EngineLost(f"no host has such a name ({last_words(error)})", reached=False) from None
            except aiohttp.ConnectionTimeoutError as error:
                raise EngineLost(last_words(error), reached=False) from None
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise EngineLost(last_words(error), reached=True) from None
        raise AssertionError("the second try returns or raises")

    async def call(
        self, instance: Instance, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        """Send a request and read the whole answer.

        Raises:
            EngineLost: no connection, it broke before the last byte, or the answer is longer than `WORD_BYTES_MAX`.
        """
        response = await self.open(instance, method, path, body, headers)
        return await read(response)

    async def status(self, instance: Instance, path: str, headers: Mapping[str, str]) -> int:
        """The HTTP status of an engine's answer to a GET. The body is not read.

        Raises:
            EngineLost: no connection, or it broke before the headers.
        """
        response = await self.open(instance, "GET", path, None, headers)
        response.close()
        return response.status

    async def say(self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """POST a short message, and read the whole answer.

        Raises:
            EngineLost: no answer within `WORD_S`, or as `call`.
        """
        try:
            async with asyncio.timeout(WORD_S):
                return await self.call(instance, "POST", path, body, headers)
        except TimeoutError:
            raise EngineLost(f"no answer within {WORD_S:g} s", reached=True) from None

    async def abort(self, instance: Instance, engine_ids: tuple[str, ...], headers: Mapping[str, str]) -> bool:
        """Ask an engine to abort requests by id (vLLM with ``--enable-scale-out``). Returns whether it answered 200; an
        engine without this path does not.
        """
        body = msgspec.json.encode({"request_ids": engine_ids})
        try:
            answer = await self.say(instance, "/inference/v1/abort_requests", body, headers)
        except EngineLost:
            return False
        return answer.status == 200


def limit_silence(response: aiohttp.ClientResponse, silence_s: float) -> None:
    """Let an open stream be silent for at most so many seconds from now on."""
    connection = response.connection
    if connection is not None and connection.protocol is not None:  # None: all of it is here already
        connection.protocol.read_timeout = silence_s
        connection.protocol.start_timeout()


async def read(response: aiohttp.ClientResponse) -> Answer:
    """The rest of an open answer.

    Raises:
        EngineLost: it broke before the last byte, is longer than `WORD_BYTES_MAX`, or encoded.
    """
    try:
        body = await whole_body(response)
    except Unfit as unfit:
        raise EngineLost(str(unfit), reached=True, unfit=unfit.why) from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineLost(last_words(error), reached=True) from None
    finally:
        response.release()
    return Answer(response.status, response.headers.get("Content-Type", "application/json"), body)


def last_words(error: BaseException) -> str:
    """The error's text. The frames and tracebacks of the error and of its causes are cleared: aiohttp's errors and the
    frames that raised them refer to each other.

    Such a cycle of some 60 objects stays until the garbage collector runs, and a lost engine is probed twice a second:
    `make soak` saw 10 MB an hour.
    """
    told = say(error)
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        former, each.__traceback__ = each.__cause__ or each.__context__, None
        each.__cause__ = each.__context__ = None
        each = former
    return told


def say(error: BaseException) -> str:
    """An exception in a few words; some of aiohttp's have no text of their own."""
    return str(error) or type(error).__name__
