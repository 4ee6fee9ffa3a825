"""Checks one engine over HTTP: health, models, a first real token. A shell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

import aiohttp

from cluster.bounded import PLAIN, Unfit, no_descriptors, whole_body
from cluster.instance import Load, models_in
from cluster.wire import RANK_HEADER
from engine.vllm.metrics import parse_loads

HEALTH_S = 5.0
"""A health check not answered within this has failed. The API server answers while the engine computes."""

FIRST_TOKEN_S = 300.0
"""Time limit of the first token, which may compile kernels."""

DEAD_STATUS = 503
"""vLLM's answer to a health check when its engine core has died."""

NO_ACCESS = frozenset({401, 403})
"""Answers to a request without the engine's key."""

NO_SUCH_PATH = 404
NO_SUCH_MODEL = b"NotFoundError"
"""vLLM's type of error where the path exists and the model does not; the status is the same."""


class Unwell(Exception):
    """The engine did not answer as a healthy one.

    `dead`: it said that it is dead, or its port refuses connections. `ours`: this process has no file descriptor left,
    and the engine may be well. `status` and `answer`: its HTTP answer; 0: none.
    """

    def __init__(
        self, because: str, *, dead: bool = False, ours: bool = False, status: int = 0, answer: bytes = b""
    ) -> None:
        super().__init__(because)
        self.dead = dead
        self.ours = ours
        self.status = status
        self.answer = answer


class Probe:
    """Questions to one engine, by `async with Probe(url, key) as probe`. Each raises `Unwell` if the answer is bad."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers={**PLAIN, **self._headers}, auto_decompress=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def health(self) -> None:
        """Return if the engine core lives; raise `Unwell` otherwise."""
        await self._ask("GET", "/health", HEALTH_S)

    async def model(self) -> str:
        """The name under which the engine serves its model."""
        answer = await self._json("GET", "/v1/models", HEALTH_S)
        match answer:
            case {"data": [{"id": str(name)}, *_]}:
                return name
            case _:
                raise Unwell("GET /v1/models: no model in the answer")

    async def models(self) -> tuple[dict[str, Any], ...]:
        """The engine's ``/v1/models`` entries, unchanged."""
        match await self._json("GET", "/v1/models", HEALTH_S):
            case {"data": [*_]} as listed:
                return models_in(listed)
            case _:
                raise Unwell("GET /v1/models: no list in the answer")

    async def first_token(self, model: str, rank: int | None = None, limit_s: float = FIRST_TOKEN_S) -> None:
        """Make the engine compute one token: weights, kernels and tokenizer then work. An engine whose model generates
        nothing (`--runner pooling`) has no such path, and no token to compute. `rank`: the data parallel rank; None:
        any. `limit_s`: the longest wait, seconds.
        """
        body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        try:
            await self._json("POST", "/v1/completions", limit_s, body, {} if rank is None else {RANK_HEADER: str(rank)})
        except Unwell as unwell:
            if unwell.status != NO_SUCH_PATH or NO_SUCH_MODEL in unwell.answer:
                raise

    async def paused(self) -> bool:
        """Whether it is paused: new requests then wait. Only an engine in vLLM's development mode knows."""
        try:
            match await self._json("GET", "/is_paused", HEALTH_S):
                case {"is_paused": True}:
                    return True
        except Unwell:
            pass
        return False

    async def metrics(self) -> str:
        """The text of the engine's ``/metrics`` (`engine.vllm.metrics`)."""
        return (await self._ask("GET", "/metrics", HEALTH_S)).decode(errors="replace")

    async def loads(self, ranks: int = 1) -> tuple[Load, ...]:
        """The present load of each data parallel rank; an engine without ranks has one load."""
        return parse_loads(await self.metrics(), ranks)

    async def _json(
        self, method: str, path: str, limit_s: float, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        try:
            return json.loads(await self._ask(method, path, limit_s, body, headers))
        except (ValueError, RecursionError) as error:  # the second one: nested without end
            raise Unwell(f"{method} {path}: the answer is not JSON") from error

    async def _ask(
        self, method: str, path: str, limit_s: float, body: object = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._session.request(
                method, self._url + path, json=body, headers=headers, timeout=timeout
            ) as response:
                answer = await whole_body(response)
        except TimeoutError as error:
            raise Unwell(f"{method} {path}: no answer in {limit_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            if no_descriptors(error.os_error):
                because = "no file descriptor is left here (`ulimit -n`)"
                raise Unwell(f"{method} {path}: {because}", ours=True) from error
            if not isinstance(error.os_error, ConnectionRefusedError):  # no name, no route, no port left: not its fault
                raise Unwell(f"{method} {path}: {error.os_error}") from error
            raise Unwell(f"{method} {path}: nothing listens there", dead=True) from error
        except Unfit as error:
            raise Unwell(f"{method} {path}: {error}") from error
        except aiohttp.ClientError as error:
            raise Unwell(f"{method} {path}: {type(error).__name__}") from error
        if response.status != 200:
            said = answer[:200].decode(errors="replace")
            because = f"{method} {path}: HTTP {response.status} {said}".strip()
            raise Unwell(because, dead=response.status == DEAD_STATUS, status=response.status, answer=answer)
        return answer
