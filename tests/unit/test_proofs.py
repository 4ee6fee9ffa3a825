"""Proofs of pairs: which pair is next, what two answers prove, and what happens to a pair that failed."""

import json

import msgspec
import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.core.values import NOTHING_PROVEN, Wanted
from router.fleet.events import LegStarted
from router.fleet.pair_proofs import (
    AGAIN_S,
    EACH,
    ITSELF,
    LATER_S,
    MERGED_MAX,
    NO_CHATS,
    TIE,
    TRIES,
    Chat,
    Pair,
    PairProofs,
    ProofAnswer,
    chat_read,
    computed_otherwise,
    disagrees,
    fault,
    inexact,
    other_chat,
    other_draw,
    question,
    question_again,
    question_alone,
    read,
)
from router.fleet.prover import LEG_S, SILENT_S
from router.fleet.view import FleetView
from router.scheduler.scoring.policies import POLICIES

P0, P1, D0, D1 = (InstanceId(name) for name in ("p0", "p1", "d0", "d1"))


def fleet(prefills: int = 2, decodes: int = 2, **epochs: int) -> FleetView:
    view = FleetView()
    roles = [(f"p{at}", Role.PREFILL) for at in range(prefills)] + [(f"d{at}", Role.DECODE) for at in range(decodes)]
    for name, role in roles:
        view.add(Instance(id=InstanceId(name), role=role, url=f"http://{name}", epoch=epochs.get(name, 1)))
        view.seen(InstanceId(name), ({"id": "m"},), Load())
    return view


def all_due(proofs: PairProofs, view: FleetView, now: float = 0.0, because: str | None = "") -> list[tuple[str, str]]:
    found = []
    while (pair := proofs.due(view.all(), "m", now)) is not None:
        found.append(pair.names)
        proofs.ended(pair, because, now)
    return found


def test_every_pair_once_and_every_instance_soon() -> None:
    proofs, view = PairProofs(), fleet()
    order = all_due(proofs, view)
    assert sorted(order) == [(P0, D0), (P0, D1), (P1, D0), (P1, D1)] and proofs.proven() == 4
    assert {name for pair in order[:3] for name in pair} == {P0, P1, D0, D1}
    assert proofs.due(view.all(), "another", 0.0) is None


def test_a_restarted_instance_is_proven_anew_and_no_instance_with_itself() -> None:
    proofs = PairProofs()
    all_due(proofs, fleet())
    assert all_due(proofs, fleet(d1=2)) in ([(P0, D1), (P1, D1)], [(P1, D1), (P0, D1)])
    both = FleetView()
    both.add(Instance(id=InstanceId("b"), role=Role.BOTH, url="http://b"))
    both.seen(InstanceId("b"), ({"id": "m"},), Load())
    assert all_due(PairProofs(), both) == []


def test_a_pair_that_has_not_met_is_proven_later() -> None:
    proofs, view = PairProofs(), fleet(1, 1)
    view.all().shuns(view.get(D0), (P0,))
    assert all_due(proofs, view) == []
    view.all().shuns(view.get(D0), ())
    assert all_due(proofs, view) == [(P0, D0)]


def test_pairs_without_a_common_tenant_are_not_proven() -> None:
    view, kept = FleetView(), {"p0": ("ann",), "p1": ("bob", "eve"), "d0": ("ann", "bob"), "d1": ()}
    for name, tenants in kept.items():
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        view.add(Instance(id=InstanceId(name), role=role, url=f"http://{name}", tenants=frozenset(tenants)))
        view.seen(InstanceId(name), ({"id": "m"},), Load())
    assert sorted(all_due(PairProofs(), view)) == [(P0, D0), (P0, D1), (P1, D0), (P1, D1)]
    view.add(Instance(id=D0, role=Role.DECODE, url="http://d0", epoch=2, tenants=frozenset({"ann"})))
    view.seen(D0, ({"id": "m"},), Load())
    assert sorted(all_due(PairProofs(), view)) == [(P0, D0), (P0, D1), (P1, D1)]


def test_pairs_with_different_weights_are_not_proven() -> None:
    view = FleetView()
    for name, role, weights in (("p0", Role.PREFILL, "old"), ("p1", Role.PREFILL, ""), ("d0", Role.DECODE, "new")):
        view.add(Instance(id=InstanceId(name), role=role, url=f"http://{name}", epoch=1, weights=weights))
        view.seen(InstanceId(name), ({"id": "m"},), Load())
    assert all_due(PairProofs(), view) == [(P1, D0)]


def test_every_prefill_instance_of_a_large_fleet_is_proven() -> None:
    proofs, view = PairProofs(), fleet(EACH, 3)
    assert len(all_due(proofs, view)) == 3 * EACH
    proofs, view = PairProofs(), fleet(EACH + 9, 1)
    order = all_due(proofs, view)
    assert len(order) == len(set(order)) == EACH + 9, "each P hands over only once it is proven with one D"
    told(proofs, view)
    assert view.all().ready("m").alike


def told(proofs: PairProofs, view: FleetView) -> None:
    view.proven(proofs.standing(view.all()))
    view.distrust(proofs.failed())


def chosen(view: FleetView, policy: str = "least_load") -> tuple[str | None, str | None]:
    found = POLICIES[policy](view.all(), Wanted(model="m", hand_over=True))
    return found.prefill, found.decode


@pytest.mark.parametrize("policy", ["least_load", "workload"])
def test_a_pair_that_is_not_proven_hands_nothing_over(policy: str) -> None:
    proofs, view = PairProofs(), fleet(1, 1)
    view.proven(NOTHING_PROVEN)
    found = POLICIES[policy](view.all(), Wanted(model="m", hand_over=True))
    assert (found.prefill, found.decode) == (None, "d0") and "no pair of instances is proven" in found.because
    assert "not proven" in view.not_exact(P0, D0)
    proofs.ended(Pair(P0, 1, D0, 1), "otherwise", 0.0)
    told(proofs, view)
    assert "otherwise" in POLICIES[policy](view.all(), Wanted(model="m", hand_over=True)).because
    proofs.ended(Pair(P0, 1, D0, 1), "", 0.0)
    told(proofs, view)
    assert chosen(view) == (P0, D0) and view.not_exact(P0, D0) == ""
    view.add(Instance(id=D0, role=Role.DECODE, url="http://d0", epoch=2))
    view.seen(D0, ({"id": "m"},), Load())
    assert chosen(view) == (None, "d0"), "another life"
    proofs.ended(Pair(P0, 1, D0, 1), "", 0.0)
    told(proofs, view)
    assert chosen(view) == (None, "d0"), "a proof of the former life that ends late proves nothing of this one"


def test_an_engine_without_an_epoch_is_proven_anew_once_it_was_down() -> None:
    proofs, view = PairProofs(), fleet(1, 1, p0=0, d0=0)
    assert all_due(proofs, view) == [(P0, D0)]
    told(proofs, view)
    assert chosen(view) == (P0, D0)
    view.unreachable(D0)
    view.seen(D0, ({"id": "m"},), Load())
    assert chosen(view) == (None, D0)
    assert all_due(proofs, view) == [(P0, D0)]
    told(proofs, view)
    assert chosen(view) == (P0, D0)


def test_a_circle_hands_over_although_not_every_pair_was_tried() -> None:
    proofs, view = PairProofs(), fleet()
    for pair in (Pair(P0, 1, D0, 1), Pair(P1, 1, D0, 1), Pair(P0, 1, D1, 1)):
        proofs.ended(pair, "", 0.0)
    told(proofs, view)
    assert view.all().pairing.proven(view.get(P1).row, view.get(D1).row) and view.not_exact(P1, D1) == ""
    proofs.ended(Pair(P1, 1, D1, 1), "otherwise", 0.0)
    told(proofs, view)
    assert view.all().pairing.apart(view.get(P1).row, view.get(D1).row), "also within one circle"
    assert not view.all().pairing.apart(view.get(P1).row, view.get(D0).row)


def test_two_circles_hand_over_each_among_themselves_until_one_pair_links_them() -> None:
    proofs, view = PairProofs(), fleet()
    proofs.ended(Pair(P0, 1, D0, 1), "", 0.0)
    proofs.ended(Pair(P1, 1, D1, 1), "", 0.0)
    told(proofs, view)
    all_of = view.all()
    found = all_of.pairing.kinships(all_of.ready("m"))
    rows = [([all_of.at(row).id for row in p.tolist()], [all_of.at(row).id for row in d.tolist()]) for p, d in found]
    assert sorted(rows) == [([P0], [D0]), ([P1], [D1])]
    assert chosen(view) in {(P0, D0), (P1, D1)} and chosen(view, "workload") not in {(P0, D1), (P1, D0)}
    assert proofs.joining(view.all(), "m", 0.0) in (Pair(P0, 1, D1, 1), Pair(P1, 1, D0, 1))
    proofs.ended(Pair(P1, 1, D0, 1), "", 0.0)
    told(proofs, view)
    assert all_of.ready("m").alike and proofs.joining(view.all(), "m", 0.0) is None


def test_a_pair_whose_first_tokens_differ_hands_over_and_seeds_nothing() -> None:
    proofs, view = PairProofs(), fleet()
    for pair in (Pair(P0, 1, D0, 1), Pair(P1, 1, D0, 1), Pair(P1, 1, D1, 1)):
        proofs.ended(pair, "", 0.0, "not the first" if pair.prefill == P0 else "")
    told(proofs, view)
    assert view.not_exact(P0, D0) == "not the first" and view.not_exact(P1, D0) == view.not_exact(P1, D1) == ""
    assert view.not_exact(P0, D1) == "not the first", "the pair was not tried: its P's worst counts"
    assert view.all().pairing.inexact.keys() == {(P0, D0), (P0, D1)}
    assert not view.all().pairing.apart(view.get(P0).row, view.get(D0).row)
    assert (P0, D0) in all_due(proofs, view, AGAIN_S), "it may have been a tie"
    told(proofs, view)
    assert view.not_exact(P0, D0) == ""


def test_a_stream_goes_on_only_in_the_circle_of_the_instance_that_began_it() -> None:
    proofs, view = PairProofs(), fleet()
    proofs.ended(Pair(P0, 1, D0, 1), "", 0.0)
    proofs.ended(Pair(P1, 1, D1, 1), "", 0.0)
    told(proofs, view)

    def goes_on(maker: InstanceId, weights: str = "") -> InstanceId | None:
        circle, wanted = (
            view.all().pairing.circle(maker),
            Wanted(model="m", hand_over=False, excluded=frozenset({maker})),
        )
        wanted = msgspec.structs.replace(wanted, weights=weights, circle=circle, meaning="model")
        return POLICIES["least_load"](view.all(), wanted).decode

    assert (goes_on(D0), goes_on(D1), goes_on(P0)) == (P0, P1, D0)
    view.add(Instance(id=InstanceId("new"), role=Role.DECODE, url="http://new", weights="w"))
    view.seen(InstanceId("new"), ({"id": "m"},), Load())
    assert goes_on(InstanceId("new")) is None, "no instance is known to be like it"
    assert goes_on(D0, "w") == "new", "its agent reports these weights"


def test_a_stream_goes_on_in_the_circle_that_its_own_has_become_part_of() -> None:
    """It remembers the number that its instance's circle had when the stream began."""
    names = [(InstanceId(f"p{number}"), InstanceId(f"d{number}")) for number in range(3)]
    proofs, view = PairProofs(), fleet(3, 3)
    for p, d in names:
        proofs.ended(Pair(p, 1, d, 1), "", 0.0)
    told(proofs, view)
    pairing = view.all().pairing
    began = [pairing.circle(d) for _, d in names]
    assert began == [1, 2, 3]

    def goes_on(circle: int) -> list[bool]:
        wanted = Wanted(model="m", hand_over=False, circle=circle, meaning="model")
        return [pairing.continues(view.get(d).row, wanted) for _, d in names]

    assert goes_on(3) == [False, False, True]
    proofs.ended(Pair(names[2][0], 1, names[1][1], 1), "", 1.0)
    told(proofs, view)
    assert (goes_on(1), goes_on(2), goes_on(3)) == ([True, False, False], [False, True, True], [False, True, True])
    proofs.ended(Pair(names[1][0], 1, names[0][1], 1), "", 2.0)
    told(proofs, view)
    assert [goes_on(circle) for circle in began] == [[True] * 3] * 3, "also a circle that was merged twice"
    assert goes_on(0) == [False] * 3 == goes_on(4)


def test_merged_circles_are_remembered_up_to_a_limit() -> None:
    proofs, view = PairProofs(), fleet()
    for life in range(2, 2 * MERGED_MAX + 2):
        proofs.ended(Pair(InstanceId("p"), life, InstanceId("d"), life), "", 0.0)
        proofs.ended(Pair(P0, 1, D0, 1), "", 0.0)
        proofs.ended(Pair(InstanceId("p"), life, D0, 1), "", 0.0)
    merged = proofs.standing(view.all()).merged
    assert len(merged) == MERGED_MAX
    newest = max(merged)
    assert merged[newest] not in merged, "each stands with the number that its circle has now"


def test_an_instance_in_both_roles_is_like_itself() -> None:
    view = FleetView()
    for name in ("a", "b"):
        view.add(Instance(id=InstanceId(name), role=Role.BOTH, url=f"http://{name}", epoch=1))
        view.seen(InstanceId(name), ({"id": "m"},), Load())
    proofs = PairProofs()
    assert len(all_due(proofs, view)) == 2
    told(proofs, view)
    assert view.all().ready("m").alike


def test_an_instance_that_fails_with_several_is_not_tried_with_all() -> None:
    proofs, view = PairProofs(), fleet(1, 20)
    tried = 0
    while (pair := proofs.joining(view.all(), "m", 0.0)) is not None:
        proofs.ended(pair, "otherwise", 0.0)
        tried += 1
    assert tried == TRIES


def test_an_engine_that_answers_no_completion_waits_after_a_few_partners() -> None:
    """Each try takes `LEG_S`. The first pause must not be over before the last of `TRIES` tries is."""
    proofs, view, now = PairProofs(), fleet(1, 20), 0.0
    for _ in range(TRIES):
        pair = proofs.joining(view.all(), "m", now)
        assert pair is not None
        now += LEG_S
        proofs.ended(pair, None, now, doubt="it took too long", pause_s=SILENT_S)
    assert proofs.joining(view.all(), "m", now) is None
    assert proofs.joining(view.all(), "m", LEG_S + SILENT_S) is not None


def test_only_the_pause_after_a_silent_engine_is_long_and_not_those_after_it() -> None:
    proofs, view = PairProofs(), fleet(1, 1)
    pair = proofs.due(view.all(), "m", 0.0)
    assert pair is not None
    proofs.ended(pair, None, 1000.0, doubt="it took too long", pause_s=SILENT_S)
    assert proofs.due(view.all(), "m", 1000.0 + SILENT_S - 1) is None
    assert proofs.due(view.all(), "m", 1000.0 + SILENT_S) == pair
    proofs.ended(pair, None, 2000.0, doubt="no answer")
    assert proofs.due(view.all(), "m", 2000.0 + 2 * LATER_S) == pair


def test_pairs_proven_at_once_are_of_different_instances() -> None:
    proofs, view = PairProofs(), fleet(3, 3)
    busy: frozenset[InstanceId] = frozenset()
    for _ in range(3):
        pair = proofs.joining(view.all(), "m", 0.0, busy)
        assert pair is not None and busy.isdisjoint(pair.names)
        busy |= {*pair.names}
    assert proofs.joining(view.all(), "m", 0.0, busy) is None


def test_a_pair_that_failed_hands_nothing_over_until_it_has_passed() -> None:
    proofs, view = PairProofs(), fleet(1, 1)
    assert all_due(proofs, view, 0.0, "otherwise") == [(P0, D0)]
    assert proofs.failed() == {(P0, D0): "otherwise"}
    view.distrust(proofs.failed())

    assert chosen(view) == (None, "d0")
    view.all().shuns(view.get(D0), ())
    assert chosen(view) == (None, "d0"), "an agent without shuns does not clear a failed proof"
    assert all_due(proofs, view, AGAIN_S - 1) == []
    assert all_due(proofs, view, AGAIN_S, "otherwise") == [(P0, D0)]
    assert all_due(proofs, view, 2 * AGAIN_S) == [], "the next pause is twice as long"
    assert all_due(proofs, view, 3 * AGAIN_S) == [(P0, D0)] and proofs.failed() == {}
    view.distrust(proofs.failed())
    assert chosen(view) == ("p0", "d0")


def test_a_proof_without_a_result_changes_nothing() -> None:
    proofs, view = PairProofs(), fleet(1, 1)
    assert all_due(proofs, view, 0.0, None) == [(P0, D0)] and proofs.failed() == {}
    assert all_due(proofs, view, LATER_S, None) == [(P0, D0)]
    assert all_due(proofs, view, 2 * LATER_S) == [] and all_due(proofs, view, 3 * LATER_S) == [(P0, D0)]
    pair = Pair(P0, 1, D0, 1)
    proofs.ended(pair, "otherwise", 0.0)
    proofs.ended(pair, None, AGAIN_S)
    assert proofs.failed(), "a proof without a result clears no failure"


def test_what_answers_prove() -> None:
    alone = ProofAnswer("abc", 0)
    assert fault(ProofAnswer("abc", 96), alone) == ""
    assert "enable-prompt-tokens-details" in (fault(ProofAnswer("abc", None), alone) or ""), "no cached tokens"
    assert fault(ProofAnswer("abc", 96, ids=(1, 2)), ProofAnswer("abc", 0, ids=(1, 3))) is None, (
        "one text of other tokens"
    )
    assert "other tokens" in (fault(ProofAnswer("abc", 96, prompt=(1,)), ProofAnswer("abc", 0, prompt=(2,))) or "")
    assert "nothing was handed over" in (fault(ProofAnswer("abc", 0), alone) or "")
    assert fault(ProofAnswer("abd", 96), alone) is None


@pytest.mark.parametrize(("behind", "good"), [(0.0, True), (TIE, True), (TIE + 0.01, False), (5.0, False)])
def test_a_tie_is_no_fault(behind: float, good: bool) -> None:
    handed = ProofAnswer("ax", 96, ("a", "x"), ({"a": -1.0}, {"x": -2.0, "y": -2.0 - behind}))
    alone = ProofAnswer("ay", 0, ("a", "y"), ({"a": -1.0}, {"y": -2.0, "x": -2.0}))
    assert (fault(handed, alone) == "") is good
    unheard_of = ProofAnswer("az", 0, ("a", "z"), ({"a": -1.0}, {"z": -2.0}))
    assert fault(handed, unheard_of)


@pytest.mark.parametrize(("place", "off", "good"), [(0, 0.4, True), (0, 0.6, False), (1, 0.4, True), (1, -0.6, False)])
def test_a_tie_among_candidates_that_differ_is_a_fault(place: int, off: float, good: bool) -> None:
    """Candidates count up to the token where the answers part; after it the two instances read different texts."""
    ones = [{"a": -0.5, "x": -2.0}, {"b": -1.0, "c": -1.1, "x": -2.0}, {"d": -0.1, "x": -3.0}]
    others = [dict(each) for each in ones]
    others[place]["x"] += off
    others[2]["x"] -= 2.0
    handed = ProofAnswer("abd", 9, ("a", "b", "d"), tuple(ones))
    alone = ProofAnswer("acd", 0, ("a", "c", "d"), tuple(others))
    assert (fault(handed, alone) == "") == good


@pytest.mark.parametrize(
    ("apart", "good"),
    [
        ((0.0, 0.0, 0.0), True),
        ((ITSELF, -ITSELF, 0.0), True),
        ((0.0, 9.0, 0.0), True),  # another expert was chosen for one token
        ((ITSELF + 0.01, -ITSELF - 0.01, 0.0), False),
        ((3.0, -2.0, 1.0), False),
    ],
)
def test_an_engine_that_disagrees_with_itself_over_half_of_its_tokens(apart: tuple[float, ...], good: bool) -> None:
    own = (-16.0, -0.5, -4.0)
    said = ProofAnswer("abc", 0, ids=(1, 2, 3), logprobs=own)
    scored = ProofAnswer("d", 0, prompt_logprobs=(-99.0, *(each + off for each, off in zip(own, apart, strict=True))))
    found = disagrees(said, scored)
    assert found is not None and (found == "") is good


def test_without_logprobs_it_is_not_known_whether_an_engine_disagrees_with_itself() -> None:
    said, scored = ProofAnswer("a", 0, ids=(1,), logprobs=(-1.0,)), ProofAnswer("b", 0, prompt_logprobs=(-1.0,))
    assert disagrees(said, scored) == ""
    silent = ProofAnswer("a", 0)
    assert disagrees(silent, scored) is disagrees(said, silent) is disagrees(silent, silent) is None
    assert disagrees(ProofAnswer("ab", 0, ids=(1, 2), logprobs=(-1.0,)), scored) is None
    assert disagrees(ProofAnswer("ab", 0, ids=(1, 2), logprobs=(-1.0, -1.0)), scored) is None


def test_whether_ps_token_is_ds_first_token() -> None:
    handed, alone = ProofAnswer("ab", 96, ids=(5, 6)), ProofAnswer("ab", 0, ids=(5, 6))
    assert inexact(ProofAnswer("a", 0, ids=(5,)), "", handed, alone) == ""
    assert "not D's first" in inexact(ProofAnswer("b", 0, ids=(6,)), "", handed, alone)
    assert inexact(ProofAnswer("a", 0, ids=(5,)), "P holds 6 of 7", handed, alone) == "P holds 6 of 7", (
        "equal by chance"
    )
    for first, other in (
        (ProofAnswer("a", 0), handed),
        (ProofAnswer("a", 0, ids=(5,)), ProofAnswer("ab", 96)),
        (ProofAnswer("a", 0, ids=(5, 6)), handed),
    ):
        assert "do not name" in inexact(first, "", other, alone)
    assert inexact(ProofAnswer("a", 0, ids=(5,)), "", ProofAnswer("xb", 96, ids=(4, 6)), alone)
    assert inexact(ProofAnswer("a", 0, ids=(5,)), "", handed, ProofAnswer("xb", 0, ids=(4, 6)))


@pytest.mark.parametrize(("p", "d"), [("", ""), ("float32", ""), ("", "float32"), ("bfloat16", "float32"),
                                      ("bfloat16", "bfloat16"), ("float32, tf32", "float32, tf32")])  # fmt: skip
def test_what_p_leaves_to_d_is_handed_over_in_float32_only(p: str, d: str) -> None:
    because = computed_otherwise("P holds 6 of 7", p, d)
    assert because.startswith("P holds 6 of 7; ") and f"(P: {p or 'unknown'}, D: {d or 'unknown'})" in because
    assert computed_otherwise("P holds 6 of 7", "float32", "float32") == ""
    assert computed_otherwise("", p, d) == "", "a P that computes the whole prompt leaves nothing to round"


def test_how_chats_are_read_and_answered() -> None:
    told = b'{"prompt_token_ids": [1, 2], "usage": {"prompt_tokens": 2}, "choices": [{"token_ids": [7, 8]}]}'
    assert chat_read(told) == Chat((1, 2), (7, 8))
    assert chat_read(b'{"usage": {"prompt_tokens": 2}, "choices": []}') == Chat(2)
    for silent in (b"{}", b"", b"[]", b'{"usage": {}}', b"\xff"):
        assert chat_read(silent) == Chat(None)
    same = ((Chat((1, 2)), Chat((1, 2))), (Chat(None), Chat((1,))), (Chat(2), Chat((1, 2))), (NO_CHATS, NO_CHATS))
    for one, other in same:
        assert other_chat(one, other) == ""
    assert "templates" in other_chat(Chat((1, 2)), Chat((1, 3)))
    assert "templates" in other_chat(NO_CHATS, Chat((1, 3))) and "templates" in other_chat(Chat(3), NO_CHATS)
    assert other_draw(Chat(1, (7, 8)), Chat(1, (7, 8))) == other_draw(Chat(1), Chat(1, (7, 8))) == ""
    assert "generation-config" in other_draw(Chat(1, (7, 9)), Chat(1, (7, 8)))


def test_questions_to_engines_and_their_answers() -> None:
    assert question("m", "x", "s")["cache_salt"] == "s" and "logprobs" not in question("m", "x", "s")
    told = {
        "choices": [{"text": "ab", "logprobs": {"tokens": ["a", "b"], "top_logprobs": [{"a": -1.0}, None]}}],
        "usage": {"prompt_tokens_details": {"cached_tokens": 64}},
    }
    assert read(json.dumps(told).encode()) == ProofAnswer("ab", 64, ("a", "b"), ({"a": -1.0}, {}))
    told["choices"][0] |= {"prompt_token_ids": [7, 8, 9], "token_ids": [1, 2]}  # type: ignore[index]
    told["choices"][0]["logprobs"]["token_logprobs"] = [-1.0, -2.0]  # type: ignore[index]
    scored = [None, {"8": {"logprob": -3.0}}, {"9": {"logprob": -4.0, "rank": 2}, "5": {"logprob": -1.0, "rank": 1}}]
    told["choices"][0]["prompt_logprobs"] = scored  # type: ignore[index]
    whole = read(json.dumps(told).encode())
    assert whole is not None and (whole.logprobs, whole.prompt_logprobs) == ((-1.0, -2.0), (-3.0, -4.0))
    scored[1] = {"6": {"logprob": -3.0}}
    assert (read(json.dumps(told).encode()) or whole).prompt_logprobs == (-4.0,), "up to the first gap"
    drawn, again = question_alone("m", "x", "s", 3), question_again("m", whole, "t")
    assert drawn["seed"] == 3 and drawn["temperature"] == drawn["logprobs"] == drawn["repetition_penalty"] == 1
    assert again["prompt"] == [7, 8, 9, 1, 2] and again["max_tokens"] == 1 and again["cache_salt"] == "t"
    assert again["prompt_logprobs"] == 1, "vLLM 0.32 fails with 0, where it refuses 1 (--kv-sharing-fast-prefill)"
    assert read(b'{"choices": [{"text": "ab"}]}') == ProofAnswer("ab", None)
    assert read(b'{"choices": [{"text": "ab"}], "usage": {"prompt_tokens_details": {}}}') == ProofAnswer("ab", 0)
    for bad in (b"", b"{}", b'{"choices": []}', b'{"choices": [{"text": 3}]}', b"[" * 10_000, b"\xff"):
        assert read(bad) is None


def test_two_instances_that_decoded_in_one_circle_need_no_new_proof_of_chats() -> None:
    """One of the two has flipped: only its hand-over is left to prove."""
    proofs, view = PairProofs(), fleet(prefills=1)
    flipped = Pair(D0, 1, D1, 1)
    assert not proofs.reads_alike(flipped)
    all_due(proofs, view)
    assert proofs.reads_alike(flipped) and not proofs.reads_alike(Pair(P0, 1, D1, 1))


def test_a_proven_decode_instance_is_not_asked_about_itself_again() -> None:
    proofs = PairProofs()
    pair = Pair(P0, 1, D0, 1)
    assert not proofs.agrees(pair)
    proofs.ended(pair, "otherwise", 0.0)
    assert not proofs.agrees(pair)
    proofs.ended(pair, "", 0.0)
    assert proofs.agrees(pair) and proofs.agrees(Pair(P1, 1, D0, 1))
    assert not proofs.agrees(Pair(P0, 1, D0, 2)) and not proofs.agrees(Pair(D0, 1, P0, 1)), "it has only prefilled"


def test_an_instance_that_joins_is_proven_with_the_partner_that_has_least_to_do() -> None:
    proofs, view = PairProofs(), fleet(prefills=1)
    all_due(proofs, view)
    view.handle(LegStarted(D0), 0.0)
    view.add(Instance(id=P1, role=Role.PREFILL, url="http://p1", epoch=1))
    view.seen(P1, ({"id": "m"},), Load())
    pair = proofs.joining(view.all(), "m", 1.0)
    assert pair is not None and pair.names == (P1, D1)
