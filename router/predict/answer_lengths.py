"""The number of tokens an answer will have: a distribution per request, learned from the answers that ended. Pure.

An answer's length is looked up at up to seven levels, from everything to (tenant, model, class, prompt size,
`max_tokens`, cues). Each level counts by how much it has seen (`router.predict.sketches`); with nothing seen, a prior
is used. What is learned is the length that the model would have chosen: an answer cut off by `max_tokens` counts as "at
least that", and the limit is applied at prediction. No prediction is above `max_tokens` or what the model's context
leaves (`room_after`), and an answer that ignores the end of sequence has exactly that many tokens. Nor is any above
`LENGTH_MAX`, whatever a client allows.

Served quantiles are calibrated online per (tenant, model). If too many answers end above the 0.9 quantile, a higher
one is served in its place, so that the share of answers below it comes to 0.9 in spite of drift. For that, the quantile
of the past answers' places in their predicted distributions is tracked by a step per answer. (Quantile recalibration,
Kuleshov 2018, with the step of adaptive conformal inference, Gibbs and Candès 2021.) Quantiles never cross.

The text is not used. A few `cues` may be given as a number (`cues_of`); docs/lengths.md says how much they help.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from router.predict.sketches import Backlog, Sketches, between

LENGTH_MAX = 1 << 17
"""The longest answer that is distinguished, in tokens; longer ones count as this long."""

_STEP = 1.12
"""The ratio of neighbouring edges, which are at least one token apart: a served length is off by 6 % at most."""

PRIOR_P50, PRIOR_P90 = 200.0, 900.0
"""Cold start, in tokens: a median between those of Azure's conversations of 2023 (129) and Mooncake's (350), and a tail
wide enough (p99 3,000) that chat (p90 424, 597) is normal and reasoning (ServeGen's R1: 5,423) not impossible."""

OUTPUT_UNKNOWN: Final = 200.0
"""Assumed tokens of an answer without a prediction: `PRIOR_P50`."""

SHARES: Final[tuple[float, ...]] = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
"""Shares of answers for which `Wanted.output_lengths` gives the length: short ones most closely, as a pause is spread
over their tokens."""

SHORT, MIDDLE = SHARES.index(0.1), SHARES.index(0.5)
"""Indices of a short answer and of the median one."""

LENGTHS_UNKNOWN: Final = tuple(OUTPUT_UNKNOWN * part for part in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0))
"""The lengths without a prediction: about as broad as the prior."""

CREDIBILITY = 30.0
"""Observations at which a level counts as much as all levels before it together. From 15 to 100 the pinball loss on the
public traces changes by 12 % at most: fewer suit where prompt size tells much, more suit the tails of small tenants."""

MEMORY = 3000.0
"""After so many answers of one key, an answer weighs 1/e."""

KEYS_MAX = 10_000
"""The number of keys of all levels; a tenant with one model and steady traffic takes about 30."""

LEVELS: Final[tuple[float, ...]] = (0.5, 0.9, 0.99)
"""The calibrated quantiles; those between are interpolated."""

RATE = 0.02
"""The calibration's step, in logits per miss: half a unit of logit after 25 misses in a row."""

_SHIFT_MAX = 4.0
"""The largest correction of a quantile in logits: 0.99 may become 0.9998 or 0.64."""

_SCOPES_MAX = 2000
"""The number of (tenant, model) pairs that are calibrated apart; the one learned from longest ago is dropped."""


def _edges() -> tuple[float, ...]:
    found = [1.0]
    while found[-1] <= LENGTH_MAX:
        found.append(max(found[-1] + 1.0, math.ceil(found[-1] * _STEP)))
    return tuple(found)


def _prior(edges: tuple[float, ...]) -> list[float]:
    """A lognormal by bin, with a floor so that no bin is impossible."""
    sigma = math.log(PRIOR_P90 / PRIOR_P50) / 1.2816  # standard normal's 0.9 quantile
    below = [0.5 * math.erfc(-math.log(edge / PRIOR_P50) / (sigma * math.sqrt(2))) for edge in edges]
    return [max(above - under, 1e-9) for under, above in pairwise(below)]


EDGES: Final = _edges()


def _logit(share: float) -> float:
    return math.log(share / (1 - share)) if 0 < share < 1 else math.copysign(math.inf, share - 0.5)


_LOGITS: Final = tuple(_logit(level) for level in LEVELS)
_SHARES: Final = tuple(_logit(share) for share in SHARES)

_SIGMAS: Final = 1.2816
"""Standard deviations from a normal's median to its 0.9 quantile."""

_ROOM_BITS: Final = 6
"""The leading bits that are kept of the room in a model's context."""

_PREDICTED_MAX: Final = 1000
"""The number of predictions kept for later requests with the same key (`_place`)."""


class Features(NamedTuple):
    """The known facts about a request when it arrives."""

    tenant: str
    model: str
    slo_class: str
    prompt_tokens: int
    """Known or estimated (`router.predict.prompt_tokens`)."""
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    cues: int = 0
    """The result of `cues_of`, or 0."""
    room: int | None = None
    """The tokens that the model's context leaves to the answer (`room_after`); None: not known."""

    @property
    def limit(self) -> int:
        """The most tokens that the answer can have."""
        most = LENGTH_MAX if self.max_tokens is None or self.max_tokens > LENGTH_MAX else self.max_tokens
        return max(1, most if self.room is None or self.room > most else self.room)


class Outlook:
    """A distribution of lengths, in tokens, as a few numbers."""

    __slots__ = ("lengths", "mean", "variance")

    def __init__(self, mean: float, lengths: tuple[int, ...], variance: float) -> None:
        self.mean: Final = mean
        self.lengths: Final = lengths
        """The lengths that these `SHARES` of answers do not exceed."""
        self.variance: Final = variance


class AnswerLengths:
    """The distribution of one answer's length, in tokens. `served` are the calibrated quantiles at `LEVELS`."""

    __slots__ = ("_below", "_cap", "_floor", "_left", "_outlook", "_shifted", "features", "served")

    def __init__(self, features: Features, below: list[float], shifts: tuple[float, ...]) -> None:
        """`below`: the share of answers shorter than each of `EDGES`; `shifts`: logits to add at each of `LEVELS`."""
        self.features: Final = features
        self._below: Final = below
        cap = features.limit
        self._cap: Final = cap
        self._floor: Final = cap if features.ignore_eos else min(cap, max(1, features.min_tokens))
        highest = -math.inf
        shifted = []
        for logit, shift in zip(_LOGITS, shifts, strict=True):
            highest = max(highest, logit + shift)
            shifted.append(highest)
        self._shifted: Final = shifted
        shares = [1.0 / (1.0 + math.exp(-logit)) for logit in shifted]
        self.served: Final = tuple([self._whole(between(share, below, EDGES)) for share in shares])
        self._left: Final = [0.0]
        """`_area` at each of `EDGES`, computed as far as it was needed."""
        self._outlook: Outlook | None = None

    def outlook(self) -> Outlook:
        """The numbers of this distribution that the choice of an instance uses."""
        found = self._outlook
        if found is None:
            spread = (self.served[1] - self.served[0]) / _SIGMAS
            found = self._outlook = Outlook(max(1.0, self.mean), self.quantiles(_SHARES), spread * spread)
        return found

    def quantile(self, q: float) -> int:
        """The length that a share `q` of such answers does not exceed, calibrated."""
        assert 0 < q < 1
        return self.quantiles((_logit(q),))[0]

    def quantiles(self, logits: Sequence[float]) -> tuple[int, ...]:
        """`quantile` of several shares, each given as its logit."""
        shares = [1.0 / (1.0 + math.exp(-self._calibrated(logit))) for logit in logits]
        return tuple([self._whole(between(share, self._below, EDGES)) for share in shares])

    def _calibrated(self, logit: float) -> float:
        """The logit with its level's shift; between levels interpolated, beyond them as at the last."""
        shifted = self._shifted
        at = bisect_right(_LOGITS, logit)
        if at == 0:
            return logit + shifted[0] - _LOGITS[0]
        if at == len(_LOGITS):
            return logit + shifted[-1] - _LOGITS[-1]
        part = (logit - _LOGITS[at - 1]) / (_LOGITS[at] - _LOGITS[at - 1])
        return shifted[at - 1] + part * (shifted[at] - shifted[at - 1])

    @property
    def mean(self) -> float:
        """The expected length, not calibrated."""
        return self.mean_remaining(0)

    def mean_remaining(self, made: int) -> float:
        """The expected number of further tokens of an answer with `made` tokens that continues; 0 if it must have
        ended.
        """
        if made >= self._cap:
            return 0.0
        if made < self._floor:
            return self._floor - made + self.mean_remaining(self._floor)
        reach = 1.0 - self.share_below(made + 1)
        if reach <= 0:
            return 1.0
        whole = (self._area(self._cap + 1) - self._area(made + 1)) / reach
        return min(max(whole, 1.0 if made else 0.0), self._cap - made)

    def _whole(self, edge: float) -> int:
        """From a place between edges to a length: bin [e, f) holds the whole numbers from e to f - 1."""
        return min(max(math.ceil(edge) - 1, self._floor), self._cap)

    def share_below(self, length: int) -> float:
        """The share of answers shorter than this, without limits and calibration."""
        return between(length, EDGES, self._below)

    def _area(self, upto: int) -> float:
        """The sum of 1 - `share_below` over the lengths from 1 to below `upto`: means are differences of such sums."""
        at = min(max(bisect_right(EDGES, upto) - 1, 0), len(EDGES) - 2)
        inside, wide = upto - EDGES[at], EDGES[at + 1] - EDGES[at]
        found, left = self._below, self._left
        while len(left) <= at:
            edge = len(left) - 1
            low, high, more = found[edge], found[edge + 1], EDGES[edge + 1] - EDGES[edge]
            left.append(left[edge] + (more * (1.0 - low) - (high - low) * (more - 1.0) / 2))
        below, above = found[at], found[at + 1]
        return left[at] + inside * (1.0 - below) - (above - below) * inside * (inside - 1) / (2 * wide)


class _Calibration:
    """The calibration of one (tenant, model): each level's shift.

    An answer is compared with the current shift, not with the one served when it began. With thousands of answers under
    way the loop would otherwise close minutes late, and oscillate (it did, on ServeGen's reasoning trace).
    """

    __slots__ = ("shifts",)

    def __init__(self) -> None:
        self.shifts: tuple[float, ...] = (0.0,) * len(LEVELS)

    def learn(self, predicted: AnswerLengths, tokens: int, rate: float) -> None:
        """An answer with this prediction has ended."""
        place = _logit(predicted.share_below(tokens))
        shifts = []
        for at, level in enumerate(LEVELS):
            shift = self.shifts[at]
            shift += rate * (level - (place < _LOGITS[at] + shift))
            shifts.append(min(max(shift, -_SHIFT_MAX), _SHIFT_MAX))
        self.shifts = tuple(shifts)


class Predictor:
    """Predicts when an answer begins, learns when it has ended."""

    def __init__(
        self,
        *,
        keys_max: int = KEYS_MAX,
        credibility: float = CREDIBILITY,
        memory: float = MEMORY,
        rate: float = RATE,
    ) -> None:
        """`rate` 0 serves quantiles as learned, without calibration."""
        self._sketches: Final = Sketches(EDGES, _prior(EDGES), keys_max=keys_max, memory=memory)
        self._credibility: Final = credibility
        self._rate: Final = rate
        self._scopes: Final[dict[tuple[str, str], _Calibration]] = {}
        self._fresh: list[tuple[AnswerLengths, int, bool]] = []
        """Answers that are not learned from yet: `learn`."""
        self._backlog: Final = Backlog()
        self._predicted: Final[dict[Hashable, AnswerLengths]] = {}
        """Predictions by `_place`; dropped when something is learned."""
        self.learned = 0
        """The number of answers learned from."""

    def __len__(self) -> int:
        self.settle()
        return len(self._sketches)

    @property
    def bytes(self) -> int:
        """The memory that the histograms take, in bytes."""
        self.settle()
        return self._sketches.bytes

    def predict(self, features: Features) -> AnswerLengths:
        """The distribution of this request's answer: the same object for requests that nothing tells apart."""
        key = _place(features)
        found = self._predicted.get(key)
        if found is None:
            calibration = self._scopes.get((features.tenant, features.model))
            below = self._sketches.mixed(_keys(features), self._credibility)
            found = AnswerLengths(features, below, calibration.shifts if calibration else (0.0,) * len(LEVELS))
            if len(self._predicted) >= _PREDICTED_MAX:
                self._predicted.clear()
            self._predicted[key] = found
        return found

    def learn(self, predicted: AnswerLengths, tokens: int, *, cut_off: bool = False) -> None:
        """An answer ended with so many tokens; it counts before long (`Backlog`). `cut_off`: it was ended by its limit
        (`finish_reason: length`), or by its client.

        Answers that ignored the end of sequence teach nothing; answers that were cut off teach nothing about
        calibration.
        """
        if predicted.features.ignore_eos or tokens < 1:
            return
        self._fresh.append((predicted, tokens, cut_off))
        if not self._backlog.takes():
            self.settle()

    def settle(self) -> None:
        """Learn from all answers that wait in the backlog."""
        fresh, self._fresh = self._fresh, []
        for predicted, tokens, cut_off in fresh:
            features = predicted.features
            self._sketches.add(_keys(features), tokens, at_least=cut_off)
            if not cut_off:
                self._calibration(features).learn(predicted, tokens, self._rate)
        self.learned += len(fresh)
        if fresh:
            self._predicted.clear()

    def _calibration(self, features: Features) -> _Calibration:
        scope = (features.tenant, features.model)
        found = self._scopes.pop(scope, None)
        if found is None:
            found = _Calibration()
            if len(self._scopes) >= _SCOPES_MAX:
                del self._scopes[next(iter(self._scopes))]
        self._scopes[scope] = found
        return found


def _quarter(tokens: int) -> int:
    """The number of the quarter octave that a prompt's size is in."""
    octave = tokens.bit_length()
    return octave << 2 | tokens >> max(octave - 3, 0) & 3


def _place(features: Features) -> Hashable:
    """The key of a prediction: all that it depends on."""
    each = features
    scope = (each.tenant, each.model, each.slo_class, _quarter(each.prompt_tokens))
    return (*scope, each.max_tokens, each.limit, each.min_tokens, each.ignore_eos, each.cues)


def room_after(prompt_tokens: int, context: int | None) -> int | None:
    """The tokens that a model's context, in tokens, leaves to the answer, up to 3 % too few: so most requests of a size
    share a prediction. None: the context is not known.
    """
    if context is None:
        return None
    left = max(1, context - prompt_tokens)
    fine = max(0, left.bit_length() - _ROOM_BITS)
    return left >> fine << fine


def _keys(features: Features) -> tuple[Hashable, ...]:
    """The keys from the most general to the most specific."""
    tenant, model, slo_class = features.tenant, features.model, features.slo_class
    octave, quarter = features.prompt_tokens.bit_length(), _quarter(features.prompt_tokens)
    scope = (tenant, model, slo_class)
    keys: tuple[Hashable, ...] = (None, model, (tenant, model), scope, (scope, octave), (scope, quarter, 0))
    if features.max_tokens is None and not features.cues:
        return keys
    limit = 0 if features.max_tokens is None else features.max_tokens.bit_length()
    return (*keys, (scope, quarter, limit, features.cues))


_TOOLS, _FORMAT, _FENCE, _SHORT = 1, 2, 4, 8
_SHORT_ASKS: Final = ("one word", "briefly", "in short", "one sentence", "yes or no")
_LAST_READ = 400
"""Characters of the last message that are looked at."""


def cues_of(body: Mapping[str, Any]) -> int:
    """A small number for hints in an OpenAI body about the answer: tools, a demanded format, a code fence, a wish for
    brevity, and the last message's length.

    Any JSON object gives a number below 64. No public trace has text, so the benefit is not measured; the cost
    of a cue that means nothing is (docs/lengths.md).
    """
    cues = (_TOOLS if body.get("tools") else 0) | (_FORMAT if body.get("response_format") else 0)
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else {"content": body.get("prompt")}
    text = last.get("content") if isinstance(last, dict) else None
    if not isinstance(text, str):
        return cues
    read = text[-_LAST_READ:]
    lower = read.lower()
    cues |= _FENCE if "```" in read else 0
    cues |= _SHORT if any(ask in lower for ask in _SHORT_ASKS) else 0
    return cues | min(len(text).bit_length() // 4, 3) << 4
