"""A router knows its engines' contexts when it predicts how long an answer will be."""

from __future__ import annotations

import pytest
from support.mock import mock_settings
from support.mocked_router import mocked_router

from cluster.instance import Role
from cluster.spec import SloClass
from router.predict.answer_lengths import AnswerLengths, Features, Predictor

CLASSES = {"easy": SloClass(ttft_ms=60_000)}
"""With classes, the router predicts."""


@pytest.mark.interpreted
async def test_an_answer_that_ignores_its_end_is_predicted_within_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was foretold 131,072 tokens, which shut the instance to all other requests."""
    found: list[AnswerLengths] = []
    predict = Predictor.predict

    def noted(self: Predictor, features: Features) -> AnswerLengths:
        found.append(predict(self, features))
        return found[-1]

    monkeypatch.setattr(Predictor, "predict", noted)
    async with mocked_router([mock_settings("both-0", Role.BOTH, max_model_len=512)], classes=CLASSES) as router:
        messages = [{"role": "user", "content": "Tell me of the harbour."}]
        body = {"model": "fake", "messages": messages, "ignore_eos": True}
        assert (await router.ask(body, "/v1/chat/completions"))[0] == 200
    (lengths,) = found
    assert 256 < lengths.outlook().mean < 512
