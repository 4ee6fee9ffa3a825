"""The explain store: what happened to the open and the last finished requests, for `/explain`. Pure.

A `Story` is one request's trace: its decisions, each with its ``because``, its legs, and its times. `ExplainStore`
keeps those of open requests, and the last finished ones within a limit in count and in bytes; the oldest go first. It
keeps no text that a client wrote or read, only names: the model, the path, the client's request id.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, Final

from cluster.request import Request
from router.core.clients import Client
from router.core.eligibility import Verdict
from router.core.slo import Judged, foretold_json
from router.core.timing_parts import Timing
from router.telemetry.timing import RequestTimeline

TEXT_MAX = 400
"""Characters kept of a reason: some reasons quote engines."""

TURNS_MAX = 64
"""Turns kept of a story, the first and the last: a request that waits long in a full fleet asks again and again."""

BYTES_MAX = 16 << 20
"""The limit of all finished stories together. One is about 3 KB, so the default count is reached long before."""

_STORY_BYTES = 1200
_TURN_BYTES = 300
_SLO_BYTES = 500
_NAME_BYTES = 550
"""The memory of a name without its text, measured with `tracemalloc` on CPython 3.11."""


_CHOICE: Final = frozenset({"prefill", "decode", "wait", "because"})

_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "choice": ("prefill", "decode", "wait", "excluded"),
    "refused": ("status",),
    "prefilled": ("finish_reason",),
    "end": ("outcome",),
}
"""The names of a turn's values, by turn. A choice has its predictions after them, in milliseconds. A leg is not listed:
it has its name and its instance."""

NOBODY: Final = Client()


_Turn = tuple[float, str, tuple[Any, ...], str | None]
"""Its time, its name, its values and its reason."""


class Story:
    """The trace of one request, as it happens."""

    __slots__ = (
        "_dropped",
        "_texts",
        "_turns",
        "client",
        "client_id",
        "judged",
        "outcome",
        "request_id",
        "seed",
        "timeline",
        "told",
        "verdict",
    )

    def __init__(self, request: Request, verdict: Verdict, client: Client = NOBODY) -> None:
        self.client: Final = client
        self.judged: Judged | None = None
        """The class's targets, the prediction and the result; None without a class."""
        self.request_id: Final = request.id
        self.client_id: Final = request.client_id
        self.verdict: Final = verdict
        self.timeline: Final = RequestTimeline(request.arrived, stream=request.stream)
        self.told: Final = {"path": request.path, "model": request.model[:TEXT_MAX], "stream": request.stream}
        self.seed = ""
        """Why the request was not seeded; empty if it was, or if the verdict says it."""
        self.outcome = ""
        """Empty while it is open."""
        self._turns: list[_Turn] = []
        self._texts = 0
        self._dropped = 0

    def add(self, now: float, turn: str, values: tuple[Any, ...] = (), because: str | None = None) -> None:
        """Keep a decision or an event. `_said` makes a turn's JSON only when it is read, as few are."""
        if because is not None:
            because = because[:TEXT_MAX]
            self._texts += len(because)
        if len(self._turns) >= TURNS_MAX:
            del self._turns[TURNS_MAX // 2]
            self._dropped += 1
        self._turns.append((now, turn, values, because))

    @property
    def bytes(self) -> int:
        """The approximate memory, in bytes."""
        texts = min(self._texts, TURNS_MAX * TEXT_MAX)
        named = _NAME_BYTES if self.client_id else 0
        return _STORY_BYTES + named + (self.judged is not None) * _SLO_BYTES + _TURN_BYTES * len(self._turns) + texts

    def timing(self, now: float) -> Timing:
        """Where the request's time went, until its end or now."""
        return self.timeline.read(now)

    def line(self, now: float) -> dict[str, Any]:
        """The request in one line."""
        timing = self.timing(now)
        ttft, tt2t = timing.ttft, timing.tt2t
        return {
            **self._names(),
            "state": self.outcome or "open",
            "way": timing.way,
            "model": self.told["model"],
            **self._whose(),
            "ttft_ms": None if ttft is None else round(ttft.total_s * 1000, 3),
            "tt2t_ms": None if tt2t is None else round(tt2t.total_s * 1000, 3),
            "total_ms": round(timing.total_s * 1000, 3),
        }

    def choice(self) -> dict[str, Any]:
        """Where the request was sent last, and why; empty if nothing was chosen yet."""
        chosen = [turn for turn in self._turns if turn[1] == "choice"]
        return {name: value for name, value in _said(chosen[-1]).items() if name in _CHOICE} if chosen else {}

    def as_json(self, now: float) -> dict[str, Any]:
        """The whole story; times in milliseconds since the request arrived."""
        arrived = self.timeline.arrived
        timing = self.timing(now).as_json()
        turns = [
            {"at_ms": round((turn[0] - arrived) * 1000, 3), "turn": turn[1], **_said(turn)} for turn in self._turns
        ]
        verdict = self.verdict
        return {
            **self._names(),
            "state": self.outcome or "open",
            **self.told,
            **self._whose(),
            **({} if self.judged is None else {"slo": self.judged.as_json()}),
            "verdict": {"way": verdict.way.value, "because": verdict.because, "resumable": verdict.resumable},
            "seed": {"given": self.timeline.seeded, "because": "" if self.timeline.seeded else self._no_seed()},
            "turns": turns,
            "turns_left_out": self._dropped,
            "timing": timing,
        }

    def _names(self) -> dict[str, str]:
        """The router's id, and the client's if it sent one."""
        return {"id": self.request_id, **({"client_id": self.client_id} if self.client_id else {})}

    def _whose(self) -> dict[str, str]:
        """Tenant and class, if there are any."""
        named = {"tenant": self.client.tenant, "slo_class": self.client.slo_class}
        return {name: value for name, value in named.items() if value}

    def _no_seed(self) -> str:
        return self.verdict.because or self.seed or "it was not handed over"


def _said(turn: _Turn) -> dict[str, Any]:
    """The JSON fields of a turn."""
    _, name, values, because = turn
    if name == "leg":
        leg, instance = values
        return {"leg": leg, "instance": instance.id, "url": instance.url, "epoch": instance.epoch}
    told: dict[str, Any] = dict(zip(_FIELDS.get(name, ()), values, strict=False))
    if name == "choice" and values[-1] is not None:
        told |= foretold_json(*values[-1])
    return told if because is None else {**told, "because": because}


class ExplainStore:
    """Open stories, and the last finished ones."""

    def __init__(self, last_max: int, bytes_max: int = BYTES_MAX) -> None:
        self.last_max: Final = last_max
        self._bytes_max: Final = bytes_max
        self._open: Final[dict[Story, None]] = {}
        self._last: Final[deque[tuple[Story, int]]] = deque()
        self._by_id: Final[dict[str, Story]] = {}
        self._by_client_id: Final[dict[str, dict[Story, None]]] = {}
        """Several requests may have one client id, of one tenant or of several; the oldest first."""
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._open) + len(self._last)

    @property
    def bytes(self) -> int:
        """The approximate memory of the finished stories."""
        return self._bytes

    def begin(self, story: Story) -> None:
        """Keep the story of a request that has come."""
        self._open[story] = None
        self._by_id[story.request_id] = story
        if story.client_id:
            self._by_client_id.setdefault(story.client_id, {})[story] = None

    def finish(self, story: Story) -> None:
        """Move a story to the finished ones, and drop the oldest of these above the limits."""
        if story not in self._open:
            return
        del self._open[story]
        size = story.bytes
        self._last.append((story, size))
        self._bytes += size
        while len(self._last) > self.last_max or self._bytes > self._bytes_max:
            oldest, freed = self._last.popleft()
            self._bytes -= freed
            self._forget(oldest)

    def _forget(self, story: Story) -> None:
        self._by_id.pop(story.request_id, None)
        if story.client_id:
            alike = self._by_client_id[story.client_id]
            del alike[story]
            if not alike:
                del self._by_client_id[story.client_id]

    def get(self, request_id: str) -> Story | None:
        """The request with this router id; None: none is kept."""
        return self._by_id.get(request_id)

    def named(self, client_id: str, tenant: str | None = None) -> list[Story]:
        """The requests with this client id, the newest first. `tenant`: of this tenant only."""
        alike = reversed(self._by_client_id.get(client_id, {}))
        return [story for story in alike if tenant is None or story.client.tenant == tenant]

    def both(self, count: int, tenant: str | None = None) -> list[Story]:
        """At most `count` open requests, and at most `count` that have ended; the newest first."""
        kinds = (reversed(self._open), (story for story, _ in reversed(self._last)))
        mine = ((story for story in kind if tenant is None or story.client.tenant == tenant) for kind in kinds)
        return [story for kind in mine for story in islice(kind, count)]

    def latest(self, count: int, tenant: str | None = None) -> list[Story]:
        """The last open requests that came, then the last that ended; the newest first. `tenant`: of this
        tenant only.
        """
        stories = (*reversed(self._open), *(story for story, _ in reversed(self._last)))
        mine = (story for story in stories if tenant is None or story.client.tenant == tenant)
        return list(islice(mine, count))
