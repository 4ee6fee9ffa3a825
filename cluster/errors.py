"""Faults, and the answers that clients get for them.

    BatonError
    ├── UsageError        wrong flag or file; the command line prints one line and exits with 2
    ├── EngineFailed      an engine did not come up or died for good; carries the last lines of its log
    └── ApiError          an HTTP answer in OpenAI's error shape
        ├── bad_request, unknown_model, too_large, timeout ...   made by the functions below

*Outcomes* (shed, expired, client left) are values, not exceptions. *Bugs* are asserts.
"""

from __future__ import annotations

import errno
from typing import Any


class BatonError(Exception):
    """Root of everything Baton raises on purpose."""


class UsageError(BatonError):
    """The user gave something that Baton cannot use. The message names the field, the value and the fix."""


_UNFIT_ADDRESS = frozenset({errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL})


def is_address_fault(error: OSError) -> bool:
    """Whether a server cannot listen because of the address it was given: taken, forbidden, of another machine, or no
    address. `getaddrinfo` reports the last with negative numbers.
    """
    return error.errno in _UNFIT_ADDRESS or (error.errno or 0) < 0


def cannot_listen(host: str, port: int, error: OSError, flag: str) -> UsageError:
    """A server cannot listen on this address.

    `flag` is the port's flag, such as ``--admin-port``; the host's flag has `host` in its place.
    """
    because = (error.strerror or str(error)).rpartition("): ")[2]  # asyncio's message begins with the address
    at_port = error.errno in {errno.EADDRINUSE, errno.EACCES}
    choose = f"another {flag}" if at_port else f"an address of this machine with {flag.replace('port', 'host')}"
    return UsageError(f"cannot listen on {host}:{port} ({because}): choose {choose}")


class EngineFailed(BatonError):
    """An engine could not be started or kept alive. `log_tail` holds its last lines."""

    def __init__(self, message: str, log_tail: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.log_tail = log_tail


class ApiError(BatonError):
    """An answer to a client that is not a success, in the shape OpenAI's clients and vLLM's users know.

    `kind` is OpenAI's ``type``; `param` the offending field where there is one.
    """

    retry_after_s: int | None = None
    """Seconds after which a new attempt is worth it, if this error says so itself (`retry_after_s`)."""

    allow: tuple[str, ...] = ()
    """The methods that the path has (``Allow``), if this error is a 405."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON object to send: the same keys as vLLM's own server (``code`` is the HTTP status).

        A message may quote a header. Headers are bytes: bytes that are no UTF-8 are shown by their numbers.
        """
        message = self.message.encode("utf-8", "backslashreplace").decode()
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.status}}


def retry_after_s(status: int, told_s: int | None = None) -> int | None:
    """The seconds of an answer's ``Retry-After``: `told_s`, or 1 for a 503 that names none, as it may pass at any time.
    None: the answer has no such header.
    """
    return 1 if told_s is None and status == 503 else told_s


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400: the request can never succeed as it is."""
    return ApiError(400, "BadRequestError", message, param)


def unknown_model(name: str, known: tuple[str, ...]) -> ApiError:
    """404 for a model that no instance serves; the message names the models that are served."""
    served = ", ".join(f"`{model}`" for model in known) or "none yet"
    return ApiError(404, "NotFoundError", f"The model `{name}` does not exist. Served here: {served}.", "model")


def not_allowed(method: str, allow: tuple[str, ...]) -> ApiError:
    """405: the path has other methods than this one."""
    error = ApiError(405, "MethodNotAllowedError", f"`{method[:20]}` is not allowed here; use {', '.join(allow)}.")
    error.allow = allow
    return error


def too_large(limit_bytes: int) -> ApiError:
    """413: the body is over the router's limit."""
    return ApiError(
        413,
        "RequestTooLargeError",
        f"The request body is larger than {limit_bytes} bytes. Send less, or raise --body-bytes-max on the router.",
    )


def body_timeout(seconds: float) -> ApiError:
    """408: the client announced a body and did not send it."""
    return ApiError(408, "RequestTimeoutError", f"The request body did not arrive within {seconds:g} s.")


def no_instance(because: str) -> ApiError:
    """503: no instance can take the request now."""
    return ApiError(503, "ServiceUnavailableError", f"No instance can serve this request: {because}.")


def no_room(because: str) -> ApiError:
    """503: the router itself has no room for the request now."""
    return ApiError(503, "ServiceUnavailableError", f"This router cannot take the request now: {because}.")


def shed(because: str, retry_after_s: int) -> ApiError:
    """429: the targets of the request's class cannot be met now, and the class sheds such requests."""
    error = ApiError(429, "RateLimitError", f"Refused: {because}. Try again in {retry_after_s} s.")
    error.retry_after_s = retry_after_s
    return error


def upstream_failed(because: str) -> ApiError:
    """502: an engine failed the request, and no other engine could take it."""
    return ApiError(502, "UpstreamError", f"The engine failed this request: {because}.")


def deadline_passed(seconds: float) -> ApiError:
    """504: the first token did not come in time."""
    return ApiError(504, "DeadlineExceededError", f"No answer from the engines within {seconds:g} s.")
