"""Unreadable JSON from other processes raises one kind of error, and no reader of such JSON crashes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cluster.errors import ApiError
from cluster.readable import deadline_in, json_in, lax_flag, object_in, text_in
from router.admin.peer_words import an_object
from router.fleet.probes import Unreadable, _models
from router.http.upstream import Answer
from router.request.releases import hold_in
from router.request.splice import said_in
from router.telemetry.timing import told_at_end, told_in

DEEP = b"[" * 4000
BAD = [DEEP, b'{"a":' * 4000, b'{"unknown": ' + DEEP, b'"\xff"', b"", b"{", b"nonsense"]


@pytest.mark.parametrize("raw", BAD)
def test_all_unreadable_json_raises_one_kind_of_error(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        json_in(raw)


@pytest.mark.parametrize("raw", BAD)
def test_an_unreadable_answer_of_an_engine_or_a_router_peer_counts_as_no_answer(raw: bytes) -> None:
    answer = Answer(200, "application/json", raw)
    with pytest.raises(Unreadable):
        _models(answer)
    assert hold_in(answer) is None
    assert isinstance(an_object(raw), str)
    assert told_in(raw) is None
    assert told_at_end(b"data: " + raw + b"\n\ndata: [DONE]\n\n") is None
    assert said_in(b"data: " + raw + b"\n\n", "/v1/completions") is None


def test_an_object_with_an_unknown_field_is_refused() -> None:
    assert object_in(b"", ("a",)) == {}
    assert object_in(b'{"a": 1}', ("a", "b")) == {"a": 1}
    with pytest.raises(ApiError, match=r"no field `c` here. It may have `a`, `b`") as refused:
        object_in(b'{"a": 1, "c": 2}', ("a", "b"))
    assert (refused.value.status, refused.value.param) == (400, "c")
    with pytest.raises(ApiError, match="It has no fields: send none"):
        object_in(b"3", ())


@pytest.mark.parametrize("raw", BAD[:4] + BAD[5:])
def test_a_body_that_cannot_be_read_is_a_400(raw: bytes) -> None:
    with pytest.raises(ApiError, match=r"The body is not JSON: .*`a`") as refused:
        object_in(raw, ("a",))
    assert refused.value.status == 400


@pytest.mark.parametrize("given", [-1, 86401, float("nan"), float("inf"), True, "5", None, [5]])
def test_a_deadline_is_a_number_of_seconds_up_to_a_day(given: Any) -> None:
    assert deadline_in({}, 60.0) == 60.0
    assert deadline_in({"deadline_s": 86400}, 60.0) == 86400.0
    with pytest.raises(ApiError, match=r"`deadline_s` is .*: it must be a number of seconds, 0 to 86400"):
        deadline_in({"deadline_s": given}, 60.0)


def test_a_text_field_must_be_a_text() -> None:
    assert text_in({}, "because") == ""
    assert text_in({"because": "x"}, "because") == "x"
    with pytest.raises(ApiError, match="`because` is 3: it must be a text"):
        text_in({"because": 3}, "because")


@pytest.mark.parametrize(
    "given",
    [
        *(True, False, None, 0, 1, 2, -1, 2**70, 0.0, 1.0, 0.5, -0.0, 1e300, "", " true", "true ", "1.0", [], {}, [1]),
        *(
            "0",
            "1",
            "t",
            "F",
            "y",
            "N",
            "on",
            "Off",
            "yes",
            "NO",
            "true",
            "FALSE",
            "True",
            "null",
            "2",
            "\uff11",
            "\u0130",
        ),
    ],
)
def test_a_flag_is_read_as_vllms_parser_reads_it(given: Any) -> None:
    pydantic = pytest.importorskip("pydantic", reason="vLLM has it: make setup")
    try:
        expected = pydantic.TypeAdapter(bool | None).validate_python(given)
    except pydantic.ValidationError:
        expected = None
    assert lax_flag(given) is expected
