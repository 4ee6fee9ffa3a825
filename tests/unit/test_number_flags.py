"""Numbers on the command line, and what `baton up` takes for a cluster file."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from baton.cli import main
from baton.number_flags import LARGEST, above_zero, port, shown, zero_or_more


@pytest.mark.parametrize("text", ["-5", "65536", "1e3", "", "9" * 5000])
def test_what_is_no_port(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="a port is a number from 0 to 65535"):
        port(text)


def test_ports() -> None:
    assert [port("0"), port("65535")] == [0, 65535]


@pytest.mark.parametrize("text", ["nan", "inf", "1e300", "-1", "x"])
def test_numbers_that_no_clock_reaches(text: str) -> None:
    for read in (above_zero, zero_or_more):
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)
    assert above_zero(str(LARGEST)) == LARGEST


@pytest.mark.parametrize(("value", "said"), [(3, "3"), (float("nan"), "nan"), (10**400, "of so many digits")])
def test_any_number_can_be_shown(value: float, said: str) -> None:
    assert shown(value) == said


def test_up_takes_any_file_for_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster"
    file.write_text("models: []\n")
    assert main(["up", str(file)]) == 2
    assert f"{file}:1:" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--prefil", "--prefil=2"])
def test_a_flag_with_a_missing_letter_is_no_abbreviation(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", word])
    assert ended.value.code == 2
    assert f"unrecognized arguments: {word}; did you mean --prefill for {word}?" in capsys.readouterr().err
