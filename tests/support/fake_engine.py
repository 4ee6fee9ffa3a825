"""A stand-in for vLLM's server, as far as a router can see it. It answers at once, keeps every request, and misbehaves
when a test asks for it. `tests/live` has real engines; those cannot be made to fail at a chosen moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from cluster.wire import ADAPTER

TOKENS = ["one ", "two ", "three "]
FIRST_TOKEN = 11
"""The token id of the first of `TOKENS`."""
Behaviour = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse | None]]


@dataclass
class FakeEngine:
    """One engine. If `behave` returns an answer to a generation request, that answer replaces the engine's."""

    name: str
    model: str = "fake"
    adapters: list[str] = field(default_factory=list)
    """The LoRA adapters that the engine has loaded."""
    tells_adapter: str | None = None
    """The digest of the adapter that the engine adds to its transfer fields, as Baton's connector does."""
    paths: list[str] | None = None
    """The paths that `/openapi.json` lists; None: the engine has no such page (`--disable-fastapi-docs`)."""
    bodies: list[tuple[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    cut_off: int = 0
    probed: int = 0
    """Questions for the engine's metrics, the last of a probe's."""
    holds: dict[str, dict[str, Any]] = field(default_factory=dict)
    peers: dict[str, FakeEngine] = field(default_factory=dict)
    behave: Behaviour | None = None
    behave_elsewhere: Callable[[FakeEngine, web.Request, bytes], Awaitable[web.Response]] | None = None
    """Answers requests to paths that the engine does not have itself."""
    finish_reason: str = "length"
    hold_leg: asyncio.Event | None = None
    """If set, prefill legs wait for this event. A request to abort sets the event, too."""
    more_metrics: str = ""
    """More lines for the engine's `/metrics`."""
    closes: bool = False
    """It closes each connection after its answer."""
    url: str = ""
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 27)
        app.router.add_get("/health", self._ok)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/inference/v1/abort_requests", self._abort)
        app.router.add_route("*", "/{rest:.*}", self._other)
        app.on_response_prepare.append(self._prepared)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def generated(self) -> list[dict[str, Any]]:
        """Bodies of generation requests, releases left out."""
        return [body for path, body in self.bodies if "completions" in path and body.get("model") in self._served]

    @property
    def _served(self) -> tuple[str, ...]:
        return (self.model, *self.adapters)

    async def _prepared(self, _: web.Request, response: web.StreamResponse) -> None:
        if self.closes:
            response.force_close()

    async def _ok(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        self.probed += 1
        usage = f"vllm:kv_cache_usage_perc {len(self.holds) / 10}\n"
        return web.Response(text=f"vllm:num_requests_running 0\n{usage}{self.more_metrics}")

    async def _models(self, _: web.Request) -> web.Response:
        own: dict[str, Any] = {"id": self.model, "object": "model", "max_model_len": 99}
        adapters = [
            {"id": name, "object": "model", "root": f"/adapters/{name}", "parent": self.model} for name in self.adapters
        ]
        return web.json_response({"object": "list", "data": [own, *adapters]})

    async def _openapi(self, _: web.Request) -> web.Response:
        if self.paths is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"openapi": "3.1.0", "paths": {path: {} for path in self.paths}})

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted += (await request.json())["request_ids"]
        if self.hold_leg is not None:
            self.finish_reason = "abort"
            self.hold_leg.set()
        return web.Response()

    @property
    def named(self) -> list[str]:
        """The ids (`x-request-id`) of the requests that the router sent here, in order; probes have none."""
        heads = [{name.lower(): value for name, value in each.items()} for each in self.headers]
        return [head["x-request-id"] for head in heads if "x-request-id" in head]

    async def _other(self, request: web.Request) -> web.Response:
        raw = await request.read()
        self.bodies.append((request.path, raw))
        self.headers.append(dict(request.headers))
        if self.behave_elsewhere is not None:
            return await self.behave_elsewhere(self, request, raw)
        return web.json_response(
            {"path": request.path_qs, "method": request.method, "echo": raw.decode(errors="replace")}
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append((request.path, body))
        self.headers.append(dict(request.headers))
        fields = body.get("kv_transfer_params") or {}
        if body.get("model") not in (*self._served, None):
            self._free(fields)
            return web.json_response(
                {"error": {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}},
                status=404,
            )
        try:
            if self.behave is not None:
                answer = await self.behave(request, body)
                if answer is not None:
                    return answer
            if fields.get("do_remote_decode"):
                return await self._prefill(request)
            self._free(fields)
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.cut_off += 1
            self._free(fields)
            raise

    def _free(self, fields: dict[str, Any]) -> None:
        if fields.get("do_remote_prefill"):
            self.peers[fields["remote_engine_id"]].holds.pop(fields["remote_request_id"], None)

    async def _prefill(self, request: web.Request) -> web.Response:
        if self.hold_leg is not None:
            await self.hold_leg.wait()
        params = None
        if self.finish_reason in {"length", "stop"}:
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [[1, 2]],
                "remote_engine_id": self.name,
                "remote_request_id": f"{request.headers['X-Request-Id']}-suffix-{len(self.bodies)}",
                "remote_num_tokens": 7,
                "remote_prefill_cached_tokens": 0,
            }
            if self.tells_adapter is not None:
                params[ADAPTER] = self.tells_adapter
            self.holds[params["remote_request_id"]] = params
        text = TOKENS[0] if self.finish_reason == "length" else ""
        choice = {
            "index": 0,
            "text": text,
            "message": {"role": "assistant", "content": text},
            "finish_reason": self.finish_reason,
        }
        if (await request.json()).get("return_token_ids"):
            choice["token_ids"] = [FIRST_TOKEN]
        usage = {"prompt_tokens": 7, "completion_tokens": 1}
        return web.json_response({"id": "x", "choices": [choice], "usage": usage, "kv_transfer_params": params})

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            choice = {"index": 0, "text": "".join(TOKENS), "finish_reason": "stop"}
            return web.json_response({"id": "x", "choices": [choice], "from": self.name})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for token in TOKENS:
            await response.write(f"data: {json.dumps({'choices': [{'text': token}], 'from': self.name})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
