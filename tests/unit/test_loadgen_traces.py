"""Every trace format: what a row means, what is wrong with a bad one, and the real files where they are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loadgen import servegen
from loadgen.arrival import Arrival, BadRow, Row
from loadgen.shaping import window
from loadgen.summary import Summary, summary_of
from loadgen.traces import FORMATS, detect, mooncake
from loadgen.traces.azure import seconds
from loadgen.traces.leaps import HELD_MAX
from loadgen.traces.ordered import rows

MOONCAKE = [
    '{"timestamp": 27000, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 48]}',
    '{"timestamp": 27000, "input_length": 600, "output_length": 26, "hash_ids": [46, 50]}',
    '{"timestamp": 30000, "input_length": 10, "output_length": 1, "hash_ids": [51]}',
]
AZURE_2023 = [
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n",
    "2023-11-16 18:17:03.9799600,4808,10\r\n",
    "2023-11-16 18:17:04.0319600,3180,8\r\n",
]
AZURE_2024 = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2024-05-10 00:00:00.009930+00:00,2162,5",
    "2024-05-10 00:00:01.509930+00:00,2399,6",
]
BURSTGPT = [
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "5,18,2.5,ChatGPT,472,18,490,Conversation log",
    "45,18,0.1,GPT-4,1087,0,1087,API log",
]
BURSTGPT_1 = [
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "5,ChatGPT,472,18,490,API log",
]
BAILIAN = [
    '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 33, "output_length": 5, "type": "text", '
    '"turn": 1, "hash_ids": [1, 2, 3]}',
    '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.1, "input_length": 49, "output_length": 7, '
    '"type": "search", "turn": 2, "hash_ids": [1, 2, 3, 4]}',
    '{"chat_id": 161, "parent_chat_id": 160, "timestamp": 63.1, "input_length": 1, "output_length": 7, '
    '"type": "search", "turn": 3, "hash_ids": [1]}',
]
BATON = [
    '{"at_s": 2.5, "input_tokens": 9, "output_tokens": 3, "request": 1, "sent_s": 2.6, "end_s": 3}',
    '{"at_s": 0.5, "input_tokens": 70, "output_tokens": 3, "prefix": [7, 8], "block_tokens": 64, "tenant": "acme", '
    '"slo_class": "batch", "end_s": 9}',
]
SAMPLES = {
    "mooncake": MOONCAKE,
    "azure": AZURE_2023,
    "burstgpt": BURSTGPT,
    "bailian": BAILIAN,
    "baton": BATON,
}


def read(format_: str, lines: list[str], **more: float) -> list[Arrival]:
    rows = list(FORMATS[format_](lines, np.random.default_rng(1), more.get("tick_s")))
    assert not [row for row in rows if isinstance(row, BadRow)]
    return [row for row in rows if isinstance(row, Arrival)]


@pytest.mark.parametrize("format_", SAMPLES)
def test_format_is_seen_by_content(format_: str) -> None:
    assert detect(SAMPLES[format_]) == format_
    assert detect(["\ufeff" + SAMPLES[format_][0], "", *SAMPLES[format_][1:]]) == format_


@pytest.mark.parametrize("lines", [[], ["hello"], ["{}"], ["[1]"], ["{"], ["x"] * 99 + BATON, ["{" * 5000]])
def test_unknown_format(lines: list[str]) -> None:
    assert detect(lines) is None


def test_mooncake_counts_from_zero_and_spreads_ticks() -> None:
    first, second, third = read("mooncake", MOONCAKE)
    assert 0 <= first.at_s < second.at_s < 3 <= third.at_s < 6
    assert (first.input_tokens, first.output_tokens, first.prefix, first.block_tokens) == (1030, 52, (46, 47, 48), 512)


def test_mooncake_as_written() -> None:
    assert [each.at_s for each in read("mooncake", MOONCAKE, tick_s=0.0)] == [0, 0, 3]


def test_fine_stamps_are_left_alone() -> None:
    lines = [
        json.dumps({"timestamp": at * 777, "input_length": 1, "output_length": 1, "hash_ids": []}) for at in range(9)
    ]
    assert [each.at_s for each in read("mooncake", lines)] == pytest.approx([at * 0.777 for at in range(9)])


@pytest.mark.parametrize(("lines", "gap_s"), [(AZURE_2023, 0.052), (AZURE_2024, 1.5)])
def test_azure(lines: list[str], gap_s: float) -> None:
    first, second = read("azure", lines)
    assert first.at_s == 0
    assert second.at_s == pytest.approx(gap_s, abs=2e-7)
    assert first.prefix == ()
    assert detect(lines) == detect(lines[1:]) == "azure"


def test_azure_calendar() -> None:
    assert seconds("2000-01-01 00:00:00") == 0
    assert seconds("2024-03-01 00:00:00") - seconds("2024-02-28 00:00:00") == 2 * 86400
    assert seconds("2023-03-01 00:00:00") - seconds("2023-02-28 00:00:00") == 86400
    assert seconds("2025-01-01 00:00:00") - seconds("2024-01-01 00:00:00") == 366 * 86400
    assert seconds("2024-05-10T02:00:00.5+02:00") == seconds("2024-05-10 00:00:00.5Z")


def test_burstgpt_failures_stay() -> None:
    first, failed = read("burstgpt", BURSTGPT)
    assert (first.session, first.tenant, first.kind) == ("18", "ChatGPT", "Conversation log")
    assert (failed.at_s, failed.input_tokens, failed.output_tokens) == (40, 1087, 0)
    assert read("burstgpt", BURSTGPT_1)[0].session is None


def test_bailian_sessions_are_chains_of_parents() -> None:
    found = read("bailian", BAILIAN)
    assert [each.session for each in found] == ["159", "159", "159"]
    assert [each.turn for each in found] == [1, 2, 3]
    assert [each.kind for each in found] == ["text", "search", "search"]
    assert found[0].block_tokens == 16
    assert found[0].slo_class is None


def test_own_record_is_sorted_by_intended_time() -> None:
    early, late = read("baton", BATON)
    assert (early.at_s, late.at_s) == (0.5, 2.5)
    assert (early.prefix, early.block_tokens, early.tenant, early.slo_class) == ((7, 8), 64, "acme", "batch")


M = '{"timestamp": %s, "input_length": %s, "output_length": %s, "hash_ids": %s}'
BAD: list[tuple[str, list[str], int, str]] = [
    ("mooncake", [M % (0, 5, 5, "[1]"), M % (-3, 5, 5, "[1]")], 2, "timestamp -3 is negative"),
    ("mooncake", [M % (0, -5, 5, "[1]")], 1, "input_length -5 is negative"),
    ("mooncake", [M % (0, 5, "null", "[1]")], 1, "output_length is missing"),
    ("mooncake", [M % (9, 5, 5, "[1]"), "", M % (3, 5, 5, "[1]")], 3, "not sorted: 0.006 s earlier than line 1"),
    ("mooncake", [M % (0, '"many"', 5, "[1]")], 1, "input_length 'many' is not a number"),
    ("mooncake", [M % (0, 5.5, 5, "[1]")], 1, "input_length 5.5 is not a whole number"),
    ("mooncake", [M % (0, "1e400", 5, "[1]")], 1, "not JSON"),
    ("mooncake", [M % (0, "true", 5, "[1]")], 1, "input_length True is not a number"),
    ("mooncake", [M % (0, 5, 5, "[1, 2]")], 1, "hash_ids holds 2 blocks, but 5 tokens make 1 of 512"),
    ("mooncake", [M % (0, 5, 5, "[-1]")], 1, "hash_ids holds -1, which is not an id"),
    ("mooncake", [M % (0, 5, 5, '"a"')], 1, "hash_ids 'a' is not a list"),
    ("mooncake", ['{"timestamp": 0, "input_length": 5'], 1, "not JSON"),
    ("mooncake", ["[1, 2]"], 1, "[1, 2] is not a JSON object"),
    ("mooncake", ["[" * 100_000], 1, "not JSON"),
    ("mooncake", [M % (0, 10**30, 5, "[]")], 1, "too large"),
    ("mooncake", [M % (0, 2**32 - 1, 5, "[]")], 1, "too large for a count of tokens (at most 10000000)"),
    ("azure", [AZURE_2023[0], "2023-11-16 18:17:03,12"], 2, "2 cells, where there are 3"),
    ("azure", [AZURE_2023[0], "2023-13-16 18:17:03,12,3"], 2, "is no date and time"),
    ("azure", [AZURE_2023[0], "yesterday,12,3"], 2, "TIMESTAMP 'yesterday' is not like"),
    ("azure", [AZURE_2023[0], ",12,3"], 2, "TIMESTAMP is missing"),
    ("azure", [*AZURE_2023, AZURE_2023[1]], 4, "not sorted: 0.052"),
    ("azure", [AZURE_2023[0], "2023-11-16 18:17:03,twelve,3"], 2, "ContextTokens 'twelve' is not a number"),
    ("azure", [AZURE_2023[0], "2023-11-16 18:17:03,12,"], 2, "GeneratedTokens is missing"),
    ("azure", [AZURE_2023[0], "2023-11-16 18:17:03,nan,3"], 2, "ContextTokens 'nan' is not a number"),
    ("burstgpt", BURSTGPT[1:2], 1, "no header with Timestamp, Request tokens, Response tokens"),
    ("burstgpt", [BURSTGPT[0], "5,18,2.5"], 2, "3 cells, where the header has 8"),
    ("burstgpt", [BURSTGPT[0], "5,18,2.5,GPT-4,472,18,999,log"], 2, "Total tokens 999 is not 472 + 18"),
    ("burstgpt", [BURSTGPT[0], "5,18,2.5,GPT\udcff,4,1,5,log"], 2, "cannot be printed"),
    ("bailian", [BAILIAN[0].replace('"chat_id": 159, ', "")], 1, "chat_id is missing"),
    ("bailian", [BAILIAN[0].replace('"turn": 1', '"turn": 0')], 1, "turn 0"),
    ("bailian", [BAILIAN[0].replace("[1, 2, 3]", "[1, 2, 3, 4]")], 1, "33 tokens make 3 of 16"),
    ("baton", ['{"at_s": 1, "input_tokens": 3}'], 1, "output_tokens is missing"),
    ("baton", [BATON[1].replace('"block_tokens": 64, ', "")], 1, "block_tokens is missing"),
    ("baton", [BATON[1].replace("batch", "a\\r\\nX-Evil: 1")], 1, "cannot be printed"),
]


@pytest.mark.parametrize(("format_", "lines", "line", "what"), BAD)
def test_bad_row_says_where_and_what(format_: str, lines: list[str], line: int, what: str) -> None:
    rows = list(FORMATS[format_](lines, np.random.default_rng(1), None))
    bad = [row for row in rows if isinstance(row, BadRow)]
    assert len(bad) == 1
    assert bad[0].line == line
    assert what in bad[0].what
    assert str(bad[0]).startswith(f"line {line}: ")


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("lines", [[], ["\n", "  "], ["\ufeff"]])
def test_empty_file_is_an_empty_load(format_: str, lines: list[str]) -> None:
    assert list(FORMATS[format_](lines, np.random.default_rng(1), None)) == []


# ServeGen

TRACE = ["0,0.5,1.0,Gamma,1.0,2.0", "600,0,0,,0,0", "1200,2.0,3.0,Weibull,0.5,0.25"]
DATASET = json.dumps(
    {
        "0": {"input_tokens": "{}", "output_tokens": "{}"},
        "21600": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{7: 1.0}"},
    }
)


def test_servegen_mixes_clients() -> None:
    files = {"a-trace.csv": TRACE, "a-dataset.json": [DATASET], "b-trace.csv": ["0,0,0,,0,0"], "README": ["x"]}
    pool = servegen.read(files)
    assert not pool.bad
    assert pool.silent == ("b",)
    found = list(servegen.arrivals(pool, np.random.default_rng(3)))
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)
    assert {each.input_tokens for each in found} == {10, 20}
    assert {(each.output_tokens, each.tenant) for each in found} == {(7, "a")}
    counts = [sum(low <= each.at_s < low + 600 for each in found) for low in (0, 600, 1200)]
    assert counts[1] == 0
    assert 230 < counts[0] < 370
    assert 900 < counts[2] < 1500


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({}, "no *-trace.csv in this folder"),
        ({"a-trace.csv": TRACE}, "a-trace.csv: there is no a-dataset.json beside it"),
        ({"a-trace.csv": TRACE, "a-dataset.json": ["{"]}, "a-dataset.json: not JSON"),
        ({"a-trace.csv": TRACE, "a-dataset.json": ["{}"]}, "input_tokens is empty in every window"),
        (
            {"a-trace.csv": TRACE, "a-dataset.json": [DATASET.replace("20: 0.5", "x: 0.5")]},
            "length 'x' is not a number",
        ),
        ({"a-trace.csv": [*TRACE, "600,1,1,Gamma,1,1"]}, "a-trace.csv: line 4: not sorted"),
        ({"a-trace.csv": ["0,1,1,Pareto,1,1"]}, "line 1: family 'Pareto'"),
        ({"a-trace.csv": ["0,-1,1,Gamma,1,1"]}, "line 1: rate '-1' is negative"),
        ({"a-trace.csv": ["0,1,1,Gamma,0,1"]}, "line 1: shape 0"),
        ({"a-trace.csv": ["0,1"]}, "line 1: 2 cells"),
    ],
)
def test_servegen_bad(files: dict[str, list[str]], what: str) -> None:
    assert any(what in str(bad) for bad in servegen.read(files).bad)


# The real files: the figures are those of the data folder's README.

DATA = os.environ.get("BATON_DATA")
CODE, CONV = (f"azure2023/AzureLLMInferenceTrace_{name}.csv" for name in ("code", "conv"))
real = pytest.mark.skipif(not DATA, reason="real traces: set BATON_DATA to the folder that holds traces/")


def summary(name: str, tick_s: float | None = None) -> Summary:
    path = Path(str(DATA)) / "traces" / name
    format_ = detect(path.read_text().splitlines()[:20])
    assert format_ is not None
    with path.open() as lines:
        rows = list(FORMATS[format_](lines, np.random.default_rng(7), tick_s))
    assert not [row for row in rows if isinstance(row, BadRow)]
    return summary_of([row for row in rows if isinstance(row, Arrival)])


@real
@pytest.mark.parametrize(
    ("name", "requests", "span_s", "rate", "gap_cv", "inputs", "outputs"),
    [
        (CODE, 8819, 3436, 2.57, 13.2, (1469, 5188, 7436, 2048), (13, 55, 251, 27.9)),
        (CONV, 19366, 3502, 5.53, 1.09, (1020, 2735, 4142, 1155), (129, 424, 601, 211)),
        (
            "mooncake/conversation_trace.jsonl",
            12031,
            3537,
            3.40,
            1.01,
            (6909, 27367, 85400, 12035),
            (350, 597, 1119, 343),
        ),
    ],
)
def test_real_trace(
    name: str, requests: int, span_s: int, rate: float, gap_cv: float, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    seen = summary(name)
    assert seen.requests == requests
    assert seen.input_p50_p90_p99 and seen.output_p50_p90_p99
    assert seen.span_s == pytest.approx(span_s, abs=3.1)
    assert seen.rate == pytest.approx(rate, abs=0.006)
    assert seen.gap_cv == pytest.approx(gap_cv, abs=0.06)
    assert (*seen.input_p50_p90_p99, seen.input_mean) == pytest.approx(inputs, abs=0.6)
    assert (*seen.output_p50_p90_p99, seen.output_mean) == pytest.approx(outputs, abs=0.6)


@real
def test_real_mooncake_as_written_is_bursty_and_shares_prefixes() -> None:
    seen = summary("mooncake/conversation_trace.jsonl", tick_s=0.0)
    assert seen.gap_cv == pytest.approx(3.03, abs=0.01)
    assert seen.shared == pytest.approx(0.374, abs=0.002)


@real
def test_real_servegen() -> None:
    folder = Path(str(DATA)) / "traces" / "servegen-deepseek-r1"
    pool = servegen.read({path.name: path.read_text().splitlines() for path in folder.glob("chunk-*")})
    assert not pool.bad
    assert len(pool.clients) + len(pool.silent) == 73
    expected = sum(w.rate * (w.end_s - w.start_s) for client in pool.clients for w in client.schedule)
    assert expected / 86400 == pytest.approx(16.0, abs=0.05)
    hour = list(window(servegen.arrivals(pool, np.random.default_rng(5), from_s=64800.0), 0.0, 1800.0))
    meant = sum(w.rate * 600 for client in pool.clients for w in client.schedule if 64800 <= w.start_s < 66600)
    assert len(hour) == pytest.approx(meant, rel=0.1)


@pytest.mark.parametrize(
    ("stamps", "bad", "kept"),
    [
        (
            [1, 2, 3, 10_000_000, 4, 5, 2, 6, 20_000_000],
            [
                (4, "not sorted: 1e+07 s later than line 5"),
                (7, "not sorted: 3 s earlier than line 6"),
                (9, "the last row is 2e+07 s later than the one before it"),
            ],
            [1, 2, 3, 4, 5, 6],
        ),
        ([1, 2, 1800, 3, 4, 5], [(3, "not sorted: 1797 s later than line 4")], [1, 2, 3, 4, 5]),
        ([1800, 3, 4, 5], [(1, "not sorted: 1797 s later than line 2")], [3, 4, 5]),
        ([1, 2, 1800, 3, 9_000, 4], [(4, "not sorted: 1797 s earlier than line 3")], None),
        ([1, 5, 3, 6], [(3, "not sorted: 2 s earlier than line 2")], [1, 5, 6]),
        ([1, 5, 3], [(3, "not sorted: 2 s earlier than line 2")], [1, 5]),
        ([1, 5, 3, 2, 4], [(4, "not sorted: 3 s earlier than line 2"), (2, "not sorted: 2 s later than line 3")], None),
        ([0, 7200], [(2, "the last row is 7200 s later than the one before it")], [0]),
        ([0, 7200, 14_400], [], [0, 7200, 14_400]),
        ([0, 3600], [], [0, 3600]),
        ([1_700_000_000], [], [1_700_000_000]),
        (  # two rows of a wrong time in the middle, and a row of a right time that comes too late
            [1, 2, 90_000, 90_001, 3, 4, 3, 5],
            [
                (3, "not sorted: 89997 s later than line 5"),
                (4, "not sorted: 89998 s later than line 5"),
                (7, "not sorted: 1 s earlier than line 6"),
            ],
            [1, 2, 3, 4, 5],
        ),
        (  # a single row that was written down late after a pause does not make the rows after the pause bad
            [0, 1, 40_000, 40_001, 40_002, 5, 40_003],
            [(6, "not sorted: 39997 s earlier than line 5")],
            [0, 1, 40_000, 40_001, 40_002, 40_003],
        ),
        (  # two kinds of wrong time
            [*range(30), 50_000, 900_000, 50_001],
            [
                (32, "not sorted: 849999 s later than line 33"),
                (31, "the last 2 rows are 49971 s later than the one before them"),
                (33, "the last 2 rows are 49971 s later than the one before them"),
            ],
            [*range(30)],
        ),
    ],
)
def test_one_stamp_of_a_wrong_time_makes_no_later_row_bad(
    stamps: list[int], bad: list[tuple[int, str]], kept: list[int] | None
) -> None:
    lines = [M % (1000 * at, 5, 5, "[1]") for at in stamps]
    found = list(FORMATS["mooncake"](lines, np.random.default_rng(1), 0.0))
    told = [(row.line, row.what) for row in found if isinstance(row, BadRow)]
    assert told[: len(bad)] == bad and len(found) == len(stamps)
    if kept is not None:
        assert len(told) == len(bad)
        assert [row.at_s for row in found if isinstance(row, Arrival)] == [at - kept[0] for at in kept]


@pytest.mark.parametrize("wrong", [1, 2, 3])
@pytest.mark.parametrize("place", [0, 1, 100, 199, 200])
def test_rows_of_a_wrong_clock_are_bad_and_the_others_are_kept(place: int, wrong: int) -> None:
    right = [at / 10 for at in range(200)]
    found = read_stamps([*right[:place], *(100_000 + number / 10 for number in range(wrong)), *right[place:]])
    bad = [row.line for row in found if isinstance(row, BadRow)]
    assert bad == list(range(place + 1, place + wrong + 1))
    assert [row.at_s for row in found if isinstance(row, Arrival)] == pytest.approx(right)


@pytest.mark.parametrize("after", [41, 100, 2000, 5000])
def test_rows_after_a_quiet_night_are_kept(after: int) -> None:
    stamps = [*map(float, range(200)), *(40_000.0 + number for number in range(after))]
    found = read_stamps(stamps)
    assert [row.at_s for row in found if isinstance(row, Arrival)] == stamps


def test_three_wrong_rows_at_the_end_of_twenty_are_bad() -> None:
    found = read_stamps([*(at / 10 for at in range(20)), 1e6, 1e6, 1e6])
    assert [row.line for row in found if isinstance(row, BadRow)] == [21, 22, 23]


def test_a_night_shorter_than_the_day_before_is_kept_before_one_row() -> None:
    stamps = [*(60.0 * number for number in range(1000)), 100_000.0]
    assert [row.at_s for row in read_stamps(stamps) if isinstance(row, Arrival)] == stamps


def test_few_rows_are_held_while_a_trace_is_read() -> None:
    read_ahead = 0

    def lines() -> Iterator[str]:
        nonlocal read_ahead
        for number in range(3 * HELD_MAX):
            read_ahead += 1
            yield M % (4_000_000 * number, 5, 5, "[1]")

    for row in rows(lines(), mooncake._parse):
        assert isinstance(row, Arrival)
        read_ahead -= 1
        assert read_ahead <= HELD_MAX + 2


def read_stamps(stamps: list[float]) -> list[Row]:
    lines = [M % (1000 * at, 5, 5, "[1]") for at in stamps]
    return list(FORMATS["mooncake"](lines, np.random.default_rng(1), 0.0))


@pytest.mark.parametrize(
    ("stamps", "bad"),
    [([0, 1, 1e12, 1e12], [3, 4]), ([0, 1, 1e12, 1e12 + 1, 2, 3], [3, 4]), ([0, 1.7e9, 1.7e9, 1.7e9 + 1], [1])],
)
def test_a_stamp_that_no_load_reaches_is_a_bad_row(stamps: list[float], bad: list[int]) -> None:
    found = read_stamps(stamps)
    told = {row.line: row.what for row in found if isinstance(row, BadRow)}
    assert sorted(told) == bad and len(found) == len(stamps)
    if bad == [3, 4] and len(stamps) == 4:
        assert told[4] == "1e+12 s later than the first row; a load lasts up to 1e+09 s"


def test_a_record_with_a_stamp_that_no_load_reaches_has_a_bad_row() -> None:
    row = '{"at_s": %s, "input_tokens": 1, "output_tokens": 1}'
    found = list(FORMATS["baton"]([row % at for at in (1, 1e12, 2)], np.random.default_rng(1), 0.0))
    assert [(each.line, each.what) for each in found if isinstance(each, BadRow)] == [
        (2, "1e+12 s later than the first row; a load lasts up to 1e+09 s")
    ]
