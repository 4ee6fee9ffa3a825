"""Draw docs/journey.md's diagram and table by playing the machine: `.venv/bin/python tools/journey_diagram.py`.

Every event is fed to a journey in every state that can be reached, and the effects are written down. Everything between
the two marks is made here; the words around it are written by hand. `tests/unit/test_router_pages.py` compares.
"""

from __future__ import annotations

import copy
from pathlib import Path

from cluster.ids import InstanceId
from cluster.wire import TransferFields
from router.core import journey as j

PAGE = Path(__file__).resolve().parents[1] / "docs" / "journey.md"
BEGIN = "<!-- made by tools/journey_diagram.py: begin -->"
END = "<!-- made by tools/journey_diagram.py: end -->"

HOLD = TransferFields({"remote_num_tokens": 1})
NAMES = tuple(InstanceId(name) for name in "pqdefg")
EVENTS: dict[str, j.Event] = {
    "two chosen": j.Chosen(NAMES[0], NAMES[2], ""),
    "two others chosen": j.Chosen(NAMES[1], NAMES[4], ""),
    "two chosen, early leg": j.Chosen(NAMES[0], NAMES[2], "", early_s=0.0),
    "early leg lost": j.EarlyLost(""),
    "one chosen": j.Chosen(None, NAMES[3], ""),
    "all full": j.Chosen(None, None, "", wait=True),
    "no instance": j.Chosen(None, None, ""),
    "fleet changed": j.FleetChanged(),
    "first token": j.PrefillAnswered("length", HOLD),
    "first token, seed allowed": j.PrefillAnswered("length", HOLD, first_token=1),
    "ended at its first token": j.PrefillAnswered("stop", HOLD),
    "aborted": j.PrefillAnswered("abort", None),
    "refused (4xx)": j.Refused(400),
    "lost, never reached": j.Lost("", untouched=True),
    "lost": j.Lost(""),
    "lost, can be joined": j.Lost("", again=True),
    "opened": j.Opened(),
    "ended": j.Ended(),
    "client left": j.ClientLeft(),
    "time is up": j.Tick(),
    "released": j.Released(ok=True),
}
DEPTH = 9
"""Events in a row after which nothing new is found."""


def explore() -> dict[tuple[str, str], dict[tuple[str, str], None]]:
    """(state, event) -> {(next state, effects)}, over streamed journeys that may hand over."""
    start = j.Journey(hand_over=True, stream=True, deadline=100.0, deadline_s=100.0, attempts_max=2)
    start.begin()
    found: dict[tuple[str, str], dict[tuple[str, str], None]] = {}
    seen: set[object] = set()
    edge = [start]
    for _ in range(DEPTH):
        following = []
        for machine in edge:
            for name, event in EVENTS.items():
                then = copy.copy(machine)
                effects = then.handle(event, _time(machine) if name == "time is up" else 1.0)
                if effects or _state(then) != _state(machine):
                    said = ", ".join(type(effect).__name__ for effect in effects)
                    found.setdefault((_state(machine), name), {})[(_state(then), said)] = None
                key = (_state(then), then.attempt, then.transfer is None, then.touched, then.first_token, then.aborted,
                       then.asks_second, then.early, then.prefilled)  # fmt: skip
                if key not in seen:
                    seen.add(key)
                    following.append(then)
        edge = following
    return found


def _time(machine: j.Journey) -> float:
    wakeup = machine.next_wakeup()
    return 1.0 if wakeup is None else wakeup


def _state(machine: j.Journey) -> str:
    silent = {j.JourneyState.STREAMING, j.JourneyState.DONE, j.JourneyState.RELEASING, j.JourneyState.CANCELLING}
    state = "prefilling twice" if len(machine.legs) > 1 else str(machine.state)
    state += ", early leg out" if machine.early else ""
    return f"{state} (spoken)" if machine.spoken and machine.state not in silent else state


def diagram(found: dict[tuple[str, str], dict[tuple[str, str], None]]) -> str:
    """A Mermaid state diagram: an edge for each pair of states, with all its events."""
    edges: dict[tuple[str, str], dict[str, None]] = {}
    for (state, event), outcomes in found.items():
        for target, _ in outcomes:
            if target != state:
                edges.setdefault((state, target), {})[event] = None
    ids = {
        state: state.replace(" (spoken)", "_spoken").replace(",", "").replace(" ", "_")
        for pair in edges
        for state in pair
    }
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> choosing"]
    lines += [f'    state "{state}" as {name}' for state, name in ids.items() if state != name]
    lines += [f"    {ids[a]} --> {ids[b]}: {', '.join(events)}" for (a, b), events in edges.items()]
    return "\n".join([*lines, "    done --> [*]", "```"])


def table(found: dict[tuple[str, str], dict[tuple[str, str], None]]) -> str:
    """A Markdown table: a row for every state, event and next state, with the effects."""
    lines = ["| state | event | next | done on the way |", "| --- | --- | --- | --- |"]
    for (state, event), outcomes in sorted(found.items()):
        for target, effects in sorted(outcomes):
            lines.append(f"| {state} | {event} | {target} | {effects} |")
    return "\n".join(lines)


def made() -> str:
    """All that stands between the marks."""
    found = explore()
    return "\n\n".join([BEGIN, diagram(found), table(found), END])


def renew(page: str) -> str:
    """The page with the made part made again."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + made() + after


if __name__ == "__main__":
    PAGE.write_text(renew(PAGE.read_text()))
