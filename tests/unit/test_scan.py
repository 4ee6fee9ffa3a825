"""A survey of a JSON text finds the same as a parser, wherever the slices are cut."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import scan
from cluster.scan import COMMON_MAX, KEYS_MAX, FoundKey, Names, TooDeep, TooMany, run, survey

OURS = ("kv_transfer_params", "vllm_xargs")
NAMES = Names(OURS)
WORDS = st.sampled_from([*OURS, "a", 'q"', "back\\", "\\u006b", "é", "😀", "[{", "}]", ",:", "", "kv_transfer_param"])
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | WORDS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=15
)


def escaped(text: str, which: set[int]) -> str:
    """The text as a JSON string; the characters at the places in `which` are escaped."""
    return '"' + "".join(f"\\u{ord(c):04X}" if at in which else json.dumps(c)[1:-1] for at, c in enumerate(text)) + '"'


def written(value: Any, data: st.DataObject) -> str:
    """The value as JSON, with drawn spaces and escapes."""
    space = data.draw(st.sampled_from(["", " ", "\n\t"]))
    if isinstance(value, str):
        plain = value.isascii() and value.isprintable()
        return escaped(value, data.draw(st.sets(st.integers(0, len(value)), max_size=3)) if plain else set())
    if isinstance(value, list):
        return f"[{space}" + f"{space},{space}".join(written(each, data) for each in value) + "]"
    if isinstance(value, dict):
        pairs = (f"{written(key, data)}{space}:{space}{written(each, data)}" for key, each in value.items())
        return "{" + f"{space},".join(pairs) + space + "}"
    return json.dumps(value)


def counted(value: Any, around: int = 0) -> tuple[int, int, list[tuple[str, int]]]:
    """The number of objects, arrays and texts, the depth, and the keys in `OURS`, each with its depth: counted in the
    parsed value. `around`: the objects and arrays that contain the value.
    """
    if isinstance(value, str):
        return 1, 0, []
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        return 0, 0, []
    keys = list(value) if isinstance(value, dict) else []
    found = [counted(each, around + 1) for each in inner]
    values = 1 + len(keys) + sum(each[0] for each in found)
    ours = [(key, around + 1) for key in keys if key in OURS] + [key for each in found for key in each[2]]
    return values, 1 + max((each[1] for each in found), default=0), ours


@settings(max_examples=50, deadline=None)
@given(st.data(), VALUES, st.sampled_from([3, 5, 17, 64, 1 << 16]))
def test_a_survey_finds_what_a_recursive_count_finds(data: st.DataObject, value: Any, slice_bytes: int) -> None:
    raw = written(value, data).encode()
    values, depth, ours = counted(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "SLICE_BYTES", slice_bytes)
        found = run(survey(raw, NAMES, depth_max=depth))
        assert found.values == values
        assert sorted((key.name, key.depth) for key in found.keys) == sorted(ours)
        for key in found.keys:
            assert raw[: key.at].rstrip().endswith(b":")
        if depth:
            with pytest.raises(TooDeep, match=f"{depth - 1} levels"):
                run(survey(raw, NAMES, depth_max=depth - 1))
        if values:
            with pytest.raises(TooMany, match="objects, arrays and texts"):
                run(survey(raw, NAMES, depth_max=depth, values_max=values - 1))


@settings(deadline=None)
@given(st.text('\\"a[]{},:k 1', max_size=60), st.sampled_from([1, 2, 3, 9]))
def test_no_text_makes_a_survey_fail(text: str, slice_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "SLICE_BYTES", slice_bytes)
        try:
            run(survey(text.encode(), NAMES, depth_max=8))
        except TooDeep:
            assert text.count("[") + text.count("{") > 8


def test_a_key_that_is_cut_by_a_slice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "SLICE_BYTES", 40)
    for before in range(60):
        raw = json.dumps({"x" * before: 1, "kv_transfer_params": 2}).encode()
        assert run(survey(raw, NAMES, depth_max=1)).keys == (FoundKey("kv_transfer_params", len(raw) - 3, 1),), before


def test_texts_that_only_look_like_keys_are_not_found() -> None:
    for raw in (
        b'{"a": "kv_transfer_params", "b": 1}',
        b'{"a": ["kv_transfer_params"]}',
        b'{"a\\"kv_transfer_params": 1}',
        b'{"a": "\\"kv_transfer_params\\": 1"}',
        b'{"\\\\u006bv_transfer_params": 1}',
    ):
        assert run(survey(raw, NAMES, depth_max=4)).keys == (), raw


def test_limits_are_met_in_the_slice_that_breaks_them() -> None:
    """The survey stops at that slice, so the rest of the body costs nothing."""
    steps = survey(b"[" * (64 << 16), NAMES, depth_max=64)
    with pytest.raises(TooDeep):
        next(steps)
    steps = survey(b"[" + b"[]," * (1 << 20), NAMES, depth_max=64, values_max=1000)
    with pytest.raises(TooMany, match="1,000"):
        next(steps)


def test_numbers_have_a_limit_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "NUMBERS_MAX", 100)
    assert run(survey(b"[" + b"1," * 100 + b"1]", NAMES, depth_max=4)).commas == 100
    with pytest.raises(TooMany, match="100 numbers"):
        run(survey(b"[" + b"1," * 101 + b"1]", NAMES, depth_max=4))
    assert run(survey(b'["' + b"1," * 101 + b'"]', NAMES, depth_max=4)).commas == 0


def test_brackets_that_do_not_match_end_the_survey() -> None:
    """Before, unmatched brackets were kept from slice to slice, and each slice went through all of them again."""
    steps = survey(b"]" * (4 << 16), NAMES, depth_max=64)
    assert len(list(steps)) == 1


def test_no_step_is_longer_than_a_slice() -> None:
    raw = b'{"a":"' + b"\\\\" * (1 << 19) + b'"}'
    assert len(list(survey(raw, NAMES, depth_max=64))) == -(-len(raw) // scan.SLICE_BYTES)


def test_a_survey_returns_at_most_keys_max_keys() -> None:
    raw = b"[" + b'{"vllm_xargs":1},' * (2 * KEYS_MAX) + b"1]"
    assert len(run(survey(raw, NAMES, depth_max=4)).keys) == KEYS_MAX


def test_names_that_are_common_are_found_apart() -> None:
    """They take no other key's place."""
    names = Names(OURS, common=["uuid"])
    raw = b"[" + b'{"uuid":1},' * (4 * KEYS_MAX) + b'{"vllm_xargs":1},' * 2 + b"1]"
    found = run(survey(raw, names, depth_max=4))
    assert [key.name for key in found.keys] == ["vllm_xargs"] * 2
    assert found.common == tuple(FoundKey("uuid", 9 + 11 * at, 2) for at in range(4 * KEYS_MAX))


def test_names_that_are_common_are_bounded() -> None:
    """Each of them takes time and memory."""
    names, unit = Names(OURS, common=["uuid"]), b'{"uuid":1},'
    assert len(run(survey(b"[" + unit * COMMON_MAX + b"1]", names, depth_max=4)).common) == COMMON_MAX
    with pytest.raises(TooMany, match="more than 10,000 keys `uuid`") as caught:
        run(survey(b"[" + unit * (COMMON_MAX + 1) + b"1]", names, depth_max=4))
    assert caught.value.key == "uuid"


def test_a_found_key_takes_as_many_bytes_as_is_said() -> None:
    raw = b"[" + b'{"uuid":1},' * COMMON_MAX + b"1]"
    tracemalloc.start()
    try:
        found = run(survey(raw, Names(OURS, common=["uuid"]), depth_max=4))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 145 * len(found.common), "130, and the two lists' spare room"


@settings(max_examples=60, deadline=None)
@given(st.data(), VALUES, st.sampled_from([6, 7, 9, 17]))
def test_a_text_without_its_plain_spans_has_the_same_structure(
    data: st.DataObject, value: Any, slice_bytes: int
) -> None:
    """The survey's plain spans can be cut out of the text. Valid JSON stays valid and keeps its structure; an invalid
    text stays invalid.
    """
    raw = written(value, data).encode().replace(b" ", b" " * data.draw(st.integers(1, 40)))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(raw)))
        raw = raw[:at] + data.draw(st.sampled_from([b"\\", b"\x01", b"\\u0", b"\\x", b" ", b'"', b"1"])) + raw[at:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "SLICE_BYTES", slice_bytes)
        plain = run(survey(raw, NAMES, depth_max=64)).plain
    rest, end = b"", 0
    for start, stop, _ in plain:
        assert end <= start < stop
        rest += raw[end:start]
        end = stop
    rest += raw[end:]
    assert shape(rest) == shape(raw)


def shape(raw: bytes) -> Any:
    """The structure of a JSON text, with the types of its values only; "none" if the text is no JSON."""
    try:
        return _shape(json.loads(raw, object_pairs_hook=list))
    except ValueError:
        return "none"


def _shape(value: Any) -> Any:
    return [_shape(each) for each in value] if isinstance(value, list | tuple) else type(value).__name__


def test_long_texts_and_spaces_are_plain_except_around_invalid_bytes() -> None:
    for unit in (b"x", b'\\"', b"\\\\", b"\\u0041", b"\\n", "語".encode()):
        raw = b'{"a":"' + unit * (400_000 // len(unit)) + b'"}'
        plain = run(survey(raw, NAMES, depth_max=4)).plain
        assert len(plain) == 1, unit
        assert plain[0].end - plain[0].start > 250_000, unit
    for wrong in (b"\\x", b"\x1f", b"\\u00g0"):
        raw = b'{"a":"' + b"x" * 200_000 + wrong + b"x" * 200_000 + b'"}'
        plain = run(survey(raw, NAMES, depth_max=4)).plain
        assert all(each.end <= raw.index(wrong) or each.start > raw.index(wrong) for each in plain), wrong
    (spaces,) = run(survey(b'{"a":1' + b" " * 400_000 + b'"b"}', NAMES, depth_max=4)).plain
    assert spaces.end - spaces.start > 250_000
