"""Clients of a cluster whose instances may flip roles: when each request's first token came, and what flipped."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import aiohttp
from support.cluster import Cluster

FLIPPED_S = 10.0
"""Seconds from the start of a burst within which a flipped instance has to give a first token."""


class Clients:
    """Streamed requests of class `chat`, by name."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self._session = session
        self.first_s: dict[str, float] = {}
        """When each request's first token came, in seconds of the monotonic clock."""
        self.texts: dict[str, str] = {}
        self.faults: list[str] = []

    async def ask(self, name: str, prompt: list[int], tokens: int) -> None:
        body = {"model": self.cluster.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        headers = {"x-slo-class": "chat", "x-request-id": name}
        url, text, whole = f"{self.cluster.endpoint}/v1/completions", "", False
        async with self._session.post(url, json=body, headers=headers) as answer:
            async for raw in answer.content:
                line = raw.decode().strip()
                whole = whole or line == "data: [DONE]"
                if answer.status != 200 or line.startswith('data: {"error"'):
                    self.faults.append(f"{name}: {answer.status} {line[:200]}")
                elif line.startswith("data: {"):
                    self.first_s.setdefault(name, time.monotonic())
                    text += str(json.loads(line[6:])["choices"][0]["text"])
        self.texts[name] = text
        if not whole:
            self.faults.append(f"{name}: {answer.status}, ended early: {text[-200:]!r}")

    def prefilled_on(self, name: str) -> str | None:
        """The instance that computed a request's prompt; None if the request was not handed over."""
        with urllib.request.urlopen(f"{self.cluster.admin}/explain/{name}", timeout=30) as answer:
            turns: list[dict[str, Any]] = json.loads(answer.read())["turns"]
        return next((each["instance"] for each in turns if each["turn"] == "leg" and each["leg"] == "prefill"), None)

    def flips(self) -> list[tuple[str, str]]:
        """Every flip that the controller has decided: the instance and its new role."""
        told = json.loads(self.cluster.baton("scale", "--json").stdout)
        return [
            (action["instance"], action["role"])
            for each in told["decisions"]
            if each["what"] == "flip"
            for action in each["actions"]
        ]

    def check_burst(self, names: list[str], sent_s: float) -> list[str]:
        """Check that no request failed, and that a flipped instance gave a first token within `FLIPPED_S`. Returns the
        requests that flipped instances prefilled.
        """
        assert self.faults == []
        flipped = {instance for instance, role in self.flips() if role == "prefill"}
        theirs = [name for name in names if self.prefilled_on(name) in flipped]
        assert theirs, (flipped, self.cluster.baton("scale").stdout)
        first_s = min(self.first_s[name] for name in theirs) - sent_s
        print(f"first token of a flipped instance after {first_s:.1f} s; {sorted(flipped)} flipped")
        assert first_s < FLIPPED_S, (first_s, flipped)
        return theirs
