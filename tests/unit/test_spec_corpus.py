"""Each cluster file in tests/corpus/wrong has exactly the problems that its header names; those in right have none.

A header line reads ``# LINE FIELD | VALUE | MESSAGE | FIX``. ``-`` stands for an empty part, and the word ``warning``
stands before the line number of a warning. MESSAGE and FIX may be the beginnings of the texts only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster.spec import Problem, Severity, parse

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
WRONG = sorted((CORPUS / "wrong").glob("*.yaml"))
RIGHT = sorted((CORPUS / "right").glob("*.yaml"))

HEADER = re.compile(r"# (warning )?(\d+) (.+?) \| (.+?) \| (.+?) \| (.+)")


class Expected(NamedTuple):
    severity: Severity
    line: int
    field: str
    value: str
    message: str
    fix: str


def text_of(path: Path) -> str:
    return path.read_bytes().decode()


def expected(text: str) -> list[Expected]:
    found = []
    for line in text.splitlines():
        header = HEADER.fullmatch(line)
        if header is None:
            break
        warning, number, field, value, message, fix = header.groups()
        severity = Severity.WARNING if warning else Severity.ERROR
        empty = {"-": ""}
        found.append(Expected(severity, int(number), empty.get(field, field), empty.get(value, value), message, fix))
    return found


def fits(problem: Problem, wanted: Expected) -> bool:
    same = (problem.severity, problem.line, problem.field, problem.value) == wanted[:4]
    return same and problem.message.startswith(wanted.message) and problem.fix.startswith(wanted.fix)


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_wrong_file(path: Path) -> None:
    text = text_of(path)
    wanted = expected(text)
    assert wanted, f"{path.name} has no header that names its problems"
    parsed = parse(text, path.name)
    told = "\n".join(map(str, parsed.problems))
    assert len(parsed.problems) == len(wanted), told
    for problem, each in zip(parsed.problems, wanted, strict=True):
        assert fits(problem, each), f"{problem}\nis not\n{each}"
    errors = [each for each in wanted if each.severity is Severity.ERROR]
    assert (parsed.spec is None) == bool(errors)


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_a_problem_points_at_its_value_or_key(path: Path) -> None:
    """The problem's line and column point at the value that it shows, or at the key that it names."""
    text = text_of(path)
    lines = text.splitlines()
    for problem in parse(text, path.name).problems:
        assert problem.file == path.name
        line = lines[problem.line - 1]
        assert 1 <= problem.column <= len(line) + 1
        if problem.value and problem.value not in {"***", "{…}", "[…]"}:
            key = problem.field.rpartition(".")[2]
            assert line[problem.column - 1 :].startswith((problem.value, key, f'"{key}'))


@pytest.mark.parametrize("path", RIGHT, ids=lambda path: path.stem)
def test_right_file(path: Path) -> None:
    parsed = parse(text_of(path), path.name)
    assert parsed.problems == ()
    assert parsed.spec is not None


def test_there_is_a_corpus() -> None:
    assert len(WRONG) >= 80
    assert len(RIGHT) >= 6


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_no_secret_is_repeated(path: Path) -> None:
    secrets = ("s3cret", "sk-1", "sk-baton-0", "hf_abcd", "abcd")
    told = "\n".join(map(str, parse(text_of(path), path.name).problems))
    assert not any(secret in told for secret in secrets)
