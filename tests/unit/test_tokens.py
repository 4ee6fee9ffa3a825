"""Numbers of tokens, estimated from bytes: kinds of text, and learned ratios by tenant."""

from __future__ import annotations

import pytest

from router.predict.prompt_tokens import START_BYTES_PER_TOKEN, Ratios, TextKind, kind_of

PROSE = "It was late in the evening, and nobody had come to the house for days; she wrote another letter. " * 20
CODE = (
    "def f(x):\n    return {k: v[1] for k, v in x.items() if v == (k << 2)}\n\n# end\n"
    "for (i = 0; i < n; ++i) { a[i] = 0; }\n" * 20
)
JSON = '{"id": 12, "name": "a thing", "tags": ["x", "y"], "sizes": [1, 2, 3], "more": {"key": "value"}}\n' * 20
CHINESE = "今天天气很好,我们一起去公园散步吧。" * 40
JAPANESE = "これはテストの文章です。よろしくお願いします。" * 40


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (PROSE, TextKind.TEXT),
        (CODE, TextKind.CODE),
        (JSON, TextKind.JSON),
        (CHINESE, TextKind.CJK),
        (JAPANESE, TextKind.CJK),
        ("Grüße aus Köln: schöne Tage, Bäume, Äpfel, Öl. " * 30, TextKind.TEXT),
        ("Привет, как дела? Сегодня хорошая погода. " * 30, TextKind.TEXT),
        ("t[i], u[j]: {k, l}, [m, n], [o], {p: q} " * 30, TextKind.CODE),
        ("", TextKind.TEXT),
        ("短", TextKind.CJK),
    ],
)
def test_kinds_of_text_are_recognised(text: str, kind: TextKind) -> None:
    assert kind_of(text.encode()) is kind


def test_kind_reads_only_samples() -> None:
    assert kind_of((PROSE * 200).encode()) is TextKind.TEXT
    assert kind_of((PROSE[:600] + CHINESE * 500 + PROSE[-600:]).encode()) is TextKind.TEXT, (
        "two of three samples are prose"
    )


def test_cold_start_uses_the_kind() -> None:
    ratios = Ratios()
    for kind, ratio in START_BYTES_PER_TOKEN.items():
        found = ratios.tokens("acme", "qwen", kind, 100_000)
        assert found == pytest.approx(100_000 / ratio, rel=0.1), kind


def test_a_tenants_ratio_is_learned() -> None:
    ratios = Ratios()
    for at in range(400):
        ratios.learn("acme", "qwen", TextKind.TEXT, 1000, 200 + at % 100)
    found = ratios.tokens("acme", "qwen", TextKind.TEXT, 1000)
    assert found == pytest.approx(250, rel=0.03)
    other = ratios.tokens("acme", "other model", TextKind.TEXT, 1000)
    assert other == pytest.approx(found, rel=0.02), "a new model begins with the ratio of all prompts of the kind"
    assert ratios.tokens("acme", "qwen", TextKind.CODE, 1000) == pytest.approx(1000 / 3.4, rel=0.1)


def test_token_ids_are_counted_and_teach_no_ratio() -> None:
    ratios = Ratios()
    known = len(ratios)
    assert ratios.tokens("acme", "qwen", TextKind.IDS, 4 * 123) == 123
    ratios.learn("acme", "qwen", TextKind.IDS, 400, 7)
    ratios.learn("acme", "qwen", TextKind.TEXT, 0, 7)
    ratios.learn("acme", "qwen", TextKind.TEXT, 7, 0)
    assert len(ratios) == known
    assert ratios.tokens("acme", "qwen", TextKind.TEXT, 0) == 1
