"""LoRA adapters: two instances may have different adapters under one name; digests tell which pairs may hand over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from cluster.wire import ADAPTER, TransferFields
from engine.vllm.adapters import Adapters
from engine.vllm.weights import adapter_marks, adapter_of
from kvtransfer.fields import other_adapter
from router.core.journey import Choose, Chosen
from router.core.values import Reported, Wanted
from router.fleet.view import FleetView
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import POLICIES

P, P2, D = InstanceId("p"), InstanceId("p2"), InstanceId("d")
ROLES = {P: Role.PREFILL, P2: Role.PREFILL, D: Role.DECODE}


def card(name: str, root: str = "") -> dict[str, Any]:
    return {"id": name, "root": root, "parent": "m"}


def view_of(
    told: Mapping[InstanceId, Mapping[str, str] | None], *, base: frozenset[InstanceId] = frozenset()
) -> FleetView:
    """`told`: each instance's adapter digests by name; None: no agent reports them. `base`: instances whose base model
    is `poet`.
    """
    view = FleetView()
    for name, digests in told.items():
        instance = Instance(id=name, role=ROLES[name], url=f"http://{name}", epoch=1)
        poet = {"id": "poet", "parent": None} if name in base else card("poet")
        models: tuple[dict[str, object], ...] = ({"id": "m", "parent": None}, poet)
        if digests is None:
            view.add(instance)
            view.seen(name, models, Load())
            continue
        view.fold(
            (
                *(_reported(each.instance, each.models_json, each.adapters) for each in view.all()),
                _reported(instance, models, digests),
            )
        )
    return view


def _reported(instance: Instance, models: tuple[dict[str, object], ...], adapters: Mapping[str, str]) -> Reported:
    load = Load()
    return Reported(
        instance=instance, state="ready", accepting=True, credits=8, load=load, models=models, adapters=adapters
    )


def chosen(view: FleetView, model: str = "poet", policy: str = "least_load") -> Chosen:
    return POLICIES[policy](view.all(), Wanted(model=model, hand_over=True))


@pytest.mark.parametrize("policy", ["least_load", "workload"])
@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        ({"poet": "a"}, {"poet": "b"}, "not one adapter everywhere"),
        ({"poet": ""}, {"poet": ""}, "not known which adapter"),
        ({"poet": "a"}, {}, "not known which adapter"),
        (None, None, "not known which adapter"),
    ],
)
def test_no_hand_over_unless_adapters_are_known_equal(policy: str, prefill: Any, decode: Any, said: str) -> None:
    found = chosen(view_of({P: prefill, D: decode}), policy=policy)
    assert (found.prefill, found.decode) == (None, D) and said in found.because


def test_one_adapter_is_handed_over_and_the_base_model_whatever_the_adapters() -> None:
    one = view_of({P: {"poet": "a"}, D: {"poet": "a"}})
    assert (chosen(one).prefill, chosen(one).decode) == (P, D)
    other = view_of({P: {"poet": "a"}, D: {"poet": "b"}})
    assert (chosen(other, "m").prefill, chosen(other, "m").decode) == (P, D)


def test_a_name_of_a_model_at_p_and_of_an_adapter_at_d_is_not_handed_over() -> None:
    found = chosen(view_of({P: {}, D: {"poet": "a"}}, base=frozenset({P})))
    assert (found.prefill, found.decode) == (None, D) and "not one adapter everywhere" in found.because


@pytest.mark.parametrize("policy", ["least_load", "workload"])
def test_p_is_chosen_among_instances_with_the_adapter_of_d(policy: str) -> None:
    view = view_of({P: {"poet": "b"}, P2: {"poet": "a"}, D: {"poet": "a"}})
    assert chosen(view, policy=policy).prefill in {P2, None}
    assert (
        not view.all().pairing.pairs(P, D, "poet")
        and view.all().pairing.pairs(P2, D, "poet")
        and view.all().pairing.pairs(P, D, "m")
    )
    prefills, decodes = zip(*view.all().pairing.kinships(view.all().ready("poet")), strict=True)
    assert [[view.all().at(row).id for row in rows.tolist()] for rows in (*prefills, *decodes)] == [[P2], [D]]


def test_a_later_digest_counts_at_once() -> None:
    view = view_of({P: {"poet": "a"}, D: {"poet": "a"}})
    assert chosen(view).prefill == P
    view.get(D).adapters = {"poet": ""}
    assert chosen(view).prefill is None
    view.get(D).adapters = {"poet": "a"}
    assert chosen(view).prefill == P


class Files:
    """A file system in memory: the content at each path, and the number of reads."""

    def __init__(self) -> None:
        self.at: dict[str, str] = {"/a": "one", "/b": "two"}
        self.read = 0

    def digest(self, root: str) -> str:
        self.read += 1
        return f"digest of {self.at[root]}"

    def marks(self, root: str) -> tuple[object, ...]:
        return (self.at[root],) if root in self.at else ()


def test_an_agent_reads_an_adapter_once_and_has_no_digest_once_its_files_change() -> None:
    files = Files()
    adapters = Adapters(files.digest, files.marks)
    loaded = [{"id": "m", "root": "m", "parent": None}, card("poet", "/a"), card("far", "org/far")]
    adapters.look(loaded)
    adapters.look(loaded)
    assert adapters.digests == {"poet": "digest of one", "far": ""} and files.read == 1
    files.at["/a"] = "three"
    assert adapters.check() and adapters.digests["poet"] == "", "the engine may compute with either version"
    adapters.look(loaded)
    assert not adapters.check() and adapters.digests["poet"] == ""
    adapters.look([card("poet", "/b")])
    assert adapters.digests == {"poet": "digest of two"}
    adapters.look([])
    adapters.look([card("poet", "/a")])
    assert adapters.digests == {"poet": "digest of three"}
    adapters.restart()
    assert adapters.digests == {}


def test_an_adapter_whose_files_change_while_they_are_read_has_no_digest() -> None:
    files = Files()

    def digest(root: str) -> str:
        files.at[root] += "!"
        return "of half of each"

    adapters = Adapters(digest, files.marks)
    adapters.look([card("poet", "/a")])
    assert adapters.digests == {"poet": ""}


def test_an_adapter_is_all_of_its_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text('{"r": 8}')
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"w" * 3_000_000)
        (tmp_path / name / "README.md").write_text(name)
    first, second = (str(tmp_path / name) for name in "ab")
    assert adapter_of(first) == adapter_of(second) != ""
    middle = bytearray(b"w" * 3_000_000)
    middle[1_234_567] = 0
    before = adapter_marks(second)
    (tmp_path / "b" / "adapter_model.safetensors").write_bytes(middle)
    os.utime(tmp_path / "b" / "adapter_model.safetensors", ns=(1, 1))
    assert adapter_of(first) != adapter_of(second) and adapter_marks(second) != before
    (tmp_path / "a" / "adapter_config.json").write_text('{"r": 9}')
    assert adapter_of(first) not in ("", adapter_of(second))
    for nothing in ("", "org/name", str(tmp_path / "none"), str(tmp_path)):
        assert adapter_of(nothing) == "" and adapter_marks(nothing) == ()


def test_a_stream_goes_on_only_under_the_same_adapter() -> None:
    view = view_of({P: {"poet": "a"}, P2: {"poet": "b"}, D: {"poet": "a"}})
    meaning = view.get(D).meaning("poet")
    wanted = Wanted(model="poet", hand_over=False, excluded=frozenset({D}), meaning=meaning)
    assert POLICIES["least_load"](view.all(), wanted).decode == P
    view.get(P).adapters = {"poet": ""}
    assert POLICIES["least_load"](view.all(), wanted).decode is None, "P's agent does not know the digest"
    assert view.get(P).meaning("poet") != view_of({P2: {"poet": ""}}).get(P2).meaning("poet")


def test_a_hold_goes_to_no_d_with_another_adapter() -> None:
    for digest, anew in (("a", False), ("b", True)):
        view = view_of({P: {"poet": "a"}, P2: {"poet": digest}, D: {"poet": digest}})
        scheduler = Scheduler(view, POLICIES["least_load"])
        context = SchedulingContext(Wanted(model="poet", hand_over=True))
        assert scheduler.choose(context, Choose(frozenset(), hand_over=True), 0.0)[0].decode == D
        found, _ = scheduler.choose(context, Choose(frozenset(), hand_over=True, holders=(P,)), 0.0)
        assert (found.decode, found.anew) == (D, anew)
        second = Choose(frozenset({P}), hand_over=True, second=True, holders=(P,))
        other = scheduler.choose(context, second, 1.0)[0]
        assert (other.prefill is None) == anew, "no second leg that would leave the first without a D"
        assert context.decode == D


@pytest.mark.parametrize(
    ("told", "mine", "why"),
    [
        (None, None, ""),
        ("a", "a", ""),
        ("a", "b", "other weights"),
        (None, "a", "without"),
        ("a", None, "without"),
        ("", "", "not known"),
        ("a", "", "not known"),
        (None, "", "without"),
        (7, "a", "other weights"),
        ([], None, "without"),
    ],
)
def test_a_hold_is_pulled_only_with_the_adapter_that_it_was_computed_with(told: Any, mine: Any, why: str) -> None:
    fields = {} if told is None else {ADAPTER: told}
    assert (other_adapter(fields, mine) == "") == (why == "") and why in other_adapter(fields, mine)


def test_fields_that_are_none_name_no_adapter() -> None:
    assert other_adapter(None, None) == "" and "without" in other_adapter(None, "a")


def test_a_first_token_counts_only_if_p_tells_the_adapter_that_d_announces() -> None:
    same, unsure, silent = TransferFields({ADAPTER: "a"}), TransferFields({ADAPTER: ""}), TransferFields({})
    assert same.of_another_adapter("a") == "" and silent.of_another_adapter("a") == ""
    for announced in ("b", "", None):
        assert "another adapter" in same.of_another_adapter(announced)
        assert "another adapter" in unsure.of_another_adapter(announced)
    view = view_of({P: {"poet": "a"}, D: {"poet": "b"}})
    assert (view.adapter(D, "poet"), view.adapter(D, "m"), view.adapter(P2, "poet")) == ("b", None, None)


def test_an_engine_names_an_adapter_at_each_request_and_reads_its_files_once() -> None:
    files = Files()
    adapters = Adapters(files.digest, files.marks)
    assert [adapters.of("poet", "/a", 1) for _ in range(3)] == ["digest of one"] * 3 and files.read == 1
    files.at["/a"] = "three"
    assert adapters.of("poet", "/a", 1) == "", "the engine may compute with either version"
    assert adapters.of("poet", "/a", 1) == "" and files.read == 1
    assert adapters.of("poet", "/a", 2) == "digest of three", "loaded anew"
    assert adapters.of("poet", "/b", 3) == "digest of two" and adapters.of("far", "org/far", 4) == ""


def test_an_engine_remembers_so_many_adapters_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.vllm.adapters.LOADED_MAX", 2)
    files = Files()
    adapters = Adapters(files.digest, files.marks)
    for name in ("one", "two", "one", "three"):
        adapters.of(name, "/a", 1)
    assert adapters.digests.keys() == {"one", "three"}
