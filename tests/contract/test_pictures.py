"""Chats with pictures through a router and mocks: predicted tokens, the prefix cache, and bounds on their size."""

from __future__ import annotations

from typing import Any

from support.mock import mock_settings
from support.mocked_router import MockedRouter, mocked_router

from cluster.instance import Role

CHAT = "/v1/chat/completions"
QUESTION = "What is to be seen on it, and where was it taken? " * 60
PICTURE = "data:image/png;base64," + "QUJD" * 100_000
"""400 KB: about 100,000 tokens as text, some hundred tokens as a picture."""


async def ask(router: MockedRouter, picture: str, name: str) -> tuple[int, Any]:
    parts = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": QUESTION}]
    asked = {"model": "fake", "messages": [{"role": "user", "content": parts}], "max_tokens": 8}
    status, answer, _ = await router.ask(asked, CHAT, x_request_id=name)
    return status, answer


async def place(router: MockedRouter, name: str) -> str:
    story = await router.explain(name)
    choice = next(each for each in story["turns"] if each["turn"] == "choice")
    return str(choice["prefill"] or choice["decode"])


async def expected(router: MockedRouter) -> float:
    """Tokens that the router expected in prefix caches."""
    return (await router.metrics())["baton_prefix_expected_tokens_total"]


async def test_the_same_picture_is_found_again_and_another_is_not_expected() -> None:
    mocks = [mock_settings(f"both-{number}", Role.BOTH) for number in range(3)]
    async with mocked_router(mocks, policy="workload") as router:
        status, answer = await ask(router, PICTURE, "first")
        assert (status, await expected(router)) == (200, 0)
        tokens = answer["usage"]["prompt_tokens"]
        assert 576 < tokens < 2000
        status, answer = await ask(router, PICTURE, "again")
        assert status == 200
        assert await place(router, "again") == await place(router, "first")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0.9 * tokens
        found = await expected(router)
        assert 0.8 * tokens < found < 1.3 * tokens, "how many tokens a picture is has still to be learned"
        for number, other in enumerate((PICTURE + "QUJD", PICTURE.replace("QUJD", "QUJE", 1))):
            status, answer = await ask(router, other, f"other-{number}")
            assert status == 200
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < 32, "the mock's own cache says so, too"
            assert await expected(router) == found


async def test_a_chat_with_a_picture_is_handed_over_and_its_tokens_are_a_pictures() -> None:
    mocks = [mock_settings("prefill-0", Role.PREFILL), mock_settings("decode-0", Role.DECODE)]
    async with mocked_router(mocks, policy="least_load") as router:
        status, answer = await ask(router, PICTURE, "one")
        assert status == 200
        assert (await router.metrics())['baton_handoffs_total{result="ok"}'] == 1
        assert answer["usage"]["prompt_tokens"] < 2000


async def test_a_picture_beyond_the_bound_is_refused_before_any_engine_sees_it() -> None:
    mocks = [mock_settings("both-0", Role.BOTH)]
    async with mocked_router(mocks, body_bytes_max=300_000) as router:
        status, answer = await ask(router, PICTURE, "large")
        assert status == 413
        assert "--body-bytes-max" in answer["error"]["message"]
        assert (await ask(router, PICTURE[:200_000], "small"))[0] == 200
