"""Names of chunks, and the text they are made from."""

from __future__ import annotations

import pytest

from router.predict.chunks import CHUNK_BYTES, CHUNKS_MAX, Hasher, answered_text, prompt_text

HASHER = Hasher(b"k" * 16)
SCOPE = HASHER.scope("qwen", "acme")
TEXT = bytes(range(256)) * 40


def test_names_are_the_same_in_every_process_and_version() -> None:
    """Routers of two versions share a fleet: a change here is a change of the key."""
    assert SCOPE == 0x925DA2F8856E7193
    assert HASHER.names(SCOPE, TEXT)[:2] == [0x5A729F9D95C7A59C, 0x49F5DBBD0CEB095A]


def test_only_whole_chunks_have_names() -> None:
    for size in (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5):
        assert len(HASHER.names(SCOPE, TEXT[:size])) == size // CHUNK_BYTES
    assert len(HASHER.names(SCOPE, bytes(CHUNK_BYTES * (CHUNKS_MAX + 3)))) == CHUNKS_MAX


def test_a_changed_byte_changes_its_name_and_all_after_it() -> None:
    names = HASHER.names(SCOPE, TEXT)
    for place in (0, CHUNK_BYTES * 3 + 7, CHUNK_BYTES * 4 - 1):
        changed = bytearray(TEXT)
        changed[place] ^= 128
        others = HASHER.names(SCOPE, bytes(changed))
        first = place // CHUNK_BYTES
        assert others[:first] == names[:first]
        assert not set(others[first:]) & set(names)


def test_order_and_repetition_count() -> None:
    a, b = b"a" * CHUNK_BYTES, b"b" * CHUNK_BYTES
    found = [HASHER.names(SCOPE, text)[-1] for text in (a, b, a + a, a + b, b + a, b + b, a + a + a)]
    assert len(set(found)) == len(found)


def test_scopes_keys_and_salts_have_nothing_in_common() -> None:
    scopes = [
        ("qwen", "acme", ""),
        ("qwen", "other", ""),
        ("llama", "acme", ""),
        ("qwen", None, ""),
        ("qwen", "acme", "s"),
    ]
    named = [set(HASHER.names(HASHER.scope(*each), TEXT)) for each in scopes]
    named.append(set(Hasher(b"l" * 16).names(SCOPE, TEXT)))
    assert len(set.union(*named)) == sum(map(len, named))
    assert HASHER.scope("a", "b") != HASHER.scope("ab", ""), "parts are kept apart"


def test_names_fit_a_signed_column() -> None:
    assert all(0 <= name < 1 << 63 for name in HASHER.names(SCOPE, TEXT))


def test_text_is_in_template_order() -> None:
    body = {
        "messages": [{"role": "system", "content": "SYS"}, {"role": "user", "content": "ASK"}],
        "tools": [{"type": "function", "function": {"name": "TOOL"}}],
    }
    text = prompt_text(body)
    assert text.index(b"TOOL") < text.index(b"SYS") < text.index(b"ASK")


def test_the_next_turn_begins_with_this_one() -> None:
    turn = {"tools": [{"name": "t"}], "messages": [{"role": "user", "content": "one ✓"}]}
    more = [{"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
    text, following = prompt_text(turn), prompt_text({**turn, "messages": [*turn["messages"], *more]})
    assert following.startswith(text)
    assert following.startswith(answered_text(text, "two"))


def test_messages_are_kept_apart() -> None:
    one = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    other = {"messages": [{"role": "user", "content": "ab"}]}
    assert prompt_text(one) != prompt_text(other)


def test_parts_calls_and_images_are_read() -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "http://one"}}]
    text = prompt_text({"messages": [{"role": "user", "content": parts}]})
    assert b"look" in text
    assert b"http://one" in text
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "7"}]}
    assert prompt_text({"messages": [called]}) != prompt_text({"messages": [{**called, "tool_calls": [{"id": "8"}]}]})


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("hello", b"hello"),
        (["hello", "other"], b"hello"),
        ([1, 2], b"\x01\0\0\0\x02\0\0\0"),
        ([[3], [4]], b"\x03\0\0\0"),
        (None, b""),
        ([], b""),
        ([1, "x"], b'[1,"x"]'),
        ([-1], b"[-1]"),
        ([True], b"[true]"),
        ([1 << 40], b"[1099511627776]"),
        (7, b"7"),
        ("\ud800", b"\xed\xa0\x80"),
    ],
)
def test_completions(prompt: object, text: bytes) -> None:
    assert prompt_text({"prompt": prompt}) == text
