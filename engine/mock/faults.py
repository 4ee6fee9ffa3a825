"""The mock's faults: which are set, which requests they strike, and their form in JSON. The random generator is passed
in, so a seed repeats a run.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, TypeVar

from cluster.errors import ApiError, bad_request

_Word = TypeVar("_Word", bound=StrEnum)


class FaultKind(StrEnum):
    """The kinds of faults."""

    REFUSE = "refuse"
    HANG = "hang"
    BREAK = "break"
    ERROR = "error"
    SLOW = "slow"
    UNWELL = "unwell"
    CLOSE = "close"
    DIE = "die"
    CORRUPT = "corrupt"
    STALE = "stale"
    FAIL_PULL = "fail_pull"
    HANG_PULL = "hang_pull"
    DROP_NOTICE = "drop_notice"
    KEEP_BACK = "keep_back"
    WRONG_TOKEN = "wrong_token"  # noqa: S105 - a fault's name


MEANS: Final[Mapping[FaultKind, str]] = {
    FaultKind.REFUSE: "answers `status` at once",
    FaultKind.HANG: "takes the request and falls silent, after `after_tokens` of its answer",
    FaultKind.BREAK: "drops the connection, after `after_tokens` of the answer (in the middle of an event)",
    FaultKind.ERROR: "ends the stream with an error event after `after_tokens`; HTTP 500 where it is not streamed",
    FaultKind.SLOW: "the whole engine takes `factor` times as long",
    FaultKind.UNWELL: "`/health` answers 503",
    FaultKind.CLOSE: "nothing listens on its port, open connections go on",
    FaultKind.DIE: "the engine dies with all it has; it comes back under a new epoch after `seconds`, or when "
    "the fault is removed",
    FaultKind.CORRUPT: "a pulled block is not what was sent",
    FaultKind.STALE: "a pulled block is another prompt's",
    FaultKind.FAIL_PULL: "a pull fails; the prompt is computed again",
    FaultKind.HANG_PULL: "a pull stands still, and fails when the faults are removed",
    FaultKind.DROP_NOTICE: "the producer is not told that its hold was pulled",
    FaultKind.KEEP_BACK: "a prefill leg leaves the prompt's last token to the consumer, as vLLM does for Mamba: the "
    "token that it answers with is not the answer's first",
    FaultKind.WRONG_TOKEN: "a prefill leg answers with a token that is not the answer's first, and says nothing of it",
}

ON_TOKENS: Final = frozenset({FaultKind.KEEP_BACK, FaultKind.WRONG_TOKEN})
"""Faults that make the token of a prefill leg's answer wrong."""
ON_REQUESTS: Final = frozenset({FaultKind.REFUSE, FaultKind.HANG, FaultKind.BREAK, FaultKind.ERROR}) | ON_TOKENS
"""Faults that strike one request as it comes."""
ON_PULLS: Final = frozenset(
    {FaultKind.CORRUPT, FaultKind.STALE, FaultKind.FAIL_PULL, FaultKind.HANG_PULL, FaultKind.DROP_NOTICE}
)
"""Faults that strike one pull (on the instance that pulls)."""
ON_INSTANCE: Final = frozenset(FaultKind) - ON_REQUESTS - ON_PULLS
"""Faults that strike the instance, at once and until they end."""


class FaultLeg(StrEnum):
    """The requests that a fault is meant for."""

    ANY = "any"
    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"
    RELEASE = "release"
    """A leg that is to be rejected, so that its producer frees the hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MockFault:
    """One fault as requested. A field that its kind does not use may not be given."""

    fault: FaultKind
    share: float = 1.0
    """Share of the requests (or pulls) that the fault strikes, drawn at random."""
    times: int | None = None
    """The fault ends after this many strikes."""
    leg: FaultLeg = FaultLeg.ANY
    request: str = ""
    """Only requests whose id contains this."""
    after_tokens: int = 0
    status: int = 503
    factor: float = 2.0
    seconds: float | None = None
    """Seconds until the fault ends (`die`: until the engine starts again); None: it never ends by itself."""


_USES: Final[Mapping[FaultKind, frozenset[str]]] = {
    **dict.fromkeys(ON_REQUESTS | ON_PULLS, frozenset({"share", "times", "leg", "request"})),
    **dict.fromkeys(ON_INSTANCE, frozenset({"seconds"})),
}
_MORE: Final[Mapping[FaultKind, frozenset[str]]] = {
    FaultKind.REFUSE: frozenset({"status"}),
    FaultKind.HANG: frozenset({"after_tokens"}),
    FaultKind.BREAK: frozenset({"after_tokens"}),
    FaultKind.ERROR: frozenset({"after_tokens"}),
    FaultKind.SLOW: frozenset({"factor"}),
}
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "share": (0, 1),
    "times": (1, 2**31),
    "after_tokens": (0, 2**31),
    "status": (400, 599),
    "factor": (0.01, 10_000),
    "seconds": (0, 86_400),
}
_WHOLE: Final = {"times", "after_tokens", "status"}
EXAMPLE: Final = '{"fault": "hang", "leg": "decode", "after_tokens": 5, "share": 0.1}'


def read_faults(body: object) -> list[MockFault]:
    """The faults in a JSON value: one object, or a list of them.

    Raises:
        ApiError: a field is wrong; the message names it and the values it may have.
    """
    return [_read(each) for each in (body if isinstance(body, list) else [body])]


def _read(body: object) -> MockFault:
    if not isinstance(body, dict):
        raise bad_request(f"A fault is a JSON object such as {EXAMPLE}.")
    kind = _word(body, "fault", FaultKind)
    allowed = {"fault"} | _USES[kind] | _MORE.get(kind, frozenset())
    for name in body:
        if name not in allowed:
            near = difflib.get_close_matches(str(name), allowed, 1)
            hint = f" Did you mean `{near[0]}`?" if near else f" It takes: {', '.join(sorted(allowed - {'fault'}))}."
            raise bad_request(f"The fault `{kind}` takes no `{name}`.{hint}", str(name))
    values = {name: _number(name, value) for name, value in body.items() if name in _RANGES and value is not None}
    leg = _word(body, "leg", FaultLeg) if "leg" in body else FaultLeg.ANY
    request = body.get("request", "")
    if not isinstance(request, str):
        raise bad_request("`request` is a part of a request's id, a text.", "request")
    return MockFault(fault=kind, leg=leg, request=request, **values)  # type: ignore[arg-type]


def _word(body: Mapping[str, Any], name: str, words: type[_Word]) -> _Word:
    value = body.get(name)
    if not isinstance(value, str) or value not in set(words):
        raise bad_request(f"`{name}` is {value!r}; it must be one of: {', '.join(words)}.", name)
    return words(value)


def _number(name: str, value: object) -> float:
    least, most = _RANGES[name]
    kinds = int if name in _WHOLE else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= most:
        whole = "a whole number" if name in _WHOLE else "a number"
        raise bad_request(f"`{name}` is {value!r}; it must be {whole} from {least:g} to {most:g}.", name)
    return value


@dataclass(slots=True)
class Active:
    """A fault that is set, under its number."""

    number: int
    fault: MockFault
    struck: int = 0

    @property
    def spent(self) -> bool:
        """Whether the fault has struck as often as it should."""
        return self.fault.times is not None and self.struck >= self.fault.times

    def as_json(self) -> dict[str, Any]:
        """The fault's fields that differ from their defaults, and how often it struck."""
        said = {each.name: getattr(self.fault, each.name) for each in fields(MockFault)}
        plain = {each.name: each.default for each in fields(MockFault)}
        shown = {name: value for name, value in said.items() if name == "fault" or value != plain[name]}
        return {"number": self.number, **shown, "struck": self.struck}


@dataclass(slots=True)
class MockFaults:
    """The faults that are set on one instance, in order; the first that fits strikes."""

    draw: Callable[[], float]
    """Gives a random number from 0 to below 1."""
    active: list[Active] = field(default_factory=list)
    _count: int = 0

    def add(self, faults: Iterable[MockFault]) -> list[Active]:
        """Set these faults, behind those that are set already."""
        added = []
        for fault in faults:
            self._count += 1
            added.append(Active(self._count, fault))
        self.active += added
        return added

    def clear(self) -> list[Active]:
        """Remove all faults; what is broken already stays broken."""
        ended, self.active = self.active, []
        return ended

    def end(self, number: int) -> None:
        """Remove the fault of this number."""
        self.active = [each for each in self.active if each.number != number]

    def strike(self, kinds: frozenset[FaultKind], leg: FaultLeg, request: str) -> MockFault | None:
        """The fault that strikes this request or pull, if one does."""
        for each in self.active:
            fault = each.fault
            if (
                fault.fault in kinds
                and not each.spent
                and fault.leg in {FaultLeg.ANY, leg}
                and fault.request in request
                and (fault.share >= 1 or self.draw() < fault.share)
            ):
                each.struck += 1
                return fault
        return None

    def has(self, kind: FaultKind) -> bool:
        """Whether a fault of this kind is set."""
        return any(each.fault.fault is kind for each in self.active)

    @property
    def factor(self) -> float:
        """How many times slower the engine is: the product of all `slow` faults' factors."""
        product = 1.0
        for each in self.active:
            if each.fault.fault is FaultKind.SLOW:
                product *= each.fault.factor
        return product

    def as_json(self) -> dict[str, Any]:
        """What `GET /mock/faults` answers."""
        return {"faults": [each.as_json() for each in self.active], "kinds": dict(MEANS)}


def spoil(kind: FaultKind, contents: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """The contents that a pull reads instead: one block with a changed bit (`corrupt`), or another prompt's (`stale`).

    `others` are the contents of an earlier pull, if there was one.
    """
    if not contents:
        return contents
    if kind is FaultKind.CORRUPT:
        middle = len(contents) // 2
        return (*contents[:middle], contents[middle] ^ 1 << 17, *contents[middle + 1 :])
    if not others or others[0] == contents[0]:
        others = tuple(content ^ (1 << 63) - 1 for content in contents)
    return tuple(others[at % len(others)] for at in range(len(contents)))


def injected() -> ApiError:
    """The error of a stream that a fault ends."""
    return ApiError(500, "InternalServerError", "Internal server error (a fault of the mock)")
