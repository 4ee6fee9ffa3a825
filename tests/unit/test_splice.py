"""Bodies that are forwarded as bytes: engines read the same fields in them as in a body that is written anew."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import wire
from router.request.body import is_plain, spliced

KEYS = sorted(wire.TRANSFER_KEYS | wire.TOP_LEVEL_KEYS | wire.FREE_FORM_KEYS | {"cache_salt"})
WORDS = st.sampled_from(["prompt", "model", "a", "x" * 200, "priorit", "é", 'q"uote', "back\\slash", "\n"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=12,
)

BODIES = st.dictionaries(WORDS, VALUES, max_size=4)


def escaped(text: str, which: set[int]) -> str:
    """The text as a JSON string; the characters at the places in `which` are escaped."""
    return '"' + "".join(f"\\u{ord(c):04x}" if at in which else json.dumps(c)[1:-1] for at, c in enumerate(text)) + '"'


@given(st.dictionaries(WORDS, VALUES, max_size=4), st.booleans())
def test_bodies_without_transfer_fields_are_plain(body: dict[str, Any], ascii_only: bool) -> None:
    raw = json.dumps(body, ensure_ascii=ascii_only).encode()
    if b"\\u00" not in raw:  # `is_plain` takes no body with such an escape
        assert is_plain(raw, body)


@given(st.data(), st.dictionaries(WORDS, VALUES, max_size=3), st.sampled_from(KEYS))
def test_no_transfer_field_is_overlooked(data: st.DataObject, body: dict[str, Any], key: str) -> None:
    """The field is found if its key is escaped, if it is nested, and if a later key replaces it."""
    which = data.draw(st.sets(st.integers(0, len(key) - 1)))
    field = f'{{{escaped(key, which)}: {{"remote_host": "evil"}}}}'
    for _ in range(data.draw(st.integers(0, 3))):
        field = data.draw(st.sampled_from(['{"x": %s}', "[1, %s]", '{"x": %s, "x": 1}'])) % field
    inside = json.dumps(body)[1:-1]
    raw = ("{" + ", ".join(filter(None, [inside, f'"deep": {field}', '"deep": 1'])) + "}").encode()
    assert not is_plain(raw, msgspec.json.decode(raw))


def test_a_body_that_nests_too_deep_is_not_plain() -> None:
    body: Any = 1
    for _ in range(wire.DEPTH_MAX - 1):
        body = [body]
    assert is_plain(json.dumps({"a": body}).encode(), {"a": body})
    assert not is_plain(json.dumps({"a": [[body]]}).encode(), {"a": [[body]]})


def test_a_body_with_many_quotes_is_not_plain() -> None:
    body = {"messages": [{"role": "user", "content": "x"}] * 500}
    assert not is_plain(json.dumps(body).encode(), body)


@given(
    st.dictionaries(WORDS, VALUES, max_size=4),
    st.dictionaries(WORDS, VALUES, max_size=4),
    st.sampled_from(["", " ", "\n\t "]),
)
def test_spliced_fields_win(body: dict[str, Any], fields: dict[str, Any], space: str) -> None:
    raw = (space + json.dumps(body)[:-1] + space + "}" + space).encode()
    for read in (json.loads, msgspec.json.decode):
        assert read(spliced(raw, fields)) == {**body, **fields}


BODY = {"model": "m", "prompt": "p", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("more", [{}, {"max_completion_tokens": 7}, {"min_tokens": 3}, {"min_tokens": 0}])
@pytest.mark.parametrize("token_ids", [False, True])
def test_a_spliced_prefill_leg_has_the_fields_of_the_prefill_body(more: dict[str, Any], token_ids: bool) -> None:
    body = {**BODY, **more}
    leg = json.loads(spliced(json.dumps(body).encode(), wire.prefill_fields(body, token_ids=token_ids)))
    whole = wire.prefill_body(body, token_ids=token_ids)
    assert {name: value for name, value in leg.items() if name in whole} == whole
    assert all(leg[name] is None for name in leg.keys() - whole.keys()), "vLLM reads null as absent"
