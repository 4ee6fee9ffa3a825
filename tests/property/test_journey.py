"""A journey under any events in any order: no hold is forgotten, every journey ends, every client gets one answer."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.ids import InstanceId
from cluster.wire import TransferFields
from router.core import journey as j

NAMES = st.sampled_from([InstanceId(name) for name in ("a", "b", "c")])
HOLDS = st.none() | st.builds(lambda n: TransferFields({"remote_num_tokens": n}), st.integers(1, 9))
SOURCE = j.PrefixSource(InstanceId("d"), 100, 1.0, cold_s=5.0)
EVENTS = st.one_of(
    st.builds(j.Chosen, st.none() | NAMES, st.none() | NAMES, st.just("")),
    st.just(j.Chosen(None, None, "", wait=True)),
    st.just(j.FleetChanged()),
    st.builds(
        j.PrefillAnswered,
        st.sampled_from(["length", "stop", "abort", None]),
        HOLDS,
        st.none() | st.just(7),
        by=st.none() | NAMES,
        pinned=st.none() | st.just(8),
    ),
    st.builds(j.Refused, st.sampled_from((400, 503)), st.none() | NAMES),
    st.builds(j.Lost, st.just("lost"), st.booleans(), st.booleans(), st.none() | NAMES),
    st.just(j.Lost("cannot be told", untouched=True, unpinned=True)),
    st.builds(j.EarlyLost, st.just("lost")),
    st.builds(j.Chosen, NAMES, NAMES, st.just(""), early_s=st.sampled_from((0.0, 10.0))),
    st.builds(j.Chosen, NAMES, NAMES, st.just(""), source=st.just(SOURCE)),
    st.builds(j.Chosen, st.none(), NAMES, st.just(""), source=st.just(SOURCE)),
    st.builds(j.SourceHeld, st.just(SOURCE), NAMES),
    st.builds(j.HolderLost, NAMES, st.sampled_from((0.0, 30.0))),
    st.just(j.Opened()),
    st.just(j.Ended()),
    st.just(j.ClientLeft()),
    st.builds(j.Released, st.booleans()),
    st.just(j.Tick()),
)


def _check_answer(effects: list[j.Effect], attempts_max: int) -> None:
    """What holds of the client's answer, whatever has happened."""
    spoken = [e for e in effects if isinstance(e, j.SendSeed | j.AnswerFromPrefill | j.ForwardRefusal | j.Fail)]
    assert len(spoken) <= 1, "the client's answer begins once"
    heard = [type(e) for e in effects if isinstance(e, j.SendSeed | j.Relay | j.Fail | j.FailStream | j.ForwardRefusal)]
    assert j.Fail not in heard[1:] and j.ForwardRefusal not in heard[1:], "no status after the first byte"
    assert j.FailStream not in heard[:1] and j.FailStream not in heard[:-1], "an error event ends a stream"
    seeded = next((at for at, e in enumerate(effects) if isinstance(e, j.SendSeed)), len(effects))
    bound = [e.first_token for e in effects[seeded:] if isinstance(e, j.SendDecode)]
    assert None not in bound, "after a seed, each decode leg begins with its token"
    given_up = [at for at, e in enumerate(effects) if isinstance(e, j.Choose) and e.unbound]
    assert len(given_up) <= 1 and given_up < [seeded], "a token is given up once, and only before the client has it"
    until = given_up[0] if given_up else len(effects)
    assert all(e.first_token is None for e in effects[until:] if isinstance(e, j.SendDecode)), "no later one binds"
    told = [e.first_token for e in effects[:until] if isinstance(e, j.SendDecode)]
    chosen = [token for token in told if token is not None]
    assert told[len(told) - len(chosen) :] == chosen and len(set(chosen)) <= 1, "a token that is chosen stays chosen"
    legs_sent = j.SendPrefill | j.SendDecode | j.SendEarly
    assert sum(isinstance(e, legs_sent) for e in effects) <= 3 * attempts_max


@given(st.lists(st.tuples(EVENTS, st.floats(0, 50)), max_size=30), st.booleans(), st.booleans())
def test_any_order_of_events(events: list[tuple[j.Event, float]], hand_over: bool, stream: bool) -> None:
    machine = j.Journey(hand_over=hand_over, stream=stream, deadline=100.0, deadline_s=100.0)
    effects: list[j.Effect] = [*machine.begin()]
    held: TransferFields | None = None
    legs: set[InstanceId] = set()
    touched = early = answered = False
    now = 0.0
    for event, step in events:
        now += step
        before, waited, newest = machine.state, machine.legs, machine.prefill
        caused = machine.handle(event, now)
        effects += caused
        if isinstance(event, j.PrefillAnswered | j.Refused | j.Lost) and before is j.JourneyState.PREFILLING:
            by = event.by or newest
            if by not in waited:
                assert not caused, "the event of a leg that is not waited for causes no effect"
            elif isinstance(event, j.PrefillAnswered):
                assert held is None
                held, touched = event.transfer, False
                answered = answered or held is not None
            legs.discard(by)  # type: ignore[arg-type]
        elif isinstance(event, j.PrefillAnswered) and before is j.JourneyState.CANCELLING:
            held, touched = event.transfer, False
        if isinstance(event, j.Lost) and before is j.JourneyState.OPENING and not event.untouched:
            touched = True
        for effect in caused:
            if isinstance(effect, j.Release):
                assert effect.transfer is held, "only a hold is released, and only once"
                held = None
            if isinstance(effect, j.SendPrefill):
                assert effect.instance not in legs, "an instance has one leg of a request"
                legs.add(effect.instance)
            if isinstance(effect, j.OutlastPrefill):
                legs.remove(effect.instance)
            if isinstance(effect, j.SendEarly):
                assert not early and legs == {effect.producer}, "an early leg is sent only beside a single prefill leg"
                assert not answered, "an early leg is sent only before P's answer"
                early = True
            if isinstance(effect, j.UseEarly):
                assert early and not legs and effect.transfer is held and not touched, "it pulls the awaited hold"
            if isinstance(effect, j.UseEarly | j.CloseEarly | j.CloseDecode):
                assert early or not isinstance(effect, j.CloseEarly), "only an open early leg is closed"
                early = False
            if isinstance(effect, j.DropDecode):
                assert before is j.JourneyState.OPENING, "a leg is replaced only before its first token"
                assert isinstance(event, j.Chosen) and event.decode is not None
                releases = [each for each in caused if isinstance(each, j.Release)]
                assert [each.transfer for each in releases] == ([] if held is None else [held])
            if isinstance(effect, j.SendDecode | j.AnswerFromPrefill):
                assert not early, "one answering leg at a time"
                assert not legs, "after the first answer, no other prefill leg is waited for"
            if isinstance(effect, j.SendDecode) and effect.transfer is not None:
                assert effect.transfer is held and not touched, "only a hold that is surely untouched is pulled"
        if isinstance(event, j.EarlyLost) and before is j.JourneyState.PREFILLING:
            early = False
        if any(isinstance(effect, j.Relay) for effect in caused):
            early = False
        if machine.state in {j.JourneyState.STREAMING, j.JourneyState.DONE} and any(
            isinstance(effect, j.Relay | j.CloseDecode) for effect in caused
        ):
            held = None  # D has the hold now; if D aborts, D releases it
    if machine.state is j.JourneyState.DONE:
        assert held is None, "a finished journey holds nothing"
        assert not machine.legs, "a finished journey waits for no leg"
        assert sum(isinstance(effect, j.Finish) for effect in effects) == 1
    _check_answer(effects, machine.attempts_max)
