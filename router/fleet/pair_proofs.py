"""Pair proofs: whether two instances really hand over to each other. Which pairs to prove, and what answers prove.
Pure.

A pair may shake hands, move bytes and confirm holds, and still give wrong answers: other weights under the same name, a
memory layout that one of them reads differently, a connector that pulls nothing and reports nothing. So each pair gets
a prompt that was never used, under a salt that no cache knows: P computes it and D continues from P's blocks; then D
answers the same prompt alone, under another salt. (A prompt that was used before would be found in D's own cache, and
prove nothing.)

*D agrees with itself* if it finds the tokens of a text as likely when it reads them in a prompt as it did when it
generated them. It is asked first, and alone: what a hand-over leaves to D is computed as if it was generated, and one
engine computes the same with the prompt. An engine on which the two differ gives equal answers only by chance
(`disagrees`).

*The hand-over* is proven if both answers have the same greedy tokens, if D reports tokens from an external cache, and
if both instances tokenize a prompt and a chat alike. Where answers differ once, the proof is repeated with another
prompt and with logprobs. A difference then is no fault if it is a tie that another batch decides differently (`TIE`),
and if a third prompt shows no fault either.

A P that leaves the prompt's last tokens to D (Mamba hybrids) hands over only where both engines say that they work in
float32 (`computed_otherwise`). D computes these tokens in a step of its own, and one engine with the rest of the
prompt. In 16 bits the two round otherwise, and few prompts show it: a proof may pass by chance.

*P's token* is proven if P reports that it has computed the whole prompt, and if the token with which P ends its leg is
the first one of both of D's answers. Both must also sample the same tokens of a chat with one seed (a request without
a temperature gets the engine's default). Only then may P's token be sent to a client before D answers, or stand for an
answer. What cannot be determined counts as not proven.

Equality is transitive: instances linked by proven pairs form a *circle* (`ProofStanding`) and hand over among
themselves. So a large fleet need not try every pair. A pair that fails hands nothing over until it has passed, whatever
its circle; it is tried again after a while. `router.fleet.prover` sends the requests.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from cluster.ids import InstanceId
from router.core.values import ProofStanding
from router.fleet.columns import InstanceView
from router.fleet.snapshot import FleetSnapshot

ANSWER_TOKENS: Final = 24
"""A wrong block shows in the first token after it, or hardly ever."""

CHAT_TOKENS: Final = 8
"""The tokens of a chat's answer. Both instances answer the chat alone: different default settings show in a few sampled
tokens."""

EACH: Final = 16
"""The number of prefill instances that each decode instance is proven with; a fleet of a thousand has 240,000 pairs."""

AGAIN_S: Final = 60.0
"""The pause after a failed pair; it doubles after each further failure..."""
AGAIN_S_MAX: Final = 3600.0
"""... up to this."""
LATER_S: Final = 10.0
"""The pause after a proof without a result: an instance was busy, or does not answer completions. It grows, too."""

TIE: Final = 0.5
"""Nats. Where two answers part, each must give the other's token a logprob within this distance of its own best.
Chosen, not measured: sums in another order move a bf16 logit of about 10 by some hundredths (8 bits of mantissa), while
another prompt's blocks make another distribution."""
LOGPROBS: Final = 5
"""The number of candidates asked for where answers differ."""

ITSELF: Final = 0.2
"""Nats. A D that agrees with itself gives half of its own tokens two logprobs within this distance or a smaller one
(docs/exactness.md, "Latent attention on CPU", has what was measured). It is a median, because where experts are chosen
by rounding a few tokens may be far off."""

PROMPTS: Final = 4
"""The number of prompts that must show no fault where D tells no logprobs, so that it cannot be asked about itself."""

ROUNDS_ALIKE: Final = "float32"
"""The number format in which it does not matter whether a token is computed alone or with others (docs/exactness.md,
"Mamba hybrids in 16 bits")."""


TRIES: Final = 3
"""The number of partners with which an unproven instance may fail before it waits as a failed pair does."""

MERGED_MAX: Final = 256
"""The number of former circles that are remembered; a stream that outlives that many is not continued elsewhere."""


class Pair(NamedTuple):
    """Two lives of two instances (`InstanceView.life`)."""

    prefill: InstanceId
    prefill_life: int
    decode: InstanceId
    decode_life: int

    @property
    def names(self) -> tuple[InstanceId, InstanceId]:
        """The two names, without their lives."""
        return self.prefill, self.decode


class ProofAnswer(msgspec.Struct, frozen=True):
    """An answer to a proof's prompt."""

    text: str
    cached_tokens: int | None
    """The number of prompt tokens that were not computed; None: the engine does not report it."""
    tokens: tuple[str, ...] = ()
    """With logprobs: the tokens..."""
    best: tuple[dict[str, float], ...] = ()
    """... and at each place the likeliest ones."""
    ids: tuple[int, ...] = ()
    """Its tokens, where the engine names them..."""
    prompt: tuple[int, ...] = ()
    """... and the prompt's."""
    logprobs: tuple[float, ...] = ()
    """With logprobs: those of its tokens..."""
    prompt_logprobs: tuple[float, ...] = ()
    """... and, if asked for, those of the prompt's last tokens, as many as the engine tells without a gap."""


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    token_logprobs: list[float | None] = []


class _Scored(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    text: str
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[str, _Scored] | None] | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


def read(body: bytes) -> ProofAnswer | None:
    """The answer in a completion's body; None if there is none. Never raises."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not answer.choices:
        return None
    choice, details = answer.choices[0], None if answer.usage is None else answer.usage.prompt_tokens_details
    cached = None if details is None else details.cached_tokens or 0
    prompt, told = choice.prompt_token_ids or (), choice.logprobs
    said = ProofAnswer(choice.text, cached, ids=choice.token_ids or (), prompt=prompt)
    if choice.prompt_logprobs is not None:
        said = msgspec.structs.replace(said, prompt_logprobs=_own(prompt, choice.prompt_logprobs))
    if told is None:
        return said
    best = tuple(each or {} for each in told.top_logprobs)
    own = tuple(each for each in told.token_logprobs if each is not None)
    return msgspec.structs.replace(said, tokens=tuple(told.tokens), best=best, logprobs=own)


def _own(prompt: tuple[int, ...], scored: list[dict[str, _Scored] | None]) -> tuple[float, ...]:
    """The logprobs of a prompt's last tokens. The first token has none, as nothing comes before it."""
    found = list[float]()
    for token, told in zip(reversed(prompt), reversed(scored), strict=False):
        mine = None if told is None else told.get(str(token))
        if mine is None:
            break
        found.append(mine.logprob)
    return tuple(reversed(found))


class _ChatUsage(msgspec.Struct):
    prompt_tokens: int | None = None


class _ChatChoice(msgspec.Struct):
    token_ids: tuple[int, ...] | None = None


class _ChatAnswer(msgspec.Struct):
    choices: list[_ChatChoice] = []
    prompt_token_ids: tuple[int, ...] | None = None
    usage: _ChatUsage | None = None


class Chat(NamedTuple):
    """How an engine has answered a chat."""

    prompt: tuple[int, ...] | int | None
    """The token ids of the chat as the engine read it, or at least their number; None: not reported."""
    ids: tuple[int, ...] = ()
    """The token ids of the answer; empty: not reported."""


NO_CHATS: Final = Chat(0)
"""The result for an engine that does not answer chats."""


def chat_read(body: bytes) -> Chat:
    """The chat answer in a body. Never raises."""
    try:
        answer = msgspec.json.decode(body, type=_ChatAnswer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Chat(None)
    read = answer.prompt_token_ids or (None if answer.usage is None else answer.usage.prompt_tokens)
    return Chat(read, (answer.choices[0].token_ids or ()) if answer.choices else ())


def question(model: str, prompt: str, salt: str, *, logprobs: bool = False) -> dict[str, Any]:
    """The request that P and D get for the hand-over, and that D gets once more alone, under another salt."""
    asked = {"model": model, "prompt": prompt, "cache_salt": salt, "temperature": 0, "max_tokens": ANSWER_TOKENS}
    return {**asked, "ignore_eos": True, "return_token_ids": True, **({"logprobs": LOGPROBS} if logprobs else {})}


def question_alone(model: str, prompt: str, salt: str, seed: int) -> dict[str, Any]:
    """A request for a text of D's own. It is drawn by lot: a greedy answer often repeats one token, which shows little.
    What would bend the logprobs is set to nothing, whatever the engine's default is.
    """
    asked = question(model, prompt, salt) | {"temperature": 1, "seed": seed, "logprobs": 1}
    return asked | {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}


def question_again(model: str, said: ProofAnswer, salt: str) -> dict[str, Any]:
    """The request in which D reads its own text as a part of the prompt."""
    asked = question(model, "", salt) | {"prompt": [*said.prompt, *said.ids], "max_tokens": 1}
    return asked | {"prompt_logprobs": 1}  # with 0 vLLM 0.32 would not refuse it where it cannot answer


def chat(model: str, prompt: str, salt: str, seed: int) -> dict[str, Any]:
    """A chat that both instances are asked alone: nothing is handed over. What a request may leave open (temperature,
    penalties) is left to the instance, and randomness to a seed that both get.
    """
    asked = {"model": model, "messages": [{"role": "user", "content": prompt}], "cache_salt": salt, "seed": seed}
    return {**asked, "max_tokens": CHAT_TOKENS, "ignore_eos": True, "return_token_ids": True}


def told_by(secret: str) -> str:
    """A prompt made of a secret: all of it, and its first half again. A model that has read how a text goes on repeats
    it, and is sure of each next token. So a token too early or too late shows as a different one.
    """
    return secret + secret[: len(secret) // 2]


def disagrees(said: ProofAnswer, scored: ProofAnswer) -> str | None:
    """How D disagrees with itself, in words; empty: it agrees. None: it has told no logprobs.

    Args:
        said: its answer to `question_alone`.
        scored: its answer to `question_again`.
    """
    count = len(said.ids)
    if not count or len(said.logprobs) != count or len(scored.prompt_logprobs) < count:
        return None
    apart = statistics.median(map(abs, map(operator.sub, said.logprobs, scored.prompt_logprobs[-count:])))
    if apart <= ITSELF:
        return ""
    return "the decode instance disagrees with itself: it finds its own tokens otherwise likely when it reads them"


def fault(handed: ProofAnswer, alone: ProofAnswer) -> str | None:
    """What is wrong with a pair with these answers of D; empty: nothing. None: logprobs are needed to tell."""
    if handed.prompt and alone.prompt and handed.prompt != alone.prompt:
        return "the prefill and the decode instance read a prompt as other tokens"
    if handed.cached_tokens is None:
        return "it cannot be told what was handed over: the decode instance needs --enable-prompt-tokens-details"
    if handed.cached_tokens == 0:
        return "nothing was handed over: the decode instance has computed all of the prompt"
    if handed.text == alone.text and handed.ids == alone.ids:
        return ""
    if not handed.tokens or not alone.tokens:
        return None
    return "" if _tie(handed, alone) else "with the other's blocks the decode instance answers otherwise than alone"


def inexact(first: ProofAnswer, held: str, handed: ProofAnswer, alone: ProofAnswer) -> str:
    """Why P's own token may not stand for D's first token; empty: it may.

    Args:
        first: P's answer, with the token that ends its leg.
        held: why P's token does not count, by P's own answer (`TransferFields.stops_short_of`).
        handed: D's answer with P's blocks.
        alone: D's answer without them.
    """
    if held:
        return held
    if len(first.ids) != 1 or not handed.ids or not alone.ids:
        return "engines do not name their tokens (return_token_ids)"
    if first.ids[0] == handed.ids[0] == alone.ids[0]:
        return ""
    return "P's own token is not D's first"


def computed_otherwise(held: str, prefill: str, decode: str) -> str:
    """Why a pair hands nothing over although its answers may be equal: what P leaves to D may come out otherwise than
    on one engine. Empty: P leaves nothing, or both work in `ROUNDS_ALIKE`.

    Args:
        held: why P's token does not count, by P's own answer (`TransferFields.stops_short_of`).
        prefill: P's number format, by its agent (`Instance.dtype`); empty: unknown.
        decode: D's.
    """
    if not held or prefill == decode == ROUNDS_ALIKE:
        return ""
    told = f"P: {prefill or 'unknown'}, D: {decode or 'unknown'}"
    return f"{held}; D computes what is left in a step of its own, which is exact in {ROUNDS_ALIKE} only ({told})"


def other_chat(prefill: Chat, decode: Chat) -> str:
    """How the two tokenize a chat differently, in words; empty: no reported difference."""
    one, other = prefill.prompt, decode.prompt
    if one is None or other is None or one == other or (type(one) is not type(other) and 0 not in (one, other)):
        return ""
    return "the prefill and the decode instance read a chat as other tokens: their chat templates differ"


def other_draw(prefill: Chat, decode: Chat) -> str:
    """How the two sample different tokens with the same seed and default settings, in words; empty: no reported
    difference.
    """
    if not prefill.ids or not decode.ids or prefill.ids == decode.ids:
        return ""
    return "left to themselves P and D draw other tokens: what they do by default differs (--generation-config)"


def _tie(handed: ProofAnswer, alone: ProofAnswer) -> bool:
    """Whether the two answers part at a token that both found likely, with alike candidates up to there.

    Rounding moves all logprobs a little. On an engine whose prefill and decode disagree (latent attention of vLLM 0.32
    on CPU), each side can find the other's token likely by chance. The logprobs of the other candidates show that.
    """
    for one, other, ones, others in zip(handed.tokens, alone.tokens, handed.best, alone.best, strict=False):
        if any(abs(ones[token] - others[token]) > TIE for token in ones.keys() & others.keys()):
            return False
        if one != other:
            return _likely(other, ones) and _likely(one, others)
    return True


def _likely(token: str, best: Mapping[str, float]) -> bool:
    return bool(best) and best.get(token, -math.inf) >= max(best.values()) - TIE


@dataclass(slots=True)
class _Record:
    good: bool = False
    because: str = ""
    """Why the pair must not be used."""
    doubt: str = ""
    """Why the last proof had no result."""
    inexact: str = ""
    """For a good pair: why P's token may not stand for D's first."""
    again_s: float = 0.0
    """The last pause before another proof, in seconds."""
    until: float = 0.0
    """The time at which that pause ends, in monotonic seconds."""


class _RecordSums(NamedTuple):
    """All records, summed up."""

    counts: Counter[InstanceId]
    """The number of good proofs by instance."""
    lately: Counter[InstanceId]
    """The number of proofs by instance that are not due again yet."""
    wanting: set[InstanceId]
    """Decode instances of pairs that have failed, or are not exact."""

    def may_try(self, view: InstanceView) -> bool:
        """Whether the instance has not just failed with several partners."""
        return self.lately[view.id] < TRIES


_Node = tuple[bool, InstanceId, int]
"""One life of an instance, as a producer (true) or as a consumer."""


class PairProofs:
    """The pair proofs of one router: which pairs are proven, which have failed, and which is next."""

    def __init__(self) -> None:
        self._records: dict[Pair, _Record] = {}
        self._circles: dict[_Node, int] = {}
        """Circles are never split: two lives stay alike when the instance that linked them has left."""
        self._circle = 0
        """The number of the newest circle. No number is used again."""
        self._merged: dict[int, int] = {}
        """By number of a circle that has become part of another one, the oldest first: that one's number."""
        self._alive: set[tuple[InstanceId, int]] = set()
        """The lives that were present at the last clean-up."""
        self.tried = 0
        """The number of finished proofs, whatever their result."""

    # --- which is next ------------------------------------------------------------------------------------------------

    def joining(
        self, fleet: FleetSnapshot, model: str, now: float, busy: frozenset[InstanceId] = frozenset()
    ) -> Pair | None:
        """A pair with an instance that is not proven yet and so hands nothing over, or a pair that may join two
        circles. None: there is none. `busy`: instances to leave out.
        """
        prefills, decodes = self._ready(fleet, model, busy)
        first = [each for each in prefills if not self._in(each, producer=True)]
        second = [each for each in decodes if not self._in(each, producer=False)]
        if first or second:
            seen = self._look(now)
            first, second = (list(filter(seen.may_try, each)) for each in (first, second))
            load = fleet.columns.inflight
            free = lambda each: (int(load[each.row]), seen.counts[each.id])  # noqa: E731 - said once for two lists
            givers = sorted((each for each in prefills if self._in(each, producer=True)), key=free)
            takers = sorted((each for each in decodes if self._in(each, producer=False)), key=free)
            # What is proven lets the other join its circle; where nothing is, two that are not begin one.
            for decode in second:
                for prefill in (*givers, *first):
                    if self._wants(fleet, prefill, decode, now):
                        return _pair(prefill, decode)
            for prefill in first:
                for decode in takers:
                    if self._wants(fleet, prefill, decode, now):
                        return _pair(prefill, decode)
        return self._bridge(fleet, prefills, decodes, now)

    def _bridge(
        self, fleet: FleetSnapshot, prefills: list[InstanceView], decodes: list[InstanceView], now: float
    ) -> Pair | None:
        """A pair across two circles that was never tried."""
        gives = {each.id: self._circles.get((True, each.id, each.life), 0) for each in prefills}
        takes = {each.id: self._circles.get((False, each.id, each.life), 0) for each in decodes}
        if len({*gives.values(), *takes.values()} - {0}) < 2:
            return None
        seen = self._look(now)
        for prefill in (each for each in prefills if gives[each.id] and seen.may_try(each)):
            for decode in decodes:
                apart = takes[decode.id] not in (0, gives[prefill.id])
                if not apart or _pair(prefill, decode) in self._records or not seen.may_try(decode):
                    continue
                if self._wants(fleet, prefill, decode, now):
                    return _pair(prefill, decode)
        return None

    def due(self, fleet: FleetSnapshot, model: str, now: float) -> Pair | None:
        """The pair to prove next, if any: first those that `joining` names, then instances with the fewest proofs, up
        to `EACH`.
        """
        joining = self.joining(fleet, model, now)
        if joining is not None:
            return joining
        prefills, decodes = self._ready(fleet, model, frozenset())
        seen = self._look(now)
        prefills.sort(key=lambda each: seen.counts[each.id])
        for decode in sorted(decodes, key=lambda each: seen.counts[each.id]):
            if seen.counts[decode.id] >= EACH and decode.id not in seen.wanting:
                continue
            for prefill in prefills:
                if self._wants(fleet, prefill, decode, now):
                    return _pair(prefill, decode)
        return None

    def _ready(
        self, fleet: FleetSnapshot, model: str, busy: frozenset[InstanceId]
    ) -> tuple[list[InstanceView], list[InstanceView]]:
        """The instances that prefill, and the instances that decode."""
        ready = fleet.ready(model)
        self._forget(fleet)
        prefills, decodes = (
            [view for view in map(fleet.at, rows.tolist()) if view.id not in busy]
            for rows in (ready.prefills, ready.decodes)
        )
        return prefills, decodes

    def _look(self, now: float) -> _RecordSums:
        """Sum up all records."""
        seen = _RecordSums(Counter(), Counter(), set())
        for pair, record in self._records.items():
            if record.good:
                seen.counts.update(pair.names)
            if record.until > now:
                seen.lately.update(pair.names)
            if record.because or record.inexact:
                seen.wanting.add(pair.decode)
        return seen

    def _in(self, view: InstanceView, *, producer: bool) -> bool:
        return (producer, view.id, view.life) in self._circles

    def _wants(self, fleet: FleetSnapshot, prefill: InstanceView, decode: InstanceView, now: float) -> bool:
        if prefill.id == decode.id or prefill.id in decode.shuns or fleet.pairing.strangers(prefill.row, decode.row):
            return False
        theirs, others = prefill.instance.tenants, decode.instance.tenants
        if theirs and others and theirs.isdisjoint(others):
            return False  # these two never hand over to each other
        record = self._records.get(_pair(prefill, decode))
        return record is None or ((not record.good or bool(record.inexact)) and now >= record.until)

    def _forget(self, fleet: FleetSnapshot) -> None:
        """Forget lives that are over."""
        alive = {(each.id, each.life) for each in fleet}
        if alive == self._alive:
            return
        self._alive = alive
        over = [pair for pair in self._records if not {pair[:2], pair[2:]} <= alive]
        for pair in over:
            del self._records[pair]
        for node in [node for node in self._circles if node[1:] not in alive]:
            del self._circles[node]

    def reads_alike(self, pair: Pair) -> bool:
        """Whether both are proven as consumers of one circle, perhaps before one of them changed its role. Then it is
        known that both tokenize chats alike, which spares the proof a second or two on a full fleet.
        """
        circle = self._circles.get((False, *pair[:2]))
        return circle is not None and circle == self._circles.get((False, *pair[2:]))

    def agrees(self, pair: Pair) -> bool:
        """Whether D is proven as a consumer, so that it has been asked about itself. That spares each further proof of
        it two requests.
        """
        return (False, *pair[2:]) in self._circles

    # --- results ------------------------------------------------------------------------------------------------------

    def ended(
        self,
        pair: Pair,
        because: str | None,
        now: float,
        inexact: str = "",
        doubt: str = "",
        pause_s: float = 0.0,
    ) -> None:
        """A proof is over.

        Args:
            pair: the proven pair.
            because: empty: it has passed; else why it failed; None: the proof had no result.
            now: monotonic seconds.
            inexact: for a passed pair, why P's token may not stand for D's first.
            doubt: why the proof had no result.
            pause_s: a pair that has not passed is left alone for at least so many seconds.
        """
        self.tried += 1
        self._alive.clear()  # the proof may be about a life that is over
        record = self._records.setdefault(pair, _Record())
        record.doubt = doubt
        if because == "":
            record.good, record.because, record.inexact = True, "", inexact
            self._join(pair)
            if not inexact:
                record.again_s = record.until = 0.0
                return
        first_s = LATER_S if because is None else AGAIN_S
        record.again_s = min(AGAIN_S_MAX, 2 * record.again_s or first_s)
        record.until = now + max(record.again_s, pause_s)
        if because:
            record.good, record.because, record.inexact = False, because, ""

    def _join(self, pair: Pair) -> None:
        """The two are alike, so their circles become one."""
        ends: tuple[_Node, _Node] = (True, *pair[:2]), (False, *pair[2:])
        twins = [(not producer, name, life) for producer, name, life in ends]  # an instance is like itself
        nodes = [*ends, *(node for node in twins if node in self._circles)]
        known = [self._circles[node] for node in nodes if node in self._circles]
        if not known:
            self._circle += 1
        circle = min(known, default=self._circle)
        for node, former in list(self._circles.items()):
            if former in known:
                self._circles[node] = circle
        self._circles |= dict.fromkeys(nodes, circle)
        self._remember({each for each in known if each != circle}, circle)

    def _remember(self, formers: set[int], circle: int) -> None:
        """These circles are part of `circle` now."""
        if not formers:
            return
        for each, into in self._merged.items():
            if into in formers:
                self._merged[each] = circle
        self._merged |= dict.fromkeys(sorted(formers), circle)
        while len(self._merged) > MERGED_MAX:
            del self._merged[next(iter(self._merged))]

    def standing(self, fleet: FleetSnapshot) -> ProofStanding:
        """What is known about this fleet now."""
        self._forget(fleet)
        circles = self._circles
        gives = {each.id: circles.get((True, each.id, each.life), 0) for each in fleet}
        takes = {each.id: circles.get((False, each.id, each.life), 0) for each in fleet}
        told = {pair.names: record.inexact for pair, record in self._records.items() if record.good}
        inexact = {names: because for names, because in told.items() if because}
        for prefill, because in {prefill: because for (prefill, _), because in inexact.items()}.items():
            others = (name for name, circle in takes.items() if circle and name != prefill)
            inexact |= {(prefill, decode): because for decode in others if (prefill, decode) not in told}
        doubts = {pair.names: record.doubt for pair, record in self._records.items() if record.doubt}
        return ProofStanding(gives, takes, inexact, doubts, dict(self._merged))

    def failed(self) -> dict[tuple[InstanceId, InstanceId], str]:
        """Pairs that hand nothing over until they have passed, and why."""
        return {pair.names: record.because for pair, record in self._records.items() if record.because}

    def proven(self) -> int:
        """The number of pairs that have passed."""
        return sum(record.good for record in self._records.values())


def _pair(prefill: InstanceView, decode: InstanceView) -> Pair:
    return Pair(prefill.id, prefill.life, decode.id, decode.life)


def models_of(views: Iterable[InstanceView]) -> list[str]:
    """The models to prove: the first one that each instance names, without its adapters."""
    return sorted({view.models[0] for view in views if view.models})
