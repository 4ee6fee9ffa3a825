"""The modules, calls and frames that a request passes before its first byte leaves for an engine, counted.

This limits how much a reader of the code has to follow; `make bench-router` measures time. `-s` prints the figures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.mock import mock_settings
from support.mocked_router import mocked_router

from cluster.instance import Role
from router.http import front, legs

pytestmark = pytest.mark.interpreted

ROOT = Path(__file__).resolve().parents[2]

LIMITS = {"least_load": (44, 230), "workload": (58, 430)}
"""The most modules of Baton, and calls of Python functions, by policy."""


class Counted:
    """A profiler's counts, from a connection's bytes to a leg's, in one stack of calls."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.calls = self.all_calls = self.depth = self.deepest = 0
        self.over = False
        self.target = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.over:
            return
        self.all_calls += event in {"call", "c_call"}
        if event == "call":
            self.calls += 1
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and {".venv", "tests"}.isdisjoint(path.parts):
                self.modules.add(str(path.relative_to(ROOT)))
        elif event == "return":
            self.depth -= 1


def counting(found: Counted, real: Callable[..., Any]) -> Callable[..., Any]:
    def data_received(self: Any, data: bytes) -> None:
        sys.setprofile(found)
        try:
            real(self, data)
        finally:
            sys.setprofile(None)

    return data_received


def ending(found: Counted, real: Callable[..., Any]) -> Callable[..., Any]:
    def send(self: Any, *given: Any, **named: Any) -> Any:
        found.target = found.target or given[0]
        leg = real(self, *given, **named)
        found.over = True
        return leg

    return send


@pytest.mark.parametrize("policy", LIMITS)
async def test_a_request_reaches_its_first_engine_by_few_modules_and_calls(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mocks = [mock_settings("p", Role.PREFILL), mock_settings("d", Role.DECODE)]
    body = {"model": "fake", "prompt": "hello " * 40, "max_tokens": 4, "stream": True}
    async with mocked_router(mocks, policy=policy) as router:
        for _ in range(3):  # what the router does once for a model, a connection or an instance is done here
            assert (await router.ask(body))[0] == 200
        real, send, tries = front.ClientConnection.data_received, legs.Legs.send, []
        for _ in range(8):  # the pairs that are priced depend on their speed: the shortest path counts
            tries.append(found := Counted())
            monkeypatch.setattr(front.ClientConnection, "data_received", counting(found, real))
            monkeypatch.setattr(legs.Legs, "send", ending(found, send))
            assert (await router.ask(body))[0] == 200
            assert found.over
    found = min(tries, key=lambda each: each.calls)
    told = f"{len(found.modules)} modules, {found.calls} calls ({found.all_calls} with C's), {found.deepest} frames"
    print(f"{policy}: {told}, to {found.target}")
    modules, calls = LIMITS[policy]
    assert len(found.modules) <= modules, sorted(found.modules)
    assert found.calls <= calls
