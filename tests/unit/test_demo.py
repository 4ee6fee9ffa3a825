"""The demo of `baton up`: what it says of how its question was served."""

from __future__ import annotations

import pytest

from baton.demo import Demo, _count, _read, _way


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (192, 192, ("served whole", "prefill handed 192 prompt tokens over to decode by NIXL, to prove")),
        (192, 208, ("the KV cache of 16 prompt tokens went from prefill to decode over NIXL",)),
        (0, 192, ("served whole", "prefill handed 192 prompt tokens over to decode by NIXL, to prove")),
        (192, 384, ("served whole", "prefill handed 384 prompt tokens over")),
        (0, 0, ("served whole by one engine",)),
    ],
    ids=["proven before", "handed over", "proven meanwhile", "a second pair meanwhile", "nothing is proven"],
)
def test_a_proof_is_not_the_questions_hand_over(before: int, after: int, said: tuple[str, ...]) -> None:
    """Seen: the proof's 192 tokens were shown as those of a question of 17."""
    demo = Demo(prompt_tokens=17)
    _count(demo, before, after)
    assert all(each in _way(demo) for each in said)


def test_a_question_served_whole_has_the_routers_own_reason() -> None:
    demo = Demo(prompt_tokens=17, because="whole on decode-0 (TTFT 9 ms); decode-0 to prefill-0 0.40")
    assert "served whole by one engine" in _way(demo)
    assert "The router's reason: whole on decode-0 (TTFT 9 ms); decode-0 to prefill-0 0.40" in _way(demo)


def test_a_hand_over_has_no_reason_for_serving_whole() -> None:
    assert "reason" not in _way(Demo(prompt_tokens=17, because="prefill-0 to decode-0 (TTFT 9 ms)"))


def test_the_question_is_counted_by_its_engine() -> None:
    assert _read(b'data: {"choices": [{"delta": {"content": "Ba"}}]}\n') == ("Ba", 0)
    assert _read(b'data: {"choices": [], "usage": {"prompt_tokens": 17}}\n') == ("", 17)
    assert _read(b"data: [DONE]\n") == _read(b": a comment\n") == ("", 0)
