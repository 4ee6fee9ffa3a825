"""Malformed and strange request bodies of a client, small and large, made from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT, TOKENIZE, SPEECH = "/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/audio/transcriptions"
JSON = "application/json"
LARGE_FROM = 1 << 20
"""Bodies of so many bytes or more name a model that is not served: a test's engine would make a copy of each."""

_FIELDS = (
    "prompt", "messages", "vllm_xargs", "extra_args", "kv_transfer_params", "ec_transfer_params", "cache_salt", "stop",
    "logit_bias", "tools", "input", "priority", "request_id", "model", "stream", "max_tokens", "n", "unknown", "é",
)  # fmt: skip
_TOKENS = (
    b"[", b"]", b"{", b"}", b",", b":", b'"a"', b'""', b"1", b"-0", b"1e9", b"null", b"true", b"[]", b"{}",
    b'"\\u0061"', b'"a":', b'"kv_transfer_params":', b'"\\u006bv_transfer_params":', b'"uuid":"x"', b'"\\\\"', b'"\\""',
    b" ", b"\n",
    b'{"a":[]}', b'["x"]', b'"{\\"a\\":1}"', b"0.5", b'"\\ud83d\\ude00"', '"語"'.encode(), b'"[[]]"', b'"\\ud800"',
    b'"kv_transfer_params"', b'{"type":"text","text":"x"}', b'{"role":"user","content":"x"}',
)  # fmt: skip
_LETTERS = (
    b"a", b"ab ", b"\\n", b"\\\\", b'\\"', b"\\u0041", b"\\u0000", b"\\ud83d\\ude00", b"\\ud800", "é".encode(),
    "語".encode(), "😀".encode(), b"[", b'{\\"a\\":', b"kv_transfer_params", b"\xff", b"\xc3", b"\x00", b"\n", b"\\x",
    b"[[]],", b"%5B", b"0,", b"\xf4\x90\x80\x80",
)  # fmt: skip
_KINDS = (
    JSON, JSON, JSON, JSON, JSON, "application/json; charset=utf-8", "application/json;charset=utf-16", "", None,
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "multipart/form-data; boundary=b",
    "multipart/form-data; boundary=" + "b" * 200, 'multipart/form-data; boundary=""', "application/jsonp", "\xe9",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: its path, its body and the type of its body."""

    path: str
    raw: bytes
    content_type: str | None = JSON

    def head(self) -> bytes:
        """The request's head, which asks the server to close the connection after its answer."""
        lines = [f"POST {self.path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(self.raw)}"]
        if self.content_type is not None:
            lines.append(f"Content-Type: {self.content_type}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def sent(chance: random.Random, bytes_max: int) -> Sent:
    """A request with a body of up to `bytes_max` bytes; most are small."""
    size = int(
        min(bytes_max, chance.choice((300, 3_000, 70_000, 70_000, 1_200_000, bytes_max)) * chance.random() * 1.2)
    )
    path = chance.choice((COMPLETIONS, COMPLETIONS, CHAT, CHAT, TOKENIZE, SPEECH))
    raw = chance.choice(_MAKERS)(chance, path, max(2, size))
    kind = "multipart/form-data; boundary=b" if raw.startswith(b"--b\r\n") else JSON
    if chance.random() < 0.25:
        raw = _spoiled(chance, raw)
    if chance.random() < 0.1:
        kind = chance.choice(_KINDS)
    if len(raw) >= LARGE_FROM:
        raw = raw.replace(b'"fake"', b'"gone"')
    return Sent(path, raw[:bytes_max], kind)


def _right(chance: random.Random, path: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "fake"}
    body |= {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    if path in {COMPLETIONS, CHAT}:
        body |= {"max_tokens": chance.choice((1, 5)), "stream": chance.random() < 0.4}
    return body


def _with(body: dict[str, Any], field: str, value: bytes) -> bytes:
    """A body as JSON, with one more field, whose value is these bytes."""
    return json.dumps(body, ensure_ascii=False).encode()[:-1] + b"," + json.dumps(field).encode() + b":" + value + b"}"


def _grammar(chance: random.Random, path: str, size: int) -> bytes:
    """A body in which some JSON tokens are repeated until it is large, in brackets or not."""
    unit = b"".join(chance.choice(_TOKENS) for _ in range(chance.randrange(1, 6)))
    head, tail = chance.choice(((b"[", b"1]"), (b"{", b'"z":1}'), (b"", b""), (b"[[", b"1]]"), (b'[{"a":[', b"1]}]")))
    sep = chance.choice((b"", b",", b", ", b",\n"))
    return _with(_right(chance, path), chance.choice(_FIELDS), head + (unit + sep) * (size // len(unit + sep)) + tail)


def _deep(chance: random.Random, path: str, size: int) -> bytes:
    opening, closing = chance.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]"), (b'"[', b']"')))
    depth = min(size // len(opening + closing), chance.choice((10, 60, 63, 64, 65, 100, 5_000, size)))
    deep = opening * depth + b"1" + (closing * depth if chance.random() < 0.8 else b"")
    if chance.random() < 0.3:
        deep = json.dumps(deep.decode()).encode()
    return _with(_right(chance, path), chance.choice(_FIELDS), deep)


def _text(chance: random.Random, path: str, size: int) -> bytes:
    letters = [chance.choice(_LETTERS) for _ in range(chance.randrange(1, 4))]
    unit = b"".join(letters)
    text = b'"' + unit * (size // len(unit)) + b'"'
    field = chance.choice(_FIELDS)
    return _with(
        _right(chance, path), field, b'[{"role":"user","content":' + text + b"}]" if field == "messages" else text
    )


def _numbers(chance: random.Random, path: str, size: int) -> bytes:
    unit = chance.choice((b"1,", b"151643,", b"-1,", b"1.5,", b"1e5,", b"0 ,", b"9" * 30 + b",", b"1e400,", b"01,"))
    ids = b"[" + unit * (size // len(unit)) + b"7]"
    return _with(_right(chance, path), chance.choice(("prompt", "stop_token_ids", "input", "é")), ids)


def _keys(chance: random.Random, path: str, size: int) -> bytes:
    name = chance.choice(
        (b"k%x", b"\\u006b%x", b"kv_transfer_params%.0x", b"%x" + b"k" * 200, b"uuid%.0x", b"cache_salt%.0x")
    )
    value = chance.choice((b"1", b"[]", b'"x"', b'{"kv_transfer_params":1}', b'"[1]"'))
    each = len(name) + len(value) + 6
    fields = b",".join(b'"' + name % number + b'":' + value for number in range(min(200_000, size // each)))
    if chance.random() < 0.5:
        return json.dumps(_right(chance, path)).encode()[:-1] + b"," + fields + b"}" if fields else b"{}"
    return _with(_right(chance, path), chance.choice(_FIELDS), b"{" + fields + b"}")


def _form(chance: random.Random, path: str, size: int) -> bytes:
    field = chance.choice((b"model", b"file", b"kv_transfer_params", b"x", b"vllm_xargs", b"stream", b"\xff", b""))
    quoted = chance.choice((b'"' + field + b'"', field, b'"' + field, b'"a\\"; name="' + field + b'"'))
    more = chance.choice(
        (b"", b"; filename=x.wav", b"; filename*=utf-8''x", b"\r\nContent-Type: application/json", b"\r\n x")
    )
    content = chance.choice((b"x", b"fake", b"", b'{"a":1}', b"\r\n--", b"--b", b"y" * chance.randrange(1, 70_000)))
    part = b"--b\r\nContent-Disposition: form-data; name=" + quoted + more + b"\r\n\r\n" + content + b"\r\n"
    end = chance.choice((b"--b--\r\n", b"", b"--b--\r\nmore", b"--b\r\n", b"--b--"))
    return part * max(1, size // len(part)) + end


def _noise(chance: random.Random, path: str, size: int) -> bytes:
    """A body that is no JSON, is JSON of an odd type, or is right but padded or in another encoding."""
    plain = json.dumps(_right(chance, path))
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: chance.randbytes(min(size, 100_000)),
        lambda: b" " * size + plain.encode(),
        lambda: plain.encode() + b" " * size,
        lambda: plain.encode(chance.choice(("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "utf-7"))),
        lambda: b'"' + b"x" * size + b'"',
        lambda: b"[" + b"{}," * (size // 3) + b"1]",
        lambda: chance.choice((b"", b"[]", b"null", b"{", b'""', b"7", b"{}", b"\x00", b"\xef\xbb\xbf{}")),
    )
    return chance.choice(kinds)()


_MAKERS = (_grammar, _grammar, _deep, _text, _text, _numbers, _keys, _form, _noise)


def _spoiled(chance: random.Random, raw: bytes) -> bytes:
    """The body with some bytes changed, removed, repeated or added."""
    at, size = chance.randrange(len(raw) + 1), chance.choice((1, 1, 2, 30, 2000))
    return chance.choice(
        (
            lambda: raw[:at] + chance.randbytes(1) + raw[at + 1 :],
            lambda: raw[:at] + raw[at + size :],
            lambda: raw[:at] + chance.choice(_TOKENS) + raw[at:],
            lambda: raw[: at + size] + raw[at : at + size] * 3 + raw[at + size :],
            lambda: raw[:at],
            lambda: raw + chance.choice(_TOKENS),
        )
    )()
