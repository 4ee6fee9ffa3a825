"""Faults: read from a file, or drawn from a seed."""

import json

import pytest

from cluster.errors import UsageError
from cluster.ids import InstanceId
from sim.faults import KINDS, PRESETS, Fault, as_json, preset, read_faults

NAMES = [InstanceId("p"), InstanceId("d")]


def test_a_json_list_and_json_lines_are_read_alike() -> None:
    rows = [{"at_s": 2, "kind": "kill", "instance": "d"}, {"at_s": 1, "kind": "leave", "share": 0.5}]
    listed = read_faults(json.dumps(rows), NAMES)
    assert listed == read_faults("\n\n".join(map(json.dumps, rows)) + "\n \n", NAMES), "blank lines are skipped"
    assert [fault.at_s for fault in listed] == [1, 2], "in order of time"
    assert read_faults(json.dumps(as_json(listed)), NAMES) == listed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{", "not JSON"),
        ('[{"at_s": 1, "kind": "flood"}]', "fault 1: kind is 'flood': must be one of kill,"),
        ('[{"at_s": 1, "kind": "kill", "instance": "x"}]', "fault 1: instance is 'x': must be one of p, d"),
        ('[{"at_s": 1, "kind": "kill", "where": "p"}]', "fault 1: 'where' is no field of a fault: it has at_s,"),
        ('[{"at_s": -1, "kind": "leave"}]', "fault 1: at_s is -1: must be a number of seconds, 0 or more"),
        ('[{"at_s": 1, "kind": "leave", "share": 0}]', "share is 0: must be a number above 0 and up to 1"),
        ('[{"at_s": NaN, "kind": "leave"}]', "at_s is nan: must be a number of seconds"),
        ('[{"at_s": 1e999, "kind": "leave"}]', "at_s is inf: must be a number of seconds"),
        ('[{"at_s": 1e300, "kind": "leave"}]', "at_s is 1e.300: must be .* up to 1,000,000,000"),
        ('[{"at_s": 1%s, "kind": "leave"}]' % ("0" * 400), "at_s is 10*: must be a number of seconds"),
        ('[{"at_s": "1", "kind": "leave"}]', "at_s is '1': must be a number of seconds"),
        ('[{"kind": "leave"}]', "at_s is None: must be a number of seconds"),
        ('[{"at_s": 1}]', "kind is None: must be one of"),
        ('[{"at_s": 1, "kind": []}]', r"kind is \[\]: must be one of"),
        ('[{"at_s": 1, "kind": "kill"}]', "instance is None: must be one of p, d"),
        (
            '[{"at_s": 1, "kind": "slow", "instance": "p", "factor": 2.5}]',
            "factor is 2.5: must be a whole number from 1",
        ),
        ('[{"at_s": 1, "kind": "slow", "instance": "p", "factor": true}]', "factor is True: must be a whole number"),
        ('[{"at_s": 1, "kind": "slow", "duration_s": Infinity}]', "duration_s is inf: must be .* above 0"),
        ("[[]]", r"fault 1: \[\] is no object"),
        ("3", "fault 1: 3 is no object"),
        ("[" * 100_000, "not a list of faults: nested too deep"),
    ],
)
def test_bad_faults_are_usage_errors(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_faults(text, NAMES)


def test_a_preset_follows_from_its_seed() -> None:
    assert preset("chaos", 3, NAMES, 100.0) == preset("chaos", 3, NAMES, 100.0)
    assert preset("chaos", 3, NAMES, 100.0) != preset("chaos", 4, NAMES, 100.0)
    assert {fault.kind for fault in preset("chaos", 3, NAMES, 1000.0, 5.0)} == set(PRESETS["chaos"])


def test_each_kind_of_fault_has_its_own_random_stream() -> None:
    """The other kinds of faults do not change when an instance is killed."""
    kills = [fault for fault in preset("chaos", 9, NAMES, 50.0) if fault.kind == "kill"]
    assert kills == list(preset("kills", 9, NAMES, 50.0))
    assert kills


def test_presets_name_kinds_that_exist() -> None:
    assert {kind for kinds in PRESETS.values() for kind in kinds} == set(KINDS)
    assert all(fault.at_s < 10.0 for fault in preset("chaos", 0, NAMES, 10.0))
    assert preset("kills", 0, NAMES, 0.0) == ()


def test_a_fault_without_a_span_is_refused() -> None:
    with pytest.raises(ValueError, match="duration_s is 0: must be a number of seconds, above 0"):
        Fault(at_s=0, kind="slow", instance=NAMES[0], duration_s=0)
