"""Whether two instances really hand over to each other: which pairs are to be proven, and what two answers prove. Pure.

A pair may shake hands, move bytes and confirm holds, and still be wrong: other weights under the same name that nobody
has told apart, a layout that one of them reads otherwise, a connector that pulls nothing and says nothing. So each pair
is given a prompt that nobody has seen, under a salt that no cache knows: P computes it and D goes on from P's blocks;
then D answers the same prompt alone, under another salt. (A prompt that was used before would be found in D's own
cache, and prove nothing.)

Greedy tokens have to be the same, and D has to say that it had tokens from elsewhere. Where they differ once, both are
asked for logprobs: a tie that another batch decides otherwise is no fault (`TIE`). A pair that fails hands nothing over
until it has passed; it is tried again after a while. Who asks is `router.prover`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from cluster.ids import InstanceId
from router.view import Fleet, InstanceView

ANSWER_TOKENS: Final = 8
"""A wrong block shows in the first token that follows it, or hardly ever; a few more cost little."""

EACH: Final = 16
"""Prefill instances that each decode instance is proven with; a fleet of a thousand has 240,000 pairs."""

AGAIN_S: Final = 60.0
"""After a pair has failed; twice as long after each time that it fails again..."""
AGAIN_S_MAX: Final = 3600.0
"""... up to this."""
LATER_S: Final = 10.0
"""After a try that says nothing of the pair: an instance was busy, or answers no completions. Longer each time, too."""

TIE: Final = 0.5
"""Nats. Where two answers part, each must give the other's token a logprob within so much of its own best. Chosen, not
measured: sums in another order move a bf16 logit of about 10 by some hundredths (8 bits of mantissa), while another
prompt's blocks make another distribution."""
LOGPROBS: Final = 5
"""Candidates that are asked for where answers differ."""


class Pair(NamedTuple):
    """Two lives of two instances."""

    prefill: InstanceId
    prefill_epoch: int
    decode: InstanceId
    decode_epoch: int

    @property
    def names(self) -> tuple[InstanceId, InstanceId]:
        """Without their lives."""
        return self.prefill, self.decode


class Said(msgspec.Struct, frozen=True):
    """An answer to a proof's prompt."""

    text: str
    cached_tokens: int | None
    """Of the prompt, those that were not computed; None: the engine does not tell."""
    tokens: tuple[str, ...] = ()
    """With logprobs: the tokens..."""
    best: tuple[dict[str, float], ...] = ()
    """... and at each place the likeliest ones."""


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class _Choice(msgspec.Struct):
    text: str
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


def read(body: bytes) -> Said | None:
    """A completion's answer; None where it is none. Never raises."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not answer.choices:
        return None
    choice, details = answer.choices[0], None if answer.usage is None else answer.usage.prompt_tokens_details
    cached = None if details is None else details.cached_tokens or 0
    told = choice.logprobs
    if told is None:
        return Said(choice.text, cached)
    return Said(choice.text, cached, tuple(told.tokens), tuple(each or {} for each in told.top_logprobs))


def question(model: str, prompt: str, salt: str, *, logprobs: bool = False) -> dict[str, Any]:
    """The request that is asked in all three ways."""
    asked = {"model": model, "prompt": prompt, "cache_salt": salt, "temperature": 0, "max_tokens": ANSWER_TOKENS}
    return {**asked, "ignore_eos": True, **({"logprobs": LOGPROBS} if logprobs else {})}


def fault(handed: Said, alone: Said) -> str | None:
    """What is wrong with a pair whose D has said this; empty: nothing. None: with logprobs one could tell."""
    if handed.cached_tokens == 0:
        return "nothing was handed over: the decode instance has computed all of the prompt"
    if handed.text == alone.text and (not handed.tokens or handed.tokens == alone.tokens):
        return ""
    if not handed.tokens or not alone.tokens:
        return None
    return "" if _tie(handed, alone) else "with the other's blocks the decode instance answers otherwise than alone"


def _tie(handed: Said, alone: Said) -> bool:
    """Whether the two part where both thought either likely."""
    for one, other, ones, others in zip(handed.tokens, alone.tokens, handed.best, alone.best, strict=False):
        if one != other:
            return _likely(other, ones) and _likely(one, others)
    return True


def _likely(token: str, best: Mapping[str, float]) -> bool:
    return bool(best) and best.get(token, -math.inf) >= max(best.values()) - TIE


@dataclass(slots=True)
class _Record:
    good: bool = False
    because: str = ""
    """Why it is not to be relied on."""
    again_s: float = 0.0
    until: float = 0.0


class Proofs:
    """Of one router: which pairs are proven, which have failed, and which is next."""

    def __init__(self) -> None:
        self._records: dict[Pair, _Record] = {}

    def due(self, fleet: Fleet, model: str, now: float) -> Pair | None:
        """The pair that is to be proven next, if any: instances with the fewest proofs first, so that one that has just
        come is proven with somebody soon.
        """
        ready = fleet.ready(model)
        prefills = [fleet.at(row) for row in ready.prefills.tolist()]
        decodes = [fleet.at(row) for row in ready.decodes.tolist()]
        self._forget(fleet)
        counts: Counter[InstanceId] = Counter()
        for pair, record in self._records.items():
            if record.good:
                counts.update(pair.names)
        for decode in sorted(decodes, key=lambda each: counts[each.id]):
            if counts[decode.id] >= EACH and not self._failed_with(decode.id):
                continue
            for prefill in sorted(prefills, key=lambda each: counts[each.id]):
                if self._wants(fleet, prefill, decode, now):
                    return _pair(prefill, decode)
        return None

    def _wants(self, fleet: Fleet, prefill: InstanceView, decode: InstanceView, now: float) -> bool:
        if prefill.id == decode.id or prefill.id in decode.shuns or fleet.strangers(prefill.row, decode.row):
            return False
        theirs, others = prefill.instance.tenants, decode.instance.tenants
        if theirs and others and theirs.isdisjoint(others):
            return False  # nobody is ever handed over between them
        record = self._records.get(_pair(prefill, decode))
        return record is None or (not record.good and now >= record.until)

    def _failed_with(self, decode: InstanceId) -> bool:
        return any(record.because for pair, record in self._records.items() if pair.decode == decode)

    def _forget(self, fleet: Fleet) -> None:
        """Lives that are over."""
        alive = {(each.id, each.instance.epoch) for each in fleet}
        over = [pair for pair in self._records if not {pair[:2], pair[2:]} <= alive]
        for pair in over:
            del self._records[pair]

    def ended(self, pair: Pair, because: str | None, now: float) -> None:
        """A proof is over: well (empty), or not and why; None: it says nothing of the pair."""
        record = self._records.setdefault(pair, _Record())
        if because == "":
            record.good, record.because, record.again_s = True, "", 0.0
            return
        record.again_s = min(AGAIN_S_MAX, 2 * record.again_s or (AGAIN_S if because else LATER_S))
        record.until = now + record.again_s
        if because:
            record.good, record.because = False, because

    def failed(self) -> dict[tuple[InstanceId, InstanceId], str]:
        """Pairs that hand nothing over until they have passed, and why."""
        return {pair.names: record.because for pair, record in self._records.items() if record.because}

    def proven(self) -> int:
        """How many pairs have passed."""
        return sum(record.good for record in self._records.values())


def _pair(prefill: InstanceView, decode: InstanceView) -> Pair:
    return Pair(prefill.id, prefill.instance.epoch, decode.id, decode.instance.epoch)


def models_of(views: Iterable[InstanceView]) -> list[str]:
    """What is proven: of each instance the first model that it names, its adapters left out."""
    return sorted({view.models[0] for view in views if view.models})
