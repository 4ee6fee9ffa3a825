"""Names of chunks, and the text they are made from."""

from __future__ import annotations

import json

import pytest

from router.core.load_notes import CHUNKS_MAX
from router.core.unread import Sort, Unread
from router.predict.chunks import CHUNK_BYTES, Hasher, prompt_text, read_prompt
from router.predict.media import HASHED_BYTES, MEDIA_BYTES

HASHER = Hasher(b"k" * 16)
SCOPE = HASHER.scope("qwen", "acme")
TEXT = bytes(range(256)) * 40


def test_names_are_the_same_in_every_process_and_version() -> None:
    """Routers of two versions may share a fleet. Other names here would act like another key: no prefix would match."""
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
    answered = prompt_text({**turn, "messages": [*turn["messages"], more[0]]})
    assert answered.startswith(text) and following.startswith(answered)


def test_messages_are_kept_apart() -> None:
    one = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    other = {"messages": [{"role": "user", "content": "ab"}]}
    assert prompt_text(one) != prompt_text(other)


def seen(*parts: object) -> dict[str, object]:
    """A chat of one message with these parts."""
    return {"messages": [{"role": "user", "content": list(parts)}]}


def picture(data: str, **more: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data, **more}}


def words(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def test_parts_calls_and_images_are_read() -> None:
    text = prompt_text(seen(words("look"), picture("http://one")))
    assert b"look" in text
    assert text != prompt_text(seen(words("look"), picture("http://two")))
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "7"}]}
    assert prompt_text({"messages": [called]}) != prompt_text({"messages": [{**called, "tool_calls": [{"id": "8"}]}]})


def test_the_same_picture_is_the_same_prefix_and_another_never_is() -> None:
    """Whatever its size in the body: it counts as `MEDIA_BYTES` of text (about 1,000 tokens) with names of its own."""
    hasher, asked = Hasher(bytes(32)), "what is there? " * 100

    def names(*parts: object) -> list[int]:
        return hasher.names(1, prompt_text(seen(*parts)))

    def alike(one: list[int], other: list[int]) -> int:
        return sum(a == b for a, b in zip(one, other, strict=False))

    data = "data:image/png;base64," + "A" * 200_000
    first = names(picture(data), words(asked))
    assert len(first) == (MEDIA_BYTES + len(asked)) // CHUNK_BYTES
    assert first == names(picture(data), words(asked))
    assert alike(first, names(picture(data), words("else" * 1000))) == MEDIA_BYTES // CHUNK_BYTES
    for other in (data + "A", data.replace("A", "B", 1), data[:-1] + "B"):
        assert alike(first, names(picture(other), words(asked))) == 0
    after = names(words(asked * 2), picture(data))
    assert alike(after, names(words(asked * 2), picture(data[:-1] + "B"))) == len(asked) * 2 // CHUNK_BYTES
    swapped = names(picture(data[:-1]), picture(data))
    assert alike(swapped, names(picture(data), picture(data[:-1]))) == 0


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": "data:x"},
        {"type": "input_audio", "input_audio": {"data": "xyz", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "http://a/b"}},
        {"image_url": {"url": 3}},
        {"type": "image_pil", "image_pil": [1, 2]},
        {"type": "image_url", "image_url": {"url": "\ud800"}},
    ],
)
def test_each_kind_of_media_counts_alike(part: dict[str, object]) -> None:
    read = read_prompt(seen(words("hello"), part))
    assert (read.media, len(read.text), read.size) == (1, MEDIA_BYTES + 11, MEDIA_BYTES + 11)
    assert read_prompt(seen(words("hello"), {"type": "odd", "image_url": None})).media == 0


def unread(body: dict[str, object]) -> dict[str, object]:
    """The same body, with messages that were too large to parse."""
    raw = memoryview(json.dumps(body["messages"]).encode())
    return {"messages": Unread(raw, Sort.LIST, 100)}


def test_pictures_of_a_large_body_are_not_parsed_and_count_the_same() -> None:
    """The next turn of a chat may be read either way."""
    large = picture("data:image/png;base64," + "QUJD" * 1_000_000)
    body = seen(words("one" * 700), large, picture("data:small"), words("two" * 700), picture("x" * 5000))
    parsed, raw = read_prompt(body), read_prompt(unread(body))
    assert raw.text == parsed.text
    assert raw.media == parsed.media == 3
    assert parsed.size == len(parsed.text)
    assert abs(raw.size - parsed.size) < 1000, "a body of 4 MB is no prompt of a million tokens"


def test_more_pictures_than_any_engine_takes_are_not_looked_at() -> None:
    read = read_prompt(unread(seen(*[picture("A" * 5000)] * 400)))
    assert read.media == CHUNKS_MAX * CHUNK_BYTES // MEDIA_BYTES
    assert read.size > 400 * MEDIA_BYTES


def test_more_media_than_is_hashed_are_told_apart_by_their_ends() -> None:
    def read(data: str) -> bytes:
        return read_prompt(unread(seen(picture(data), words("x")))).text

    many = "A" * (HASHED_BYTES + 1000)
    assert read(many) == read(many)
    assert len({read(many), read(many + "A"), read("B" + many[1:]), read(many[:-1] + "B")}) == 4


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
