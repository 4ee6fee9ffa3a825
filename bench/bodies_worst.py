"""The worst known bodies of an allowed size, and large ones that must pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster.scan import COMMON_MAX

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TOKENIZE = "/tokenize"
SPEECH = "/v1/audio/transcriptions"
JSON = "application/json"
FORM = "multipart/form-data; boundary=b"
LARGE = 33_000_000
"""Just below the usual `--body-bytes-max`."""


@dataclass(frozen=True, slots=True)
class Worst:
    """One body, made when it is sent: all bodies together would fill a small machine."""

    name: str
    make: Callable[[], bytes]
    path: str = COMPLETIONS
    content_type: str = JSON
    passes: bool = False
    """Whether it is a legitimate body: it must be answered 200."""


def filled(unit: bytes, head: bytes, tail: bytes, size: int = LARGE) -> bytes:
    """A body of about `size` bytes: `unit`, again and again, between `head` and `tail`."""
    return head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail


def _repeated(
    name: str,
    unit: bytes,
    head: bytes,
    tail: bytes,
    *,
    size: int = LARGE,
    path: str = COMPLETIONS,
    content_type: str = JSON,
    passes: bool = False,
) -> Worst:
    return Worst(name, lambda: filled(unit, head, tail, size), path, content_type, passes)


def _keys(size: int) -> bytes:
    """An object of distinct keys."""
    return b"{" + b",".join(b'"k%x":1' % number for number in range(size // 11)) + b"}"


def _ids(count: int) -> bytes:
    return b'{"max_tokens":2,"stream":true,"prompt":[' + b",".join(b"%d" % (n % 150_000) for n in range(count)) + b"]}"


def _part(field: bytes, content: bytes = b"x") -> bytes:
    return b'--b\r\nContent-Disposition: form-data; name="' + field + b'"\r\n\r\n' + content + b"\r\n"


_XARGS = b'{"prompt":"x","max_tokens":2,"vllm_xargs":['
_PROMPT = b'{"max_tokens":2,"stream":true,"prompt":"'
_CHAT = b'{"max_tokens":2,"stream":true,"messages":[{"role":"user","content":'
_IMAGE = _CHAT + b'[{"type":"image_url","image_url":{"url":"data:image/png;base64,'


def bodies() -> Iterator[Worst]:
    """All worst bodies, and the large ones that must pass."""
    yield from _structure()
    yield from _texts()
    yield from _numbers()
    yield from _forms()
    yield from _smaller()
    yield from _ordinary()


def _structure() -> Iterator[Worst]:
    yield _repeated("empty lists", b"[],", _XARGS, b"1]}")
    yield _repeated("objects with a list", b'{"a":[]},', _XARGS, b"1]}")
    yield _repeated("lists 60 deep", b"[" * 60 + b"]" * 60 + b",", _XARGS, b"1]}")
    yield _repeated("a list that never ends", b"[", b'{"a":', b"")
    yield _repeated("only closing brackets", b"]", b"", b"")
    yield _repeated("JSON in a text in JSON", b"[[]],", b'{"prompt":"x","vllm_xargs":"[', b'1]"}')
    yield _repeated("the same, escaped", b"\\u005b\\u005d,", b'{"prompt":"x","vllm_xargs":"[', b'1]"}')
    yield Worst("three million fields", lambda: _keys(LARGE))
    yield Worst("a million keys in a field", lambda: b'{"prompt":"x","logit_bias":' + _keys(11_000_000) + b"}")
    yield _repeated("one key again and again", b'"a":1,', b"{", b'"prompt":"x"}')
    yield _repeated("escaped keys", b'"\\u006b\\u0076_":1,', b'{"a":{', b'"x":1}}')
    yield _repeated("keys that are nearly ours", b'"kv_transfer_param":"kv_transfer_params",', b'{"a":{', b'"x":1}}')
    yield _repeated("keys that are ours", b'"kv_transfer_params":1,', b'{"prompt":"x","a":{', b'"x":1}}')
    yield from _media()
    yield _repeated("tiny messages", b'{"role":"user","content":"a"},', b'{"messages":[', b"{}]}", path=CHAT)
    yield _repeated("tiny parts", b'{"type":"text","text":"a"},', _CHAT + b"[", b"{}]}]}", path=CHAT)
    yield _repeated("a million stops", b'"a",', b'{"prompt":"x","stream":true,"stop":[', b'"b"]}', size=4_000_000)
    yield _repeated("one long stop", b"a", b'{"prompt":"x","stream":true,"stop":"', b'"}', size=900_000)
    yield _repeated("a large schema", b'"a":{"type":"string"},', b'{"prompt":"x","response_format":{', b'"b":{}}}')
    yield _repeated("/tokenize, empty lists", b"[],", b'{"a":[', b"1]}", path=TOKENIZE)
    yield _repeated("/tokenize, a list of objects", b'{"a":[]},', b"[", b"1]", path=TOKENIZE)


def _media() -> Iterator[Worst]:
    """As many keys as a body may have that name media or look like it, in a body of the largest size."""
    keys = b'{"uuid":"a"},' * (COMMON_MAX - 1)
    rest = b'{"type":"text","text":"'
    for name, before, after in (
        ("names of media", b"[", b""),
        ("keys that only look like names of media", b'[{"input":[', b"1]},"),
    ):
        head = _CHAT + before + keys + after + rest
        yield _repeated(name, b"x", head, b'"}]}]}', size=32_000_000, path=CHAT, passes=True)  # names grow by 63 bytes
    tail = b'"a","type":"text","text":"x"}]}]}'
    yield _repeated("spaces before a name", b" ", _CHAT + b'[{"uuid":', tail, path=CHAT, passes=True)
    yield _repeated("spaces before a colon", b" ", _CHAT + b'[{"uuid"', b":" + tail, path=CHAT, passes=True)
    yield _repeated("spaces before null", b" ", _CHAT + b'[{"uuid":', b"null," + tail[4:], path=CHAT, passes=True)
    head, tail = _CHAT + b'"x"}],"a":{"vllm_xargs":', b'{},"b":"' + b"x" * 100_000 + b'"}}'
    yield _repeated("spaces before an object", b" ", head, tail, path=CHAT, passes=True)


def _texts() -> Iterator[Worst]:
    yield _repeated("escaped letters", b"\\u0041", _PROMPT, b'"}')
    yield _repeated("escaped letters of our keys", b"\\u0065", _PROMPT, b'"}')
    yield _repeated("backslashes", b"\\\\", _PROMPT, b'"}')
    yield _repeated("quotes", b'\\"', _PROMPT, b'"}')
    yield _repeated("brackets", b"[{", _PROMPT, b'"}')
    yield _repeated("one wide character", b"x", _PROMPT + "😀".encode(), b'"}', passes=True)
    yield _repeated("wide characters", "語".encode(), _PROMPT, b'"}', passes=True)
    yield _repeated("a million texts", b'"",', b'{"prompt":[', b'""]}', size=3_000_000)
    yield _repeated("no UTF-8 at the end", b"x", _PROMPT + b"\xc3\xa9", b'\xff"}')
    yield _repeated("a byte order mark", b"x", b"\xef\xbb\xbf" + _PROMPT, b'"}')
    yield Worst("UTF-16", lambda: filled(b"x", _PROMPT, b'"}', LARGE // 2).decode().encode("utf-16"), TOKENIZE, "")
    yield _repeated("spaces", b" ", b"{", b'"prompt":"x"}')
    yield _repeated("spaces first", b" ", b"", b'{"prompt":"x"}')
    yield _repeated("spaces last", b" ", b'{"prompt":"x"}', b"")


def _numbers() -> Iterator[Worst]:
    yield _repeated("short numbers", b"1,", b'{"prompt":[', b"1]}")
    yield _repeated("floats", b"1.5e-300,", b'{"prompt":[', b"1]}")
    yield _repeated("one long number", b"9", b'{"prompt":"x","max_tokens":', b"}")
    yield _repeated("one long fraction", b"9", b'{"prompt":"x","temperature":1.', b"}")
    yield _repeated("one long exponent", b"9", b'{"prompt":"x","temperature":1e', b"}")


def _forms() -> Iterator[Worst]:
    end = b"--b--\r\n"
    yield _repeated("a form of many parts", _part(b"a"), b"", end, path=SPEECH, content_type=FORM)
    yield _repeated(
        "a form with a long head", b"A: b\r\n", b"--b\r\n", b"\r\n\r\n" + end, path=SPEECH, content_type=FORM
    )
    edge = b"\r\n--" + b"a" * 69
    like = FORM[:-1] + "a" * 70
    yield _repeated("a form of nearly boundaries", edge + b"b", b"", b"", path=SPEECH, content_type=like)
    yield _repeated("a form with a long name", b"m", b"", end, path=SPEECH, content_type=FORM)
    kind = "application/x-www-form-urlencoded"
    yield _repeated("fields of a web form", b"a=1&", b"", b"", path=TOKENIZE, content_type=kind)


def _smaller() -> Iterator[Worst]:
    """Bodies just below the size that is read in slices, and between that size and `LARGE`."""
    for size in (64_000, 1_000_000):
        yield _repeated(f"empty lists, {size // 1000} kB", b"[],", _XARGS, b"1]}", size=size)
        yield _repeated(f"objects, {size // 1000} kB", b'{"a":[]},', _XARGS, b"1]}", size=size)
        head = b'{"prompt":"x","vllm_xargs":"['
        yield _repeated(f"JSON in a text, {size // 1000} kB", b"[[]],", head, b'1]"}', size=size)
        yield _repeated(f"the same, escaped, {size // 1000} kB", b"\\u005b\\u005d,", head, b'1]"}', size=size)
        yield _repeated(f"short numbers, {size // 1000} kB", b"1,", b'{"prompt":[', b"1]}", size=size)
        yield _repeated(f"texts, {size // 1000} kB", b'"a",', b'{"prompt":[', b'"b"]}', size=size)
        yield _repeated(f"/tokenize, {size // 1000} kB", b'{"a":[]},', b'{"a":[', b"1]}", size=size, path=TOKENIZE)


def _ordinary() -> Iterator[Worst]:
    """Large bodies that are valid."""
    yield _repeated("an image of 20 MB", b"A", _IMAGE, b'"}}]}]}', size=20_000_000, path=CHAT, passes=True)
    named = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,' + b"A" * 400 + b'"},"uuid":"a"},'
    yield _repeated("pictures with names", named, _CHAT + b"[", named[:-1] + b"]}]}", size=4_500_000, path=CHAT,
                    passes=True)  # fmt: skip
    named = named.replace(b"A" * 400, b"A" * 1_000_000)
    yield _repeated("pictures of a megabyte with names", named, _CHAT + b"[", named[:-1] + b"]}]}", path=CHAT,
                    passes=True)  # fmt: skip
    yield Worst("a million token ids", lambda: _ids(1_000_000), passes=True)
    yield _repeated("prose of 8 MB", b"Call me Ishmael, said \\n", _PROMPT, b'"}', size=8_000_000, passes=True)
    message = b'{"role":"user","content":"' + b"word " * 200 + b'"},'
    tail = b'{"role":"user","content":"so?"}],"max_tokens":2,"stream":true}'
    yield _repeated("a chat of 8 MB", message, b'{"messages":[', tail, size=8_000_000, path=CHAT, passes=True)
    tool = b'{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{}}}}},'
    head = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":2,"stream":true,"tools":['
    yield _repeated("tools of 2 MB", tool, head, tool[:-1] + b"]}", size=2_000_000, path=CHAT, passes=True)
    yield Worst(
        "a recording of 25 MB",
        lambda: (
            _part(b"model", b"bench") + _part(b'file"; filename="a.wav', b"\x01\xff\r\n" * 6_250_000) + b"--b--\r\n"
        ),
        SPEECH,
        FORM,
        passes=True,
    )
    yield _repeated("text to embed", b'"some text to embed",', b'{"input":[', b'"x"]}', size=9_000_000,
                    path="/v1/embeddings", passes=True)  # fmt: skip
