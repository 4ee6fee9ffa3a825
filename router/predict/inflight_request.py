"""One request's part of the load in flight. Pure."""

from __future__ import annotations

import math
from typing import Final

from router.predict.shared_beginnings import Beginnings
from router.predict.stall_limits import LengthLimit
from router.predict.step_model import Make
from router.predict.transfer_model import ExpectedTransfer

OF_A_PEER: Final = -1
"""The number (`InflightRequest.number`) of each request of a router peer."""


class InflightRequest:
    """The bookings of one request. It has many attributes: each booked number is kept, to be taken back as it was."""

    __slots__ = (
        "answers", "began_batch", "began_tpot_ms", "beginnings", "begins_s", "cached_tokens",
        "chunks", "context", "decode_life", "decode_row", "first_margin", "first_s",
        "limits", "margin", "mean_tokens", "middle_tokens", "nth_prompt", "number", "opened_s",
        "pause_ms", "placed_s", "plain_ms", "prefill_life", "prefill_ms", "prefill_row", "prompt_tokens", "pull",
        "seeded", "sent_s", "sheds", "short_tokens", "stall_ms", "tpot_ms", "tried", "ttft_ms", "uncomputed",
        "variance",
    )  # fmt: skip

    def __init__(
        self,
        *,
        prompt_tokens: int,
        mean_tokens: float,
        short_tokens: float,
        middle_tokens: float,
        variance: float,
        tpot_ms: float = math.inf,
        answers: int = 1,
    ) -> None:
        """A request that is not placed yet. `variance`: of each answer's length, in tokens²; `tpot_ms`: its target."""
        self.number = 0
        """Its number in notes to router peers; 0: none yet; `OF_A_PEER`: it is a peer's request."""
        self.prompt_tokens = prompt_tokens
        self.mean_tokens, self.answers = mean_tokens, answers
        """The expected length of each of its answers, and their number."""
        self.short_tokens, self.middle_tokens = short_tokens, middle_tokens
        """The lengths of a short answer and of a median one (`answer_lengths.SHORT`, `MIDDLE`)."""
        self.variance, self.tpot_ms = variance, tpot_ms
        self.prefill_row = -1
        self.prefill_life = -1
        self.prefill_ms = self.plain_ms = 0.0
        """The predicted time of its prompt, 0 once the prompt is computed; the same by the cost profile alone."""
        self.placed_s = self.sent_s = self.begins_s = 0.0
        """The times at which its prompt was placed, can begin once the engine's front end has passed it on, and is
        predicted to begin after those before it; in seconds."""
        self.stall_ms = 0.0
        """For how long its prompt was predicted to keep answers there waiting."""
        self.nth_prompt = 0
        """The number of prompts placed there up to its own (`StallLimits.prompts`)."""
        self.cached_tokens = 0
        """The expected number of cached prompt tokens at the prefill instance."""
        self.uncomputed = 0
        """The tokens of its prompt that it was placed to compute."""
        self.chunks: tuple[int, ...] = ()
        """Names of its prompt's chunks, for the prefix-cache index; empty: they are not hashed."""
        self.beginnings: Beginnings | None = None
        """Its prompt's beginnings, which other answers may share; None: they have no names."""
        self.decode_row = -1
        self.decode_life = -1
        self.context = 0.0
        """Its tokens of context when its answer is half made."""
        self.pause_ms = 0.0
        """The expected pause between its first and second token, if it is handed over."""
        self.pull: ExpectedTransfer | None = None
        """Its transfer, for D's transfer model; None: there is none, or nothing can be learned from it."""
        self.opened_s = -1.0
        """The time of the first token from the decoding instance; -1: it has not come."""
        self.seeded = False
        """Its client has the first token from the instance that computes the prompt."""
        self.first_s = -1.0
        """The time at which its client had the first token; -1: it has none."""
        self.margin = 0.0
        """The share of its target up to which predictions had room when it was let in (`Margins`); 0: it was let in for
        another reason, or has no target."""
        self.sheds = False
        """Its class refuses late requests."""
        self.first_margin = 0.0
        """The same share of its TTFT target; 0 again once its first token has come."""
        self.tried = False
        """It was let in as a try (`Tries`), and its first token has not come."""
        self.ttft_ms = 0.0
        """Its TTFT target."""
        self.limits: tuple[LengthLimit, ...] = ()
        """Its limits for a short answer and for a median one, if it has a TPOT target."""
        self.began_batch = 0
        """The number of answers there, its own included, when it began to decode."""
        self.began_tpot_ms = 0.0
        """The expected time per token when it began to decode."""

    def counted_ms(self, make: Make, tokens: int) -> float:
        """The time of its prompt by the costs alone, now that an engine has counted its `tokens`. The first estimates,
        from bytes, may be wrong by a factor of four: a speed that was learned from them would be as wrong.
        """
        foretold, cached = self.prompt_tokens, self.cached_tokens
        if tokens <= 0 or foretold <= 0 or tokens == foretold:
            return self.plain_ms
        now_cached, was_ms = cached * tokens / foretold, make.prompt_ms(foretold - cached, cached)
        return self.plain_ms * make.prompt_ms(tokens - now_cached, now_cached) / was_ms if was_ms > 0 else 0.0
