"""The predictors: a request's prompt size, prefix names and expected answer length, before the choice. Pure.

Nothing here tokenizes: prompt sizes are estimated from bytes with ratios that engines' `usage` corrects
(`router.predict.prompt_tokens`), prefixes are named by text (`router.predict.chunks`), and lengths are learned from
ended answers (`router.predict.answer_lengths`). Only routers whose policy or admission needs predictions have a
predictor: it costs some tens of microseconds a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from msgspec.structs import replace

from router.core.eligibility import COMPLETIONS, is_on
from router.core.unread import Sort, Unread
from router.core.values import Wanted
from router.predict.answer_lengths import AnswerLengths, Features, Predictor, cues_of, room_after
from router.predict.chunks import CHUNK_BYTES, Hasher, read_prompt
from router.predict.prompt_tokens import Ratios, TextKind, kind_of

COMPLETION_TOKENS: Final = 16
"""vLLM's default ``max_tokens`` of a completion (the default of chats is the rest of the context)."""

KEY_BYTES: Final = 32

TOKENS_MAX: Final = 1 << 31
"""No text has so many tokens: larger counts are refused, so that sums stay within the range of numpy's columns."""

ANSWERS_MAX: Final = 1024
"""The answers that one request counts for: vLLM decodes as many together by default at most, and others wait in it."""


class PredictedRequest:
    """One request with its predictions."""

    __slots__ = ("kind", "lengths", "prompts", "text_bytes", "wanted")

    def __init__(
        self, wanted: Wanted, lengths: AnswerLengths, kind: TextKind, text_bytes: int, prompts: int = 1
    ) -> None:
        self.wanted: Final = wanted
        self.lengths: Final = lengths
        self.kind: Final = kind
        self.text_bytes: Final = text_bytes
        self.prompts: Final = prompts
        """See `ReadPrompt`: an engine's counts are of all prompts together."""


class RequestPredictor:
    """The predictors of one router."""

    def __init__(self, lengths: Predictor, key: bytes) -> None:
        """`key`: for names of chunks; routers that exchange names need the same key."""
        self._lengths: Final = lengths
        self._hasher: Final = Hasher(key)
        self._ratios: Final = Ratios()

    @property
    def learned(self) -> tuple[int, int]:
        """The numbers of answers and of prompts learned from; those of the last seconds may be missing."""
        return self._lengths.learned, self._ratios.learned

    def take(
        self, wanted: Wanted, path: str, body: Mapping[str, Any], *, scope: str | None, context: int | None = None
    ) -> PredictedRequest:
        """The same request with all predictions.

        Args:
            wanted: has the tenant, class, model and arrival.
            path: the endpoint.
            body: the parsed body, without transfer fields.
            scope: the scope that its names match in (`Clients.scope`).
            context: the model's context, in tokens (`ReadyRows.context`); None: not known.
        """
        text, size, media, prompts = read_prompt(body)
        model = wanted.model or ""
        kind = TextKind.IDS if _is_ids(body) else TextKind.MEDIA if media else kind_of(text)
        tokens = self._ratios.tokens(wanted.tenant, model, kind, size)
        salt = body.get("cache_salt")
        names = self._hasher.names(self._hasher.scope(model, scope, salt if isinstance(salt, str) else ""), text)
        features = Features(
            wanted.tenant,
            model,
            wanted.slo_class,
            tokens,
            tokens_limit(path, body),
            _count(body.get("min_tokens")) or 0,
            is_on(body, "ignore_eos"),
            cues_of(body),
            room_after(tokens, context),
        )
        lengths = self._lengths.predict(features)
        outlook = lengths.outlook()
        told = replace(
            wanted,
            prompt_tokens=tokens,
            prefix=tuple(names),
            prefix_block_tokens=_chunk_tokens(tokens, size),
            # A hold ends before the first picture: its size would say that the source has no more of the prompt.
            one_prompt=wanted.one_prompt and not media,
            output_tokens=outlook.mean,
            answers=answers_to(body, prompts),
            output_lengths=outlook.lengths,
            output_variance=outlook.variance,
        )
        return PredictedRequest(told, lengths, kind, size, prompts)

    def told(self, wanted: Wanted, taken: PredictedRequest, usage: Mapping[str, Any]) -> Wanted:
        """An engine has counted the prompt's tokens: learn from the count, and replace the estimate by it."""
        tokens = _count(usage.get("prompt_tokens"))
        if tokens is None or not taken.text_bytes:
            return wanted
        self._ratios.learn(wanted.tenant, wanted.model or "", taken.kind, taken.text_bytes, tokens)
        if tokens == wanted.prompt_tokens:
            return wanted
        return replace(wanted, prompt_tokens=tokens, prefix_block_tokens=_chunk_tokens(tokens, taken.text_bytes))


def foretold(predictor: Predictor, wanted: Wanted, *, max_tokens: int | None = None) -> tuple[Wanted, AnswerLengths]:
    """The same request with its answer's expected length; and the prediction, for `Placement.lengths`."""
    found = predictor.predict(
        Features(wanted.tenant, wanted.model or "", wanted.slo_class, wanted.prompt_tokens, max_tokens)
    )
    outlook = found.outlook()
    told = replace(wanted, output_tokens=outlook.mean, output_lengths=outlook.lengths, output_variance=outlook.variance)
    return told, found


def cached_in(usage: Mapping[str, Any]) -> int | None:
    """Prompt tokens that came from the prefix cache; None if the engine does not report them (vLLM does with
    ``--enable-prompt-tokens-details``).
    """
    details = usage.get("prompt_tokens_details")
    return _count(details.get("cached_tokens"), least=0) if isinstance(details, dict) else None


def answer_tokens(usage: Mapping[str, Any]) -> int | None:
    """The number of an answer's tokens; None if the engine does not report it."""
    return _count(usage.get("completion_tokens"))


def chunk_key(secret: bytes) -> bytes:
    """A key for names of chunks, from a secret that all routers of the fleet have."""
    return blake2b(secret[:64], digest_size=KEY_BYTES, person=b"baton chunks").digest()


def _chunk_tokens(tokens: int, text_bytes: int) -> float:
    return CHUNK_BYTES * tokens / text_bytes if text_bytes else 0.0


def tokens_limit(path: str, body: Mapping[str, Any]) -> int | None:
    """The answer's limit in tokens as vLLM reads it; None: it has none but the context's."""
    limit = body.get("max_completion_tokens")
    limit = _count(body.get("max_tokens") if limit is None else limit)
    return COMPLETION_TOKENS if limit is None and path == COMPLETIONS else limit


def answers_to(body: Mapping[str, Any], prompts: int) -> int:
    """The number of answers to so many prompts (`ReadPrompt`), `ANSWERS_MAX` at most."""
    return min(ANSWERS_MAX, max(1, prompts) * (_count(body.get("n")) or 1))


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
