"""What all requests of one router share: made once, handed to the driver of each. A shell: it holds shells."""

from __future__ import annotations

from typing import Final, Protocol

from cluster.telemetry import Tracing
from router.core.clients import Clients, OpenBodies
from router.fleet.view import FleetView
from router.http.engines import Engines
from router.http.tasks import Tasks
from router.predict.predictors import RequestPredictor
from router.request.refusals import Refusals
from router.scheduler.dispatch import Dispatch, Losses, Waiters
from router.scheduler.scheduler import Scheduler
from router.telemetry.explain_store import ExplainStore
from router.telemetry.metrics import RouterMetrics

BUG: Final = "%s: a request failed in the router"
"""The log line for a bug of the router's; it takes the request's label."""


class Open(Protocol):
    """A request that is not over."""

    def stop(self) -> None:
        """The router ends: ignore all further events."""


class RequestLimits:
    """The limits of a request, and what may be done for it."""

    __slots__ = ("answer_bytes_max", "client_stall_s", "seeding", "stall_s")

    def __init__(self, *, answer_bytes_max: int, stall_s: float, client_stall_s: float, seeding: bool) -> None:
        """See `router.api.config.RouterConfig`."""
        self.answer_bytes_max: Final = answer_bytes_max
        self.stall_s: Final = stall_s
        self.client_stall_s: Final = client_stall_s
        self.seeding: Final = seeding


class Telling:
    """The receivers of reports about requests."""

    __slots__ = ("memory", "meters", "tracing")

    def __init__(self, meters: RouterMetrics, memory: ExplainStore, tracing: Tracing | None) -> None:
        self.meters: Final = meters
        self.memory: Final = memory
        self.tracing: Final = tracing


class Parts:
    """All shared parts of a router, an attribute each. This class decides nothing."""

    __slots__ = (
        "bodies", "clients", "dispatch", "engines", "limits", "line", "losses", "meters", "open", "predictor",
        "refusals", "scheduler", "tasks", "telling", "view",
    )  # fmt: skip

    def __init__(
        self,
        *,
        limits: RequestLimits,
        bodies: OpenBodies,
        clients: Clients,
        engines: Engines,
        dispatch: Dispatch,
        predictor: RequestPredictor | None,
        telling: Telling,
        tasks: Tasks,
    ) -> None:
        """`predictor`: None if no predictions are made."""
        self.limits: Final = limits
        self.bodies: Final = bodies
        self.clients: Final = clients
        self.engines: Final = engines
        self.dispatch: Final = dispatch
        self.scheduler: Final[Scheduler] = dispatch.scheduler
        self.view: Final[FleetView] = dispatch.view
        self.line: Final[Waiters] = dispatch.line
        self.losses: Final[Losses] = dispatch.losses
        self.predictor: Final = predictor
        self.telling: Final = telling
        self.meters: Final[RouterMetrics] = telling.meters
        self.tasks: Final = tasks
        self.refusals: Final = Refusals(telling.meters)
        self.open: Final[set[Open]] = set()
        """Requests that are not over."""
