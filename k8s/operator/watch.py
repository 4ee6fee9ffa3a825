"""Keeps all objects of one kind: lists them, watches with bookmarks, lists again if the server asks. A shell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from k8s.operator.client import ApiAway, ApiClient, ApiFailed

logger = logging.getLogger("baton.operator")

WAIT_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds between attempts to reach the API server; the last value repeats."""

Json = Mapping[str, Any]


class WatchCache:
    """All objects of one kind in a namespace (empty: in all namespaces)."""

    def __init__(
        self,
        client: ApiClient,
        api_version: str,
        kind: str,
        namespace: str,
        selector: str,
        changed: Callable[[Json], None],
    ) -> None:
        """`changed` is called with every object that has come, changed or gone."""
        self.objects: dict[tuple[str, str], Json] = {}
        """By namespace and name."""
        self.listed = asyncio.Event()
        """Set once all objects were listed."""
        self.lists = 0
        """Number of times that the whole list was read."""
        self.kind: Final = kind
        self._of: Final = (api_version, kind, namespace)
        self._selector: Final = selector
        self._client: Final = client
        self._changed: Final = changed
        self._version = ""
        """resourceVersion of the last list or event; empty: a list must be read."""
        self._latest = ""
        """The same, but it stays while a list is read."""

    async def run(self) -> None:
        """List and watch until cancelled."""
        tries, loop = 0, asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                tries = 0
                await asyncio.sleep(max(0.0, began + WAIT_S[0] - loop.time()))  # a server may end watches at once
            except ApiFailed as refusal:
                gone = refusal.status == 410
                self._version = ""
                if gone:
                    await asyncio.sleep(max(0.0, began + WAIT_S[0] - loop.time()))
                else:
                    logger.warning("cannot watch %s: %s", self.kind, refusal)
                    await asyncio.sleep(WAIT_S[min(tries, len(WAIT_S) - 1)])
                    tries += 1
            except ApiAway as loss:
                logger.info("lost the watch of %s: %s", self.kind, loss)
                await asyncio.sleep(WAIT_S[min(tries, len(WAIT_S) - 1)])
                tries += 1

    async def _list(self) -> None:
        """Read the whole list: objects that are missing in it are gone."""
        said = await self._client.list(*self._of, self._selector)
        api_version, kind, _ = self._of
        found: dict[tuple[str, str], Json] = {
            _key(each): {"apiVersion": api_version, "kind": kind, **each} for each in said.get("items") or ()
        }
        self._version = str(said["metadata"]["resourceVersion"])
        before = self.objects
        # Objects that the server answered while the list was read stay: the watch begins at the list and will report
        # them. If versions have gone back, as after a restore of etcd, the list alone counts.
        restored = _is_below(self._version, self._latest)
        later = {} if restored else {key: each for key, each in before.items() if _later(each, self._version)}
        self.objects = found | later
        self._latest = self._version
        self.lists += 1
        for key, each in found.items():
            if before.get(key, {}).get("metadata", {}).get("resourceVersion") != each["metadata"]["resourceVersion"]:
                self._changed(each)
        for key in before.keys() - self.objects.keys():
            self._changed(before[key])
        self.listed.set()

    async def _watch(self) -> None:
        async for event in self._client.watch(*self._of, self._version, self._selector):
            thing = event["object"]
            self._version = self._latest = str(thing["metadata"]["resourceVersion"])
            if event["type"] in {"ADDED", "MODIFIED", "DELETED"}:
                self._take(thing, gone=event["type"] == "DELETED")
                self._changed(thing)

    def _take(self, thing: Json, *, gone: bool) -> None:
        """Take an object from the watch. A later version from an answer (`put`) stays: otherwise the operator would see
        a mark again that it has just removed, and act on it.
        """
        key = _key(thing)
        known = self.objects.get(key)
        if known is not None and _later(known, self._version):
            return
        if gone:
            self.objects.pop(key, None)
        else:
            self.objects[key] = thing

    def put(self, thing: Json) -> None:
        """Take an object from an answer, before the watch reports it. An older version changes nothing.

        An unknown object is taken if its version is later than the watch's: the watch will report what happened since.
        """
        key = _key(thing)
        known = self.objects.get(key)
        if _later(thing, self._version if known is None else str(known["metadata"]["resourceVersion"])):
            self.objects[key] = thing


def _key(thing: Json) -> tuple[str, str]:
    return str(thing["metadata"].get("namespace", "")), str(thing["metadata"]["name"])


def _later(thing: Json, version: str) -> bool:
    """Whether an object's resourceVersion is later: they are compared as numbers, as Kubernetes 1.35 allows."""
    return _is_below(version, str(thing["metadata"]["resourceVersion"]))


def _is_below(version: str, other: str) -> bool:
    return version.isdecimal() and other.isdecimal() and int(version) < int(other)
