"""Proofs of pairs: which is next, what two answers prove, and what becomes of a pair that failed."""

import json

import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.policy import POLICIES
from router.proofs import AGAIN_S, EACH, LATER_S, TIE, Pair, Proofs, Said, fault, question, read
from router.records import Wanted
from router.view import View

P0, P1, D0, D1 = (InstanceId(name) for name in ("p0", "p1", "d0", "d1"))


def fleet(prefills: int = 2, decodes: int = 2, **epochs: int) -> View:
    view = View()
    roles = [(f"p{at}", Role.PREFILL) for at in range(prefills)] + [(f"d{at}", Role.DECODE) for at in range(decodes)]
    for name, role in roles:
        view.add(Instance(id=InstanceId(name), role=role, url=f"http://{name}", epoch=epochs.get(name, 1)))
        view.seen(InstanceId(name), ({"id": "m"},), Load())
    return view


def all_due(proofs: Proofs, view: View, now: float = 0.0, because: str | None = "") -> list[tuple[str, str]]:
    found = []
    while (pair := proofs.due(view.all(), "m", now)) is not None:
        found.append(pair.names)
        proofs.ended(pair, because, now)
    return found


def test_every_pair_once_and_every_instance_soon() -> None:
    proofs, view = Proofs(), fleet()
    order = all_due(proofs, view)
    assert sorted(order) == [(P0, D0), (P0, D1), (P1, D0), (P1, D1)] and proofs.proven() == 4
    assert {name for pair in order[:2] for name in pair} == {P0, P1, D0, D1}
    assert proofs.due(view.all(), "another", 0.0) is None


def test_a_life_is_proven_anew_and_nobody_with_himself() -> None:
    proofs = Proofs()
    all_due(proofs, fleet())
    assert all_due(proofs, fleet(d1=2)) in ([(P0, D1), (P1, D1)], [(P1, D1), (P0, D1)])
    both = View()
    both.add(Instance(id=InstanceId("b"), role=Role.BOTH, url="http://b"))
    both.seen(InstanceId("b"), ({"id": "m"},), Load())
    assert all_due(Proofs(), both) == []


def test_whom_one_has_not_met_is_proven_later() -> None:
    proofs, view = Proofs(), fleet(1, 1)
    view.all().shuns(view.get(D0), (P0,))
    assert all_due(proofs, view) == []
    view.all().shuns(view.get(D0), ())
    assert all_due(proofs, view) == [(P0, D0)]


def test_pairs_that_nobody_is_handed_over_between_are_not_proven() -> None:
    view, kept = View(), {"p0": ("ann",), "p1": ("bob", "eve"), "d0": ("ann", "bob"), "d1": ()}
    for name, tenants in kept.items():
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        view.add(Instance(id=InstanceId(name), role=role, url=f"http://{name}", tenants=frozenset(tenants)))
        view.seen(InstanceId(name), ({"id": "m"},), Load())
    assert sorted(all_due(Proofs(), view)) == [(P0, D0), (P0, D1), (P1, D0), (P1, D1)]
    view.add(Instance(id=D0, role=Role.DECODE, url="http://d0", epoch=2, tenants=frozenset({"ann"})))
    view.seen(D0, ({"id": "m"},), Load())
    assert sorted(all_due(Proofs(), view)) == [(P0, D0), (P0, D1), (P1, D1)]


def test_who_serves_other_weights_is_not_asked() -> None:
    view = View()
    for name, role, weights in (("p0", Role.PREFILL, "old"), ("p1", Role.PREFILL, ""), ("d0", Role.DECODE, "new")):
        view.add(Instance(id=InstanceId(name), role=role, url=f"http://{name}", epoch=1, weights=weights))
        view.seen(InstanceId(name), ({"id": "m"},), Load())
    assert all_due(Proofs(), view) == [(P1, D0)]


def test_of_many_some_are_enough() -> None:
    proofs, view = Proofs(), fleet(EACH + 9, 1)
    assert len(all_due(proofs, view)) == EACH


def test_what_failed_hands_nothing_over_until_it_has_passed() -> None:
    proofs, view = Proofs(), fleet(1, 1)
    assert all_due(proofs, view, 0.0, "otherwise") == [(P0, D0)]
    assert proofs.failed() == {(P0, D0): "otherwise"}
    view.distrust(proofs.failed())

    def chosen() -> tuple[str | None, str | None]:
        found = POLICIES["least_load"](view.all(), Wanted(model="m", hand_over=True))
        return found.prefill, found.decode

    assert chosen() == (None, "d0")
    view.all().shuns(view.get(D0), ())
    assert chosen() == (None, "d0"), "what its agent says is another thing"
    assert all_due(proofs, view, AGAIN_S - 1) == []
    assert all_due(proofs, view, AGAIN_S, "otherwise") == [(P0, D0)]
    assert all_due(proofs, view, 2 * AGAIN_S) == [], "twice as long"
    assert all_due(proofs, view, 3 * AGAIN_S) == [(P0, D0)] and proofs.failed() == {}
    view.distrust(proofs.failed())
    assert chosen() == ("p0", "d0")


def test_what_says_nothing_of_a_pair_changes_nothing() -> None:
    proofs, view = Proofs(), fleet(1, 1)
    assert all_due(proofs, view, 0.0, None) == [(P0, D0)] and proofs.failed() == {}
    assert all_due(proofs, view, LATER_S, None) == [(P0, D0)]
    assert all_due(proofs, view, 2 * LATER_S) == [] and all_due(proofs, view, 3 * LATER_S) == [(P0, D0)]
    pair = Pair(P0, 1, D0, 1)
    proofs.ended(pair, "otherwise", 0.0)
    proofs.ended(pair, None, AGAIN_S)
    assert proofs.failed(), "nor does it clear what has failed"


def test_what_answers_prove() -> None:
    alone = Said("abc", 0)
    assert fault(Said("abc", 96), alone) == "" and fault(Said("abc", None), alone) == ""
    assert "nothing was handed over" in (fault(Said("abc", 0), alone) or "")
    assert fault(Said("abd", 96), alone) is None


@pytest.mark.parametrize(("behind", "good"), [(0.0, True), (TIE, True), (TIE + 0.01, False), (5.0, False)])
def test_a_tie_is_no_fault(behind: float, good: bool) -> None:
    handed = Said("ax", 96, ("a", "x"), ({"a": -1.0}, {"x": -2.0, "y": -2.0 - behind}))
    alone = Said("ay", 0, ("a", "y"), ({"a": -1.0}, {"y": -2.0, "x": -2.0}))
    assert (fault(handed, alone) == "") is good
    unheard_of = Said("az", 0, ("a", "z"), ({"a": -1.0}, {"z": -2.0}))
    assert fault(handed, unheard_of)


def test_what_an_engine_says() -> None:
    assert question("m", "x", "s")["cache_salt"] == "s" and "logprobs" not in question("m", "x", "s")
    told = {
        "choices": [{"text": "ab", "logprobs": {"tokens": ["a", "b"], "top_logprobs": [{"a": -1.0}, None]}}],
        "usage": {"prompt_tokens_details": {"cached_tokens": 64}},
    }
    assert read(json.dumps(told).encode()) == Said("ab", 64, ("a", "b"), ({"a": -1.0}, {}))
    assert read(b'{"choices": [{"text": "ab"}]}') == Said("ab", None)
    assert read(b'{"choices": [{"text": "ab"}], "usage": {"prompt_tokens_details": {}}}') == Said("ab", 0)
    for bad in (b"", b"{}", b'{"choices": []}', b'{"choices": [{"text": 3}]}', b"[" * 10_000, b"\xff"):
        assert read(bad) is None
