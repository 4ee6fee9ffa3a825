"""Malformed request bodies, made by the thousand from a seed. Each names what is wrong with it (`kind`)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/completions?x=1")
JSON = "application/json"

NUMBERS = ("max_tokens", "min_tokens", "n", "temperature", "top_p", "seed")


@dataclass(frozen=True, slots=True)
class Malformed:
    """One request. `length` is the value of its Content-Length; None: the body's length."""

    kind: str
    path: str
    body: bytes
    content_type: str | None = JSON
    length: bytes | None = None

    def head(self) -> bytes:
        lines = [f"POST {self.path} HTTP/1.1", "Host: x"]
        if self.content_type is not None:
            lines.append(f"Content-Type: {self.content_type}")
        length = str(len(self.body)).encode() if self.length is None else self.length
        return "\r\n".join(lines).encode() + b"\r\nContent-Length: " + length + b"\r\n\r\n"


def malformed(seed: int, count: int) -> Iterator[Malformed]:
    """`count` malformed requests, with about as many of each kind."""
    chance = random.Random(seed)
    kinds = list(KINDS.items())
    for number in range(count):
        kind, make = kinds[number % len(kinds)]
        path = chance.choice([each for each in PATHS if "completions" in each or kind != "wrong number"])
        body, *more = make(chance, path)
        yield Malformed(kind, path, body, *more)


def _text(chance: random.Random) -> str:
    return "".join(chance.choice('abc "\\\n{}[]:,é語😀\u0000') for _ in range(chance.randrange(1, 40)))


def _right(chance: random.Random, path: str) -> dict[str, Any]:
    """The body of a request that a server would answer."""
    body: dict[str, Any] = {"model": "fake"}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": _text(chance)}]
    else:
        body["prompt"] = _text(chance)
    if "completions" in path:
        body |= {"max_tokens": chance.randrange(1, 3), "stream": chance.random() < 0.5}
    return body


def _raw(chance: random.Random, path: str) -> bytes:
    return json.dumps(_right(chance, path), ensure_ascii=chance.random() < 0.5).encode()


def _truncated(chance: random.Random, path: str) -> tuple[bytes]:
    raw = _raw(chance, path)
    return (raw[: chance.randrange(1, len(raw))],)


def _nested(chance: random.Random, path: str) -> tuple[bytes]:
    depth = chance.choice([70, 500, 2_000, 20_000])
    opening, closing = chance.choice([(b"[", b"]"), (b'{"a":', b"}")])
    whole = chance.random() < 0.5
    deep = opening * depth + (b"1" + closing * depth if whole else b"")
    raw = _raw(chance, path)
    return (raw[:-1] + b', "deep": ' + deep + (b"}" if whole else b""),)


def _changed(chance: random.Random, path: str, **fields: Any) -> bytes:
    return json.dumps({**_right(chance, path), **fields}).encode()


def _wrong_type(chance: random.Random, path: str) -> tuple[bytes]:
    field, odd = chance.choice(
        [
            ("model", chance.choice([7, ["fake"], {"a": 1}, True, 1.5])),
            ("messages" if "chat" in path else "prompt", chance.choice([7, {"a": 1}, True, 1.5, [[{}]], [1.5]])),
        ]
    )
    return (_changed(chance, path, **{field: odd}),)


def _wrong_number(chance: random.Random, path: str) -> tuple[bytes]:
    """Only generation requests have these fields."""
    odd = chance.choice(["x", [], {}, True, -1, -(10**30), [1], "1e400", 10**400])
    field = chance.choice(NUMBERS[:3])
    return (_changed(chance, path, **{field: odd}).replace(b"Infinity", b"1e400"),)


def _huge_number(chance: random.Random, path: str) -> tuple[bytes]:
    number = chance.choice([b"1e400", b"-1e999", b"9" * 5_000, b"1" + b"0" * 400, b"1e" + b"9" * 30])
    return (_raw(chance, path)[:-1] + b', "max_tokens": ' + number + b', "prompt": ' + number + b"}",)


def _not_a_number(chance: random.Random, path: str) -> tuple[bytes]:
    word = chance.choice([b"NaN", b"Infinity", b"-Infinity", b"nan", b"undefined", b"0x10", b"01", b"+1", b".5", b"1."])
    return (_raw(chance, path)[:-1] + b', "temperature": ' + word + b"}",)


def _not_utf8(chance: random.Random, path: str) -> tuple[bytes]:
    wrong = chance.choice([b"\xff", b"\xc3", b"\xe2\x82", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\xaf"])
    raw = _raw(chance, path)
    return (raw[:-1] + b', "user": "' + wrong + b'"}',)


def _other_encoding(chance: random.Random, path: str) -> tuple[bytes]:
    text = json.dumps(_right(chance, path))
    return (text.encode(chance.choice(["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])),)


def _wrong_kind(chance: random.Random, path: str) -> tuple[bytes, str | None]:
    kinds = ["text/plain", "application/x-www-form-urlencoded", "", "json", "application/jsonp", "multipart/form-data"]
    kind = chance.choice(kinds if "completions" in path else [kinds[1], kinds[-1]])
    return _raw(chance, path), kind


def _not_an_object(chance: random.Random, path: str) -> tuple[bytes]:
    return (chance.choice([b"[]", b"[{}]", b'"x"', b"7", b"null", b"true", b"", b" ", b"[1, 2]", b'"\\ud800"']),)


def _twice(chance: random.Random, path: str) -> tuple[bytes]:
    """If a key occurs twice, its last value counts. Here the last value is wrong."""
    field = chance.choice(["model", "messages" if "chat" in path else "prompt"])
    return (_raw(chance, path)[:-1] + f', "{field}": 7}}'.encode(),)


def _broken(chance: random.Random, path: str) -> tuple[bytes]:
    raw = _raw(chance, path)
    broken = [
        raw + b"}",
        raw + b" {}",
        raw.replace(b'"model"', b"model"),
        raw.replace(b'"model"', b"'model'"),
        raw[:-1] + b",}",
        raw[:-1] + b', "a": "\n"}',
        raw[:-1] + b', "a": "\\x41"}',
        raw[:-1] + b', "a": "\\ud800"}',
        raw[:-1] + b', "a"}',
        raw[:-1] + b', "a": /* no */ 1}',
        b"\x00" + raw,
        raw[:-1] + b"\x00}",
    ]
    return (chance.choice(broken),)


def _noise(chance: random.Random, path: str) -> tuple[bytes]:
    return (b"{" + chance.randbytes(chance.randrange(1, 300)),)


def _wrong_length(chance: random.Random, path: str) -> tuple[bytes, str, bytes]:
    """A wrong Content-Length. The connection cannot be used after it: the next request's beginning is unknown."""
    return b"", JSON, chance.choice([b"x", b"-1", b"1e3", b"0x10", b"+5", b"9" * 30, b"5, 6", b"1 2"])


KINDS: dict[str, Callable[[random.Random, str], tuple[Any, ...]]] = {
    "truncated": _truncated,
    "nested": _nested,
    "wrong type": _wrong_type,
    "wrong number": _wrong_number,
    "huge number": _huge_number,
    "not a number": _not_a_number,
    "not UTF-8": _not_utf8,
    "another encoding": _other_encoding,
    "wrong content type": _wrong_kind,
    "not an object": _not_an_object,
    "a key twice": _twice,
    "broken": _broken,
    "noise": _noise,
    "wrong length": _wrong_length,
}
