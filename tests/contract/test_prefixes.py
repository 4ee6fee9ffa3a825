"""Turns of chats with tools go to the instance whose cache has their prefix, and find the tokens expected there."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from support.mock import mock_settings
from support.mocked_router import MockedRouter, mocked_router

from cluster.instance import Instance, Role
from costs.step import StepCost
from router.predict.step_model import Make

pytestmark = pytest.mark.timed

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"look_up_{name}",
            "description": f"Looks up the {name} that a traveller asks for, as of now, in the language asked in.",
            "parameters": {
                "type": "object",
                "properties": {
                    "where": {"type": "string", "description": f"Place of the {name}"},
                    "limit": {"type": "integer"},
                },
                "required": ["where"],
            },
        },
    }
    for name in ("weather", "train", "hotel", "museum", "ferry", "restaurant")
]
SENTENCE = "In the {}th year the old harbour master wrote down which ships had come and which of them had gone. "


class Talk:
    """One conversation: the messages that its client sends at each turn."""

    def __init__(self, number: int) -> None:
        system = "You help people travel. " + "".join(SENTENCE.format(number * 1000 + line) for line in range(12))
        self.number = number
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}]

    async def turn(self, router: MockedRouter, turn: int) -> str:
        """Send the next turn and keep its answer, as a client does. Returns the instance that computed the prompt."""
        lines = "".join(SENTENCE.format(self.number * 1000 + 100 * turn + line) for line in range(15))
        self.messages.append({"role": "user", "content": f"And then? {lines}"})
        asked = {"model": "fake", "messages": self.messages, "tools": TOOLS, "max_tokens": 40}
        name = f"talk-{self.number}-{turn}"
        status, answer, _ = await router.ask(asked, "/v1/chat/completions", x_request_id=name)
        assert status == 200, answer
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        story = await router.explain(name)
        chosen = next(each for each in story["turns"] if each["turn"] == "choice")
        return str(chosen["prefill"] or chosen["decode"])


def slow_to_prefill(instance: Instance) -> Make:
    """Decode instances prefill so slowly that a handover is cheaper."""
    slow = instance.role is Role.DECODE
    cost = StepCost(
        floor_ms=1.0,
        start_ms=1.0,
        token_ms=1.0 if slow else 0.005,
        area_ms=0.0,
        decode_ms=1.0,
        context_ms=0.0,
        request_ms=0.0,
    )
    return Make(prefill=cost, decode=cost)


@pytest.fixture(autouse=True)
def no_pauses() -> Iterator[None]:
    """Router and engines share this process: a long garbage collection looks like an engine that has become slow."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.parametrize("makes", [slow_to_prefill, None], ids=["handed over", "whole"])
async def test_turns_go_where_their_prefix_is_and_what_is_expected_is_there(
    makes: Callable[[Instance], Make] | None,
) -> None:
    roles = (Role.PREFILL, Role.DECODE) if makes else (Role.BOTH,)
    mocks = [mock_settings(f"{role.value}-{number}", role) for role in roles for number in range(2)]
    talks = [Talk(number) for number in range(6)]
    seen: list[list[str]] = [[] for _ in talks]
    async with mocked_router(mocks, policy="workload", makes=makes) as router:
        for turn in range(5):
            for at in range(0, len(talks), 2):
                went = await asyncio.gather(*(talk.turn(router, turn) for talk in talks[at : at + 2]))
                for row, where in zip(seen[at:], went, strict=False):
                    row.append(where)
        found = await router.metrics()
    expected, there, cached = (found[f"baton_prefix_{name}_tokens_total"] for name in ("expected", "found", "cached"))
    told = f"expected {expected}, found {there}, cached {cached}; {seen}"
    assert expected > 20_000, told
    assert there >= 0.95 * expected, told
    assert there >= 0.8 * cached, told
    pairs = [pair for row in seen for pair in pairwise(row)]
    assert sum(before == after for before, after in pairs) >= 0.9 * len(pairs), told
    names = {name for row in seen for name in row}
    assert names == {each.name for each in mocks if each.role.prefills}, "all of them are used, and no others"
