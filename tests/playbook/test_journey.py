"""The journey as readable scripts: what happened on the left, what must be done on the right."""

import pytest
from msgspec.structs import replace

from cluster.errors import ApiError
from cluster.ids import InstanceId
from cluster.wire import TOLD_EARLY, TransferFields
from router.core.journey import (
    CANCEL_WAIT_S,
    HOLD_USE_S,
    PATIENCE_S,
    TURN,
    TURN_LEAST_S,
    AnswerFromPrefill,
    AwaitFleet,
    CancelPrefill,
    Choose,
    Chosen,
    ClientLeft,
    CloseDecode,
    CloseEarly,
    ClosePrefill,
    DropDecode,
    EarlyLost,
    Ended,
    Fail,
    FailStream,
    Finish,
    FleetChanged,
    ForgoPrefill,
    ForwardRefusal,
    HolderLost,
    Journey,
    JourneyState,
    Lost,
    Opened,
    OutlastPrefill,
    PrefillAnswered,
    PrefixSource,
    Refused,
    Relay,
    Release,
    Released,
    SendDecode,
    SendEarly,
    SendPrefill,
    SendSeed,
    SourceHeld,
    Tick,
    UseEarly,
)

P, P2, P3, D, D2 = (InstanceId(name) for name in ("p", "p2", "p3", "d", "d2"))
HOLD = TransferFields(
    {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_num_tokens": 7, "remote_engine_id": "e"}
)
BOTH_LEGS = Chosen(P, D, "test")
HELD = PrefillAnswered("length", HOLD)
NOBODY = Chosen(None, None, "nobody else")


def journey(*, hand_over: bool = True, stream: bool = True) -> Journey:
    return Journey(hand_over=hand_over, stream=stream, deadline=100.0, deadline_s=100.0)


def play(machine: Journey, script: list[tuple[object, list[object]]], now: float = 1.0) -> None:
    """Each row: an event, and the effects it must cause. Errors compare by class and status."""
    for number, (event, expected) in enumerate(script):
        got = [_shape(effect) for effect in machine.handle(event, now)]  # type: ignore[arg-type]
        assert got == [_shape(effect) for effect in expected], f"row {number}: {event} in {machine.state}"


def _shape(effect: object) -> object:
    error = getattr(effect, "error", None)
    return (type(effect), error.status) if isinstance(error, ApiError) else effect


def error(status: int) -> ApiError:
    return ApiError(status, "", "")


def test_handoff() -> None:
    machine = journey()
    assert machine.begin() == (Choose(frozenset(), hand_over=True),)
    play(
        machine,
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (HELD, [SendDecode(D, HOLD)]),
            (Opened(), [Relay()]),
            (Ended(), [Finish("served")]),
        ],
    )
    assert machine.state is JourneyState.DONE


def test_aggregated_on_one_instance() -> None:
    play(
        journey(hand_over=False),
        [(Chosen(None, D, "whole"), [SendDecode(D, None)]), (Opened(), [Relay()]), (Ended(), [Finish("served")])],
    )


# -- a P that keeps silent --

HOLD_2 = TransferFields({**HOLD.fields, "remote_engine_id": "e2"})
SECOND = Choose(frozenset({P}), hand_over=True, second=True, holders=(P,))
HALF = 1.0 + 99.0 * TURN
"""When P's turn ends, in seconds: the leg was sent at 1, and the request's deadline is 100."""


def silent(*, stream: bool = True) -> Journey:
    """P has had its turn, and P2 has a leg beside it."""
    machine = journey(stream=stream)
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)])])
    assert machine.next_wakeup() == HALF
    play(machine, [(Tick(), [])], now=HALF - 1)
    play(machine, [(Tick(), [SECOND]), (Chosen(P2, D2, "second"), [SendPrefill(P2, 2)])], now=HALF)
    return machine


def answer(
    by: InstanceId, hold: TransferFields | None, reason: str = "length", token: int | None = None
) -> PrefillAnswered:
    return PrefillAnswered(reason, hold, token, by=by)


def test_a_silent_prefill_leg_gets_a_second_one_beside_it_and_the_second_answers_first() -> None:
    machine = silent()
    play(
        machine,
        [
            (answer(P2, HOLD_2, token=7), [OutlastPrefill(P), SendSeed(), SendDecode(D2, HOLD_2, 7)]),
            (answer(P, HOLD), []),
            (Opened(), [Relay()]),
            (Ended(), [Finish("served")]),
        ],
    )
    assert machine.excluded == {P}, "if D fails, P is not asked again"


def test_the_first_leg_may_still_answer_first_and_is_used() -> None:
    machine = silent()
    play(machine, [(answer(P, HOLD), [OutlastPrefill(P2), SendDecode(D2, HOLD)])])
    assert machine.prefill == P and P not in machine.excluded
    play(
        machine,
        [(Lost("connection refused", untouched=True), [Choose(frozenset({P2, D2}), hand_over=True, holders=(P,))])],
    )
    play(machine, [(Chosen(P, D, "again"), [SendDecode(D, HOLD)])])


def test_a_second_leg_that_we_cannot_send_does_not_end_the_first() -> None:
    """A router out of descriptors refuses its own leg with 503; a client's own 4xx ends all."""
    machine = silent()
    play(machine, [(Refused(503, by=P2), []), (answer(P, HOLD), [SendDecode(D2, HOLD)])])
    play(silent(), [(Refused(400, by=P2), [OutlastPrefill(P), ForwardRefusal(), Finish("refused")])])


def test_where_no_other_p_is_free_a_silent_leg_is_waited_for_to_the_end() -> None:
    """A fleet with one P, or a full fleet: the first leg goes on, and the policy is asked again and again."""
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)])])
    asked = []
    while (wakeup := machine.next_wakeup()) != 100.0:
        assert wakeup is not None
        asked.append(wakeup)
        play(machine, [(Tick(), [SECOND]), (Chosen(None, D, "whole", wait=len(asked) == 1), [])], now=wakeup)
    assert asked[:2] == [HALF, HALF + (100.0 - HALF) * TURN]
    assert 100.0 - asked[-1] < 4 * TURN_LEAST_S and len(asked) < 12
    play(machine, [(HELD, [SendDecode(D, HOLD)])], now=99.9)
    assert (machine.attempt, machine.excluded) == (1, frozenset())


def test_the_last_try_has_all_the_time_that_is_left() -> None:
    machine = silent()
    quarter = HALF + (100.0 - HALF) * TURN
    assert machine.next_wakeup() == quarter
    third = Choose(frozenset({P, P2}), hand_over=True, second=True, holders=(P, P2))
    play(machine, [(Tick(), [third]), (Chosen(P3, D, "third"), [SendPrefill(P3, 3)])], now=quarter)
    assert machine.next_wakeup() == 100.0
    gone = [OutlastPrefill(P), OutlastPrefill(P2)]
    play(machine, [(Tick(), [Fail(error(504)), CloseDecode(), *gone, ForgoPrefill(P3)])], now=100.0)
    play(machine, [(HELD, [Release(D, HOLD)]), (Released(ok=True), [Finish("expired")])], now=100.1)


def test_a_second_leg_that_fails_costs_the_first_nothing() -> None:
    machine = silent()
    play(
        machine,
        [
            (Lost("reset", by=P2), [Choose(frozenset({P, P2}), hand_over=True, second=True, holders=(P,))]),
            (NOBODY, []),
            (answer(P, HOLD), [SendDecode(D2, HOLD)]),
        ],
    )
    machine = silent()
    play(
        machine,
        [
            (
                answer(P2, HOLD_2, "abort"),
                [Release(D2, HOLD_2), Choose(frozenset({P, P2}), True, second=True, holders=(P,))],
            ),
            (Chosen(P3, D, "third"), [SendPrefill(P3, 3)]),
            (Lost("reset", by=P3), []),
            (Lost("reset", by=P), [Fail(error(502)), Finish("failed")]),
        ],
    )


def test_a_first_leg_that_is_lost_leaves_the_second_its_turn() -> None:
    machine = silent()
    before = machine.next_wakeup()
    play(machine, [(Lost("the instance was lost", by=P), [])], now=60.0)
    assert machine.next_wakeup() == before
    play(machine, [(HELD, [SendDecode(D2, HOLD)])], now=60.0)


def test_a_refusal_by_the_first_leg_goes_to_the_client() -> None:
    play(silent(), [(Refused(400, by=P), [OutlastPrefill(P2), ForwardRefusal(), Finish("refused")])])


def test_ended_at_the_first_token_of_a_second_leg() -> None:
    machine = silent(stream=False)
    ended = [OutlastPrefill(P), AnswerFromPrefill(), Release(D2, HOLD_2)]
    play(machine, [(answer(P2, HOLD_2, "stop"), ended), (Released(ok=True), [Finish("served")])])
    machine = silent()
    play(machine, [(answer(P2, HOLD_2, "stop"), [OutlastPrefill(P), Release(D2, HOLD_2), SendDecode(P2, None)])])


def test_a_client_that_leaves_with_two_legs_under_way() -> None:
    machine = silent()
    play(machine, [(ClientLeft(), [CloseDecode(), OutlastPrefill(P), ForgoPrefill(P2)])], now=60.0)
    play(machine, [(Tick(), [CancelPrefill(P2)])], now=60.0 + PATIENCE_S)
    play(machine, [(answer(P2, None, "abort"), [Finish("client_left")])], now=62.0)


# -- a source that stands still --

SOURCE = PrefixSource(D2, 100, 1.0, cold_s=3.0)
PULLED = SourceHeld(SOURCE, P)
WITHOUT = Choose(
    frozenset({P, D2}),
    hand_over=True,
    second=True,
    holders=(P,),
    otherwise=(frozenset({P}), frozenset({D2}), frozenset()),
)
"""The second leg goes to another P and to a D that is not the source; if there is none, also to these."""


def pulling(source: PrefixSource = SOURCE) -> Journey:
    """P was sent at 1 s, and pulls a prompt's beginning from 1.2 s on."""
    machine = journey()
    play(machine, [(Chosen(P, D, "test", source=source), [SendPrefill(P, 1, source)])])
    assert machine.next_wakeup() == HALF, "a source that does not answer has a wait of its own"
    play(machine, [(SourceHeld(source, P), [])], now=1.2)
    return machine


def test_a_leg_that_pulls_has_the_time_of_a_cold_prompt_and_the_sources_wait() -> None:
    machine = pulling()
    assert machine.next_wakeup() == pytest.approx(5.0)
    play(machine, [(Tick(), [])], now=4.9)
    play(machine, [(Tick(), [WITHOUT]), (Chosen(P2, D, "second", source=SOURCE), [SendPrefill(P2, 2)])], now=5.0)
    assert machine.next_wakeup() == 5.0 + 95.0 * TURN, "the second leg pulls nothing"
    play(machine, [(answer(P2, HOLD_2), [OutlastPrefill(P), SendDecode(D, HOLD_2)])], now=5.1)


def test_the_leg_that_pulls_may_still_answer_first() -> None:
    machine = pulling()
    play(machine, [(Tick(), [WITHOUT]), (Chosen(P2, D, "second"), [SendPrefill(P2, 2)])], now=5.0)
    play(machine, [(answer(P, HOLD), [OutlastPrefill(P2), SendDecode(D, HOLD)])], now=5.1)


def test_without_another_p_the_same_p_computes_the_prompt_without_a_source() -> None:
    """Its first leg is let go then: a P has one awaited leg of a request."""
    machine = pulling()
    again = Chosen(P, D, "the same again", source=SOURCE)
    play(machine, [(Tick(), [WITHOUT]), (again, [OutlastPrefill(P), SendPrefill(P, 2)])], now=5.0)
    play(machine, [(answer(P, HOLD_2), [SendDecode(D, HOLD_2)]), (Opened(), [Relay()])], now=5.1)
    assert machine.excluded == frozenset()
    machine = pulling()
    play(machine, [(Tick(), [WITHOUT]), (Chosen(D, P, "it would decode there"), [])], now=5.0)


def test_the_early_leg_of_a_leg_that_pulls_is_closed_as_any_other() -> None:
    machine = journey()
    chosen = Chosen(P, D, "test", source=SOURCE, early_s=0.0)
    play(machine, [(chosen, [SendPrefill(P, 1, SOURCE), SendEarly(D, P, 1)]), (PULLED, [])])
    again = [CloseEarly(), OutlastPrefill(P), SendPrefill(P, 2)]
    play(machine, [(Tick(), [WITHOUT]), (Chosen(P, D, "again"), again)], now=5.0)


def test_where_none_can_begin_a_leg_that_pulls_has_as_long_again() -> None:
    machine = pulling()
    asked = [5.0, 9.0, 17.0, 33.0]
    for at in asked:
        assert machine.next_wakeup() == pytest.approx(at)
        play(machine, [(Tick(), [WITHOUT]), (Chosen(None, None, "full"), [])], now=at)
    assert machine.next_wakeup() == pytest.approx(65.0), "within half of what is left"
    play(machine, [(Tick(), [WITHOUT]), (Chosen(None, None, "full"), [])], now=65.0)
    assert machine.next_wakeup() == 65.0 + 35.0 * TURN
    play(machine, [(HELD, [SendDecode(D, HOLD)])], now=70.0)


@pytest.mark.parametrize(
    ("source", "ends"),
    [
        (PrefixSource(D2, 100, 0.2, cold_s=0.02), 1.2 + TURN_LEAST_S),
        (PrefixSource(D2, 100, 1.0, cold_s=1000.0), HALF),
        (PrefixSource(D2, 100, 1.0), HALF),
    ],
    ids=["no shorter than a turn", "no later than without a source", "the cold time is not known"],
)
def test_the_bounds_of_a_turn_with_a_source(source: PrefixSource, ends: float) -> None:
    assert pulling(source).next_wakeup() == pytest.approx(ends)


def test_what_is_said_of_another_leg_or_too_late_sets_no_turn() -> None:
    machine = silent()
    before = machine.next_wakeup()
    play(machine, [(PULLED, [])], now=HALF + 1)
    assert machine.next_wakeup() == before, "P2 was sent last"
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)]), (HELD, [SendDecode(D, HOLD)]), (PULLED, [])])
    assert machine.state is JourneyState.OPENING


def test_the_last_try_of_a_leg_that_pulls_has_all_the_time_that_is_left() -> None:
    machine = journey()
    machine.attempts_max = 1
    play(machine, [(Chosen(P, D, "test", source=SOURCE), [SendPrefill(P, 1, SOURCE)]), (PULLED, [])])
    assert machine.next_wakeup() == 100.0


# -- the same for a request that is served whole --

INSTEAD = Choose(frozenset({D, D2}), hand_over=True, second=True, instead=True, otherwise=(frozenset({D2}),))
"""The leg in place of D's goes anywhere but to D and the source; if there is no such place, to D."""
PULLED_WHOLE = SourceHeld(SOURCE, D)


def pulling_whole() -> Journey:
    """D was sent the whole request at 1 s, and pulls its prompt's beginning from 1.2 s on."""
    machine = journey()
    play(machine, [(Chosen(None, D, "test", source=SOURCE), [SendDecode(D, None, source=SOURCE)])])
    assert machine.next_wakeup() == 100.0, "a source that does not answer has a wait of its own"
    play(machine, [(PULLED_WHOLE, [])], now=1.2)
    return machine


@pytest.mark.parametrize("at", [D, P2], ids=["the same instance", "another one"])
def test_an_aggregated_leg_that_pulls_has_the_time_of_a_cold_prompt_and_the_sources_wait(at: InstanceId) -> None:
    """Then the leg is closed, and the request served whole without a source."""
    machine = pulling_whole()
    assert machine.next_wakeup() == pytest.approx(5.0)
    play(machine, [(Tick(), [])], now=4.9)
    again = Chosen(None, at, "without", source=SOURCE)
    play(machine, [(Tick(), [INSTEAD]), (again, [DropDecode(), SendDecode(at, None)])], now=5.0)
    assert machine.next_wakeup() == 100.0, "the second leg pulls nothing"
    assert machine.excluded == frozenset(), "the first instance may be well"
    play(machine, [(Opened(), [Relay()]), (Ended(), [Finish("served")])], now=5.1)
    assert machine.attempt == 2


def test_in_place_of_an_aggregated_leg_the_request_may_be_handed_over() -> None:
    machine = pulling_whole()
    pair = Chosen(P, P2, "a pair", source=SOURCE, early_s=0.0)
    play(machine, [(Tick(), [INSTEAD]), (pair, [DropDecode(), SendPrefill(P, 2)])], now=5.0)
    assert machine.next_wakeup() == 5.0 + 95.0 * TURN
    play(machine, [(answer(P, HOLD), [SendDecode(P2, HOLD)]), (Opened(), [Relay()])], now=5.1)


def test_where_none_can_begin_an_aggregated_leg_that_pulls_has_as_long_again() -> None:
    machine = pulling_whole()
    for at in (5.0, 9.0, 17.0, 33.0):
        assert machine.next_wakeup() == pytest.approx(at)
        play(machine, [(Tick(), [INSTEAD]), (Chosen(None, None, "full", wait=at == 5.0), [])], now=at)
    play(machine, [(Opened(), [Relay()]), (Ended(), [Finish("served")])], now=34.0)
    assert (machine.attempt, machine.next_wakeup()) == (1, None)


def test_an_aggregated_leg_whose_first_token_is_out_is_not_replaced() -> None:
    machine = pulling_whole()
    play(machine, [(Opened(), [Relay()]), (Tick(), []), (Chosen(None, P, "late"), [])], now=5.0)


def test_an_aggregated_leg_that_pulls_nothing_is_waited_for_to_the_deadline() -> None:
    machine = journey()
    play(machine, [(Chosen(None, D, "test"), [SendDecode(D, None)]), (Chosen(None, P, "not asked for"), [])])
    play(machine, [(SourceHeld(SOURCE, P), [])])
    assert machine.next_wakeup() == 100.0, "P has no leg"
    machine = pulling_whole()
    machine.attempt = machine.attempts_max
    assert machine.next_wakeup() == 100.0, "no try is left"
    play(machine, [(Tick(), [])], now=6.0)


def test_a_decode_leg_sets_no_turn_for_a_source() -> None:
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)]), (HELD, [SendDecode(D, HOLD)]), (PULLED_WHOLE, [])])
    assert machine.next_wakeup() == 100.0


# -- a hold whose instance is lost --

ELSEWHERE = Choose(frozenset({D, P}), hand_over=True, second=True, instead=True, otherwise=(frozenset({P}),), lost=True)
"""The leg in place of D's goes anywhere but to D and P; if there is no such place, to D."""


def pulling_a_hold(machine: Journey | None = None) -> Journey:
    """The request came at 0 s; P has computed the prompt by 3 s, and D pulls it."""
    machine = machine or journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)])])
    play(machine, [(HELD, [SendDecode(D, HOLD)])], now=3.0)
    return machine


def test_a_leg_whose_holder_is_lost_has_the_time_to_compute_the_prompt_itself() -> None:
    """A read may hang until the transport notices: so another place serves the request, once there is one."""
    machine = pulling_a_hold()
    assert machine.next_wakeup() == 100.0
    play(machine, [(HolderLost(P2), []), (HolderLost(P), []), (HolderLost(P), [])], now=9.0)
    for at in (15.0, 27.0, 51.0):
        assert machine.next_wakeup() == pytest.approx(at)
        play(machine, [(Tick(), [])], now=at - 0.1)
        play(machine, [(Tick(), [ELSEWHERE]), (NOBODY, [])], now=at)
    pair = Chosen(P2, D2, "a pair", source=SOURCE, early_s=0.0)
    given_up = [DropDecode(), Release(D, HOLD), SendPrefill(P2, 2)]
    play(machine, [(Tick(), [ELSEWHERE]), (pair, given_up), (Released(ok=False), [])], now=75.5)
    play(machine, [(answer(P2, HOLD_2), [SendDecode(D2, HOLD_2)]), (Opened(), [Relay()])], now=76.0)
    play(machine, [(HolderLost(P2), []), (Ended(), [Finish("served")])], now=85.0)


def test_the_leg_of_a_lost_holder_that_answers_in_time_is_used() -> None:
    machine = pulling_a_hold()
    play(machine, [(HolderLost(P), [])], now=9.0)
    play(machine, [(Opened(), [Relay()]), (Tick(), []), (Ended(), [Finish("served")])], now=14.9)
    assert (machine.attempt, machine.next_wakeup()) == (1, None)


def test_a_hold_whose_instance_is_lost_is_pulled_by_no_other_instance() -> None:
    machine = pulling_a_hold()
    play(machine, [(HolderLost(P), [])], now=9.0)
    asks = Choose(frozenset({D}), hand_over=True)
    play(machine, [(Lost("refused", untouched=True), [asks])], now=9.1)
    play(machine, [(Chosen(P2, D2, "a pair"), [Release(D2, HOLD), SendPrefill(P2, 2)])], now=9.1)


def test_only_a_leg_that_pulls_waits_for_a_holder() -> None:
    machine = journey()
    play(machine, [(HolderLost(P), []), (Chosen(None, D, "test"), [SendDecode(D, None)]), (HolderLost(D), [])])
    assert machine.next_wakeup() == 100.0
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)]), (HolderLost(P), [])])
    assert machine.next_wakeup() == 1.0 + 99.0 * TURN, "a prefill leg whose instance is lost has an event of its own"


def test_a_seeded_stream_whose_holder_is_lost_goes_on_elsewhere_with_its_token() -> None:
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)])])
    play(machine, [(answer(P, HOLD, token=7), [SendSeed(), SendDecode(D, HOLD, 7)])], now=3.0)
    play(machine, [(HolderLost(P), [])], now=5.0)
    assert machine.next_wakeup() == pytest.approx(11.0), "not half of the stall timeout"
    instead = [DropDecode(), Release(D, HOLD), SendDecode(D2, None, 7)]
    play(machine, [(Tick(), [ELSEWHERE]), (Chosen(None, D2, "on"), instead)], now=11.0)


def test_an_answer_in_one_piece_has_the_time_of_the_whole_answer_more() -> None:
    """The next leg has as long for its first token as a new request."""
    machine = Journey(hand_over=True, stream=False, deadline=100.0, deadline_s=100.0, whole_deadline=1800.0)
    play(pulling_a_hold(machine), [(HolderLost(P, answer_s=300.0), [])], now=9.0)
    ends = 9.0 + 6.0 + 300.0
    assert machine.next_wakeup() == pytest.approx(ends)
    given_up = [DropDecode(), Release(D, HOLD), SendPrefill(P2, 2)]
    play(machine, [(Tick(), [replace(ELSEWHERE, lost=False)]), (Chosen(P2, D2, "a pair"), given_up)], now=ends)
    assert machine.next_wakeup() == pytest.approx(ends + 100.0 * TURN)


@pytest.mark.parametrize("whole_s", [50.0, 1000.0])
def test_an_answer_in_one_piece_has_a_turn_if_its_longest_time_is_known(whole_s: float) -> None:
    """Its first token cannot be seen, so the driver says that the leg pulls only with the time of the whole answer."""
    machine = Journey(hand_over=True, stream=False, deadline=100.0, deadline_s=100.0, whole_deadline=whole_s)
    source = replace(SOURCE, cold_s=40.0)
    sent = [(Chosen(None, D, "", source=SOURCE), [SendDecode(D, None, source=SOURCE)])]
    play(machine, [*sent, (SourceHeld(source, D), [])])
    assert machine.next_wakeup() == min(1.0 + 40.0 + SOURCE.wait_s, 1.0 + (whole_s - 1.0) * TURN)
    play(machine, [(Tick(), [INSTEAD]), (Chosen(None, P, ""), [DropDecode(), SendDecode(P, None)])], now=42.0)
    assert machine.next_wakeup() == whole_s


@pytest.mark.parametrize("whole_s", [50.0, 1000.0])
def test_an_answer_in_one_piece_without_such_a_time_has_the_time_of_any_other(whole_s: float) -> None:
    machine = Journey(hand_over=True, stream=False, deadline=100.0, deadline_s=100.0, whole_deadline=whole_s)
    play(machine, [(Chosen(None, D, "", source=SOURCE), [SendDecode(D, None, source=SOURCE)])])
    assert machine.next_wakeup() == whole_s
    play(machine, [(Tick(), [Fail(error(504)), CloseDecode(), Finish("expired")])], now=whole_s)


def test_a_stream_that_goes_on_by_a_leg_that_pulls_is_given_up_after_half_of_the_stall_at_the_latest() -> None:
    """As any other leg that keeps silent while the client waits for the rest."""
    machine = journey()
    play(machine, [(Chosen(None, P, "test"), [SendDecode(P, None)]), (Opened(), [Relay()])])
    play(machine, [(Lost("reset", again=True), [CloseDecode(), Choose(frozenset({P}), hand_over=True)])], now=10.0)
    slow = replace(SOURCE, cold_s=20.0)
    play(machine, [(Chosen(None, D, "on", source=slow), [SendDecode(D, None, source=slow)])], now=10.0)
    half_s = machine.next_wakeup()
    play(machine, [(SourceHeld(slow, D), [])], now=10.5)
    assert machine.next_wakeup() == 31.0 < half_s
    play(machine, [(Tick(), [replace(INSTEAD, excluded=frozenset({P, D, D2}), otherwise=(frozenset({P, D2}),))])],
         now=31.0)  # fmt: skip
    play(machine, [(NOBODY, [])], now=31.0)
    assert machine.next_wakeup() == half_s
    play(machine, [(Tick(), [CloseDecode(), Choose(frozenset({P, D}), hand_over=True)])], now=half_s)


def test_a_choice_that_the_journey_did_not_ask_for_sends_nothing() -> None:
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)]), (Chosen(P2, D2, ""), [])])
    play(machine, [(Tick(), [SECOND]), (Chosen(P, D2, "the same again"), [])], now=HALF)


def test_a_refusal_names_a_failure_only_after_one() -> None:
    failed, _ = journey().handle(Chosen(None, None, "none is ready"), 1.0)
    assert isinstance(failed, Fail)
    assert failed.error.message == "No instance can serve this request: none is ready."
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)])])
    machine.handle(Lost("reset", by=P), 1.0)
    failed, *_ = machine.handle(Chosen(None, None, "none is ready"), 1.0)
    assert isinstance(failed, Fail)
    assert failed.error.message == "No instance can serve this request: none is ready; last failure: p: reset."


def test_without_an_instance_the_request_fails() -> None:
    play(journey(), [(Chosen(None, None, "none ready"), [Fail(error(503)), Finish("failed")])])


def test_a_full_fleet_is_waited_for() -> None:
    machine = journey()
    play(
        machine,
        [
            (Chosen(None, None, "full", wait=True), [AwaitFleet()]),
            (FleetChanged(), [Choose(frozenset(), hand_over=True)]),
            (Chosen(None, None, "full", wait=True), [AwaitFleet()]),
        ],
    )
    play(machine, [(Tick(), [Fail(error(504)), Finish("expired")])], now=100.0)


def test_after_a_prefill_without_a_hold_the_decode_instance_serves_aggregated() -> None:
    play(journey(), [(BOTH_LEGS, [SendPrefill(P, 1)]), (PrefillAnswered("length", None), [SendDecode(D, None)])])


def test_ended_at_the_first_token_answers_from_prefill_and_releases() -> None:
    play(
        journey(stream=False),
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (PrefillAnswered("stop", HOLD), [AnswerFromPrefill(), Release(D, HOLD)]),
            (Released(ok=True), [Finish("served")]),
        ],
    )


def test_ended_at_the_first_token_streams_from_prefill_and_releases() -> None:
    play(
        journey(stream=True),
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (PrefillAnswered("stop", HOLD), [Release(D, HOLD), SendDecode(P, None)]),
            (Released(ok=True), []),
            (Opened(), [Relay()]),
            (Ended(), [Finish("served")]),
        ],
    )


@pytest.mark.parametrize(("end", "said"), [(ClientLeft(), []), (Tick(), [Fail(error(504))])])
def test_a_request_that_ends_in_the_queue_ends_at_once_and_its_hold_is_released_meanwhile(
    end: object, said: list[object]
) -> None:
    """Others behind it in the queue must not wait for an instance that does not answer the release."""
    machine = journey()
    play(
        machine,
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (HELD, [SendDecode(D, HOLD)]),
            (Lost("connection refused", untouched=True), [Choose(frozenset({D}), hand_over=True, holders=(P,))]),
            (Chosen(None, None, "all are full", wait=True), [AwaitFleet()]),
        ],
    )
    left: list[object] = [Finish("client_left" if not said else "expired")]
    play(machine, [(end, [*said, Release(D, HOLD), *left])], now=101.0)
    assert machine.state is JourneyState.DONE


def test_client_error_from_prefill_is_the_clients_to_read() -> None:
    play(journey(), [(BOTH_LEGS, [SendPrefill(P, 1)]), (Refused(400), [ForwardRefusal(), Finish("refused")])])


def test_client_error_from_decode_releases_the_hold() -> None:
    play(
        journey(),
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (HELD, [SendDecode(D, HOLD)]),
            (Refused(400), [ForwardRefusal(), Release(D, HOLD)]),
            (Released(ok=True), [Finish("refused")]),
        ],
    )


def test_lost_prefill_goes_to_another() -> None:
    play(
        journey(),
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (Lost("connection refused"), [Choose(frozenset({P}), hand_over=True)]),
            (Chosen(P2, D, "retry"), [SendPrefill(P2, 2)]),
            (HELD, [SendDecode(D, HOLD)]),
        ],
    )


def test_an_engine_going_down_says_abort_and_another_takes_over() -> None:
    play(
        journey(),
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (PrefillAnswered("abort", None), [Choose(frozenset({P}), hand_over=True)]),
        ],
    )


def test_a_decode_leg_that_never_arrived_lets_another_pull_the_same_hold() -> None:
    play(
        journey(),
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (HELD, [SendDecode(D, HOLD)]),
            (Lost("connection refused", untouched=True), [Choose(frozenset({D}), hand_over=True, holders=(P,))]),
            (Chosen(P, D2, "retry"), [SendDecode(D2, HOLD)]),
        ],
    )


def test_a_hold_that_a_decode_instance_may_have_touched_is_pulled_by_no_other() -> None:
    """D may have pulled or given back the hold before D failed: P's blocks may hold another prompt by now."""
    play(
        journey(),
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (HELD, [SendDecode(D, HOLD)]),
            (Lost("reset"), [Choose(frozenset({D}), hand_over=True)]),
            (Chosen(P, D2, "retry"), [Release(D2, HOLD), SendPrefill(P, 2)]),
            (Released(ok=True), []),
            (HELD, [SendDecode(D2, HOLD)]),
        ],
    )


SEEDING = PrefillAnswered("length", HOLD, first_token=7)


def seeded() -> Journey:
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)]), (SEEDING, [SendSeed(), SendDecode(D, HOLD, 7)])])
    return machine


def test_a_seed_goes_out_before_the_handoff_and_binds_d() -> None:
    play(seeded(), [(Opened(), [Relay()]), (Ended(), [Finish("served")])])


def test_only_streams_are_seeded() -> None:
    play(journey(stream=False), [(BOTH_LEGS, [SendPrefill(P, 1)]), (SEEDING, [SendDecode(D, HOLD)])])


DRAWN = PrefillAnswered("length", HOLD, pinned=7)
"""P's token was drawn by lot, and the client may not have it yet."""


TOLD_HOLD, UNTOLD_HOLD = (TransferFields({**HOLD.fields, TOLD_EARLY: told}) for told in (True, False))


def test_an_early_leg_that_may_not_know_of_a_draw_is_replaced_by_one_that_is_told() -> None:
    """Its D may have computed the prompt itself. A draw of D's own would not be noticed: the client has no token."""
    told = PrefillAnswered("length", TOLD_HOLD, pinned=7)
    play(early(), [(told, [UseEarly(TOLD_HOLD)]), (Lost("reset"), [Choose(frozenset({D}), hand_over=True)])])
    untold = PrefillAnswered("length", UNTOLD_HOLD, pinned=7)
    play(early(), [(untold, [CloseEarly(), SendDecode(D, UNTOLD_HOLD, 7)]), (Opened(), [Relay()])])
    play(early(), [(DRAWN, [UseEarly(HOLD)])])  # engines of earlier versions tell, and do not say so
    play(early(), [(SEEDING, [SendSeed(), UseEarly(HOLD)])])


def test_an_early_leg_that_was_not_told_is_used_where_any_d_would_answer_alike() -> None:
    """P answers short prompts before D's question comes, and tells it late. Another leg would find the blocks that the
    early one has pulled, some milliseconds later.
    """
    greedy, seeded = PrefillAnswered("length", UNTOLD_HOLD), PrefillAnswered("length", UNTOLD_HOLD, first_token=7)
    play(early(), [(greedy, [UseEarly(UNTOLD_HOLD)])])
    play(early(), [(seeded, [SendSeed(), UseEarly(UNTOLD_HOLD)])])


def test_after_two_refused_tickets_the_request_is_served_whole() -> None:
    """The first engine may lack the key. If a second one refuses, the router's clock or key is wrong."""
    refused = Lost("the engine's guard refused the router's ticket", untouched=True, no_ticket=True)
    play(
        journey(),
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (refused, [Choose(frozenset({P}), hand_over=True)]),
            (Chosen(P2, D, "retry"), [SendPrefill(P2, 2)]),
            (refused, [Choose(frozenset({P, P2}), hand_over=False)]),
            (Chosen(None, D, "whole"), [SendDecode(D, None)]),
            (Opened(), [Relay()]),
        ],
    )


def test_refused_tickets_of_prefill_and_decode_legs_count_together() -> None:
    refused = Lost("the engine's guard refused the router's ticket", untouched=True, no_ticket=True)
    play(
        journey(),
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (HELD, [SendDecode(D, HOLD)]),
            (refused, [Choose(frozenset({D}), hand_over=True, holders=(P,))]),
            (Chosen(P, D2, "retry"), [SendDecode(D2, HOLD)]),
            (refused, [Choose(frozenset({D, D2}), hand_over=False, holders=(P,))]),
        ],
    )


def test_a_token_drawn_by_lot_binds_each_d_before_the_client_has_it() -> None:
    machine = journey()
    play(
        machine,
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (DRAWN, [SendDecode(D, HOLD, 7)]),
            (Lost("refused", untouched=True), [Choose(frozenset({D}), hand_over=True, holders=(P,))]),
            (Chosen(P, D2, "retry"), [SendDecode(D2, HOLD, 7)]),
            (Lost("reset"), [Choose(frozenset({D, D2}), hand_over=True)]),
            (Chosen(None, P, "only one left"), [Release(D2, HOLD), SendDecode(P, None, 7)]),
            (Lost("reset"), [Fail(error(502)), Finish("failed")]),
        ],
    )


@pytest.mark.parametrize(
    "later", [HELD, PrefillAnswered("length", HOLD, 9), PrefillAnswered("stop", HOLD, first=False, pinned=9)]
)
def test_what_a_later_p_draws_changes_nothing(later: PrefillAnswered) -> None:
    machine = journey()
    play(
        machine,
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (DRAWN, [SendDecode(D, HOLD, 7)]),
            (Lost("reset"), [Choose(frozenset({D}), hand_over=True)]),
            (Chosen(P2, D2, "retry"), [Release(D2, HOLD), SendPrefill(P2, 2)]),
            (later, [SendDecode(D2, HOLD, 7)]),
            (Opened(), [Relay()]),
        ],
    )


UNPINNED = Lost("cannot be told", untouched=True, unpinned=True)


def test_a_draw_that_no_instance_is_left_for_is_given_up_before_the_client_has_it() -> None:
    """Those that could not be told the token are asked again, and their refusals were no tries."""
    machine = journey()
    play(
        machine,
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (DRAWN, [SendDecode(D, HOLD, 7)]),
            (Lost("reset"), [Choose(frozenset({D}), hand_over=True)]),
            (Chosen(None, D2, "retry"), [Release(D2, HOLD), SendDecode(D2, None, 7)]),
            (UNPINNED, [Choose(frozenset({D, D2}), hand_over=True)]),
            (Chosen(None, P2, "retry"), [SendDecode(P2, None, 7)]),
            (UNPINNED, [Choose(frozenset({D, D2, P2}), hand_over=True)]),
            (NOBODY, [Choose(frozenset({D}), hand_over=True, unbound=True)]),
            (Chosen(P, D2, "any"), [SendPrefill(P, 4)]),
            (DRAWN, [SendDecode(D2, HOLD)]),
            (Lost("reset"), [Choose(frozenset({D, D2}), hand_over=True)]),
            (NOBODY, [Fail(error(503)), Release(D2, HOLD), Finish("failed")]),
        ],
    )


def test_a_draw_is_given_up_where_its_d_begins_to_drain() -> None:
    machine = journey()
    play(
        machine,
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (DRAWN, [SendDecode(D, HOLD, 7)]),
            (Lost("it drains", untouched=True), [Choose(frozenset({D}), hand_over=True, holders=(P,))]),
            (NOBODY, [Choose(frozenset({D}), hand_over=True, holders=(P,), unbound=True)]),
            (Chosen(P2, D2, "new", anew=True), [Release(D2, HOLD), SendPrefill(P2, 2)]),
            (SEEDING, [SendDecode(D2, HOLD)]),
            (Opened(), [Relay()]),
        ],
    )


def test_a_token_that_the_client_has_is_never_given_up() -> None:
    machine = seeded()
    play(machine, [(Lost("reset"), [Choose(frozenset({D}), hand_over=True)])])
    play(machine, [(NOBODY, [FailStream(error(503)), Release(D, HOLD), Finish("failed")])])


def test_a_draw_that_ends_the_answer_is_handed_over() -> None:
    stop = PrefillAnswered("stop", HOLD, first=False, pinned=7)
    play(journey(), [(BOTH_LEGS, [SendPrefill(P, 1)]), (stop, [SendDecode(D, HOLD, 7)]), (Opened(), [Relay()])])
    told_stop = PrefillAnswered("stop", TOLD_HOLD, first=False, pinned=7)
    play(early(), [(told_stop, [UseEarly(TOLD_HOLD)]), (Opened(), [Relay()])])
    drawn_by_d = PrefillAnswered("stop", HOLD, first=False)
    play(journey(stream=False), [(BOTH_LEGS, [SendPrefill(P, 1)]), (drawn_by_d, [SendDecode(D, HOLD)])])


def test_after_a_seed_another_d_goes_on_with_the_same_token() -> None:
    machine = seeded()
    play(
        machine,
        [
            (Lost("refused", untouched=True), [Choose(frozenset({D}), hand_over=True, holders=(P,))]),
            (Chosen(P, D2, "retry"), [SendDecode(D2, HOLD, 7)]),
            (Lost("reset"), [Choose(frozenset({D, D2}), hand_over=True)]),
            (Chosen(None, P, "only one left"), [Release(D2, HOLD), SendDecode(P, None, 7)]),
            (Lost("reset"), [FailStream(error(502)), Finish("failed")]),
        ],
    )


def test_a_refusal_after_a_seed_is_an_event() -> None:
    machine = seeded()
    play(
        machine,
        [
            (Lost("reset"), [Choose(frozenset({D}), hand_over=True)]),
            (Chosen(P2, D2, "retry"), [Release(D2, HOLD), SendPrefill(P2, 2)]),
            (Refused(400), [FailStream(error(502)), Finish("failed")]),
        ],
    )


def test_a_second_prefill_seeds_nothing_again() -> None:
    machine = seeded()
    play(
        machine,
        [
            (Lost("reset"), [Choose(frozenset({D}), hand_over=True)]),
            (Chosen(P2, D2, "retry"), [Release(D2, HOLD), SendPrefill(P2, 2)]),
            (PrefillAnswered("length", HOLD, first_token=9), [SendDecode(D2, HOLD, 7)]),
        ],
    )


def test_after_a_seed_errors_are_events() -> None:
    play(seeded(), [(Refused(400), [FailStream(error(502)), Release(D, HOLD)])])
    machine = seeded()
    play(
        machine,
        [
            (Lost("x", untouched=True), [Choose(frozenset({D}), hand_over=True, holders=(P,))]),
            (Chosen(None, None, "nobody"), [FailStream(error(503)), Release(D, HOLD), Finish("failed")]),
        ],
    )


def test_a_d_that_keeps_a_seeded_client_waiting_is_left_for_another() -> None:
    machine = seeded()
    turn, end = 1.0 + machine.stall_s * TURN, 1.0 + machine.stall_s
    assert machine.next_wakeup() == turn
    play(machine, [(Tick(), [CloseDecode(), Choose(frozenset({D}), hand_over=True)])], now=turn)
    play(machine, [(Chosen(P, D2, "retry"), [Release(D2, HOLD), SendPrefill(P, 2)])], now=turn + 1)
    second = Choose(frozenset({D, P}), hand_over=True, second=True, holders=(P,))
    while (wakeup := machine.next_wakeup()) != end:
        assert wakeup is not None and wakeup < end, "the client waits no longer for the second D than for the first"
        play(machine, [(Tick(), [second]), (NOBODY, [])], now=wakeup)
    play(machine, [(Tick(), [FailStream(error(504)), CloseDecode(), ForgoPrefill(P)])], now=end)


def test_all_tries_for_a_waiting_client_share_one_stall_limit() -> None:
    machine = seeded()
    for other in (D2, InstanceId("d3")):
        turn = machine.next_wakeup()
        assert turn is not None and turn < 1.0 + machine.stall_s
        play(
            machine, [(Tick(), [CloseDecode(), Choose(machine.excluded | {machine.decode}, hand_over=True)])], now=turn
        )
        held = [Release(D2, HOLD)] if other is D2 else []
        play(machine, [(Chosen(None, other, "whole"), [*held, SendDecode(other, None, 7)])], now=turn)
    end = machine.next_wakeup()
    assert end == 1.0 + machine.stall_s, "the last one has all the time that is left"
    play(machine, [(Tick(), [FailStream(error(504)), CloseDecode(), Finish("expired")])], now=end)


def test_a_broken_stream_goes_on_elsewhere_where_that_is_exact() -> None:
    machine = seeded()
    play(
        machine,
        [
            (Opened(), [Relay()]),
            (Lost("reset", again=True), [CloseDecode(), Choose(frozenset({D}), hand_over=True)]),
            (Chosen(P, D2, "retry"), [SendPrefill(P, 2)]),
            (HELD, [SendDecode(D2, HOLD, 7)]),
            (Opened(), [Relay()]),
            (Lost("reset again"), [CloseDecode(), FailStream(error(502)), Finish("failed")]),
        ],
    )


def test_a_plain_stream_that_breaks_is_resumed_too() -> None:
    machine = journey()
    play(
        machine,
        [
            (Chosen(None, D, "whole"), [SendDecode(D, None)]),
            (Opened(), [Relay()]),
            (Lost("reset", again=True), [CloseDecode(), Choose(frozenset({D}), hand_over=True)]),
        ],
    )
    assert machine.next_wakeup() == 1.0 + machine.stall_s * (1 - TURN), "the first D had its turn"
    play(machine, [(Chosen(None, None, "nobody"), [FailStream(error(503)), Finish("failed")])])


def test_a_producer_is_never_asked_to_pull() -> None:
    """No decode instance is left: the prefill instance serves the request aggregated, without the hold's fields."""
    play(
        journey(),
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (HELD, [SendDecode(D, HOLD)]),
            (Lost("reset"), [Choose(frozenset({D}), hand_over=True)]),
            (Chosen(None, P, "only one left"), [Release(D, HOLD), SendDecode(P, None)]),
        ],
    )


def test_tries_are_bounded() -> None:
    machine = journey()
    play(
        machine,
        [
            (Chosen(None, D, ""), [SendDecode(D, None)]),
            (Lost("one"), [Choose(frozenset({D}), hand_over=True)]),
            (Chosen(None, D2, ""), [SendDecode(D2, None)]),
            (Lost("two"), [Choose(frozenset({D, D2}), hand_over=True)]),
            (Chosen(None, P, ""), [SendDecode(P, None)]),
            (Lost("three"), [Fail(error(502)), Finish("failed")]),
        ],
    )


def test_broken_stream_ends_with_an_error_event() -> None:
    play(
        journey(),
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (HELD, [SendDecode(D, HOLD)]),
            (Opened(), [Relay()]),
            (Lost("stalled"), [CloseDecode(), FailStream(error(502)), Finish("failed")]),
        ],
    )


def test_client_leaves_during_prefill_and_a_short_leg_is_released_by_name() -> None:
    """Aborting would race with the step's end and strand the blocks for the whole lease (vLLM 46283's kind)."""
    play(
        journey(),
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (ClientLeft(), [CloseDecode(), ForgoPrefill(P)]),
            (HELD, [Release(D, HOLD)]),
            (Released(ok=True), [Finish("client_left")]),
        ],
    )


def test_client_leaves_during_a_long_prefill_and_it_is_aborted() -> None:
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)]), (ClientLeft(), [CloseDecode(), ForgoPrefill(P)])], now=5.0)
    assert machine.next_wakeup() == 5.0 + PATIENCE_S
    play(machine, [(Tick(), [CancelPrefill(P)])], now=5.0 + PATIENCE_S)
    assert machine.next_wakeup() == 5.0 + PATIENCE_S + CANCEL_WAIT_S
    play(machine, [(PrefillAnswered("abort", None), [Finish("client_left")])], now=7.0)


def test_client_leaves_before_its_prefill_leg_was_sent() -> None:
    """The prefill leg waits for its source leg, and is never sent."""
    source = PrefixSource(D2, 100, 1.0)
    play(
        journey(),
        [
            (Chosen(P, D, "test", source=source), [SendPrefill(P, 1, source)]),
            (ClientLeft(), [CloseDecode(), ForgoPrefill(P)]),
            (Lost("not sent", untouched=True, by=P), [Finish("client_left")]),
        ],
    )


def test_prefill_that_never_answers_is_given_up() -> None:
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)]), (ClientLeft(), [CloseDecode(), ForgoPrefill(P)])], now=5.0)
    play(machine, [(Tick(), [CancelPrefill(P)])], now=6.0)
    play(machine, [(Tick(), [ClosePrefill(), Finish("client_left")])], now=6.0 + CANCEL_WAIT_S)


@pytest.mark.parametrize("opened", [False, True])
def test_client_leaves_during_decode_and_the_leg_is_closed(opened: bool) -> None:
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)]), (HELD, [SendDecode(D, HOLD)])])
    if opened:
        play(machine, [(Opened(), [Relay()])])
        play(machine, [(ClientLeft(), [CloseDecode(), Finish("client_left")]), (ClientLeft(), [])])
        return
    play(machine, [(ClientLeft(), [CloseDecode(), Release(D, HOLD)]), (ClientLeft(), [])])
    play(machine, [(Released(ok=True), [Finish("client_left")])])


def test_deadline_in_prefill() -> None:
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)]), (Tick(), [])], now=99.0)
    play(machine, [(Tick(), [Fail(error(504)), CloseDecode(), ForgoPrefill(P)])], now=100.0)
    play(machine, [(HELD, [Release(D, HOLD)]), (Released(ok=False), [Finish("expired")])], now=100.1)


def test_deadline_before_the_first_streamed_token() -> None:
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)]), (HELD, [SendDecode(D, HOLD)])])
    play(machine, [(Tick(), [Fail(error(504)), CloseDecode(), Release(D, HOLD)])], now=100.0)


def test_an_answer_in_one_piece_has_its_own_deadline_once_prefilled() -> None:
    machine = journey(stream=False)
    machine.whole_deadline = 1900.0
    machine.attempts_max = 1
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)])])
    assert machine.next_wakeup() == 100.0
    play(machine, [(HELD, [SendDecode(D, HOLD)])])
    assert machine.next_wakeup() == 1900.0
    play(machine, [(Tick(), [])], now=1000.0)
    play(machine, [(Tick(), [Fail(error(504)), CloseDecode(), Release(D, HOLD)])], now=1900.0)


def test_an_answer_in_one_piece_that_is_lost_late_has_time_for_another_try() -> None:
    """D dies at 400 s of an answer that may take 1,800 s, when the time for a first token has long passed."""
    machine = journey(stream=False)
    machine.whole_deadline = 1800.0
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)]), (HELD, [SendDecode(D, HOLD)])])
    play(machine, [(Lost("reset"), [Choose(frozenset({D}), hand_over=True)]), (Tick(), [])], now=400.0)
    assert machine.next_wakeup() == 500.0, "as long for a first token as a new request"
    play(machine, [(Chosen(P, D2, "retry"), [Release(D2, HOLD), SendPrefill(P, 2)]), (Tick(), [])], now=401.0)
    play(machine, [(HELD, [SendDecode(D2, HOLD)]), (Opened(), [Relay()]), (Ended(), [Finish("served")])], now=402.0)


def test_an_answer_in_one_piece_ends_by_its_own_deadline_whatever_is_tried() -> None:
    machine = journey(stream=False)
    machine.whole_deadline = 1800.0
    play(machine, [(Chosen(None, D, "whole"), [SendDecode(D, None)])])
    play(machine, [(Lost("reset"), [Choose(frozenset({D}), hand_over=True)])], now=1750.0)
    assert machine.next_wakeup() == 1800.0
    play(machine, [(Chosen(None, None, "full", wait=True), [AwaitFleet()])], now=1750.0)
    failed, _ = machine.handle(Tick(), 1800.0)
    assert isinstance(failed, Fail) and "within 1800 s" in failed.error.message


@pytest.mark.parametrize("lost_at", [10.0, 400.0])
def test_the_time_that_an_answer_in_one_piece_had_counts_from_its_arrival(lost_at: float) -> None:
    machine = journey(stream=False)
    machine.whole_deadline = 1800.0
    play(machine, [(Chosen(None, D, "whole"), [SendDecode(D, None)])])
    play(machine, [(Lost("reset"), [Choose(frozenset({D}), hand_over=True)])], now=lost_at)
    play(machine, [(Chosen(None, D2, "whole"), [SendDecode(D2, None)])], now=lost_at)
    failed, *_ = machine.handle(Tick(), 1800.0)
    assert isinstance(failed, Fail) and "within 1800 s" in failed.error.message


@pytest.mark.parametrize(("waited_s", "pulls"), [(HOLD_USE_S - 1, True), (HOLD_USE_S, False)])
def test_a_hold_whose_lease_may_have_ended_is_not_pulled(waited_s: float, pulls: bool) -> None:
    """D did not take the leg, and no other D had a place for a while: by then P's blocks may be another prompt's."""
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)]), (HELD, [SendDecode(D, HOLD)])])
    play(machine, [(Lost("refused", untouched=True), [Choose(frozenset({D}), hand_over=True, holders=(P,))])])
    play(machine, [(Chosen(None, None, "full", wait=True), [AwaitFleet()])])
    holders = (P,) if pulls else ()
    play(machine, [(FleetChanged(), [Choose(frozenset({D}), hand_over=True, holders=holders)])], now=1.0 + waited_s)
    anew = [Release(D2, HOLD), SendPrefill(P, 2)]
    play(machine, [(Chosen(P, D2, "a place"), [SendDecode(D2, HOLD)] if pulls else anew)], now=1.0 + waited_s)


def test_late_events_are_no_ops() -> None:
    machine = journey()
    play(machine, [(BOTH_LEGS, [SendPrefill(P, 1)]), (Refused(400), [ForwardRefusal(), Finish("refused")])])
    for late in (HELD, Lost("x"), Opened(), Ended(), ClientLeft(), Tick(), Released(ok=True), BOTH_LEGS):
        play(machine, [(late, [])], now=1e9)


# -- a P whose token is not the answer's first --


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_token_that_is_not_the_answers_first_is_used_for_nothing(stream: bool, reason: str) -> None:
    machine = journey(stream=stream)
    play(
        machine,
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (PrefillAnswered(reason, HOLD, None, first=False), [SendDecode(D, HOLD)]),
            (Opened(), [Relay()]),
            (Ended(), [Finish("served")]),
        ],
    )


def test_a_hold_is_released_where_the_choice_is_to_begin_anew() -> None:
    machine = journey()
    play(
        machine,
        [
            (BOTH_LEGS, [SendPrefill(P, 1)]),
            (HELD, [SendDecode(D, HOLD)]),
            (Lost("refused", untouched=True), [Choose(frozenset({D}), hand_over=True, holders=(P,))]),
            (Chosen(P2, D2, "other weights", anew=True), [Release(D2, HOLD), SendPrefill(P2, 2)]),
        ],
    )


# --- early legs ------------------------------------------------------------------------------------------------------

EARLY = Chosen(P, D, "test", early_s=0.0)
SENT_EARLY = [SendPrefill(P, 1), SendEarly(D, P, 1)]


def early(*, stream: bool = True) -> Journey:
    machine = journey(stream=stream)
    machine.begin()
    play(machine, [(EARLY, list(SENT_EARLY))])
    return machine


def test_an_early_leg_becomes_the_decode_leg() -> None:
    machine = early()
    play(machine, [(HELD, [UseEarly(HOLD)]), (Opened(), [Relay()]), (Ended(), [Finish("served")])])


def test_with_a_seed_the_client_has_ps_token_first() -> None:
    play(early(), [(PrefillAnswered("length", HOLD, 5), [SendSeed(), UseEarly(HOLD)]), (Opened(), [Relay()])])


def test_an_early_leg_may_be_sent_later() -> None:
    machine = journey()
    machine.begin()
    play(machine, [(Chosen(P, D, "test", early_s=4.0), [SendPrefill(P, 1)])])
    assert machine.next_wakeup() == 5.0
    play(machine, [(Tick(), [])], now=4.0)
    play(machine, [(Tick(), [SendEarly(D, P, 1)]), (HELD, [UseEarly(HOLD)])], now=5.0)


def test_p_that_answers_before_the_early_leg_gets_an_ordinary_decode_leg() -> None:
    machine = journey()
    machine.begin()
    play(machine, [(Chosen(P, D, "test", early_s=4.0), [SendPrefill(P, 1)]), (HELD, [SendDecode(D, HOLD)])])
    assert machine.early_at > 1e9


def test_d_that_answers_before_p_is_relayed_and_ps_leg_is_outlasted() -> None:
    play(early(), [(Opened(), [OutlastPrefill(P), Relay()]), (HELD, []), (Ended(), [Finish("served")])])


def test_a_p_that_an_early_leg_outlasts_gets_no_other_leg_of_the_request() -> None:
    """P is asked to abort by the request's id, which would end that leg, too."""
    play(
        early(),
        [
            (Opened(), [OutlastPrefill(P), Relay()]),
            (Lost("reset", again=True), [CloseDecode(), Choose(frozenset({P, D}), hand_over=True)]),
        ],
    )


def test_minutes_later_a_p_that_an_early_leg_outlasted_may_serve_again() -> None:
    """With one P and one D nobody else could: before, a stream whose D died failed although P was well."""
    machine = early()
    play(machine, [(Opened(), [OutlastPrefill(P), Relay()])])
    play(machine, [(Lost("died", again=True), [CloseDecode(), Choose(frozenset({D}), hand_over=True)])], now=600.0)


def test_an_early_leg_that_is_lost_costs_nothing() -> None:
    play(early(), [(EarlyLost("reset"), []), (HELD, [SendDecode(D, HOLD)]), (Opened(), [Relay()])])


def test_a_lost_p_closes_the_early_leg_and_others_are_chosen() -> None:
    script: list[tuple[object, list[object]]] = [
        (Lost("died", by=P), [CloseEarly(), Choose(frozenset({P}), hand_over=True)]),
        (Chosen(P2, D2, "test", early_s=0.0), [SendPrefill(P2, 2), SendEarly(D2, P2, 2)]),
        (PrefillAnswered("length", HOLD), [UseEarly(HOLD)]),
    ]
    play(early(), script)


@pytest.mark.parametrize("answered", [Refused(400), PrefillAnswered("stop", HOLD), PrefillAnswered("abort", None)])
def test_an_answer_without_a_hold_to_pull_closes_the_early_leg(answered: object) -> None:
    machine = early()
    effects = machine.handle(answered, 1.0)  # type: ignore[arg-type]
    assert CloseEarly() in effects and not machine.early
    assert not any(isinstance(effect, UseEarly) for effect in effects)


def test_p_that_holds_nothing_closes_the_early_leg_and_d_computes() -> None:
    play(early(), [(PrefillAnswered("length", None), [CloseEarly(), SendDecode(D, None)])])


def test_a_client_that_leaves_closes_the_early_leg() -> None:
    play(
        early(),
        [
            (ClientLeft(), [CloseDecode(), ForgoPrefill(P)]),
            (HELD, [Release(D, HOLD)]),
            (Released(ok=True), [Finish("client_left")]),
        ],
    )


def test_a_second_prefill_leg_closes_the_early_leg_first() -> None:
    machine = early()
    play(machine, [(Tick(), [Choose(frozenset({P}), hand_over=True, second=True, holders=(P,))])], now=51.0)
    play(machine, [(Chosen(P2, D2, "test"), [CloseEarly(), SendPrefill(P2, 2)])], now=51.0)
    play(machine, [(PrefillAnswered("length", HOLD, by=P), [OutlastPrefill(P2), SendDecode(D2, HOLD)])], now=52.0)


def test_an_early_leg_that_breaks_after_p_answered_may_have_touched_the_hold() -> None:
    script: list[tuple[object, list[object]]] = [
        (HELD, [UseEarly(HOLD)]),
        (Lost("reset"), [Choose(frozenset({D}), hand_over=True)]),
        (Chosen(P, D2, "test", early_s=0.0), [Release(D2, HOLD), SendPrefill(P, 2)]),
        (PrefillAnswered("length", HOLD), [SendDecode(D2, HOLD)]),
    ]
    play(early(), script)


DREW: list[tuple[object, list[object]]] = [
    (PrefillAnswered("length", HOLD, 5), [SendSeed(), UseEarly(HOLD)]),
    (Opened(), [Relay()]),
    (
        Lost("another token", again=True, drew=True),
        [CloseDecode(), Choose(frozenset({D}), hand_over=True)],
    ),
]
"""D has computed the prompt itself, and begins with another token than the client has."""


@pytest.mark.parametrize("p_fails_too", [True, False])
def test_a_d_that_drew_a_token_of_its_own_is_asked_again_where_there_is_no_other(p_fails_too: bool) -> None:
    """When D is told the client's token, it makes the same answer as any other D."""
    machine = early()
    play(machine, DREW)
    attempt = 2
    if p_fails_too:
        failing = Choose(frozenset({D, P}), hand_over=True)
        play(machine, [(Chosen(None, P, "whole"), [SendDecode(P, None, 5)]), (Lost("refused"), [failing])])
        attempt = 3
    play(machine, [(NOBODY, [Choose(frozenset({P}), hand_over=True)])])
    play(machine, [(Chosen(None, D, "whole"), [SendDecode(D, None, 5)]), (Opened(), [Relay()])])
    assert machine.attempt == attempt
    play(machine, [(Ended(), [Finish("served")])])


def test_an_engine_that_was_told_the_token_and_draws_another_is_not_asked_again() -> None:
    """P cannot be told a token: the D that can is asked instead."""
    script: list[tuple[object, list[object]]] = [
        *DREW,
        (Chosen(None, P, "whole"), [SendDecode(P, None, 5)]),
        (Opened(), [Relay()]),
        (
            Lost("another token", again=True, drew=True),
            [CloseDecode(), Choose(frozenset({D, P}), hand_over=True)],
        ),
        (NOBODY, [Choose(frozenset({P}), hand_over=True)]),
        (Chosen(None, D, "whole"), [SendDecode(D, None, 5)]),
    ]
    play(early(), script)


def test_a_d_that_drew_its_own_token_is_asked_again_after_another_d_broke() -> None:
    script: list[tuple[object, list[object]]] = [
        *DREW,
        (Chosen(P, D2, "test"), [SendPrefill(P, 2)]),
        (PrefillAnswered("length", HOLD, 5), [SendDecode(D2, HOLD, 5)]),
        (Opened(), [Relay()]),
        (Lost("reset", again=True), [CloseDecode(), Choose(frozenset({D, D2}), hand_over=True)]),
        (NOBODY, [Choose(frozenset({D2, P}), hand_over=True)]),
    ]
    play(early(), script)


def test_a_d_that_drew_its_own_token_is_asked_again_once() -> None:
    asked_again: tuple[object, list[object]] = (NOBODY, [Choose(frozenset({P}), hand_over=True)])
    play(early(), [*DREW, asked_again, (NOBODY, [FailStream(error(503)), Finish("failed")])])


def test_a_d_whose_connection_broke_is_not_asked_again() -> None:
    script: list[tuple[object, list[object]]] = [
        *DREW[:2],
        (Lost("reset", again=True), [CloseDecode(), Choose(frozenset({D}), hand_over=True)]),
        (NOBODY, [FailStream(error(503)), Finish("failed")]),
    ]
    play(early(), script)


def test_after_a_p_that_went_down_with_a_hold_no_early_leg_is_sent() -> None:
    """The client gets the number of cached tokens that the first P reported. An early leg would give it the last P's
    number, so none is sent.
    """
    aborted: list[tuple[object, list[object]]] = [
        (PrefillAnswered("abort", HOLD), [CloseEarly(), Choose(frozenset({P}), hand_over=True, holders=(P,))]),
        (Chosen(P2, D2, "test", anew=True, early_s=0.0), [Release(D2, HOLD), SendPrefill(P2, 2)]),
    ]
    machine = early()
    play(machine, aborted)
    assert machine.early_at > 1e9
    held_nothing: list[tuple[object, list[object]]] = [
        (PrefillAnswered("abort", None), [CloseEarly(), Choose(frozenset({P}), hand_over=True)]),
        (Chosen(P2, D2, "test", early_s=0.0), [SendPrefill(P2, 2), SendEarly(D2, P2, 2)]),
    ]
    play(early(), held_nothing)


def test_a_client_that_has_part_of_its_answer_gets_no_early_leg() -> None:
    machine = journey()
    machine.spoken = True
    play(machine, [(EARLY, [SendPrefill(P, 1)])])
