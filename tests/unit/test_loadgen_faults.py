"""Faults on a timeline: read, refused, due in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.faults import Action, Asks, BadAction, FaultTimeline, read, read_lines


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("30s kill prefill-0", Action(at_s=30, do="kill", target="prefill-0")),
        ("500ms drain d deadline_s=20", Action(at_s=0.5, do="drain", target="d", body={"deadline_s": 20})),
        ("2m resume d", Action(at_s=120, do="resume", target="d")),
        ("45 role p-1 decode", Action(at_s=45, do="role", target="p-1", body={"role": "decode"})),
        (
            "1.5s slow d factor=3 seconds=10",
            Action(at_s=1.5, do="slow", target="d", body={"fault": "slow", "factor": 3, "seconds": 10}),
        ),
        ("1s refuse d leg=decode share=0.5",
         Action(at_s=1, do="refuse", target="d", body={"fault": "refuse", "leg": "decode", "share": 0.5})),
        ("1s clear d", Action(at_s=1, do="clear", target="d")),
    ],
)  # fmt: skip
def test_actions(text: str, told: Action) -> None:
    assert read(text) == told


def test_which_program_carries_out_each_action() -> None:
    told = {do: read(f"1s {do} x{' decode' if do == 'role' else ''}").asks for do in ("kill", "drain", "role", "die")}
    assert told == {"kill": Asks.KERNEL, "drain": Asks.AGENT, "role": Asks.AGENT, "die": Asks.MOCK}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill prefill-0", "write WHEN WHAT INSTANCE"),
        ("soon kill x", "'soon' is no moment"),
        ("-1s kill x", "is no moment"),
        ("1s kil x", "'kil' is nothing that can be done"),
        ("1s role x", "takes one of prefill, decode, both"),
        ("1s kill x now=1", "`kill` takes no `now`"),
        ("1s slow x factor=0", "`factor` is 0"),
        ("1s slow x status=500", "takes no `status`"),
        ("1s slow x fast", "write NAME=VALUE"),
        ("1s kill 'x", "No closing quotation"),
    ],
)
def test_bad_actions_are_refused_with_a_reason(text: str, said: str) -> None:
    with pytest.raises(BadAction, match=said):
        read(text)


def test_a_file_names_its_line_and_is_put_in_order() -> None:
    found = read_lines(["# first", "", "20s kill a", "  10s drain b "])
    assert [each.target for each in found] == ["b", "a"]
    with pytest.raises(BadAction, match="line 2: 'x' is no moment"):
        read_lines(["1s kill a", "x kill b"])


@given(st.lists(st.floats(0, 1000), max_size=20), st.lists(st.floats(0, 1200), max_size=20))
def test_each_action_comes_once_and_not_before_its_moment(moments: list[float], looks: list[float]) -> None:
    timeline = FaultTimeline(Action(at_s=at, do="kill", target=str(number)) for number, at in enumerate(moments))
    seen: list[str] = []
    for now in sorted(looks):
        for action in timeline.handle(now):
            assert action.at_s <= now
            seen.append(action.target)
        wakeup = timeline.next_wakeup()
        assert wakeup is None or wakeup > now
    seen += [action.target for action in timeline.handle(2000.0)]
    assert sorted(seen) == sorted(str(number) for number in range(len(moments)))
    assert timeline.next_wakeup() is None
