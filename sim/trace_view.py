"""A window of a run as Chrome trace events, for chrome://tracing and https://ui.perfetto.dev. Pure.

Each instance has a row with its steps, and pulls beside them; each request is shown from its arrival to its end.
Times are microseconds, as the format wants them.
"""

from __future__ import annotations

from typing import Any, Final

from engine.twin import events as ev
from sim.instance import SimInstance
from sim.result import Result
from sim.world import World

EVENTS_MAX: Final = 500_000
"""About 100 MB of JSON, more than a browser handles well: the rest of the window is left out, and the file says so."""

_ROUTER = 0


class TraceView:
    """Collects events while a world runs."""

    def __init__(self, world: World, from_ns: int, until_ns: int) -> None:
        self._from_ns, self._until_ns = from_ns, until_ns
        self._world: Final = world
        self._events: Final[list[dict[str, Any]]] = []
        self._runs: Final[dict[int, dict[str, Any]]] = {}
        self.left_out = 0
        world.on_effect = self._seen

    def _seen(self, at: SimInstance, effect: ev.Effect) -> None:
        now_ns = self._world.kernel.now_ns
        if not self._from_ns <= now_ns < self._until_ns:
            return
        pid = at.index + 1
        match effect:
            case ev.StepRun():
                name = f"{effect.prompt_tokens} prompt tokens" if effect.prompt_tokens else f"decode × {effect.batch}"
                end_ns = at.world_ns(effect.end_ns)
                told = {"steps": effect.steps, "requests": effect.batch, "context": effect.sum_context}
                event = _event("X", name, "step", now_ns, pid) | {"dur": (end_ns - now_ns) / 1000, "tid": 0}
                self._runs[at.index] = event
                self._add(event | {"args": told}, keep=event)
            case ev.Cut():
                run = self._runs.get(at.index)
                if run is not None:
                    run["dur"] = at.world_ns(effect.end_ns) / 1000 - run["ts"]
            case ev.PullBlocks(source=source):
                self._add(_event("b", "pull", "pull", now_ns, pid) | {"id": str(source.transfer), "tid": 1})
            case ev.GiveBack(source=source):
                self._add(_event("e", "pull", "pull", now_ns, pid) | {"id": str(source.transfer), "tid": 1})
            case ev.Preempted(request=request):
                self._add(_event("i", f"preempted {request}", "step", now_ns, pid) | {"tid": 0, "s": "t"})
            case _:
                pass

    def _add(self, event: dict[str, Any], keep: dict[str, Any] | None = None) -> None:
        if len(self._events) >= EVENTS_MAX:
            self.left_out += 1
            return
        if keep is not None:
            keep.update(event)  # a cut still shortens it
            event = keep
        self._events.append(event)

    def document(self, result: Result) -> dict[str, Any]:
        """The whole file, to be written as JSON."""
        names = [("router", _ROUTER), *((at.name, at.index + 1) for at in self._world.instances)]
        headings = [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}} for name, pid in names
        ]
        return {"displayTimeUnit": "ms", "traceEvents": [*headings, *self._events, *self._requests(result)]}

    def _requests(self, result: Result) -> list[dict[str, Any]]:
        rows = result.columns
        here = (rows["at_ns"] < self._until_ns) & (rows["end_ns"] >= self._from_ns)
        found: list[dict[str, Any]] = []
        for number, row in zip(here.nonzero()[0].tolist(), rows[here], strict=True):
            name = f"request {number}"
            told = {"input": int(row["input_tokens"]), "output": int(row["output_tokens"])}
            rest = {"id": number, "tid": 0}
            found.append(_event("b", name, "request", int(row["at_ns"]), _ROUTER) | rest | {"args": told})
            if row["first_ns"] >= 0:
                found.append(_event("n", "first token", "request", int(row["first_ns"]), _ROUTER) | rest)
            found.append(_event("e", name, "request", int(row["end_ns"]), _ROUTER) | rest)
        return found


def _event(kind: str, name: str, category: str, at_ns: int, pid: int) -> dict[str, Any]:
    return {"ph": kind, "name": name, "cat": category, "ts": at_ns / 1000, "pid": pid}
