"""The one boundary where a request's errors become answers in OpenAI's shape. A shell: it writes."""

from __future__ import annotations

import logging
import secrets
from typing import Final

import msgspec

from cluster.errors import ApiError, retry_after_s
from cluster.ids import client_id_in
from router.http.outlet import Outlet
from router.telemetry.metrics import RouterMetrics

logger = logging.getLogger("baton.router")


class Refusals:
    """The refusals of one router, which are counted."""

    def __init__(self, meters: RouterMetrics) -> None:
        self._meters: Final = meters

    def refuse(
        self, outlet: Outlet, problem: Exception, client_id: str | None, *, ours: str = "", close: bool = False
    ) -> None:
        """Answer with the raised error.

        Args:
            outlet: the way to the client.
            problem: the error.
            client_id: the request's ``X-Request-Id`` as it came.
            ours: the router's name for the request; empty: it has none yet.
            close: do not read the rest of the request.
        """
        if not isinstance(problem, ApiError):
            logger.error("a request failed in the router", exc_info=problem)
            problem = broken()
        self._meters.rejected.labels(str(problem.status)).inc()
        about = headers_of(problem) | names_of(client_id, ours or new_id())
        headers = {"Content-Type": "application/json; charset=utf-8", **about}
        if outlet.begun:
            outlet.abort()
        else:
            outlet.whole(problem.status, headers, msgspec.json.encode(problem.body()), close=close)


def broken() -> ApiError:
    """A bug of the router's has ended a request."""
    return ApiError(500, "InternalServerError", "The router failed on this request; its log says why.")


def new_id() -> str:
    """A name for a request that is refused before it has one."""
    return secrets.token_hex(16)


def names_of(client_id: str | None, ours: str) -> dict[str, str]:
    """The headers that name an answer's request. `client_id`: its ``X-Request-Id`` as it came."""
    return {"X-Request-Id": client_id_in(client_id) or ours, "X-Baton-Request-Id": ours}


def headers_of(problem: ApiError) -> dict[str, str]:
    """The headers of an error's answer."""
    again_s = retry_after_s(problem.status, problem.retry_after_s)
    headers = {} if again_s is None else {"Retry-After": str(again_s)}
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if problem.allow:
        headers["Allow"] = ", ".join(problem.allow)
    return headers
