"""Prompts of all lengths are handed over: of long ones the router does not read the list of blocks in P's answer."""

from __future__ import annotations

import pytest
from support.mock import mock_settings
from support.mocked_router import mocked_router

from cluster.instance import Role


@pytest.mark.parametrize("words", [40, 30_000])
async def test_a_prompt_of_any_length_is_handed_over(words: int) -> None:
    fleet = [mock_settings(f"{role.value}-0", role, max_model_len=40_000) for role in (Role.PREFILL, Role.DECODE)]
    async with mocked_router(fleet) as router:
        status, _, headers = await router.ask({"prompt": "once " * words, "max_tokens": 4})
        assert status == 200
        turns = (await router.explain(headers["X-Baton-Request-Id"]))["turns"]
    assert [turn["leg"] for turn in turns if turn["turn"] == "leg"] == ["prefill", "decode"]
