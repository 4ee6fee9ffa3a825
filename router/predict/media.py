"""Pictures, sound and video in a chat: each counts as `MEDIA_BYTES` of text that is made of a hash of its bytes. Pure.

As text the base64 of a picture would be hundreds of thousands of tokens, and use up all names of its prompt; an engine
makes some hundred to some thousand tokens of it. The tokens for each byte of such a prompt are learned apart from those
of other prompts (`TextKind.MEDIA`), so that `MEDIA_BYTES` need not be right. The same picture gives the same text, and
another picture another, from its first byte on.

A picture given by a URL is known by that URL: if something else is there tomorrow, the router expects a prefix that no
engine has. It costs the prefill that was expected to be saved, and no more (vLLM hashes the pictures themselves).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b, shake_256
from typing import Any, Final

import msgspec

MEDIA_BYTES: Final = 4096
"""About a thousand tokens, as many as a picture of a megapixel makes in today's models (a tile of 336 × 336 is 576)."""

HASHED_BYTES: Final = 4 << 20
"""So many bytes of one prompt's media are hashed whole, which takes 4 ms. Of media beyond that only both ends and the
length are hashed."""

_END_BYTES: Final = 1 << 16

_FIELDS: Final = (
    "image_url", "input_image", "image_pil", "image_embeds", "image", "input_audio", "audio_url", "audio_embeds",
    "video_url", "video",
)  # fmt: skip
"""Fields of a part in which vLLM looks for media (``vllm/entrypoints/chat_utils.py``), those of OpenAI among them."""

_INNER: Final = ("url", "data")
_LOOKED_AT: Final = 4096
"""An encoder that writes escapes in base64 (``\\/``) writes one within so many bytes."""
_ESCAPE: Final = re.compile(rb"\\")


class MediaReader:
    """Reads the media of one prompt, in their order."""

    __slots__ = ("_left", "count", "raw_bytes")

    def __init__(self) -> None:
        self._left = HASHED_BYTES
        self.count = 0
        self.raw_bytes = 0
        """The bytes of media parts in the body that were not parsed."""

    def text(self, part: Mapping[str, Any]) -> str | None:
        """The text that stands for a parsed part of a message; None: the part holds no media."""
        field = next((name for name in _FIELDS if part.get(name) is not None), None)
        if field is None:
            return None
        held = part[field]
        inner = next((name for name in _INNER if isinstance(held.get(name), str)), "") if isinstance(held, dict) else ""
        held = held[inner] if inner else held
        said = held.encode(errors="surrogatepass") if isinstance(held, str) else msgspec.json.encode(held)
        return self._stands_for(field, memoryview(said))

    def raw_text(self, part: memoryview) -> str | None:
        """The text that stands for a part that is too large to parse; None: the part holds no media.

        Raises:
            msgspec.DecodeError: the part is no JSON object.
        """
        fields = msgspec.json.decode(part, type=dict[str, msgspec.Raw])
        for field in _FIELDS:
            if field in fields and bytes(memoryview(fields[field])) != b"null":
                held = _inner(memoryview(fields[field]))
                self.raw_bytes += len(part)
                return self._stands_for(field, held)
        return None

    def _stands_for(self, field: str, held: memoryview) -> str:
        self.count += 1
        digest = blake2b(field.encode() + b"\0", digest_size=32)
        if len(held) <= self._left:
            digest.update(held)
        else:
            for piece in (held[:_END_BYTES], held[-_END_BYTES:], len(held).to_bytes(8, "little")):
                digest.update(piece)
        self._left -= min(self._left, len(held))
        return shake_256(digest.digest()).hexdigest(MEDIA_BYTES // 2)


def _inner(held: memoryview) -> memoryview:
    """The URL or data within a field's JSON, without quotes where it has no escapes; else the JSON itself."""
    if bytes(held[:1]) == b"{":
        fields = msgspec.json.decode(held, type=dict[str, msgspec.Raw])
        for name in _INNER:
            if name in fields and bytes(memoryview(fields[name])[:1]) == b'"':
                held = memoryview(fields[name])
                break
    plain = bytes(held[:1]) == b'"' and _ESCAPE.search(held[:_LOOKED_AT]) is None
    return held[1:-1] if plain else held
