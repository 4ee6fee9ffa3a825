"""Large bodies, read in slices: the engine gets the same body as if it were read at once, or the client gets a 400."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster import scan, wire
from cluster.errors import ApiError
from cluster.scan import COMMON_MAX, KEYS_MAX, SLICE_BYTES, Steps, run
from router.core import eligibility
from router.core.eligibility import CHAT, COMPLETIONS, Way, verdict
from router.core.unread import Sort, Unread, beginning
from router.predict.answer_lengths import cues_of
from router.predict.chunks import NAMED_BYTES, prompt_bytes, prompt_text
from router.request import body as bodies
from router.request import heavy
from router.request.heavy import FIELDS_MAX, HEAVY_BYTES, LIGHT_BYTES, Heavy, is_heavy, read

OURS = sorted(wire.TRANSFER_KEYS | wire.TOP_LEVEL_KEYS | wire.FREE_FORM_KEYS | {"cache_salt"})
WORDS = st.sampled_from(["prompt", "messages", "a", "x" * 40, "é", 'q"', "back\\", '{"kv_transfer_params": 1}', "[1]"])
KEYS = WORDS | st.sampled_from(OURS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def refused(steps: Steps[Heavy]) -> str:
    with pytest.raises(ApiError) as caught:
        run(steps)
    assert caught.value.status == 400
    return caught.value.message


def attempt(raw: bytes, namespace: str = "") -> Heavy | ApiError:
    try:
        return run(read(raw, namespace=namespace))
    except ApiError as error:
        return error


def keys_of(raw: bytes) -> set[str]:
    """Every key at any depth, also of what a later key replaces, and in texts that are JSON."""
    found: set[str] = set()

    def hook(pairs: list[tuple[str, Any]]) -> None:
        for name, value in pairs:
            found.add(name)
            if name in wire.FREE_FORM_KEYS and isinstance(value, str):
                try:
                    found.update(keys_of(value.encode()))
                except ValueError:
                    continue

    json.loads(raw, object_pairs_hook=hook)
    return found


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=5), st.booleans(), st.sampled_from([1, 16, 60, 1 << 16]))
def test_what_is_read_in_slices_is_what_is_read_at_once(body: dict[str, Any], ascii_only: bool, small: int) -> None:
    """And no transfer field is left in the bytes, whatever the size from which a field counts as large."""
    if small <= LIGHT_BYTES // 2:
        body.pop("cache_salt", None)  # a salt is hashed only while it counts as small
    raw = json.dumps(body, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heavy, "SMALL_BYTES", small)
        found = attempt(raw, "t")
    if isinstance(found, ApiError):
        assert found.param in keys_of(raw) & (wire.TRANSFER_KEYS | wire.FREE_FORM_KEYS), found.message
        return
    clean = wire.strip(json.loads(raw), namespace="t")
    assert json.loads(found.raw) == clean
    assert found.body.keys() == clean.keys()
    for name, value in found.body.items():
        whole = json.loads(bytes(value.raw)) if isinstance(value, Unread) else value
        assert whole == clean[name] or [whole] == clean[name]
    assert wire.TRANSFER_KEYS.isdisjoint(keys_of(found.raw))


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(sorted(wire.TRANSFER_KEYS)), st.sampled_from([1, 1 << 16]))
def test_no_spelling_and_no_depth_hides_a_transfer_field(data: st.DataObject, key: str, small: int) -> None:
    which = data.draw(st.sets(st.integers(0, len(key) - 1)))
    spelled = "".join(f"\\u{ord(c):04x}" if at in which else c for at, c in enumerate(key))
    field = f'{{"{spelled}" : {{"remote_host": "evil"}}}}'
    for _ in range(data.draw(st.integers(0, 3))):
        field = data.draw(st.sampled_from(['{"x": %s}', "[1, %s]", '{"x": %s, "x": 1}'])) % field
    raw = '{"a": 1, "deep": ' + field + data.draw(st.sampled_from(["}", ', "deep": 1}']))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heavy, "SMALL_BYTES", small)
        found = attempt(raw.encode())
    if isinstance(found, ApiError):
        assert found.param == key
        return
    assert key not in keys_of(found.raw)


@settings(deadline=None)
@given(st.binary(max_size=60) | st.text('{}[]",:\\u01é a-.eE', max_size=60).map(str.encode))
def test_any_bytes_are_taken_as_they_are_at_once_or_refused(raw: bytes) -> None:
    try:
        at_once = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        assert refused(read(raw))
        return
    found = attempt(raw)
    assert isinstance(found, Heavy)
    assert found.is_object == isinstance(at_once, dict)


def large(**fields: Any) -> bytes:
    """A body of more than `HEAVY_BYTES`, by a text that is not read."""
    return json.dumps({"model": "m", **fields, "junk": "x" * HEAVY_BYTES}).encode()


def test_which_bodies_are_heavy() -> None:
    assert not is_heavy(b"[]," * (LIGHT_BYTES // 3))
    assert is_heavy(b"[]," * LIGHT_BYTES)
    assert is_heavy(b"1," * LIGHT_BYTES)
    assert is_heavy(b'"",' * LIGHT_BYTES)
    assert not is_heavy(b'{"prompt":"' + b"word, " * 10_000 + b'"}'), "an ordinary prompt of 60 kB"
    numbers = b'{"prompt":[' + b"1," * 60_000 + b"1]}"
    assert is_heavy(numbers)
    assert is_heavy(b'{"a":"' + b"1," * 60_000 + b'","b":[' + b"1," * 60_000 + b"1]}")
    assert is_heavy(b'{"a":[' + b'"",' * 100 + b'"x"' + b",1" * 60_000 + b"]}")
    assert not is_heavy(b'{"a":"' + b"x, [" * 4_000 + b"y" * 60_000 + b'"}'), "in a text it is all one value"
    assert not is_heavy(b"x" * HEAVY_BYTES)
    assert is_heavy(b"x" * (HEAVY_BYTES + 1))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a":' + b"[]," * 2_000_000, "1,048,576 objects, arrays and texts"),
        (b'{"a":[' + b"1," * 9_000_000, "8,388,608 numbers"),
        (b'{"a":' + b"[" * 100_000, "64 levels"),
        (b'{"a":' + b'{"b":' * 66 + b"1" + b"}" * 67, "64 levels"),
        (b"{" + b",".join(b'"%d":1' % number for number in range(FIELDS_MAX + 1)) + b"}", "1,024 fields"),
        (b'{"a":"\xff"}', "no UTF-8 at byte 6"),
        (b'{"a":"' + "é".encode() * 600_000 + b'\xc3"}', "no UTF-8 at byte 1200006"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        ('{"a":1}'.encode("utf-16"), "no UTF-8 at byte 0"),
        (b'{"a":1,}', "not valid JSON"),
        (b'{"a":"\\x"}', "not valid JSON"),
        (b'{"max_tokens":1e400}', "`max_tokens` is not valid JSON"),
        (b" " * 70_000 + b"{}", "65,536 spaces"),
        (b'{"vllm_xargs":"[' + b"1," * 40_000 + b'1]"}', "65,536 are looked into"),
        (large(a=[[[{"kv_transfer_params": {}}]]] * 30_000), "`kv_transfer_params` stands inside `a`"),
        (large(a=[{"b": 1}] * 30_000 + [{"extra_args": '{"a": 1}'}]), "`extra_args` stands inside `a`"),
        (large(a=[{"vllm_xargs": "1"}] * KEYS_MAX + ["x"] * 30_000), "`vllm_xargs` stands inside `a`"),
        (b'[{"kv_transfer_params":1}]', "stands inside the body"),
        (b"[" + b'{"uuid":1},' * KEYS_MAX + b'{"kv_transfer_params":1}]', "stands inside the body"),
        (large(a=[{"uuid": "1", "b": "x"}] * (COMMON_MAX + 1)), "10,000 keys `uuid`. Send fewer"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_what_is_refused_and_how(raw: bytes, words: str) -> None:
    assert words in refused(read(raw))


def test_fields_are_taken_out_and_the_rest_stays_as_it_came() -> None:
    raw = large(priority=3, kv_transfer_params={"a": 1}, cache_salt="s", vllm_xargs={"b": 1, "ec_transfer_params": 2})
    found = run(read(raw, namespace="t"))
    clean = wire.strip(json.loads(raw), namespace="t")
    assert json.loads(found.raw) == clean
    assert clean.keys() == {"model", "cache_salt", "vllm_xargs", "junk"}
    words = [{"extra_args": {"b": "text"}, "priority": 1}, {"vllm_xargs": "a word"}, {"vllm_xargs": None}]
    plain = large(a=[*words, "x" * LIGHT_BYTES])
    assert json.loads(run(read(plain)).raw) == json.loads(plain)
    assert run(read(large(a={"priority": 1}))).raw == large(a={"priority": 1}), "deeper, it is the client's own field"


def test_a_large_field_that_no_client_may_set_is_left_out() -> None:
    raw = large(kv_transfer_params={"x": "y" * LIGHT_BYTES}, priority="z" * LIGHT_BYTES)
    assert json.loads(run(read(raw)).raw) == {"model": "m", "junk": "x" * HEAVY_BYTES}


@settings(deadline=None)
@given(st.text(max_size=30), st.integers(1, 40), st.booleans())
def test_the_beginning_of_an_unread_text_is_exact(text: str, limit: int, ascii_only: bool) -> None:
    try:
        raw = json.dumps(text, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    try:
        whole = msgspec.json.decode(raw).encode(errors="surrogatepass")
    except msgspec.DecodeError:
        return  # half of a surrogate pair
    found = beginning(memoryview(raw), limit)
    assert whole.startswith(found)
    if ascii_only or limit >= len(raw):
        assert len(found) >= min(len(whole), limit // 6 - 3)


CHATS = [
    [{"role": "user", "content": "word é😀 " * 40}] * 400,
    [
        {
            "role": "user",
            "content": [{"type": "text", "text": "t" * 300}, {"type": "image_url", "image_url": {"url": "u"}}],
        }
    ]
    * 400,
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"arguments": "{}"}}]}] * 2000,
    [{"role": "user", "content": "x" * 3_000_000}],
    [{"role": "user", "content": "x" * 1000}, {"role": "user", "content": "é\n" * 500_000}],
    [{"role": "user", "content": "x" * 700_000}] * 5,
    ["odd" * 20, 7, {"role": 7}] * 2_000,
]


@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("tools", [None, [{"type": "function"}]])
def test_a_chat_has_the_same_names_read_either_way(messages: list[Any], tools: Any) -> None:
    """A conversation that grows beyond `HEAVY_BYTES` still finds its own prefixes."""
    raw = json.dumps({"messages": messages, "tools": tools, "junk": "x" * HEAVY_BYTES}).encode()
    found, whole = run(read(raw)), json.loads(raw)
    assert isinstance(found.body["messages"], Unread)
    told, text = prompt_text(found.body), prompt_text(whole)
    assert text.startswith(told)
    assert len(told) >= min(len(text), NAMED_BYTES // 6)
    assert prompt_bytes(found.body, told) >= len(told)
    assert cues_of(found.body) >= 0
    assert verdict(CHAT, found.body).way == verdict(CHAT, whole).way


PROMPTS = [
    "word " * 50_000,
    "é😀" * 600_000,
    list(range(300_000)),
    [list(range(300_000))],
    ["word " * 50_000],
    ["a" * 70_000, "b"],
    [[1, 2], [3] * 50_000],
    [1.5] * 50_000,
    [True] * 50_000,
    {"a": "x" * 70_000},
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_a_prompt_is_the_same_read_either_way(prompt: Any) -> None:
    raw = json.dumps({"prompt": prompt, "stream": True, "junk": "x" * HEAVY_BYTES}).encode()
    found, whole = run(read(raw)), json.loads(raw)
    unread = found.body["prompt"]
    assert isinstance(unread, Unread)
    kept = verdict(COMPLETIONS, found.body)
    if prompt != [True] * 50_000:
        assert kept == verdict(COMPLETIONS, whole)
    told, text = prompt_text(found.body), prompt_text(whole)
    assert text.startswith(told)
    if unread.sort in {Sort.TEXT, Sort.IDS}:
        assert len(told) >= min(len(text), NAMED_BYTES // 6)
    if unread.sort is Sort.IDS:
        assert prompt_bytes(found.body, told) == len(text)
    else:
        assert kept.way is Way.AGGREGATED or unread.sort is Sort.TEXT


@pytest.mark.parametrize("prompt", [b"[%b]", b"[[%b]]"], ids=["list", "list in a list"])
def test_a_large_list_of_nothing_but_spaces_has_no_ids(prompt: bytes) -> None:
    spaces = b" \n" * HEAVY_BYTES
    found = run(read(b'{"prompt": ' + prompt % spaces + b"}"))
    unread = found.body["prompt"]
    assert (unread.sort, unread.count) == (Sort.LIST, 0)
    assert verdict(COMPLETIONS, found.body) == verdict(COMPLETIONS, {"prompt": []})
    found = run(read(b'{"prompt": ' + prompt % (spaces + b"7" + spaces) + b"}"))
    assert (found.body["prompt"].sort, found.body["prompt"].count) == (Sort.IDS, 1)


def test_large_tools_stand_for_themselves() -> None:
    tools = [{"type": "function", "function": {"name": "f" * 1000}}] * 100
    raw = json.dumps(
        {"messages": [{"role": "user", "content": "x"}], "tools": tools, "junk": "x" * HEAVY_BYTES}
    ).encode()
    found = run(read(raw)).body
    assert isinstance(found["tools"], Unread)
    told = prompt_text(found)
    assert told[:20] == json.dumps(tools).encode()[:20]
    assert prompt_bytes(found, told) >= 100_000


def test_many_stop_strings_are_not_looked_for_in_a_seed() -> None:
    plain = {"messages": [{}], "stream": True, "temperature": 0}
    assert verdict(CHAT, {**plain, "stop": ["x"] * eligibility.STOPS_MAX}).way is Way.SEEDED
    for stop in (
        ["x"] * (eligibility.STOPS_MAX + 1),
        "x" * 5_000,
        ["x" * 5_000],
        Unread(memoryview(b"[]"), Sort.LIST, 1),
    ):
        assert verdict(CHAT, {**plain, "stop": stop}).way is Way.PLAIN


def test_adding_fields_copies_a_body_once() -> None:
    for raw in (
        b'{"a": "' + b"x" * 100_000 + b'" }\n',
        b'{"a": "x"' + b" " * 100_000 + b"}",
        b"{" + b" " * 100_000 + b"}",
    ):
        assert json.loads(bodies.spliced(raw, {"b": 1})) == {**json.loads(raw), "b": 1}


# --- names of media ---------------------------------------------------------------------------------------------------

IMAGE = "data:image/png;base64," + "A" * (1 << 20)


def _asks(name: str, *, spelled: str = "uuid") -> bytes:
    """A chat with an image of a megabyte that its client has named."""
    part = f'{{"type": "image_url", "{spelled}": {json.dumps(name)}, "image_url": {{"url": "{IMAGE}"}}}}'
    return f'{{"messages": [{{"role": "user", "content": [{part}]}}], "model": "m"}}'.encode()


@pytest.mark.parametrize("spelled", ["uuid", "\\u0075uid", "uui\\u0064"])
@pytest.mark.parametrize("name", ["cat", 'a "quoted" \u00e9 \\ name', ""])
def test_names_of_media_are_a_tenants_own_in_large_bodies_too(name: str, spelled: str) -> None:
    """As in small bodies (`wire.strip`). By a shared name, vLLM would give one tenant another's image."""
    raw = _asks(name, spelled=spelled)
    assert is_heavy(raw)
    found = [json.loads(run(read(raw, namespace=tenant)).raw) for tenant in ("acme", "other")]
    small = {"messages": [{"role": "user", "content": [{"type": "image_url", "uuid": name}]}]}
    named = [wire.strip(small, namespace=tenant)["messages"][0]["content"][0]["uuid"] for tenant in ("acme", "other")]
    assert [each["messages"][0]["content"][0]["uuid"] for each in found] == named
    assert named[0] != named[1]
    assert all(each["messages"][0]["content"][0]["image_url"]["url"] == IMAGE for each in found)
    assert all(each["model"] == "m" for each in found)


def test_a_name_of_media_that_is_no_text_is_refused_in_large_bodies() -> None:
    raw = _asks("x").replace(b'"uuid": "x"', b'"uuid": {"a": 1}')
    with pytest.raises(ApiError, match="`uuid` must be a text"):
        run(read(raw))


def test_a_name_of_media_that_is_null_is_none() -> None:
    """vLLM serves such a picture without a name."""
    raw = _asks("x").replace(b'"uuid": "x"', b'"uuid" : null')
    assert json.loads(run(read(raw, namespace="acme")).raw) == json.loads(raw)


PICTURE = {"type": "image_url", "image_url": {"url": IMAGE}}
EMBEDS = {"type": "image_embeds", "image_embeds": None, "uuid": "cat"}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [PICTURE, EMBEDS]}]},
        {"messages": [[{"role": "user", "content": [PICTURE]}], [{"role": "user", "content": [EMBEDS]}]]},
        {"query": "a", "documents": {"content": [PICTURE, EMBEDS]}},
        {"queries": [{"content": [PICTURE, EMBEDS]}], "documents": "a"},
        {"text_1": "a", "text_2": ["b", {"content": [PICTURE, EMBEDS]}]},
        {"data_1": "a", "data_2": {"content": [PICTURE, EMBEDS]}},
        {"queries": "a", "items": {"content": [PICTURE, EMBEDS]}},
    ],
    ids=["chat", "batch of chats", "rerank", "queries", "text_2", "data_2", "items"],
)
def test_media_are_renamed_wherever_vllm_reads_their_names(body: dict[str, Any]) -> None:
    """As in small bodies."""
    raw = json.dumps(body).encode()
    for written in (raw, raw.replace(b"[", b" \n[ ")):
        found = json.loads(run(read(written, namespace="acme")).raw)
        assert found == wire.strip(body, namespace="acme")
        assert found != body


@pytest.mark.parametrize("given", [{"uuid": "x"}, {"content": {"uuid": "x"}}, {"content": [{"uuid": "x"}]}])
@pytest.mark.parametrize("batch", [False, True])
def test_uuids_in_a_tools_input_stay_in_large_bodies_too(given: dict[str, Any], batch: bool) -> None:
    tool = {"type": "tool_use", "name": "f", "id": "1", "input": given}
    messages = [{"role": "assistant", "uuid": "x", "content": [{"type": "text", "text": "x" * (1 << 20)}, tool]}]
    body = {"messages": [messages] if batch else messages}
    raw = json.dumps(body).encode()
    assert json.loads(run(read(raw, namespace="acme")).raw) == body == wire.strip(body, namespace="acme")


LONG_TEXT = {"type": "text", "text": "x" * (1 << 20)}
NAMED = {"type": "image_url", "uuid": "x"}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "assistant", "content": [LONG_TEXT], "tool_calls": [{"id": "1", "uuid": "x"}]}]},
        {"messages": [{"role": "assistant", "content": [LONG_TEXT], "tool_calls": [{"uuid": {"a": 1}}]}]},
        {"messages": [{"role": "user", "content": [LONG_TEXT], "a content": [NAMED], '"content': [NAMED]}]},
        {"messages": [{"role": "user", "content": [LONG_TEXT, [NAMED]]}, {"content": {"uuid": "x"}}]},
        {"messages": [{"role": "user", "content": [LONG_TEXT], "a": {"content": [NAMED]}}]},
        {
            "messages": [
                [{"role": "user", "content": [LONG_TEXT]}],
                {"a": {"content": [NAMED]}},
                [[{"content": [NAMED]}]],
            ]
        },
        {"documents": {"content": [LONG_TEXT, {"content": [NAMED]}]}},
        {"documents": {"content": [LONG_TEXT]}, "tools": [{"parameters": [{"uuid": "x"}]}] * 3_000},
    ],
    ids=["tool call", "no text", "other keys", "lists and objects", "deeper", "batch", "content in content", "tools"],
)
def test_uuids_beside_the_parts_of_a_content_stay_in_bodies_of_every_size(body: dict[str, Any]) -> None:
    """In large bodies, depth alone decided, and a value that is no text was refused."""
    raw = json.dumps(body).encode()
    assert is_heavy(raw)
    for written in (raw, raw.replace(b"[", b" [ ").replace(b":", b" : ")):
        assert json.loads(run(read(written, namespace="acme")).raw) == body
    small = {name: json.loads(json.dumps(value).replace(LONG_TEXT["text"], "x")) for name, value in body.items()}
    assert wire.strip(small, namespace="acme") == small


@pytest.mark.parametrize(
    "body",
    [{"messages": [{"content": [LONG_TEXT]}, [{"content": [NAMED]}]]}, {"input": [{"content": [NAMED, LONG_TEXT]}]}],
)
@pytest.mark.parametrize("key", ['"content"', '"c\\u006fntent"', '"content"' + " \n" * 100_000])
def test_media_have_the_same_names_in_bodies_of_every_size(body: dict[str, Any], key: str) -> None:
    raw = json.dumps(body).replace('"content"', key).encode()
    found = json.loads(run(read(raw, namespace="acme")).raw)
    assert found == wire.strip(body, namespace="acme") != body


MEDIA_KEYS = st.sampled_from(["content", "uuid", "a"])
MEDIA = st.recursive(
    st.sampled_from(["x", "\\", '"', "content", "[{", None]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MEDIA_KEYS, inner, max_size=3),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["messages", "content", "a"]), MEDIA, max_size=3), st.integers(0, 90))
def test_media_are_the_same_read_in_slices_or_at_once(body: dict[str, Any], spaces: int) -> None:
    raw = re.sub("([][{}:,])", " " * spaces + r"\1" + " " * spaces, json.dumps(body)).strip().encode()
    body = json.loads(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heavy, "SMALL_BYTES", 1)
        patch.setattr("cluster.scan.SLICE_BYTES", 60)
        found = attempt(raw, "t")
    if isinstance(found, ApiError):
        assert "`uuid` must be a text" in found.message
        return
    assert json.loads(found.raw) == wire.strip(body, namespace="t")


MANY = 2 * KEYS_MAX
ROWS = [{"uuid": f"{at:032x}", "text": "x" * 4_000} for at in range(MANY)]
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {"rows": ROWS}}
SCHEMA = {"type": "object", "properties": {"uuid": {"type": "string", "description": "x" * 4_000}}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "assistant", "content": [CALL]}]},
        {
            "messages": [
                {"role": "user", "content": [{**PICTURE, "image_url": {"url": "x" * 4_000}, **row}]} for row in ROWS
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "image_url", **row} for row in ROWS]}, ROWS[0]]},
        {"messages": [], "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}] * MANY},
    ],
    ids=["tool input", "pictures of many messages", "pictures of one message", "tools"],
)
def test_many_keys_of_that_name_are_no_hindrance(body: dict[str, Any]) -> None:
    """Of 256 of them and more, a body over a megabyte was refused."""
    raw = json.dumps(body).encode()
    assert is_heavy(raw)
    assert json.loads(run(read(raw, namespace="acme")).raw) == wire.strip(body, namespace="acme")


def test_many_keys_of_that_name_hide_no_transfer_field() -> None:
    body = {"messages": [{"role": "user", "content": [*ROWS, {"kv_transfer_params": {"remote_host": "evil"}}]}]}
    assert "`kv_transfer_params` stands inside `messages`" in refused(read(json.dumps(body).encode()))


def test_names_of_media_are_written_in_steps() -> None:
    """While one body is read, other requests go on: writing as many names as are allowed takes 50 ms."""
    part = b'{"uuid":"a"},'
    raw = b'{"messages":[{"content":[' + part * COMMON_MAX + b'{"a":"' + b"x" * HEAVY_BYTES + b'"}]}]}'
    assert len(list(read(raw))) > COMMON_MAX // 64


def test_pictures_just_below_a_step_are_written_in_steps() -> None:
    """32 of them were copied in one."""
    picture = b"x" * 1_000_000
    assert len(list(heavy._joined([picture] * 32))) >= 16


@pytest.mark.parametrize("value", ['"a"', "null"])
def test_spaces_after_a_key_are_gone_through_in_steps(value: str) -> None:
    """33 MB of them were one step. Spaces before a colon are searched slice by slice; those before a value are left out
    already where names of media are looked for.
    """
    spaces = " " * (40 * SLICE_BYTES)
    for key in (f'"uuid"{spaces}:', f'"uuid":{spaces}', f'"uuid" :{spaces}'):
        body = f'{{"messages":[{{"content":[{{{key}{value}}}]}}]}}'
        raw = body.encode()
        found = run(scan.survey(raw, heavy._NAMES, depth_max=9))
        short = heavy._Shortened(raw, found.plain)
        assert len(short.raw) < 3 * SLICE_BYTES
        assert raw.startswith(value.encode(), short.value(found.common[0]))
        assert short.raw[short.place(found.common[0].at) - 1] == ord(":")
        assert json.loads(run(read(raw, namespace="t")).raw) == wire.strip(json.loads(raw), namespace="t")
    steps = [len(list(scan.survey(f'["uuid"{spaces}{end}]'.encode(), heavy._NAMES, depth_max=9))) for end in ",:1"]
    assert min(steps) >= 2 * 40


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("x" * 4_096, True),
        ("x" * 4_097, False),
        ("語" * 1_365, True),
        ("語" * 1_366, False),
        ("\n" * 2_048, True),
        ("\n" * 2_049, False),
    ],
)
def test_a_name_of_a_medium_is_bounded_in_bytes(name: str, fits: bool) -> None:
    raw = _asks("x").replace(b'"x"', json.dumps(name, ensure_ascii=False).encode())
    if fits:
        assert run(read(raw, namespace="t")).is_object
    else:
        assert "4,096 bytes, as written in JSON" in refused(read(raw))


def test_no_small_field_is_left_unread() -> None:
    """If `stream` stayed unread, the router would take another value for it than the engine."""
    fields = {f"x{at}": "x" * (1 << 16) for at in range(17)}
    with pytest.raises(ApiError, match="beside its large fields"):
        run(read(json.dumps({**{name: text[:-100] for name, text in fields.items()}, "stream": True}).encode()))


def test_a_key_of_the_same_name_elsewhere_stays() -> None:
    """A tool's schema may have a property with the name `uuid`."""
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"uuid": {"type": "string"}}}}}
    ]
    tools[0]["function"]["description"] = "x" * (1 << 20)
    raw = json.dumps({"messages": [{"role": "user", "content": "hi"}], "tools": tools}).encode()
    assert json.loads(run(read(raw, namespace="acme")).raw)["tools"] == tools


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(KEYS, VALUES, max_size=5), st.integers(0, 400), st.sampled_from(["", "\\", '"', "1", "{", "\x01"])
)
def test_a_body_read_without_its_long_texts_is_read_the_same(body: dict[str, Any], at: int, wrong: str) -> None:
    """Slices of nine bytes make nearly every text a long one; a mistake is refused with the same words and place."""
    text = json.dumps(body).replace(" ", " " * 20)
    raw = (text[:at] + wrong + text[at:]).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heavy, "SMALL_BYTES", 30)
        whole = attempt(raw, "t")
        patch.setattr("cluster.scan.SLICE_BYTES", 9)
        short = attempt(raw, "t")
    assume(not isinstance(short, ApiError) or "A field's name takes over" not in short.message)
    assert told(short) == told(whole)


def test_a_name_that_no_engine_can_know_is_refused_and_no_shorter_one_taken_for_it() -> None:
    name = "kv_transfer_params" + "x" * 300_000
    assert "A field's name takes over" in refused(read(json.dumps({"prompt": "a", name: 1}).encode()))
    assert "given twice" in refused(read(b'{"prompt":"%s","prompt":"b"}' % (b"x" * 300_000)))


def told(found: Heavy | ApiError) -> Any:
    if isinstance(found, ApiError):
        return found.message, found.param
    values = {
        name: (value.sort, bytes(value.raw), value.count) if isinstance(value, Unread) else value
        for name, value in found.body.items()
    }
    return values, found.raw, found.is_object


def test_two_numbers_stay_two_however_many_spaces_are_passed_over() -> None:
    before = b'{"prompt":"x",'
    before += b" " * (SLICE_BYTES - len(before) - 5) + b'"a":1'
    assert len(before) == SLICE_BYTES  # the spaces begin with a slice
    assert "not valid JSON" in refused(read(before + b" " * (2 * HEAVY_BYTES) + b"2}"))
