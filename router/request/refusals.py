"""What is wrong with a request, as an answer: one boundary where faults become OpenAI's errors. A shell: it writes."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from cluster.errors import ApiError
from router.http.outlet import Outlet
from router.telemetry.metrics import RouterMetrics

logger = logging.getLogger("baton.router")


class Refusals:
    """Of one router: they are counted."""

    def __init__(self, meters: RouterMetrics) -> None:
        self._meters: Final = meters

    def refuse(self, outlet: Outlet, problem: Exception, *, close: bool = False) -> None:
        """Answer with what was raised. `close`: the rest of the request is not worth reading."""
        if not isinstance(problem, ApiError):
            logger.error("a request failed in the router", exc_info=problem)
            problem = broken()
        self._meters.rejected.labels(str(problem.status)).inc()
        headers = {"Content-Type": "application/json; charset=utf-8", **headers_of(problem)}
        if outlet.begun:
            outlet.abort()
        else:
            outlet.whole(problem.status, headers, msgspec.json.encode(problem.body()), close=close)


def broken() -> ApiError:
    """A bug of ours has ended a request."""
    return ApiError(500, "InternalServerError", "The router failed on this request; its log says why.")


def headers_of(problem: ApiError) -> dict[str, str]:
    """What an answer says beside the problem itself."""
    headers = {"Retry-After": "1"} if problem.status == 503 else {}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(problem.retry_after_s)
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers
