"""The router's API as an OpenAPI document: rows of `router.api.paths`, and small schemas kept by hand. Pure.

Schemas contain what the router itself requires or reads; the engine judges everything else in a body, so objects are
open. docs/openapi.json is generated from this, ``GET /openapi.json`` answers it, and tests send what it allows.
"""

from __future__ import annotations

from typing import Any, Final

from router.api.paths import PATHS, RESPONSES, How, Path
from router.core.eligibility import CHAT, COMPLETIONS

VERSION: Final = "1"
"""The version of the paths and of their inputs."""

_JSON: Final = "application/json"

Schema = dict[str, Any]


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for row in PATHS:
        if row.how is not How.REFUSED:
            paths.setdefault(row.template, {}).update({method.lower(): _operation(row) for method in row.methods})
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": VERSION,
            "description": "OpenAI's API, and vLLM's beside it, in front of prefill and decode pools.",
        },
        "paths": paths,
        "security": [{}, {"key": []}],
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR},
            "responses": {"Error": {"description": "What is wrong.", "content": {_JSON: {"schema": _ref("Error")}}}},
        },
    }


def _operation(row: Path) -> dict[str, Any]:
    said: dict[str, Any] = {"tags": [row.group], "x-baton-answered-by": row.how.value}
    if row.note:
        said["description"] = f"{row.note[0].upper()}{row.note[1:]}."
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in ("response_id", "model")
        if f"{{{name}}}" in row.template
    ]
    if row.how is How.SPLIT:
        parameters += _HEADERS
    if parameters:
        said["parameters"] = parameters
    if "POST" in row.methods and row.how is not How.OWNER:
        said["requestBody"] = {"required": True, "content": _request(row)}
    return {**said, "responses": _responses(row)}


def _request(row: Path) -> dict[str, Any]:
    if row.group == "audio":
        return {"multipart/form-data": {"schema": _AUDIO}}
    return {_JSON: {"schema": _BODIES.get(row.template, _OBJECT)}}


def _responses(row: Path) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "The answer."}
    if row.how is not How.HERE or row.template.startswith("/v1/"):
        good["content"] = {_JSON: {"schema": {"type": "object"}}}
    if row.template in _STREAMS:
        good["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {"200": good, "default": {"$ref": "#/components/responses/Error"}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


# --- schemas ----------------------------------------------------------------------------------------------------------

_TEXT: Final[Schema] = {"type": "string"}
_MODEL: Final[Schema] = {"type": ["string", "null"], "description": "A model, an adapter or an alias; none: any."}
_COUNT: Final[Schema] = {"type": ["integer", "null"], "minimum": 0}
_NUMBER: Final[Schema] = {"type": ["number", "null"]}
_FLAG: Final[Schema] = {"type": ["boolean", "null"]}
_OBJECT: Final[Schema] = _object([], model=_MODEL)

_STREAMS: Final = frozenset({COMPLETIONS, CHAT, RESPONSES, "/v1/responses/{response_id}", "/v1/messages"})

_ERROR: Final[Schema] = _object(
    ["error"],
    error=_object(
        ["message", "type", "param", "code"],
        message=_TEXT,
        type=_TEXT,
        param={"type": ["string", "null"]},
        code={"type": ["integer", "string", "null"], "description": "The HTTP status."},
    ),
)

_SAMPLING: Final[Schema] = {
    "model": _MODEL,
    "max_tokens": _COUNT,
    "min_tokens": _COUNT,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "seed": {"type": ["integer", "null"]},
    "n": {"type": ["integer", "null"], "minimum": 1},
    "stop": {"type": ["string", "array", "null"], "items": _TEXT},
    "stream": _FLAG,
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _FLAG}},
    "cache_salt": {"type": ["string", "null"], "description": "Hashed with the tenant before an engine sees it."},
}

_BODIES: Final[dict[str, Schema]] = {
    COMPLETIONS: _object(
        ["prompt"],
        prompt={
            "anyOf": [
                _TEXT,
                {"type": "array", "items": {"anyOf": [_TEXT, {"type": "integer", "minimum": 0}]}},
            ]
        },
        **_SAMPLING,
    ),
    CHAT: _object(
        ["messages"],
        messages={
            "type": "array",
            "items": _object(["role"], role=_TEXT, content={"type": ["string", "array", "null"]}),
        },
        max_completion_tokens=_COUNT,
        tools={"type": ["array", "null"], "items": {"type": "object"}},
        tool_choice={"type": ["string", "object", "null"]},
        **_SAMPLING,
    ),
    RESPONSES: _object(
        ["input"],
        model=_MODEL,
        input={"type": ["string", "array"]},
        previous_response_id={"type": ["string", "null"]},
        stream=_FLAG,
        store=_FLAG,
    ),
    "/v1/messages": _object(
        ["model", "messages", "max_tokens"],
        model=_TEXT,
        messages={"type": "array", "items": _object(["role", "content"], role=_TEXT)},
        max_tokens={"type": "integer", "minimum": 1},
        stream=_FLAG,
    ),
}

_AUDIO: Final[Schema] = _object(["file"], file={"type": "string", "format": "binary"}, model=_TEXT)

_HEADERS: Final[list[dict[str, Any]]] = [
    {"name": name, "in": "header", "required": False, "description": text, "schema": _TEXT}
    for name, text in (
        ("x-slo-class", "The request's SLO class, as the cluster file names it."),
        ("x-request-id", "The client's id of the request: returned in a header, logged, and found by /explain."),
        ("x-baton-timing", "1: return where the request's time went, as a header or as a stream's last comment."),
    )
]
