"""Laws of predicted answer lengths and prompt token counts, under any history."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.predict.answer_lengths import EDGES, LENGTH_MAX, LEVELS, Features, Predictor, cues_of
from router.predict.prompt_tokens import Ratios, TextKind, kind_of

features = st.builds(
    Features,
    tenant=st.sampled_from("ab"),
    model=st.sampled_from("mn"),
    slo_class=st.sampled_from(["", "batch"]),
    prompt_tokens=st.integers(0, 1 << 20),
    max_tokens=st.none() | st.integers(1, 1 << 18),
    min_tokens=st.integers(0, 50),
    ignore_eos=st.booleans(),
    cues=st.integers(0, 63),
    room=st.none() | st.integers(1, 1 << 18),
)
answers = st.lists(st.tuples(features, st.integers(0, 1 << 18), st.booleans()), max_size=60)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(answers, features, st.integers(20, 60))
@settings(max_examples=150, deadline=None)
def test_quantiles_rise_stay_within_limits_and_memory_is_bounded(
    history: list[tuple[Features, int, bool]], asked: Features, keys_max: int
) -> None:
    predictor = Predictor(keys_max=keys_max, memory=30, rate=0.5)
    for each, tokens, cut_off in history:
        predictor.learn(predictor.predict(each), tokens, cut_off=cut_off)
    found = predictor.predict(asked)
    cap = min(each for each in (LENGTH_MAX, asked.max_tokens, asked.room) if each is not None)
    low = cap if asked.ignore_eos and asked.max_tokens else 1
    quantiles = [found.quantile(at / 1000) for at in range(1, 1000)]
    assert quantiles == sorted(quantiles)
    assert low <= quantiles[0] <= quantiles[-1] <= cap
    assert list(found.served) == [quantiles[round(level * 1000) - 1] for level in LEVELS]
    assert len(predictor) <= keys_max
    assert predictor.bytes <= keys_max * 32 * len(EDGES)


@given(answers, features, st.integers(0, 1 << 18))
@settings(max_examples=150, deadline=None)
def test_the_mean_remaining_length_is_within_the_limit(
    history: list[tuple[Features, int, bool]], asked: Features, made: int
) -> None:
    predictor = Predictor(memory=30)
    for each, tokens, cut_off in history:
        predictor.learn(predictor.predict(each), tokens, cut_off=cut_off)
    found = predictor.predict(asked)
    cap = min(each for each in (LENGTH_MAX, asked.max_tokens, asked.room) if each is not None)
    left = found.mean_remaining(made)
    assert 0 <= left <= max(0, cap - made)
    assert (left == 0) == (made >= cap)
    assert 1 - 1e-6 <= found.mean <= cap


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "tools", "response_format"]), json_values))
def test_any_body_has_cues(body: dict[str, object]) -> None:
    assert 0 <= cues_of(body) < 64


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(TextKind), st.integers(0, 10**7), st.integers(0, 10**6)),
        max_size=50,
    ),
    st.sampled_from(TextKind),
    st.integers(0, 10**8),
)
@settings(deadline=None)
def test_estimates_grow_with_the_text(history: list[tuple[str, TextKind, int, int]], kind: TextKind, size: int) -> None:
    ratios = Ratios()
    for tenant, each, text_bytes, tokens in history:
        ratios.learn(tenant, "m", each, text_bytes, tokens)
    found, larger = (ratios.tokens("a", "m", kind, each) for each in (size, 2 * size + 10))
    assert 1 <= found <= larger


@given(st.binary(max_size=4000))
def test_every_text_has_a_kind(text: bytes) -> None:
    assert kind_of(text) in set(TextKind) - {TextKind.IDS}
