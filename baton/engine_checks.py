"""Checks over HTTP whether a running vLLM server can be used unchanged, and which flags it lacks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from baton.checks import VLLM_PINNED, DoctorFinding, missing, note, ok
from cluster import wire

ANSWER_S = 30.0
"""Time limit for one answer: a busy engine may take long for a short prompt."""

CONNECT_S = 3.0

_CONNECTOR = (
    "start vLLM with --kv-transfer-config "
    '\'{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}\' '
    "(kv_producer for prefill alone, kv_consumer for decode alone)"
)


@dataclass(slots=True)
class _Seen:
    """What the checks know of the engine so far."""

    url: str
    session: aiohttp.ClientSession
    model: str = ""
    """The first model that it lists."""
    leg: dict[str, Any] = field(default_factory=dict)
    """Its answer to a prefill leg; empty: none."""


def check_engine(url: str) -> list[DoctorFinding]:
    """All findings about the engine at `url`. The engine computes a short prompt and holds its block for one lease."""
    return asyncio.run(_check(url.rstrip("/")))


async def _check(url: str) -> list[DoctorFinding]:
    key = os.environ.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        seen = _Seen(url, session)
        findings = [await _health(seen)]
        if findings[0].fix:
            return findings
        findings += [await _tried("vLLM", _version, seen), await _tried("Model", _model, seen, needed=True)]
        if seen.model:
            findings += [
                await _tried("Prefill leg", _prefill, seen, needed=True),
                await _tried("Side channel", _side_channel, seen),
                await _tried("Abort by id", _abort, seen),
                await _tried("Cached tokens", _details, seen),
                await _tried("Timing", _metrics, seen),
            ]
        findings.append(note("Failed loads", "cannot be seen from outside", "set kv_load_failure_policy to recompute"))
        return findings


async def _tried(
    what: str, check: Callable[[_Seen], DoctorFinding | Awaitable[DoctorFinding]], seen: _Seen, *, needed: bool = False
) -> DoctorFinding:
    """The finding of a check. An exception is one, too: `missing` if the router needs the check, else a note."""
    try:
        found = check(seen)
        return found if isinstance(found, DoctorFinding) else await found
    except Exception as error:  # noqa: BLE001 - a server may answer anything, or nothing
        told = f"could not be checked: {type(error).__name__}{f': {error}' if str(error) else ''}"
        return (
            missing(what, told, "see that URL is a vLLM server, and what its log says") if needed else note(what, told)
        )


async def _get(seen: _Seen, path: str) -> tuple[int, Any]:
    async with seen.session.get(seen.url + path) as answer:
        return answer.status, await answer.json(content_type=None) if answer.status == 200 else await answer.text()


async def _health(seen: _Seen) -> DoctorFinding:
    try:
        async with seen.session.get(f"{seen.url}/health") as answer:
            status = answer.status
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return missing(
            "Engine",
            f"{seen.url} does not answer: {str(error) or type(error).__name__}",
            "check URL, port and firewall",
        )
    if status != 200:
        return missing("Engine", f"{seen.url}/health: HTTP {status}", "its log says why it is not well")
    return ok("Engine", f"{seen.url} answers")


async def _version(seen: _Seen) -> DoctorFinding:
    status, body = await _get(seen, "/version")
    version = body.get("version", "?") if isinstance(body, dict) else "?"
    if status != 200:
        return note("vLLM", f"/version: HTTP {status}: is this a vLLM server?")
    if not str(version).startswith(VLLM_PINNED):
        return note("vLLM", f"{version}; Baton is tested with {VLLM_PINNED}")
    return ok("vLLM", str(version))


async def _model(seen: _Seen) -> DoctorFinding:
    status, body = await _get(seen, "/v1/models")
    if status == 401:
        return missing("Model", "the engine wants a key", "set VLLM_API_KEY")
    names = [str(entry.get("id")) for entry in body.get("data", [])] if isinstance(body, dict) else []
    if not names:
        return missing("Model", f"/v1/models: HTTP {status}, no model listed", "wait until the engine has loaded one")
    seen.model = names[0]
    return ok("Model", ", ".join(names))


async def _prefill(seen: _Seen) -> DoctorFinding:
    """A prefill leg, as the router sends it."""
    body = wire.prefill_body({"model": seen.model, "prompt": "Hello, how are you today?"})
    async with seen.session.post(f"{seen.url}/v1/completions", json=body) as answer:
        status, text, routed = answer.status, await answer.text(), "X-Baton-Request-Id" in answer.headers
        seen.leg = await answer.json(content_type=None) if status == 200 else {}
    if routed:
        return missing(
            "Prefill leg", "this is one of Baton's routers, not an engine", "give an engine's URL to --engine"
        )
    if wire.is_ticket_refused(status, text.encode()):
        return note("Prefill leg", "guarded: it takes legs with a router's ticket only, so this was not tried")
    if status != 200:
        return missing("Prefill leg", f"HTTP {status}: {text[:160]}", "the engine must serve /v1/completions")
    transfer = wire.read_transfer(seen.leg)
    if transfer is None:
        return missing("Prefill leg", "answered without a hold: no KV connector, or a consumer only", _CONNECTOR)
    return ok("Prefill leg", f"holds {transfer.tokens} tokens, mode {transfer.fields.get('transfer_mode', 'pull')}")


async def _side_channel(seen: _Seen) -> DoctorFinding:
    """Whether other engines can connect to it for NIXL's handshake."""
    transfer = wire.read_transfer(seen.leg)
    if transfer is None:
        return note("Side channel", "not told: no hold")
    host, port = str(transfer.fields.get("remote_host")), int(transfer.fields.get("remote_port") or 0)
    fix = "set VLLM_NIXL_SIDE_CHANNEL_HOST to an address the decode instances can reach"
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
    except (OSError, TimeoutError):
        return missing("Side channel", f"{host}:{port} cannot be reached from here", fix)
    if host in {"localhost", "127.0.0.1", "::1"}:
        return note("Side channel", f"{host}:{port}: only engines on its own machine can pull from it", fix)
    return ok("Side channel", f"{host}:{port}")


async def _abort(seen: _Seen) -> DoctorFinding:
    async with seen.session.post(f"{seen.url}/inference/v1/abort_requests", json={"request_ids": []}) as answer:
        if answer.status == 200:
            return ok("Abort by id", "yes")
    return note("Abort by id", "no: prefill legs of clients that left run to their end", "add --enable-scale-out")


def _details(seen: _Seen) -> DoctorFinding:
    if not seen.leg:
        return note("Cached tokens", "not told: no prefill leg")
    usage = seen.leg.get("usage") or {}
    if usage.get("prompt_tokens_details") is not None:
        return ok("Cached tokens", "told in usage")
    return note(
        "Cached tokens",
        "not told in usage: hand-overs to it cannot be proven, so as a decode instance it gets none",
        "add --enable-prompt-tokens-details",
    )


def _metrics(seen: _Seen) -> DoctorFinding:
    if seen.leg.get("metrics") is not None:
        return ok("Timing", "told per request")
    return note("Timing", "not told per request", "add --enable-per-request-metrics")
