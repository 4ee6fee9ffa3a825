"""The precomputed end of a prefill leg's body has the fields that `wire.prefill_fields` gives."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cluster import wire
from cluster.ids import InstanceId, RequestId, TransferId
from cluster.instance import Instance, Role
from router.request.outgoing import Outgoing, _prefill_ending

VALUES: dict[str, Any] = {"stream_options": {"include_usage": True}, "max_completion_tokens": 7, "min_tokens": 3}
CASES = [
    dict(zip(VALUES, values, strict=True)) for values in product(*((None, value, ...) for value in VALUES.values()))
]


@pytest.mark.parametrize("token_ids", [False, True])
def test_the_precomputed_end_has_the_fields_of_each_body(token_ids: bool) -> None:
    transfer = TransferId(RequestId("5f" * 16), 2, 41)
    for case in CASES:
        body = {"model": "m", **{name: value for name, value in case.items() if value is not ...}}
        has = "stream_options" in body, "max_completion_tokens" in body, bool(body.get("min_tokens"))
        start, end = _prefill_ending(*has, token_ids)
        said = msgspec.json.decode(b"{" + start + str(transfer).encode() + end)
        assert said == wire.prefill_fields(body, token_ids=token_ids, transfer=transfer)


@pytest.mark.interpreted
@pytest.mark.parametrize(("name", "more"), [("p", b""), ("p@0", b"x-data-parallel-rank: 0\r\n"), ("p@x", b"")])
def test_every_leg_names_its_rank(name: str, more: bytes) -> None:
    """Header lines of prefill and decode legs (`lines`), and of source legs (`untraced`)."""
    leg = object.__new__(Outgoing)
    leg._head = b"a: b\r\n"
    leg._trace = SimpleNamespace(recorded=False, sends=lambda *_: None)
    target = Instance(id=InstanceId(name), role=Role.BOTH, url="http://h")
    assert leg.lines("leg", target) == leg.untraced(target) == b"a: b\r\n" + more
