"""What a router makes of a request before it chooses: prompt size, prefix names, expected answer. Pure.

Nothing here reads a token: sizes are guessed from bytes by ratios that engines' `usage` corrects
(`router.predict.prompt_tokens`), prefixes are named by text (`router.predict.chunks`), lengths by what ended before
(`router.predict.answer_lengths`). Only routers whose policy or admission foresees anything have an
intake: it costs them some tens of microseconds a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from msgspec.structs import replace

from router.core.eligibility import COMPLETIONS
from router.core.unread import Sort, Unread
from router.core.values import Wanted
from router.predict.answer_lengths import Features, Lengths, Predictor, cues_of
from router.predict.chunks import CHUNK_BYTES, Hasher, prompt_bytes, prompt_text
from router.predict.prompt_tokens import Kind, Ratios, kind_of

COMPLETION_TOKENS: Final = 16
"""vLLM's ``max_tokens`` of a completion that names none (chats then have the rest of the context)."""

KEY_BYTES: Final = 32

TOKENS_MAX: Final = 1 << 31
"""Nothing has so many tokens: a count from there on is no count. Sums of them stay within what numpy's columns hold."""


class PredictedRequest:
    """One request as taken in."""

    __slots__ = ("kind", "lengths", "text_bytes", "wanted")

    def __init__(self, wanted: Wanted, lengths: Lengths, kind: Kind, text_bytes: int) -> None:
        self.wanted: Final = wanted
        self.lengths: Final = lengths
        self.kind: Final = kind
        self.text_bytes: Final = text_bytes


class RequestPredictor:
    """Of one router."""

    def __init__(self, lengths: Predictor, key: bytes) -> None:
        """`key`: for names of chunks, the same for all routers that are to understand each other's."""
        self._lengths: Final = lengths
        self._hasher: Final = Hasher(key)
        self._ratios: Final = Ratios()

    def take(self, wanted: Wanted, path: str, body: Mapping[str, Any], *, scope: str | None) -> PredictedRequest:
        """The same request with everything that can be foretold of it.

        Args:
            wanted: tenant, class, model and arrival are known.
            path: the endpoint.
            body: already stripped.
            scope: whose text its names match (`Clients.scope`).
        """
        text = prompt_text(body)
        model = wanted.model or ""
        size = prompt_bytes(body, text)
        kind = Kind.IDS if _is_ids(body) else kind_of(text)
        tokens = self._ratios.tokens(wanted.tenant, model, kind, size)
        salt = body.get("cache_salt")
        names = self._hasher.names(self._hasher.scope(model, scope, salt if isinstance(salt, str) else ""), text)
        features = Features(
            wanted.tenant,
            model,
            wanted.slo_class,
            tokens,
            _limit(path, body),
            _count(body.get("min_tokens")) or 0,
            body.get("ignore_eos") is True,
            cues_of(body),
        )
        lengths = self._lengths.predict(features)
        outlook = lengths.outlook()
        told = replace(
            wanted,
            prompt_tokens=tokens,
            prefix=tuple(names),
            prefix_block_tokens=_chunk_tokens(tokens, size),
            output_tokens=outlook.mean,
            output_lengths=outlook.lengths,
            output_variance=outlook.variance,
        )
        return PredictedRequest(told, lengths, kind, size)

    def told(self, wanted: Wanted, taken: PredictedRequest, usage: Mapping[str, Any]) -> Wanted:
        """An engine has counted the prompt's tokens: learned from, and put in place of what had been estimated."""
        tokens = _count(usage.get("prompt_tokens"))
        if tokens is None or not taken.text_bytes:
            return wanted
        self._ratios.learn(wanted.tenant, wanted.model or "", taken.kind, taken.text_bytes, tokens)
        if tokens == wanted.prompt_tokens:
            return wanted
        return replace(wanted, prompt_tokens=tokens, prefix_block_tokens=_chunk_tokens(tokens, taken.text_bytes))


def foretold(predictor: Predictor, wanted: Wanted, *, max_tokens: int | None = None) -> tuple[Wanted, Lengths]:
    """The same request with its answer's expected length; and the prediction, for `Expected.lengths`."""
    found = predictor.predict(
        Features(wanted.tenant, wanted.model or "", wanted.slo_class, wanted.prompt_tokens, max_tokens)
    )
    outlook = found.outlook()
    told = replace(wanted, output_tokens=outlook.mean, output_lengths=outlook.lengths, output_variance=outlook.variance)
    return told, found


def cached_in(usage: Mapping[str, Any]) -> int | None:
    """Tokens of a prompt that came from the cache; None where the engine does not say (vLLM does with
    ``--enable-prompt-tokens-details``).
    """
    details = usage.get("prompt_tokens_details")
    return _count(details.get("cached_tokens"), least=0) if isinstance(details, dict) else None


def answer_tokens(usage: Mapping[str, Any]) -> int | None:
    """Tokens of an answer."""
    return _count(usage.get("completion_tokens"))


def chunk_key(secret: bytes) -> bytes:
    """A key for names of chunks from a secret that all routers of the fleet have."""
    return blake2b(secret[:64], digest_size=KEY_BYTES, person=b"baton chunks").digest()


def _chunk_tokens(tokens: int, text_bytes: int) -> float:
    return CHUNK_BYTES * tokens / text_bytes if text_bytes else 0.0


def _limit(path: str, body: Mapping[str, Any]) -> int | None:
    """The answer's limit as vLLM reads it."""
    limit = body.get("max_completion_tokens")
    limit = _count(body.get("max_tokens") if limit is None else limit)
    return COMPLETION_TOKENS if limit is None and path == COMPLETIONS else limit


def _count(value: object, *, least: int = 1) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and least <= value < TOKENS_MAX else None


def _is_ids(body: Mapping[str, Any]) -> bool:
    prompt = body.get("prompt")
    if isinstance(prompt, Unread):
        return "messages" not in body and prompt.sort is Sort.IDS
    if "messages" in body or not isinstance(prompt, list) or not prompt:
        return False
    first = prompt[0]
    return isinstance(first[0] if isinstance(first, list) and first else first, int)
