"""Every path that clients call: what answers it, and how. Pure.

`PATHS` is the table; docs/api.md and the OpenAPI file are generated from it. A path without a row is passed through if
it is below ``/v1/`` and an engine reports that it has it; otherwise the answer is 404. Engines report their paths
themselves (``/openapi.json``, which vLLM's server generates from its own routes and its plugins'); an engine that does
not report is tried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from cluster.errors import ApiError, not_allowed
from router.core.eligibility import CHAT, COMPLETIONS
from router.fleet.engine_paths import pattern

RESPONSES: Final = "/v1/responses"


class How(StrEnum):
    """What answers a path."""

    SPLIT = "two instances"
    """Prefill on one instance, decode on another, where that is exact (docs/exactness.md)."""
    PASSTHROUGH = "one instance"
    """Passed through to one instance that has the path and the model."""
    OWNER = "the instance that has the id"
    HERE = "the router"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Path:
    """One row of the table."""

    template: str
    """As OpenAPI writes it: ``/v1/responses/{response_id}``."""
    methods: tuple[str, ...]
    how: How
    group: str
    """The purpose by which docs/api.md groups the paths."""
    note: str = ""
    needs: str = ""
    """What an engine needs to have the path; empty: every engine that generates text has it."""


_POST: Final = ("POST",)
_GET: Final = ("GET",)
_ANY: Final = ("GET", "POST")

_EMBED: Final = "a model that embeds"
_SCORE: Final = "a model that scores"
_POOL: Final = "a pooling model"
_SPEECH: Final = "a speech model"

PATHS: Final[tuple[Path, ...]] = (
    Path(COMPLETIONS, _POST, How.SPLIT, "generate"),
    Path(CHAT, _POST, How.SPLIT, "generate"),
    Path(RESPONSES, _POST, How.PASSTHROUGH, "generate",
         "with `previous_response_id`: the instance that has that response"),
    Path("/v1/responses/{response_id}", _GET, How.OWNER, "generate",
         "engines keep responses only with `VLLM_ENABLE_RESPONSES_API_STORE=1`"),
    Path("/v1/responses/{response_id}/cancel", _POST, How.OWNER, "generate", "background responses"),
    Path("/v1/messages", _POST, How.PASSTHROUGH, "generate", "Anthropic's API"),
    Path("/v1/messages/count_tokens", _POST, How.PASSTHROUGH, "generate", "Anthropic's API"),
    Path("/v1/chat/completions/batch", _POST, How.PASSTHROUGH, "generate", "several chats in one request"),
    Path("/v1/embeddings", _POST, How.PASSTHROUGH, "embed", needs=_EMBED),
    Path("/v2/embed", _POST, How.PASSTHROUGH, "embed", "Cohere's API", _EMBED),
    Path("/pooling", _POST, How.PASSTHROUGH, "embed", needs=_POOL),
    Path("/classify", _POST, How.PASSTHROUGH, "embed", needs="a model that classifies"),
    Path("/score", _POST, How.PASSTHROUGH, "rank", needs=_SCORE),
    Path("/v1/score", _POST, How.PASSTHROUGH, "rank", needs=_SCORE),
    Path("/rerank", _POST, How.PASSTHROUGH, "rank", needs=_SCORE),
    Path("/v1/rerank", _POST, How.PASSTHROUGH, "rank", "Jina's API", _SCORE),
    Path("/v2/rerank", _POST, How.PASSTHROUGH, "rank", "Cohere's API", _SCORE),
    Path("/v1/audio/transcriptions", _POST, How.PASSTHROUGH, "audio", "a form, up to --body-bytes-max", _SPEECH),
    Path("/v1/audio/translations", _POST, How.PASSTHROUGH, "audio", "a form, up to --body-bytes-max", _SPEECH),
    Path("/v1/realtime", _GET, How.REFUSED, "audio", "a WebSocket, which the router does not relay"),
    Path("/tokenize", _POST, How.PASSTHROUGH, "tokens"),
    Path("/detokenize", _POST, How.PASSTHROUGH, "tokens"),
    Path("/v1/models", _GET, How.HERE, "about", "of all engines together, with LoRA adapters and aliases"),
    Path("/v1/models/{model}", _GET, How.HERE, "about"),
    Path("/openapi.json", _GET, How.HERE, "about", "this table for machines; needs no key"),
    Path("/version", _GET, How.PASSTHROUGH, "about", "an engine's"),
    Path("/health", _GET, How.HERE, "about", "200 while this process serves; needs no key"),
    Path("/ready", _GET, How.HERE, "about", "200 when every leg has an instance to run it; needs no key"),
    Path("/metrics", _GET, How.HERE, "about", "with tenants, or several processes, on the admin side alone"),
    Path("/v1/load_lora_adapter", _ANY, How.REFUSED, "operate", "changes one engine: call each engine itself"),
    Path("/v1/unload_lora_adapter", _ANY, How.REFUSED, "operate", "changes one engine: call each engine itself"),
)  # fmt: skip

OUTSIDE_V1: Final = tuple(
    path.template for path in PATHS if path.how is How.PASSTHROUGH and not path.template.startswith("/v1/")
)
"""Passed through although not below ``/v1/``. Operators' paths there (sleep, weights) stay closed."""


def find(path: str) -> tuple[Path, Mapping[str, str]] | None:
    """The row of a request's path, and the ids in it; None if no row matches."""
    for row in PATHS:
        match = pattern(row.template).fullmatch(path)
        if match is not None:
            return row, match.groupdict()
    return None


def check(path: str, method: str) -> None:
    """Check whether a request may be passed to an engine at all. Paths without a row may, by every method. `path` is as
    it came, with its escapes.

    Raises:
        ApiError: 404 for a path that two readers might read differently, such as ``/v1/../sleep``; 405 naming the
            methods that the table has; 403 or 501 for refused paths.
    """
    if _PLAIN.fullmatch(path) is None or "/./" in f"{path}/" or "/../" in f"{path}/":
        raise _no_such(path)
    found = find(path)
    if found is None:
        return
    row = found[0]
    if row.how is How.REFUSED:
        raise _refused(row)
    if method not in row.methods:
        raise not_allowed(method, row.methods)
    if row.how in {How.SPLIT, How.HERE}:
        raise _no_such(path)  # the router answers these itself; here an engine would, past clients' limits


def _no_such(path: str) -> ApiError:
    return ApiError(404, "NotFoundError", f"There is no `{path[:200]}` here. Try `/v1/chat/completions`.")


_PLAIN: Final = re.compile(r"(/[A-Za-z0-9_.~!$&'()*+,;=:@-]+)+")
"""Segments, none of them empty, that need no escaping: so the engine reads the same path as the router."""


def not_here(path: str, model: str | None) -> ApiError:
    """404: no engine that serves the model has this path. `model` None: no engine at all has it."""
    found = find(path)
    needs = f" It needs {found[0].needs}." if found is not None and found[0].needs else ""
    none = "No engine here" if model is None else f"No engine that serves `{model[:200]}`"
    return ApiError(404, "NotFoundError", f"{none} has `{path[:200]}`.{needs}")


def _refused(row: Path) -> ApiError:
    """403, or 501 for a path that no router relays: a refused row."""
    status, kind = (403, "PermissionDeniedError") if row.group == "operate" else (501, "NotImplementedError")
    return ApiError(status, kind, f"`{row.template}`: {row.note}.")


# --- ids --------------------------------------------------------------------------------------------------------------

TAG_CHARS: Final = 16
ID_CHARS_MAX: Final = 200


def response_id(chance: str, tag: str) -> str:
    """A response's id that names its owner. `chance`: 32 random hexadecimal characters."""
    return f"resp_{chance}{tag}"


def owner_tag(digest: str) -> str:
    """The tag in an id for an instance and a tenant: the beginning of a digest over both."""
    return digest[:TAG_CHARS]


def tag_in(identifier: str) -> str:
    """The tag of an id that a Baton router made; for other ids a text that matches no tag."""
    return identifier[-TAG_CHARS:]


def is_plain_id(identifier: str) -> bool:
    """Whether the id can stand in a path as it is."""
    return len(identifier) <= ID_CHARS_MAX and re.fullmatch(r"[A-Za-z0-9_-]+", identifier) is not None


def body_id(path: str, body: Mapping[str, Any]) -> str | None:
    """The id of the response that a body continues."""
    given = body.get("previous_response_id") if path == RESPONSES else None
    return given if isinstance(given, str) and given else None
