"""Counts the requests that come to this router, and their results, for the goodput controller. Pure.

Demand is counted at arrival: a full fleet finishes no more than it can, whatever the demand is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from cluster.flow import BUCKETS_MAX, NAME_CHARS_MAX, OTHERS, SERIES_MAX, FlowCounts
from goodput.sketch import bucket_of
from router.core.slo import MET, MISSED, SHED

Series = tuple[str, str]

ADAPTERS_MAX: Final = 4096
"""The number of adapters whose models are remembered after no instance has them any more."""


class _Counters:
    """The counters of one model and class."""

    __slots__ = (
        "answer_tokens", "answers", "arrivals", "cached_tokens", "computed_tokens", "ended", "late_first",
        "prompt_tokens", "prompts", "results",
    )  # fmt: skip

    def __init__(self) -> None:
        self.arrivals = self.ended = self.prompt_tokens = self.answer_tokens = 0
        self.cached_tokens = self.computed_tokens = self.late_first = 0
        self.prompts: dict[int, int] = {}
        self.answers: dict[int, int] = {}
        self.results = {MET: 0, MISSED: 0, SHED: 0}


class RouterFlow:
    """The counters of one router process, since its start. A request for a LoRA adapter counts for the adapter's model:
    adapters come and go, and instances are started for models.
    """

    def __init__(self) -> None:
        self.base: Callable[[str], str] = str
        """Gives the model that a name means (`router.fleet.view.ServedModels.base`); empty: no instance serves it."""
        self._series: Final[dict[Series, _Counters]] = {}
        self._adapters: Final[dict[str, str]] = {}
        """The models of adapters, by name, the one asked for longest ago first."""

    def arrived(self, model: str, slo_class: str, prompt_tokens: int) -> None:
        """A request that may be served has arrived. `prompt_tokens`: estimated, by the predictor or from its bytes."""
        counters = self._of(model, slo_class)
        counters.arrivals += 1
        counters.prompt_tokens += prompt_tokens
        _count(counters.prompts, prompt_tokens)

    def prefilled(self, model: str, slo_class: str, prompt_tokens: int, cached_tokens: int) -> None:
        """An engine has reported how much of a prompt was cached."""
        counters = self._of(model, slo_class)
        counters.cached_tokens += min(cached_tokens, prompt_tokens)
        counters.computed_tokens += max(0, prompt_tokens - cached_tokens)

    def ended(self, model: str, slo_class: str, answer_tokens: int | None, result: str, *, late_first: bool) -> None:
        """A request is over.

        Args:
            model: as at its arrival, and so is `slo_class`.
            slo_class: empty for best effort.
            answer_tokens: None if there was no answer, or the engine did not count.
            result: of `router.core.slo`; empty if nothing was promised.
            late_first: whether its first token was late, or never came.
        """
        counters = self._of(model, slo_class)
        counters.ended += 1
        if result in counters.results:
            counters.results[result] += 1
            counters.late_first += late_first and result != MET
        if answer_tokens:
            counters.answer_tokens += answer_tokens
            _count(counters.answers, answer_tokens)

    def told(self) -> tuple[FlowCounts, ...]:
        """All counters as they are now."""
        return tuple(_told(series, counters) for series, counters in self._series.items())

    def model_of(self, name: str) -> str:
        """The model that a request for this name counts for, also after its adapter was unloaded."""
        base, known = self.base(name), self._adapters.pop(name, name)
        model = base or known
        if model != name:
            self._adapters[name] = model
            if len(self._adapters) > ADAPTERS_MAX:
                del self._adapters[next(iter(self._adapters))]
        return model

    def _of(self, model: str, slo_class: str) -> _Counters:
        model = self.model_of(model)
        series = (model, slo_class)
        found = self._series.get(series)
        if found is not None:
            return found
        if len(self._series) >= SERIES_MAX - 1 or max(len(model), len(slo_class)) > NAME_CHARS_MAX:
            series = (OTHERS, "")
        return self._series.setdefault(series, _Counters())


@lru_cache(maxsize=4096)
def _bucket(tokens: int) -> int:
    return min(BUCKETS_MAX - 1, bucket_of(tokens))


def _count(into: dict[int, int], tokens: int) -> None:
    bucket = _bucket(tokens)
    into[bucket] = into.get(bucket, 0) + 1


def _told(series: Series, counters: _Counters) -> FlowCounts:
    return FlowCounts(
        model=series[0],
        slo_class=series[1],
        arrivals=counters.arrivals,
        prompt_tokens=counters.prompt_tokens,
        prompts=dict(counters.prompts),
        cached_tokens=counters.cached_tokens,
        computed_tokens=counters.computed_tokens,
        ended=counters.ended,
        answer_tokens=counters.answer_tokens,
        answers=dict(counters.answers),
        met=counters.results[MET],
        missed=counters.results[MISSED],
        shed=counters.results[SHED],
        late_first=counters.late_first,
    )
