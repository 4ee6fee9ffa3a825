"""`/explain`: what was decided about requests, on whichever router they were. A shell: HTTP, a clock."""

from __future__ import annotations

import math
import time
from typing import Any, Final
from urllib.parse import quote

from aiohttp import web

from cluster.errors import ApiError, bad_request
from router.admin.access import AdminAccess
from router.admin.peer_words import listed
from router.admin.peers import RouterPeers, read_answer
from router.http.cold import json_response
from router.telemetry.explain_store import ExplainStore, Story


class Explanations:
    """The requests that this router and its peers remember."""

    def __init__(self, memory: ExplainStore, peers: RouterPeers, access: AdminAccess) -> None:
        self._memory: Final = memory
        self._peers: Final = peers
        self._access: Final = access

    async def latest(self, http: web.Request) -> web.Response:
        """``/explain``: open requests and the last that ended, of all routers, newest first; at most ``?n=``, else 100.

        Raises:
            ApiError: 400 for an invalid `n`; as `AdminAccess.reader`.
        """
        given = http.query.get("n", "100")
        if not given.isdecimal() or len(given) > 9:
            raise bad_request(f"`n` is {given[:50]!r}: give a count, as in /explain?n=20", "n")
        now, reader = time.monotonic(), self._access.reader(http)
        found = [
            {**story.line(now), "ago_s": round(now - story.timeline.arrived, 3), "router": str(self._peers.name)}
            for story in self._memory.latest(int(given), reader)
        ]
        silent: dict[str, str] = {}
        if not self._peers.asks(http.headers):
            for name, answer in (await self._peers.ask(f"/explain?n={given}", reader)).items():
                said = read_answer(answer, listed)
                if isinstance(said, str):
                    silent[name] = said
                else:
                    found += said["requests"]
            found.sort(key=lambda each: float(each["ago_s"]))
        more = {"silent": silent} if silent else {}
        return json_response({"requests": found[: int(given)], **more})

    async def one(self, http: web.Request) -> web.Response:
        """``/explain/ID``: what was decided about one request, on whichever router it was.

        ID is the router's id or the client's. Clients may use one id several times: the answer is the newest request
        that the reader may see, and the number of such requests (``named_alike``).
        """
        name, reader = http.match_info["id"], self._access.reader(http)
        story = self._memory.get(name)
        if story is not None and reader in {None, story.client.tenant}:
            return json_response(self._told(story))
        alike = self._memory.named(name, reader)
        found = [{**self._told(alike[0]), "named_alike": len(alike)}] if alike else []
        missing = ""
        if not self._peers.asks(http.headers):
            answers = await self._peers.ask(f"/explain/{quote(name, safe='')}", reader)
            found += [said for answer in answers.values() if isinstance(said := read_answer(answer), dict)]
            silent = [f"{each} ({why})" for each, why in answers.items() if isinstance(why, str)]
            missing = f" Not asked: {'; '.join(silent)}." if silent else ""
        if not found:
            kept = f"Open requests are remembered, and the last {self._memory.last_max} finished"
            message = f"No request `{name[:200]}` is known here. {kept} (--explain-last). Answers tell their id in"
            raise ApiError(404, "NotFoundError", f"{message} X-Baton-Request-Id.{missing}")
        return json_response(_newest(found))

    def _told(self, story: Story) -> dict[str, Any]:
        now = time.monotonic()
        ago_s = round(now - story.timeline.arrived, 3)
        return {**story.as_json(now), "ago_s": ago_s, "router": str(self._peers.name)}


def _newest(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several routers' answers about one name: the request with that router id, else the newest request with that
    client id, and the number of these.
    """
    ours = next((each for each in found if "named_alike" not in each), None)
    if ours is not None:
        return ours
    newest: dict[str, Any] = min(found, key=_ago_s)
    return {**newest, "named_alike": sum(map(_alike, found))}


def _ago_s(said: dict[str, Any]) -> float:
    """How long ago a request came; infinite if the peer sent no number."""
    ago_s = said.get("ago_s")
    return float(ago_s) if isinstance(ago_s, int | float) else math.inf


def _alike(said: dict[str, Any]) -> int:
    """How many requests a router reports of a name; one if it sent no count."""
    count = said.get("named_alike")
    return count if isinstance(count, int) and 0 < count < 1 << 31 else 1
