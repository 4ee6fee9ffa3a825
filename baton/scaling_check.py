"""Before an instance leaves: simulates the fleet without it, in a process of its own (`goodput.decision.Check`, live).

The controller goes on meanwhile; the answer comes as an event. The process (`baton.scaling_simulation`) is niced, has
`CPU_S` of CPU time for the simulation, and `WALL_S` in all. After any failure the verdict is None, with the
reason, and the controller's formulas decide as without a check.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from typing import Final

from baton import compiled
from baton.packing import packed, unpacked
from baton.scaling_simulation import COMPILED, CPU_S
from goodput.decision import Check, Checked
from goodput.demand import ClassPromise
from loadgen.report import Targets
from router.core.values import Promise as Promised
from sim.evaluate import Goal
from sim.fleet import SimulatedMember

WALL_S: Final = 20.0
"""Seconds for one check: on a busy machine the process gets its CPU time slowly. Below `goodput.controller.CHECK_S`."""


def goals_of(promises: Mapping[str, ClassPromise]) -> dict[str, Goal]:
    """The classes' targets in the form that simulations take."""
    return {
        name: Goal(
            targets=Targets(each.ttft_ms, each.tt2t_ms, each.tpot_ms, each.e2e_ms),
            attainment=each.attainment,
            promise=Promised(ttft_ms=each.ttft_ms or 0.0, tpot_ms=each.tpot_ms or 0.0),
        )
        for name, each in promises.items()
    }


class Checker:
    """Answers the checks of one model's controller."""

    def __init__(self, members: Mapping[str, SimulatedMember], promises: Mapping[str, ClassPromise]) -> None:
        """`members`: by pool, an instance as simulated; `promises`: targets by class, which may change meanwhile."""
        self._members: Final = members
        self._promises: Final = promises

    async def __call__(self, asked: Check) -> Checked:
        """Simulate, and return the verdict; a failure is the verdict unknown (None), with the reason."""
        goals = goals_of(self._promises)
        if not goals:
            return Checked(asked.number, None, "nothing is promised to any class")
        job = packed((dict(self._members), goals, asked))
        words = (sys.executable, "-m", "baton.scaling_simulation", *((COMPILED,) if compiled.in_use() else ()))
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            return Checked(asked.number, None, f"no process for a simulation: {error.strerror}")
        try:
            async with asyncio.timeout(WALL_S):
                told, errors = await process.communicate(job)
        except TimeoutError:
            return Checked(asked.number, None, f"the simulation was not done within {WALL_S:g} s")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode == -signal.SIGXCPU:
            return Checked(asked.number, None, f"the simulation took more than {CPU_S} s of CPU")
        if process.returncode:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2][:200]
            return Checked(asked.number, None, f"the simulation ended with {process.returncode}: {last}")
        answer = unpacked(told)
        assert isinstance(answer, Checked)
        return answer
