"""The watch cache of one kind: answers to the operator's writes arrive before or after the watch's events of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from k8s.operator import watch
from k8s.operator.client import ApiClient, ApiFailed
from k8s.operator.watch import WatchCache

Json = dict[str, Any]


def thing(version: int, mark: str = "", name: str = "decode-0") -> Json:
    labels = {"draining-since": mark} if mark else {}
    return {"kind": "Deployment", "metadata": {"name": name, "resourceVersion": str(version), "labels": labels}}


class Server:
    """An API server that lists its objects, and sends an event when a test asks for it."""

    def __init__(self, *there: Json) -> None:
        self.there = there
        self.version = "9"
        self.events: asyncio.Queue[tuple[str, Json]] = asyncio.Queue()

    async def list(self, *_: str) -> Json:
        return {"metadata": {"resourceVersion": self.version}, "items": list(self.there)}

    async def watch(self, *_: str) -> AsyncIterator[Json]:
        while True:
            kind, told = await self.events.get()
            if kind == "ERROR":
                self.events.task_done()
                raise ApiFailed(410, "Expired", "too old resource version")
            yield {"type": kind, "object": told}
            self.events.task_done()

    async def tells(self, kind: str, told: Json) -> None:
        """Send one event, and wait until the cache has taken it."""
        self.events.put_nowait((kind, told))
        await self.events.join()


async def kept(server: Server, changed: list[Json]) -> tuple[WatchCache, asyncio.Task[None]]:
    cache = WatchCache(cast("ApiClient", server), "apps/v1", "Deployment", "ns", "", changed.append)
    running = asyncio.get_running_loop().create_task(cache.run())
    await cache.listed.wait()
    return cache, running


async def test_an_event_older_than_an_answer_changes_nothing() -> None:
    """A drain is marked (version 10) and taken back (12); then the watch's event of the mark arrives, late. If the
    cache took it, the operator would tell the agent to drain again, without a mark.
    """
    server = Server(thing(5))
    cache, running = await kept(server, [])
    cache.put(thing(10, mark="now"))
    cache.put(thing(12))
    await server.tells("MODIFIED", thing(10, mark="now"))
    assert cache.objects["", "decode-0"] == thing(12)
    await server.tells("MODIFIED", thing(12))
    await server.tells("MODIFIED", thing(13, mark="later"))
    assert cache.objects["", "decode-0"] == thing(13, mark="later")
    running.cancel()


@pytest.mark.parametrize("event", ["DELETED", "MODIFIED", "ADDED"])
async def test_an_event_of_an_object_that_was_made_anew_changes_nothing(event: str) -> None:
    server = Server(thing(5))
    changed: list[Json] = []
    cache, running = await kept(server, changed)
    cache.put(thing(15))  # the object was deleted (11), and made again under its name
    await server.tells(event, thing(11))
    assert cache.objects["", "decode-0"] == thing(15)
    assert changed[-1]["metadata"]["resourceVersion"] == "11", "the operator looks at the object all the same"
    await server.tells("DELETED", thing(16))
    assert not cache.objects
    running.cancel()


async def test_events_whose_versions_are_no_numbers_are_taken() -> None:
    server = Server()
    cache, running = await kept(server, [])
    for version in ("b", "a"):
        told = {"kind": "Deployment", "metadata": {"name": "x", "resourceVersion": version}}
        await server.tells("MODIFIED", told)
        assert cache.objects["", "x"] == told
    running.cancel()


async def test_an_answer_newer_than_a_list_stays() -> None:
    """The list has version 9; before it came, the server answered the write of a drain's mark with version 12."""
    server = Server(thing(5))
    changed: list[Json] = []
    cache = WatchCache(cast("ApiClient", server), "apps/v1", "Deployment", "ns", "", changed.append)
    cache.put(thing(3, name="gone"))
    cache.objects["", "decode-0"] = thing(12, mark="now")
    running = asyncio.get_running_loop().create_task(cache.run())
    await cache.listed.wait()
    assert cache.objects == {("", "decode-0"): thing(12, mark="now")}
    running.cancel()


async def test_after_a_restore_only_the_list_counts() -> None:
    """A restore of the server's data sets versions back: a kept object is not newer than the list, whatever its own."""
    server = Server(thing(5), thing(6, name="made-later"))
    changed: list[Json] = []
    cache, running = await kept(server, changed)
    await server.tells("MODIFIED", thing(50, mark="now"))
    await server.tells("MODIFIED", thing(51, name="made-later"))
    server.there, server.version = (thing(3),), "4"
    await server.tells("ERROR", {})
    while cache.lists < 2:
        await asyncio.sleep(0)
    assert {key: each["metadata"] for key, each in cache.objects.items()} == {("", "decode-0"): thing(3)["metadata"]}
    assert [each["metadata"]["name"] for each in changed[-2:]] == ["decode-0", "made-later"]
    await server.tells("MODIFIED", thing(7, mark="again"))
    assert cache.objects["", "decode-0"] == thing(7, mark="again")
    running.cancel()


@pytest.mark.parametrize("ends", ["at once", "too old"])
async def test_watches_that_end_at_once_are_not_repeated_without_a_pause(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hasty(Server):
        watches = 0

        async def watch(self, *_: str) -> AsyncIterator[Json]:
            self.watches += 1
            if ends == "too old":
                raise ApiFailed(410, "Expired", "too old resource version")
            for nothing in ():
                yield nothing

    pauses: list[float] = []
    enough = asyncio.Event()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            enough.set()
            await asyncio.Event().wait()

    server = Hasty(thing(5))
    monkeypatch.setattr(watch.asyncio, "sleep", pause)
    _, running = await kept(server, [])
    await enough.wait()
    running.cancel()
    assert server.watches == 3 and min(pauses) > watch.WAIT_S[0] / 2
