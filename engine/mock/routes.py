"""The mock's paths: vLLM's, and its own under `/mock`. A shell: it answers connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cluster.errors import ApiError, bad_request
from cluster.http.requests import Request
from cluster.ids import RequestId
from cluster.wire import RANK_HEADER, RELEASE_PATH
from engine.mock.answers import VERSION, encode
from engine.mock.asked import CHAT, COMPLETIONS, chat_pieces, read_body
from engine.mock.faults import FaultKind
from engine.mock.http import Exchange
from engine.mock.metrics import CONTENT_TYPE, merged
from engine.mock.transfer import hold_of
from engine.mock.words import text_of, tokenize
from kvtransfer.fields import name_in

if TYPE_CHECKING:
    from engine.mock.instance import MockInstance

Answer = Callable[[Request, Exchange], None]

_GUARDED = ("/v1", "/inference")
"""Beginnings of the paths that vLLM's ``--api-key`` guards."""


class Routes:
    """The paths of one instance."""

    def __init__(self, instance: MockInstance, siblings: Mapping[str, MockInstance]) -> None:
        self._instance = instance
        self._siblings = siblings
        self._created = int(time.time())  # noqa: TID251 - told to clients
        self._table: dict[str, dict[str, Answer]] = {
            COMPLETIONS: {"POST": lambda request, exchange: self._generate(request, exchange, chat=False)},
            CHAT: {"POST": lambda request, exchange: self._generate(request, exchange, chat=True)},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/version": {"GET": lambda _, exchange: _json(exchange, {"version": VERSION})},
            "/v1/models": {"GET": self._models},
            "/openapi.json": {"GET": self._openapi},
            "/metrics": {"GET": self._metrics},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/inference/v1/abort_requests": {"POST": self._abort},
            RELEASE_PATH: {"POST": self._release},
            "/mock/read": {"POST": self._read},
            "/mock/release": {"POST": lambda request, exchange: self._heard(request, exchange, "release")},
            "/mock/heartbeat": {"POST": lambda request, exchange: self._heard(request, exchange, "heartbeat")},
            "/mock/state": {"GET": lambda _, exchange: _json(exchange, self._instance.state())},
            "/mock/faults": {"GET": self._faults, "POST": self._faults, "DELETE": self._faults},
        }

    def handle(self, request: Request, exchange: Exchange) -> None:
        """Answer a request, or begin to."""
        try:
            self._rank(request).find(request)(request, exchange)
        except ApiError as error:
            exchange.respond(error.status, encode(error.body()))

    def _rank(self, request: Request) -> Routes:
        """The routes of the data parallel rank that a request names; without one rank 0 answers."""
        said = request.headers.get(RANK_HEADER)
        if self._instance.rank is None or said is None or not said.isdecimal():
            return self
        ranks = self._instance.ranks
        if int(said) >= len(ranks):
            raise bad_request(f"data_parallel_rank {said} is out of range [0, {len(ranks)}).")
        return ranks[int(said)].routes

    def find(self, request: Request) -> Answer:
        """The function that answers a request here, whatever rank it names.

        Raises:
            ApiError: the path names an instance that this process does not have.
        """
        path = request.path
        if path.startswith("/mock/") and path.count("/") == 3:
            return self._of_sibling(path)
        methods = self._table.get(path)
        if methods is None:
            return _refuse(404, "Not Found")
        if request.method not in methods:
            return _refuse(405, "Method Not Allowed")
        key = self._instance.settings.api_key
        if key and path.startswith(_GUARDED) and request.headers.get("authorization") != f"Bearer {key}":
            return lambda _, exchange: exchange.respond(401, encode({"error": "Unauthorized"}))
        return methods[request.method]

    def _of_sibling(self, path: str) -> Answer:
        """``/mock/NAME/faults`` or ``/mock/NAME/state``: of another instance of this process, which may be dead."""
        _, _, name, rest = path.split("/")
        sibling = self._siblings.get(name)
        if sibling is None or rest not in {"faults", "state"}:
            raise ApiError(404, "NotFoundError", f"No instance `{name}` here: {', '.join(self._siblings)}.")
        return lambda request, exchange: sibling.routes.answer_own(rest, request, exchange)

    def answer_own(self, what: str, request: Request, exchange: Exchange) -> None:
        """``/mock/faults`` or ``/mock/state``, asked by way of a sibling."""
        methods = self._table[f"/mock/{what}"]
        if request.method not in methods:
            raise ApiError(405, "Method Not Allowed", "Method Not Allowed")
        methods[request.method](request, exchange)

    # -- vLLM's --

    def _generate(self, request: Request, exchange: Exchange, *, chat: bool) -> None:
        self._instance.frontend.generate(request, exchange, chat=chat)

    def _health(self, _: Request, exchange: Exchange) -> None:
        exchange.respond(503 if self._instance.faults.has(FaultKind.UNWELL) else 200)

    def _models(self, _: Request, exchange: Exchange) -> None:
        settings = self._instance.settings
        card: dict[str, Any] = {"id": settings.model, "object": "model", "created": self._created, "owned_by": "vllm"}
        card |= {"root": settings.model, "parent": None, "max_model_len": settings.config.max_model_len}
        _json(exchange, {"object": "list", "data": [{**card, "permission": []}]})

    def _openapi(self, _: Request, exchange: Exchange) -> None:
        """The list of paths, without their parameters."""
        own = {path: methods for path, methods in self._table.items() if not path.startswith("/mock/")}
        paths: dict[str, Any] = {path: {method.lower(): {} for method in methods} for path, methods in own.items()}
        _json(exchange, {"openapi": "3.1.0", "info": {"title": "FastAPI", "version": "0.1.0"}, "paths": paths})

    def _metrics(self, _: Request, exchange: Exchange) -> None:
        ranks = self._instance.ranks
        pages = [rank.metrics.text(rank.load(), len(ranks)) for rank in ranks]
        exchange.respond(200, (pages[0] if len(pages) == 1 else merged(pages)).encode(), CONTENT_TYPE)

    def _tokenize(self, request: Request, exchange: Exchange) -> None:
        body = _body(request)
        if "messages" in body:
            ids = [token for piece in chat_pieces(body) for token in piece.tolist()]
        else:
            ids = tokenize(_text(body, "prompt")).tolist()
        shown = [text_of([token]) for token in ids] if body.get("return_token_strs") else None
        longest = self._instance.settings.config.max_model_len
        _json(exchange, {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": shown})

    def _detokenize(self, request: Request, exchange: Exchange) -> None:
        tokens = _body(request).get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
            raise bad_request("`tokens` is a list of token ids.", "tokens")
        _json(exchange, {"prompt": text_of(tokens)})

    def _abort(self, request: Request, exchange: Exchange) -> None:
        names = _body(request).get("request_ids")
        if names is None:
            raise ApiError(400, "Bad Request", "Missing 'request_ids' in request body")
        exchange.respond(200)
        self._instance.serving.abort_named([name for name in names if isinstance(name, str)])

    # -- Baton's, inside vLLM --

    def _release(self, request: Request, exchange: Exchange) -> None:
        """A router gives a hold up by its name, as an engine's guard takes it."""
        if self._instance.frontend.strikes_release(request, exchange):
            return
        name = name_in(_body(request).get("kv_transfer_params"))
        if name is None:
            raise bad_request("A hold is given up by its name.", "kv_transfer_params")
        self._instance.handoffs.give_up(name)
        _json(exchange, {"ok": True})

    # -- the mock's own --

    def _read(self, request: Request, exchange: Exchange) -> None:
        body = _body(request)
        blocks = body.get("blocks")
        if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
            raise bad_request("`blocks` is a list of block ids.", "blocks")
        request_id = RequestId(_text(body, "request_id") if "request_id" in body else "")
        source = hold_of(_text(body, "engine_id"), request_id, body)
        read = self._instance.handoffs.read(source.producer, source, tuple(blocks))
        if read is None:
            raise ApiError(410, "Gone", "No such blocks in this life of the engine")
        said = None if read.said is None else read.said.hex()
        _json(exchange, {"contents": read.contents, "vouched": read.vouched, "said": said})

    def _heard(self, request: Request, exchange: Exchange, what: str) -> None:
        body = _body(request)
        names = body.get("request_ids")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise bad_request("`request_ids` is a list of texts.", "request_ids")
        _json(exchange, {"known": self._instance.handoffs.heard(what, _text(body, "engine_id"), names)})

    def _faults(self, request: Request, exchange: Exchange) -> None:
        instance = self._instance
        if request.method == "POST":
            answer = instance.set_faults(request.body)
        else:
            answer = instance.clear_faults() if request.method == "DELETE" else instance.faults.as_json()
        _json(exchange, answer)


def _json(exchange: Exchange, body: object) -> None:
    exchange.respond(200, encode(body))


def _refuse(status: int, because: str) -> Answer:
    """A refusal in the shape of FastAPI, on which vLLM's server is built."""
    return lambda _, exchange: exchange.respond(status, encode({"detail": because}))


def _body(request: Request) -> dict[str, Any]:
    """The JSON body, whatever its content type: aborts come without one."""
    return read_body(request.body, "application/json")


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise bad_request(f"`{name}` is a text.", name)
    return value
