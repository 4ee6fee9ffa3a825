"""Faults: read from a file, or drawn from a seed."""

import json

import pytest

from cluster.errors import UsageError
from cluster.ids import InstanceId
from sim.faults import KINDS, PRESETS, Fault, as_json, preset, read_faults

NAMES = [InstanceId("p"), InstanceId("d")]


def test_a_list_and_a_line_each_are_the_same() -> None:
    rows = [{"at_s": 2, "kind": "kill", "instance": "d"}, {"at_s": 1, "kind": "leave", "share": 0.5}]
    listed = read_faults(json.dumps(rows), NAMES)
    assert listed == read_faults("\n".join(map(json.dumps, rows)), NAMES)
    assert [fault.at_s for fault in listed] == [1, 2], "in order of time"
    assert read_faults(json.dumps(as_json(listed)), NAMES) == listed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{", "not JSON"),
        ('[{"at_s": 1, "kind": "flood"}]', "fault 1: kind 'flood' is none of"),
        ('[{"at_s": 1, "kind": "kill", "instance": "x"}]', "fault 1: there is no instance 'x'"),
        ('[{"at_s": 1, "kind": "kill", "where": "p"}]', "fault 1: .*where"),
        ('[{"at_s": -1, "kind": "leave"}]', "fault 1: at_s must be 0 or more"),
        ('[{"at_s": 1, "kind": "leave", "share": 0}]', "share above 0"),
    ],
)
def test_bad_faults_are_usage_errors(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_faults(text, NAMES)


def test_a_preset_follows_from_its_seed() -> None:
    assert preset("chaos", 3, NAMES, 100.0) == preset("chaos", 3, NAMES, 100.0)
    assert preset("chaos", 3, NAMES, 100.0) != preset("chaos", 4, NAMES, 100.0)
    assert {fault.kind for fault in preset("chaos", 3, NAMES, 1000.0, 5.0)} == set(PRESETS["chaos"])


def test_each_kind_has_a_stream_of_its_own() -> None:
    """A kill is where it is, whatever else goes wrong."""
    kills = [fault for fault in preset("chaos", 9, NAMES, 50.0) if fault.kind == "kill"]
    assert kills == list(preset("kills", 9, NAMES, 50.0))
    assert kills


def test_presets_name_kinds_that_exist() -> None:
    assert {kind for kinds in PRESETS.values() for kind in kinds} == set(KINDS)
    assert all(fault.at_s < 10.0 for fault in preset("chaos", 0, NAMES, 10.0))
    assert preset("kills", 0, NAMES, 0.0) == ()


def test_a_fault_without_a_span_is_refused() -> None:
    with pytest.raises(ValueError, match="duration_s above 0"):
        Fault(at_s=0, kind="slow", instance=NAMES[0], duration_s=0)
