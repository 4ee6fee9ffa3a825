"""How long a prompt and its answer may be, as an engine's list of models says it."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from router.fleet.view import FleetView

BASE = {"id": "base", "max_model_len": 2048, "parent": None}


@pytest.mark.parametrize(
    ("models", "asked", "context"),
    [
        ((BASE,), "base", 2048),
        ((BASE,), "", 2048),
        ((BASE,), "other", None),
        ((BASE, {"id": "poet", "max_model_len": None, "parent": "base"}), "poet", 2048),
        (({"id": "poet", "max_model_len": None, "parent": "base"}, BASE), "poet", 2048),
        (({"id": "poet", "max_model_len": None, "parent": "gone"}, BASE), "poet", None),
        (({"id": "poet", "max_model_len": None, "parent": "poet"},), "poet", None),
        (({"id": "a", "parent": "b"}, {"id": "b", "parent": "a"}), "a", None),
        ((), "base", None),
    ],
)
def test_an_adapter_has_its_parents_length(models: tuple[dict[str, Any], ...], asked: str, context: int | None) -> None:
    view = FleetView()
    view.add(Instance(id=InstanceId("d"), role=Role.DECODE, url="http://d"))
    view.seen(InstanceId("d"), models, None)
    assert view.get(InstanceId("d")).context(asked) == context


def test_a_fleets_context_is_the_longest_that_an_instance_reports_now() -> None:
    view = FleetView()
    for name, length in (("a", 2048), ("b", 4096), ("c", None)):
        view.add(Instance(id=InstanceId(name), role=Role.BOTH, url=f"http://{name}"))
        view.seen(InstanceId(name), ({**BASE, "max_model_len": length},), None)
    fleet = view.all()
    assert fleet.ready("base").context == fleet.ready(None).context == 4096
    assert fleet.ready("other").context is None
    view.seen(InstanceId("b"), (BASE,), None)
    assert fleet.ready("base").context == 2048, "its engine was started again with another length"
    view.seen(InstanceId("a"), ({**BASE, "max_model_len": None},), None)
    view.get(InstanceId("b")).up = False
    assert fleet.ready("base").context is None
