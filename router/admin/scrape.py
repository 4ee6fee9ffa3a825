"""The content of `/metrics`, on both sides of a router. A shell: the clock."""

from __future__ import annotations

import time
from typing import Final

from router.fleet.discovery import Discovery
from router.http.doors import Doors
from router.http.uploads import Uploads
from router.request.parts import Parts


class Scrape:
    """The metrics of one router."""

    def __init__(self, parts: Parts, watch: Discovery | None, doors: Doors, uploads: Uploads) -> None:
        """`watch`: None without a registry."""
        self._parts: Final = parts
        self._watch: Final = watch
        self._doors: Final = doors
        self._uploads: Final = uploads

    def unproven(self) -> dict[str, str]:
        """Instances and routers in the registry that are ignored for want of a valid proof, and why."""
        return {} if self._watch is None else self._watch.unproven()

    def text(self) -> bytes:
        """Prometheus text."""
        parts, watch = self._parts, self._watch
        stale_s = 0.0 if watch is None else watch.stale_s(time.monotonic())
        parts.meters.open.set(len(parts.open))
        parts.meters.clients.show(self._doors, self._uploads, parts.bodies)
        controlled = watch is not None and watch.controller is not None
        waiting, unproven = len(parts.scheduler.line), len(self.unproven())
        return parts.meters.text(parts.view, waiting, stale_s, unproven, controlled=controlled)
