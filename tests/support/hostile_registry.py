"""Malformed and strange contents of a registry, from a seed: heartbeats of both kinds, and raw values of its keys."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

from redis.exceptions import ResponseError

from cluster.registry.redis import RedisRegistry

NUMBERS = (
    -1, 0, 1, 2**31, 2**52, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.0, 1e15,
    1e308, -1e308,
)  # fmt: skip
TEXTS = (
    "", "x", "\x00", "\x1b[2J", "a:b", "a b", "é", "\u2028", "x" * 128, "x" * 513, "x" * 70_000, "../../x", "nan",
    "__proto__", "router-1", "p", "d",
)  # fmt: skip
URLS = (
    "http://127.0.0.1:9", "http://127.0.0.1:0", "http://127.0.0.1:99999999", "http://[", "http://[::1", "http://[x]:1",
    "http://a:b@127.0.0.1:9", "https://127.0.0.1:9/", "http://127.0.0.1:9/?x=", "http://127.0.0.1:9#x", "http://:9",
    "http://%00:9", "http://127.0.0.1:9/" + "x" * 480, "file:///etc/passwd", "http://127.0.0.1:-1", "http://127.0.0.1:٣",
)  # fmt: skip
LITERALS = ("NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 500, "[" * 3000 + "]" * 3000, "{" * 2000, '"\\ud800"')
"""Words that `json.dumps` would not write for a heartbeat; some are no JSON."""

NAMES = ("p", "d", "router-1", "router-2", "x")


def any_value(chance: random.Random, depth: int = 0) -> Any:
    """Any value that JSON can express."""
    kind = chance.randrange(8 if depth < 3 else 6)
    if kind == 0:
        return chance.choice(NUMBERS)
    if kind == 1:
        return chance.choice(TEXTS)
    if kind == 2:
        return chance.choice(URLS)
    if kind == 3:
        return chance.choice((None, True, False))
    if kind == 4:
        return chance.randrange(2**53 + 2)
    if kind == 5:
        return chance.random()
    if kind == 6:
        return [any_value(chance, depth + 1) for _ in range(chance.choice((0, 1, 2, 5, 40)))]
    return {chance.choice((*TEXTS, *NAMES)): any_value(chance, depth + 1) for _ in range(chance.choice((0, 1, 3)))}


def heartbeat(chance: random.Random, *, url: str = "http://127.0.0.1:9") -> dict[str, Any]:
    """A heartbeat that usually decodes, with values that no program of Baton writes."""
    big = lambda: chance.choice((0, 1, 7, 2**31, 2**52, 2**53 - 1, 2**53))  # noqa: E731
    name, kind = chance.choice(NAMES), chance.choice(("instance", "router"))
    beat: dict[str, Any] = {
        "id": name, "agent": chance.choice(("a", "b", f"x{chance.randrange(10**6)}")), "kind": kind, "url": url,
        "epoch": big(), "seq": big(), "state": chance.choice(("ready", "ready", "draining", "gone", "starting")),
        "role": chance.choice(("prefill", "decode", "both")), "agent_url": chance.choice((None, url, "http://127.0.0.1:9")),
        "credits": big(), "sent_at": chance.choice((0.0, -1e300, 1e300, 5e-324)),
        "models": [{"id": chance.choice((*NAMES, 3, None, [], {})), "max_model_len": any_value(chance)} for _ in "ab"],
        "load": {"running": big(), "waiting": big(), "kv_usage": chance.random(), "kv_tokens": big(), "deferred": big(),
                 "prompt_tokens": big(), "generation_tokens": big(), "external_kv_tokens": big()},
        "grants": {f"router-{number}": big() for number in range(chance.choice((0, 1, 400)))},
        "legs": {each: [big(), big(), big()] for each in chance.sample(NAMES, 3)},
        "demand": [{"role": "decode", "model": chance.choice(("", "fake", "x" * 256)), "places": big(),
                    "tenants": {"": [big(), chance.choice((5e-324, 1.0, 1e9))], "*": [big(), 1e-300]}}],
        "quarantined": {each: [big(), chance.random() < 0.5, chance.choice(("", "why", "x" * 400)), "router-1"]
                        for each in chance.sample(NAMES, 3)},
        "shuns": chance.sample(NAMES, 2), "evicted": [big(), big()], "weights": chance.choice(("", "w" * 512)),
        "node": chance.choice(("", "n" * 512)), "tenants": chance.choice(([], ["acme"])), "pins": chance.random() < 0.5,
        "shape": {"tp": chance.choice((1, 65536))}, "holds": big(), "future": any_value(chance),
    }  # fmt: skip
    return beat


def cases(seed: int, *, url: str = "http://127.0.0.1:9", count: int = 40) -> list[bytes]:
    """Payloads for one round: heartbeats that decode, spoiled ones, and bytes that are no JSON."""
    chance = random.Random(seed)
    found: list[bytes] = []
    for _ in range(count):
        beat = heartbeat(chance, url=url)
        for _ in range(chance.choice((0, 0, 0, 1, 3))):
            field = chance.choice(list(beat))
            beat[field] = chance.choice(URLS) if "url" in field and chance.random() < 0.8 else any_value(chance)
        if chance.random() < 0.3 and isinstance(beat["load"], dict):
            beat["load"][chance.choice(("running", "waiting", "kv_tokens", "prompt_tokens"))] = chance.choice(NUMBERS)
        text = json.dumps(beat)
        spoil = chance.randrange(10)
        if spoil == 0:
            at = chance.randrange(len(text))
            text = text[:at] + chance.choice(LITERALS) + text[at:]
        elif spoil == 1:
            text = text[: chance.randrange(len(text))]
        elif spoil == 2:
            text = text.replace("0", chance.choice(LITERALS), 1)
        payload = text.encode("utf-8", "surrogatepass")
        found.append(chance.randbytes(chance.randrange(64)) if spoil == 3 else payload)
    return found


def raw_value(chance: random.Random) -> bytes:
    """A strange value for any key of a registry that is not a heartbeat."""
    return chance.choice(
        (b"", b"\xff\xfe", b"0", b"-1", b"9" * 5000, b"9007199254740993", b"1e5", "٣".encode(), b"\x1b]0;x\x07",
         b"a" * 10_000, chance.randbytes(40), json.dumps(any_value(chance)).encode("utf-8", "surrogatepass"))
    )  # fmt: skip


async def spoil(
    registry: RedisRegistry, cluster: str, chance: random.Random, *, url: str = "http://127.0.0.1:9"
) -> None:
    """Write a strange value, of any of several Redis types, into every key that programs read."""
    redis, prefix = registry._redis, f"baton:{cluster}:"
    for kind in ("instance", "router"):
        keys = [f"{kind}:lock:{name}" for name in NAMES] + [f"{kind}:members"]
        keys += [f"{kind}:beat:{name}:{agent}" for name in NAMES for agent in "ab"]
        for key in keys:
            await _write(redis, prefix + key, chance, url, text=key.endswith(":members") or chance.random() < 0.7)
        entries = [f"{name} {agent}".encode() for name in NAMES for agent in "ab"]
        if chance.random() < 0.7:
            await redis.delete(f"{prefix}{kind}:members")
            await redis.sadd(f"{prefix}{kind}:members", *entries, raw_value(chance) or b"x")
    for name in NAMES:
        await _write(redis, f"{prefix}epoch:{name}", chance, url, text=chance.random() < 0.8)
        for epoch in (1, 2):
            await _write(redis, f"{prefix}posted:{name}:a:{epoch}", chance, url, text=chance.random() < 0.3)


async def _write(redis: Any, key: str, chance: random.Random, url: str, *, text: bool) -> None:
    with suppress(ResponseError):  # another client has just written the key with another type
        await _written(redis, key, chance, url, text=text)


async def _written(redis: Any, key: str, chance: random.Random, url: str, *, text: bool) -> None:
    await redis.delete(key)
    if text:
        await redis.set(
            key, chance.choice((raw_value(chance), chance.choice(cases(chance.randrange(10**6), url=url, count=1))))
        )
    elif chance.random() < 0.5:
        await redis.hset(key, mapping={"p": raw_value(chance), "/credentials": raw_value(chance)})
    else:
        await redis.rpush(key, raw_value(chance))
