"""Bytes to requests: what is refused, and in which words."""

import gzip
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ApiError
from router.request import body

JSON_TYPE = "application/json"


@pytest.mark.parametrize(
    ("raw", "content_type", "words"),
    [
        (b"{", JSON_TYPE, "not valid JSON"),
        (b"", JSON_TYPE, "empty"),
        (b"[1]", JSON_TYPE, "must be a JSON object, not an array"),
        (b'"x"', JSON_TYPE, "not a string"),
        (b"nan", JSON_TYPE, "not valid JSON"),
        (b"\xff\xfe", JSON_TYPE, "not valid JSON"),
        (b"{}", "", "Content-Type is missing"),
        (b"{}", "text/plain", "`text/plain`"),
        (b"[" * 100_000, JSON_TYPE, ""),
    ],
)
def test_bad_bodies(raw: bytes, content_type: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        body.parse_json(raw, content_type)
    assert caught.value.status == 400
    assert words in caught.value.message
    assert set(caught.value.body()["error"]) == {"message", "type", "param", "code"}


def test_good_body() -> None:
    assert body.parse_json(b'{"a": 1}', "application/json; charset=utf-8") == {"a": 1}


@given(st.binary(max_size=200), st.sampled_from([JSON_TYPE, "", "text/plain", "multipart/form-data; boundary=b"]))
def test_any_bytes_are_parsed_or_refused(raw: bytes, content_type: str) -> None:
    for read in (body.parse_json, body.clean_json):
        status = 200
        try:
            read(raw, content_type)
        except ApiError as error:
            status = error.status
        assert status in {200, 400}


@pytest.mark.parametrize("content_type", [JSON_TYPE, "text/plain", "", "application/vnd.x+json"])
def test_transfer_fields_go_whatever_the_content_type_says(content_type: str) -> None:
    raw = json.dumps({"input": "x", "kv_transfer_params": {"remote_host": "h"}}).encode()
    assert json.loads(body.clean_json(raw, content_type)) == {"input": "x"}


def test_duplicate_and_escaped_keys() -> None:
    raw = b'{"kv_transfer_params": 1, "kv\\u005ftransfer_params": {"remote_host": "h"}, "a": 1}'
    assert body.clean_json(raw, JSON_TYPE) == b'{"a":1}'


def test_lists_of_bodies_are_cleaned() -> None:
    assert body.clean_json(b'[{"kv_transfer_params": 1, "a": 2}]', JSON_TYPE) == b'[{"a":2}]'


def form(*fields: str, boundary: str = "b") -> bytes:
    parts = "".join(f"--{boundary}\r\nContent-Disposition: {field}\r\n\r\nvalue\r\n" for field in fields)
    return (parts + f"--{boundary}--\r\n").encode()


def test_an_ordinary_form_passes() -> None:
    raw = form('form-data; name="file"; filename="a.wav"', 'form-data; name="model"')
    assert body.clean_json(raw, "multipart/form-data; boundary=b") == raw


@pytest.mark.parametrize(
    "field",
    [
        'form-data; name="kv_transfer_params"',
        'form-data; name="vllm_xargs"',
        'form-data; name="vllm_xargs[kv_transfer_params]"',
        "form-data; name*=utf-8''vllm%5Fxargs",
        "form-data; name=vllm_xargs",
        'form-data; filename="f"; name="vllm_xargs"',
        'form-data; name="a"; name="vllm_xargs"',
    ],
)
def test_a_form_cannot_smuggle(field: str) -> None:
    with pytest.raises(ApiError) as caught:
        body.clean_json(form('form-data; name="model"', field), "multipart/form-data; boundary=b")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("raw", "boundary"),
    [
        (form('form-data; name="model"').replace(b"value", b"a--b--c") + form('form-data; name="vllm_xargs"'), "b"),
        (form('form-data; name="model"') + form('form-data; name="vllm_xargs"'), "b"),
        (b"x" + form('form-data; name="model"'), "b"),
        (form('form-data; name="model"', boundary="a"), "a; boundary=b"),
        (form('form-data; name="model"'), "b; charset=utf-16"),
        (form('form-data; name="model"')[:-4], "b"),
        (b"", "b"),
    ],
    ids=["ends in a value", "goes on after its end", "begins before", "two boundaries", "charset", "no end", "empty"],
)
def test_a_form_that_two_readers_read_differently_is_refused(raw: bytes, boundary: str) -> None:
    with pytest.raises(ApiError) as caught:
        body.clean_json(raw, f"multipart/form-data; boundary={boundary}")
    assert caught.value.status == 400


def test_a_boundary_within_a_line_is_content() -> None:
    """Every reader treats it so. A field behind it formerly passed here unchecked, and the engine read it."""
    raw = form('form-data; name="model"', 'form-data; name="vllm_xargs"').replace(b"value", b"a--b--c", 1)
    with pytest.raises(ApiError, match="vllm_xargs"):
        body.clean_json(raw, "multipart/form-data; boundary=b")


def test_model_names() -> None:
    assert body.model_of({"model": "m"}) == "m"
    assert body.model_of({}) is None
    with pytest.raises(ApiError, match="must be a string, not a number"):
        body.model_of({"model": 3})


def test_a_body_that_names_media_is_written_anew() -> None:
    """`uuid` names media. In unchanged bytes the client's own name would reach engines."""
    for raw in (b'{"messages":[{"content":[{"uuid":"x"}]}]}', rb'{"messages":[{"content":[{"\u0075uid":"x"}]}]}'):
        assert not body.is_plain(raw, json.loads(raw))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (gzip.compress(b'{"model": "m"}'), "compressed (gzip). Send it plain, without Content-Encoding"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ('{"model": "m"}'.encode("utf-16"), "it is UTF-16"),
        ('{"model": "m"}'.encode("utf-16-le"), "it is UTF-16"),
    ],
)
def test_a_body_in_another_form_is_told_what_to_send(raw: bytes, said: str) -> None:
    with pytest.raises(ApiError, match=re.escape(said)):
        body.parse_json(raw, JSON_TYPE)
