"""Legs between routers and engines: requests on their way there, first tokens and ends on their way back.

A message takes `hop_us`, and an engine's server reads a request before the engine has it. An instance that is cut off
accepts no leg, and its own messages wait until it can be reached again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from cluster.ids import RequestId
from engine.twin import events as ev
from engine.twin.tokens import answer_key
from sim import result as rows
from sim.instance import SimInstance, SimulatedLeg
from sim.kernel import NS, Kernel
from sim.pulls import SimulatedPulls
from sim.roughness import Rough
from sim.settings import SimSettings


class SimulatedLegs:
    """All legs of all routers."""

    def __init__(
        self,
        kernel: Kernel,
        settings: SimSettings,
        rough: Rough,
        pulls: SimulatedPulls,
        counts: Counter[str],
        tell: Callable[[SimInstance, ev.Event], None],
        *,
        reads_text: bool,
    ) -> None:
        """`tell` sends an event to an instance's engine; `reads_text`: engines keep contents, so that the text of
        answers is compared with the model's.
        """
        self._kernel: Final = kernel
        self._rough: Final = rough
        self._pulls: Final = pulls
        self._counts: Final = counts
        self._tell: Final = tell
        self._reads_text: Final = reads_text
        self._digests: Final = settings.digests
        self._hop_ns: Final = settings.hop_ns
        self._connect_ns: Final = round(settings.connect_s * NS)
        self._pull_front_ns: Final = round(settings.pull_front_ms * 1e6)
        self._early_slows_ns: Final = round(settings.early_slows_ms * 1e6)

    # --- from routers to engines --------------------------------------------------------------------------------------

    def front_of_pull(self, at: SimInstance) -> int:
        """When the engine's server has read an early leg that is sent now, in the kernel's nanoseconds."""
        return self._rough.front_ns(at, self._kernel.now_ns + self._hop_ns, self._pull_front_ns)

    def send(self, leg: SimulatedLeg, *, at_server_ns: int | None = None) -> None:
        """The router sends a leg. `at_server_ns`: of an early leg, when its engine's server has read it. D then
        learns of the hold when the router does: P's notice takes as long as P's answer.
        """
        at, kernel = leg.at, self._kernel
        at.legs[leg.request.id] = leg
        if at.cut_off:
            kernel.at(kernel.now_ns + self._connect_ns, self._no_connection, leg)
            return
        if at_server_ns is not None:
            kernel.at(max(kernel.now_ns, at_server_ns), self._submit, leg)
            return
        front_ns = self._pull_front_ns if leg.request.pull is not None else at.member.prompt_front_ns
        kernel.at(self._rough.front_ns(at, kernel.now_ns + self._hop_ns, front_ns), self._submit, leg)

    def _submit(self, leg: SimulatedLeg) -> None:
        at = leg.at
        if leg.detached:  # the connection was closed before the engine had read the request
            at.legs.pop(leg.request.id, None)
            self._unread(leg)
        elif not at.ready:
            self._kernel.at(self._kernel.now_ns + self._hop_ns, self._no_connection, leg)
        else:
            if not leg.prefill:
                at.awaited[leg.request.id] = leg
            if leg.request.pull is not None:
                at.pulling[leg.request.id] = (leg.request.pull, self._kernel.now_ns)
            self._tell(at, ev.Submit(leg.request))

    def _unread(self, leg: SimulatedLeg) -> None:
        """A leg closed before its engine had read it: if it pulls, D tells P all the same, as vLLM's server does."""
        if leg.request.pull is not None and leg.at.ready:
            self._pulls.give_back(leg.at, leg.request.pull)

    def _no_connection(self, leg: SimulatedLeg) -> None:
        """The instance accepts no connection, so all other legs to it will fail, too."""
        _forget(leg.at, leg.request.id, self._kernel.now_ns)
        front = leg.passage.front
        if front.unreachable(leg.at.name):
            front.announce_lost(leg.at.name, list(leg.at.legs.values()))
        because = "connecting took too long" if leg.at.cut_off else "connection refused"
        leg.passage.lost(leg, because, untouched=True)

    def abort(self, leg: SimulatedLeg) -> None:
        """The router closes a leg, or asks for its end."""
        if not leg.over:
            self._kernel.at(self._kernel.now_ns + self._hop_ns, self._abort, leg)

    def _abort(self, leg: SimulatedLeg) -> None:
        if not leg.over and leg.at.ready and not leg.at.cut_off:
            self._tell(leg.at, ev.AbortRequest(leg.request.id))

    # --- from engines to routers --------------------------------------------------------------------------------------

    def _deliver(self, at: SimInstance, when_ns: int, call: Callable[[Any], None], word: Any) -> None:
        """An instance sends a message to the router; while it is cut off, its messages wait."""
        if at.cut_off:
            at.held.append((call, word))
        else:
            self._kernel.at(when_ns + self._hop_ns, call, word)

    def ran(self, at: SimInstance, run: ev.StepRun) -> None:
        """Record when first and second tokens are made: at the ends of the run's first two steps, or of the
        next run's.
        """
        former, at.run_steps = at.run_steps, run.steps
        if not at.young and not at.awaited:
            return
        local_ns = run.end_ns if run.steps == 1 else _step_end(at, run, 1)
        for leg in at.young:
            if former < 2 and not leg.over:  # the run with the first token was cut after it
                leg.second_ns = at.world_ns(local_ns)
        at.young.clear()
        for share in run.shares if at.awaited else ():
            begun = None if share.first else at.awaited.pop(share.request, None)
            if begun is not None:
                begun.local_ns = (local_ns, _step_end(at, run, 2) if run.steps > 1 else -1)
                if self._reads_text:
                    self._read_token(begun, share)
                at.young.append(begun)
                self.announce(at, begun)

    def _read_token(self, leg: SimulatedLeg, share: ev.RunShare) -> None:
        """Check whether the text is the model's: a wrong block shows in everything that follows."""
        if share.key != answer_key(leg.request.prompt, leg.request.seed):
            leg.passage.row.flags |= rows.WRONG
            self._counts["wrong_text"] += 1

    def announce(self, at: SimInstance, leg: SimulatedLeg) -> None:
        """Schedule the first token's arrival at the router."""
        first_ns, second_ns = leg.local_ns
        leg.first_ns = at.world_ns(first_ns)
        leg.second_ns = at.world_ns(second_ns) if second_ns >= 0 else -1
        self._deliver(at, leg.first_ns, self._opened, leg)

    def _opened(self, leg: SimulatedLeg) -> None:
        if self._kernel.now_ns >= leg.first_ns + self._hop_ns:  # else its clock has slowed down since
            leg.passage.opened(leg)

    def finished(self, at: SimInstance, effect: ev.RequestFinished) -> None:
        """The engine has ended a request."""
        leg = _forget(at, effect.request, self._kernel.now_ns)
        if leg is None:
            return
        if effect.hold is not None and self._digests:
            self._kernel.at(self._kernel.now_ns, self._pulls.vouch, (at, effect.hold))
        leg.last_ns, leg.outputs = self._kernel.now_ns, effect.outputs
        if effect.outputs < 2:
            leg.second_ns = -1
        if effect.preemptions:
            leg.passage.row.flags |= rows.PREEMPTED
        slowed_ns = self._slowed_ns(leg) if self._early_slows_ns and leg.prefill else 0
        self._deliver(at, self._kernel.now_ns + slowed_ns, _answered, (leg, effect))

    def _slowed_ns(self, leg: SimulatedLeg) -> int:
        """The delay of this prefill leg's answer by the early legs that wait for prompts of its instance."""
        prompts = [leg, *(each for each in leg.at.legs.values() if each.prefill)]
        return self._early_slows_ns * sum(each.passage.journey.early for each in prompts)

    def refused(self, at: SimInstance, effect: ev.RequestRefused) -> None:
        """The engine's own status: 400, as vLLM answers a request that does not fit."""
        leg = _forget(at, effect.request, self._kernel.now_ns)
        if leg is not None:
            self._deliver(at, self._kernel.now_ns, _turned_down, (leg, effect.because))

    def lost(self, at: SimInstance, effect: ev.RequestLost) -> None:
        """The engine died with a request."""
        leg = _forget(at, effect.request, self._kernel.now_ns)
        if leg is not None:
            self._deliver(at, self._kernel.now_ns, _broke, leg)

    def preempted(self, at: SimInstance, effect: ev.Preempted) -> None:
        """The engine took a request's blocks for another."""
        self._counts["preempted"] += 1
        leg = at.legs.get(effect.request)
        if leg in at.young and at.run_steps < 2:
            at.young.remove(leg)  # its second token comes after a new computation: not followed


def _step_end(at: SimInstance, run: ev.StepRun, steps: int) -> int:
    return run.at_ns + at.member.costs.decode_run_ns(run.batch, run.sum_context, steps)


def _forget(at: SimInstance, request: RequestId, now_ns: int) -> SimulatedLeg | None:
    at.awaited.pop(request, None)
    at.pulling.pop(request, None)
    leg = at.legs.pop(request, None)
    if leg is not None:
        leg.over, leg.over_ns = True, now_ns
    return leg


def _answered(word: tuple[SimulatedLeg, ev.RequestFinished]) -> None:
    leg, effect = word
    leg.passage.answered(leg, effect)


def _turned_down(word: tuple[SimulatedLeg, str]) -> None:
    leg, because = word
    leg.passage.refused(leg, 400, because)


def _broke(leg: SimulatedLeg) -> None:
    leg.passage.lost(leg, "the connection broke")
