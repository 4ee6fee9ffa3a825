"""What every actuator does: it reports which instances exist, and carries out `goodput.actions`.

An actuator decides nothing and remembers nothing that the fleet itself does not hold, so a controller that was killed
between any two actions starts again from `observe`:

- **The caller names instances.** `Start` with the name of an instance that exists is done already: an empty answer, and
  nothing is started. So an action may be given twice, by the same controller or by the next one.
- **Asked for is existing.** An instance exists from the moment `Start` was accepted until its last process has ended
  and its GPUs are free; `observe` lists it all that time, also while it waits for a GPU.
- **No answer waits for an instance.** `start` returns once the instance is asked for, `drain` once its agent was told.
  An instance that finds no GPU stays `InstanceLife.PENDING`, with the reason, and blocks nothing.
- **A refusal is a text.** Empty: carried out, or under way. Else why not, for people; nothing has changed then.
"""

from __future__ import annotations

from typing import Protocol

from cluster.errors import BatonError
from goodput.actions import Action, Drain, Flip, Start, Stop
from goodput.actuate.existing import ExistingFleet


class Unobservable(BatonError):
    """Which instances exist is unknown now. The caller leaves the fleet as it is: unknown is not zero."""


class Actuator(Protocol):
    """Carries out actions on one kind of cluster."""

    async def observe(self) -> ExistingFleet:
        """Everything that was asked for and is not gone.

        Raises:
            Unobservable: it is unknown now.
        """

    async def start(self, action: Start) -> str:
        """Ask for one more instance; no effect if one of this name exists."""

    async def flip(self, action: Flip) -> str:
        """Tell its agent to take another role; no effect if it has that role."""

    async def drain(self, action: Drain) -> str:
        """Tell its agent to take no new work and to end. A pending instance is cancelled."""

    async def stop(self, action: Stop) -> str:
        """End it now; no effect if it is gone."""


async def carry_out(actuator: Actuator, action: Action) -> str:
    """One action by its kind: an empty text, or why it is not carried out."""
    match action:
        case Start():
            return await actuator.start(action)
        case Flip():
            return await actuator.flip(action)
        case Drain(leave=False):
            return f"{action.instance}: only an instance that is to leave is drained here"
        case Drain():
            return await actuator.drain(action)
        case Stop():
            return await actuator.stop(action)
