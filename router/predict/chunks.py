"""A prompt's text in template order, cut into chunks, each named by a keyed hash of all text up to its end. Pure.

Chunks lie at fixed distances from the beginning, and only whole ones are named: appended text, such as the next turn of
a conversation, changes no name. Names depend on a key that all routers of a fleet share, and on a scope (model, tenant
or `shared`, cache salt): equal text in two scopes has no name in common, and a client without the key cannot produce a
given name.

The hash is multilinear (Carter and Wegman 1979; Lemire and Kaser 2014): each 32-bit word so far, times a secret random
64-bit number of its place, is summed up modulo 2^64; the scope and a random number for each chunk are added. The upper
63 bits are the name. Two different texts collide with probability 2^-33 at most over the choice of the key, which is a
bound and no hope. numpy does this to 100 KB in a fifth of the time that chained SHA-256 or BLAKE2b take
(`make bench-prefixes`), and to 2 KB in about the same. It is no cryptographic hash and need not be one: a false match
sends a request to an instance that has to compute its prompt, and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b, shake_256
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.errors import bad_request
from router.core.load_notes import CHUNKS_MAX
from router.core.unread import Sort, Unread, beginning
from router.predict.media import MEDIA_BYTES, MediaReader

CHUNK_BYTES = 1024
"""About 256 tokens of prose. Smaller chunks save hardly any prefill (it flattens near 1,000 tokens), and each chunk
costs an entry of the index."""

NAMED_BYTES: Final = CHUNK_BYTES * CHUNKS_MAX

_IDS_BYTES: Final = 3 * NAMED_BYTES
"""Bytes of a list of token ids that are read: enough for the named ones, at up to eleven digits."""

_OF_A_PROMPT: Final = ("messages", "prompt", "tools")

_UNREAD_VALUES: Final = 50_000
"""A chat with more objects, arrays, texts and commas gets no names."""

_UNREAD_BUILT: Final = 2 * NAMED_BYTES
"""Bytes of messages that are parsed for their text: 20 ms at worst."""

_SCOPES_MAX: Final = 1000
"""The number of scopes whose numbers are kept: clients may send any number of salts."""
_PLACED_MAX: Final = 100
"""The number of scopes whose parts of the chunks' sums are kept (`Hasher._placed`), 8 KB each."""

_WORDS = CHUNK_BYTES // 4
_WORD: Final = np.dtype("<u4")
_ONE: Final = np.uint64(1)
"""Shifts out the lowest bit of a sum, which is the weakest: so names are 0 or more and fit a signed column."""

Words = NDArray[np.uint64]


class Hasher:
    """Names chunks, with one key."""

    def __init__(self, key: bytes) -> None:
        """`key`: a secret of 16 to 64 bytes; routers that exchange names need the same key."""
        assert 16 <= len(key) <= 64
        self._key: Final = key
        self._scopes: Final[dict[tuple[str, str | None, str], int]] = {}
        size = 8 * CHUNKS_MAX * (_WORDS + 1)
        drawn = np.frombuffer(shake_256(b"baton chunks" + key).digest(size), dtype="<u8").astype(np.uint64)
        self._weights: Final[Words] = drawn[CHUNKS_MAX:].reshape(CHUNKS_MAX, _WORDS)
        """The secret numbers, by chunk and word."""
        self._places: Final[Words] = drawn[:CHUNKS_MAX].cumsum(dtype=np.uint64)
        self._in_scope: Final[dict[int, Words]] = {}

    def scope(self, model: str, tenant: str | None, salt: str = "") -> int:
        """The number of a scope; names match only within one. `tenant` None: the scope of all tenants whose
        `cache_scope` is `shared`. `salt`: vLLM's `cache_salt`.
        """
        found = self._scopes.get((model, tenant, salt))
        if found is None:
            said = msgspec.json.encode([model, tenant, salt])
            found = int.from_bytes(blake2b(said, key=self._key, digest_size=8).digest(), "little")
            if len(self._scopes) >= _SCOPES_MAX:
                self._scopes.clear()
            self._scopes[model, tenant, salt] = found
        return found

    def names(self, scope: int, text: bytes) -> list[int]:
        """The names of the whole chunks of a text, from its beginning."""
        count = min(len(text) // CHUNK_BYTES, CHUNKS_MAX)
        if not count:
            return []
        words: Words = np.ndarray((count, _WORDS), _WORD, text)
        found: Words = np.vecdot(words, self._weights[:count]).cumsum()
        found += self._placed(scope)[:count]
        found >>= _ONE
        names: list[int] = found.tolist()
        return names

    def _placed(self, scope: int) -> Words:
        """By chunk: what the scope and the number of chunks add to its sum, whatever the text is."""
        found = self._in_scope.get(scope)
        if found is None:
            if len(self._in_scope) >= _PLACED_MAX:
                self._in_scope.clear()
            found = self._in_scope[scope] = self._places + np.uint64(scope)
        return found


class ReadPrompt(NamedTuple):
    """The prompt of an OpenAI body."""

    text: bytes
    """See `prompt_text`; of a large body as far as chunks are named."""
    size: int
    """Bytes of all its text."""
    media: int
    """Pictures, sounds and videos in it, each counted as `MEDIA_BYTES`."""
    prompts: int = 1
    """The number of prompts, each of which is answered; 0: unknown, in a large body."""


def read_prompt(body: Mapping[str, Any]) -> ReadPrompt:
    """Read the prompt of an OpenAI body. Of several prompts the text is the first one's, and the size that of all.

    Raises:
        ApiError: 400, a long text in a large body is no valid JSON: only here it is read to its end.
    """
    try:
        if body.get("messages") is None:
            return _read_completion(body)
        media = MediaReader()
        text = prompt_text(body, media)
        return ReadPrompt(text, prompt_bytes(body, text, media), media.count)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON: {error}") from None


def _read_completion(body: Mapping[str, Any]) -> ReadPrompt:
    prompt = body.get("prompt")
    text = _completion(prompt)
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        texts = sum(len(_encoded(each)) for each in prompt if isinstance(each, str))
        ids = sum(4 * len(each) for each in prompt if isinstance(each, list))
        return ReadPrompt(text, texts + ids, 0, len(prompt))
    unknown = isinstance(prompt, Unread) and prompt.sort not in (Sort.TEXT, Sort.IDS)
    return ReadPrompt(text, prompt_bytes(body, text), 0, 0 if unknown else 1)


def prompt_text(body: Mapping[str, Any], media: MediaReader | None = None) -> bytes:
    """The text that an engine's chat template will read from an OpenAI body, in its order: tools, then messages, or the
    prompt.

    The template's own text is left out, as it does not distinguish prompts; so nothing here depends on the model. A
    conversation's next turn begins with the bytes of the turn before. Any JSON object gives bytes. Prompts of token ids
    are four bytes a token, and pictures become the text that `router.predict.media` makes of them.
    """
    messages = body.get("messages")
    media = MediaReader() if media is None else media
    if isinstance(messages, Unread):
        return _unread_chat(messages, body.get("tools"), media)
    if not isinstance(messages, list):
        return _completion(body.get("prompt"))
    parts: list[str] = []
    tools = body.get("tools")
    if isinstance(tools, Unread):
        return _as_it_came(tools)
    if tools:
        parts.append(_json(tools))
    for message in messages:
        _message(message, parts, media)
    return _encoded("".join(parts))


def _message(message: Any, parts: list[str], media: MediaReader) -> None:
    parts.append("\x1e")
    if not isinstance(message, dict):
        parts.append(_json(message))
        return
    parts.append(str(message.get("role")))
    parts.append("\x1f")
    _content(message.get("content"), parts, media)
    if calls := message.get("tool_calls"):
        parts.append(_json(calls))


def _content(content: Any, parts: list[str], media: MediaReader) -> None:
    """A message's text. A picture becomes the text that stands for it, any other part its JSON."""
    if isinstance(content, str):
        parts.append(content)
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                text = media.text(part) if isinstance(part, dict) else None
            parts.append(_json(part) if text is None else text)
    elif content is not None:
        parts.append(_json(content))


def _completion(prompt: Any) -> bytes:
    """A completion's prompt: a text, token ids, or the first of several of either."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _encoded(prompt)
    if isinstance(prompt, list) and all(type(each) is int and 0 <= each < 1 << 32 for each in prompt):
        return np.array(prompt, dtype="<u4").tobytes()
    if isinstance(prompt, Unread):
        return _unread_prompt(prompt)
    return b"" if prompt is None else _encoded(_json(prompt))


# --- of large bodies: as far as chunks are named ----------------------------------------------------------------------


def prompt_bytes(body: Mapping[str, Any], text: bytes, media: MediaReader | None = None) -> int:
    """The length of a prompt's text in bytes. `text`: its `prompt_text`, which stops early at unread fields; `media`:
    the reader that has read its pictures.
    """
    unread = [each for each in map(body.get, _OF_A_PROMPT) if isinstance(each, Unread)]
    size = sum(4 * each.count if each.sort is Sort.IDS else len(each.raw) for each in unread)
    if media is not None and media.raw_bytes:
        size += media.count * MEDIA_BYTES - media.raw_bytes
    return max(len(text), size)


def _unread_prompt(prompt: Unread) -> bytes:
    if prompt.sort is Sort.TEXT:
        return beginning(prompt.raw, NAMED_BYTES)
    if prompt.sort is not Sort.IDS:
        return b""
    cut = bytes(prompt.raw[:_IDS_BYTES])
    commas = np.flatnonzero(np.frombuffer(cut, dtype=np.uint8) == ord(","))
    if len(commas) >= NAMED_BYTES // 4:
        cut = cut[: commas[NAMED_BYTES // 4 - 1]]
    elif len(cut) < len(prompt.raw):
        cut = cut[: commas[-1]] if len(commas) else b""
    # Takes a fifth of the time of lists of Python's numbers; a number that is too large becomes the largest.
    ids = np.fromstring(cut.strip(b"[]").decode(), dtype=np.int64, sep=",")
    plain = len(ids) and ids.min() >= 0 and ids.max() < 1 << 32
    return ids.astype("<u4").tobytes() if plain else b""


def _unread_chat(messages: Unread, tools: Any, media: MediaReader) -> bytes:
    """The same text as from a parsed chat, from its beginning to `NAMED_BYTES`, or to a message that is too large to
    parse and is not the usual text.
    """
    if messages.sort is not Sort.LIST or messages.values > _UNREAD_VALUES:
        return b""
    parts: list[str] = []
    if isinstance(tools, Unread):
        return _as_it_came(tools)
    if tools:
        parts.append(_json(tools))
    left, built = NAMED_BYTES, _UNREAD_BUILT
    for each in msgspec.json.decode(messages.raw, type=list[msgspec.Raw]):
        raw, have = memoryview(each), len(parts)
        try:
            apart = _parts_apart(raw, media) if len(raw) > MEDIA_BYTES else []
            if apart:
                parts += apart
            elif len(raw) > built:
                return _encoded("".join(parts)) + _large_message(raw)
            else:
                built -= len(raw)
                _message(msgspec.json.decode(raw), parts, media)
        except msgspec.DecodeError:  # a number that no float can hold
            break
        left -= sum(map(len, parts[have:]))
        if left <= 0:
            break
    return _encoded("".join(parts))


def _as_it_came(unread: Unread) -> bytes:
    """The bytes of a large field of unknown form, used as its text."""
    return bytes(unread.raw[:NAMED_BYTES])


def _parts_apart(raw: memoryview, media: MediaReader) -> list[str]:
    """The text of a message whose content is a list of parts; parts with a picture are not parsed. Text beyond what is
    named is left out. Empty: the message has another form.
    """
    if bytes(raw[:1]) != b"{":
        return []
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    content = memoryview(fields["content"]) if "content" in fields else memoryview(b"null")
    if bytes(content[:1]) != b"[" or "tool_calls" in fields:
        return []
    role = msgspec.json.decode(fields["role"]) if "role" in fields and len(memoryview(fields["role"])) < 100 else None
    found, room = [f"\x1e{role}\x1f"], NAMED_BYTES
    for each in msgspec.json.decode(content, type=list[msgspec.Raw]):
        part, have = memoryview(each), len(found)
        picture = media.raw_text(part) if len(part) > MEDIA_BYTES and bytes(part[:1]) == b"{" else None
        if picture is not None:
            found.append(picture)
        elif len(part) > room:
            found.append(bytes(part[:room]).decode(errors="replace"))
        else:
            _content([msgspec.json.decode(part)], found, media)
        room -= sum(map(len, found[have:]))
        if room <= 0:
            break  # more pictures than any engine takes would cost as many hashes
    return found


def _large_message(raw: memoryview) -> bytes:
    """The beginning of a message that is too large to parse."""
    if bytes(raw[:1]) != b"{":
        return b"\x1e" + bytes(raw[:NAMED_BYTES])
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    role = msgspec.json.decode(fields["role"]) if "role" in fields and len(memoryview(fields["role"])) < 100 else None
    head = _encoded(f"\x1e{role}\x1f")
    content = memoryview(fields["content"]) if "content" in fields else memoryview(b"null")
    if bytes(content[:1]) == b'"':
        return head + beginning(content, NAMED_BYTES)
    return head + bytes(content[:NAMED_BYTES])


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
