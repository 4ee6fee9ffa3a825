"""Every command that the documents and the commands' own help show can be copied and run as printed."""

import importlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from baton.cli import COMMANDS, EPILOG, _parser, _split

ROOT: Final = Path(__file__).parents[2]
DOCUMENTS: Final = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
SETTING: Final = r"(?:[A-Z_]+=\S+ +)*"  # variables set in front of a command
COMMAND: Final = re.compile(rf"^{SETTING}(?:\.venv/bin/baton|make|curl) ")
BARE: Final = re.compile(rf"^{SETTING}baton (?!>)")  # not the layers of docs/architecture.md


def _fenced(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a document's fenced blocks without a language; continued lines are joined."""
    inside, language, held, at = False, "", "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if fence := re.match(r"```(\w*)", line):
            inside, language = not inside, fence[1]
        elif inside and language == "":
            at = at if held else number
            held += line
            if held.endswith("\\"):
                held = held[:-1]
            else:
                yield at, held
                held = ""


def _shown(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """(file and line number, line) of each line in these blocks that matches the pattern."""
    return [
        (f"{path.relative_to(ROOT)}:{number}", line)
        for path in DOCUMENTS
        for number, line in _fenced(path.read_text())
        if pattern.match(line)
    ]


def _words(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    return words


def _understood(words: list[str]) -> None:
    """Baton's own parser accepts these words; otherwise it raises SystemExit."""
    own, _ = _split(words)
    assert _parser(own[0]).parse_args(own).command == own[0]


SHOWN: Final = _shown(COMMAND)
HELP_TEXTS: Final = {"": EPILOG} | {
    name: importlib.import_module(f"baton.commands.{name}").__doc__ for name in COMMANDS
}
HELP: Final = [
    (name, line.strip())
    for name, text in HELP_TEXTS.items()
    for line in (text or "").replace("\\\n", "").splitlines()
    if re.match(r" +baton ", line)
]


def test_documents_name_baton_by_its_path_in_a_fresh_clone() -> None:
    assert len(SHOWN) > 40
    assert not [where for where, _ in _shown(BARE)], "a clone has .venv/bin/baton, and no baton on the path"


@pytest.mark.parametrize(("where", "line"), SHOWN, ids=[where for where, _ in SHOWN])
def test_a_command_of_the_documents_is_understood(where: str, line: str) -> None:
    assert "…" not in line and "..." not in line, "a reader copies the line as printed"
    program, *words = _words(line)
    if program == "make":
        _made(words)
    elif program != "curl":
        _understood(words)


def _made(words: list[str]) -> None:
    """The target is in the Makefile, and the source of the module that it runs names the flags."""
    makefile = (ROOT / "Makefile").read_text()
    rule = re.search(rf"^{re.escape(words[0])}:.*?(?=^\S|\Z)", makefile, re.MULTILINE | re.DOTALL)
    assert rule, f"no target {words[0]}"
    flags = [word for given in words[1:] for word in given.removeprefix("ARGS=").split() if word.startswith("--")]
    assert all(re.match(r"[A-Z]+=", given) for given in words[1:]), "prose after a command needs a # before it"
    if flags:
        module = re.search(r"-m ((?:bench|tools)\.\w+)", rule[0])
        assert module, f"{words[0]} takes no ARGS"
        base = ROOT / Path(*module[1].split("."))
        sources = [base.with_suffix(".py")] if base.with_suffix(".py").exists() else sorted(base.glob("*.py"))
        text = "".join(path.read_text() for path in sources)
        assert [flag for flag in flags if f'"{flag}"' not in text] == []


@pytest.mark.parametrize(("name", "line"), HELP, ids=[f"{name}-{number}" for number, (name, _) in enumerate(HELP)])
def test_an_example_of_a_command_s_help_is_understood(name: str, line: str) -> None:
    words = _words(line)[1:]
    assert name in {"", words[0]}
    _understood(words)


def test_make_help_lists_every_target_with_a_description() -> None:
    described = re.findall(r"^(\S+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    asked = ["make", "--no-print-directory", "help"]  # tests run within another make
    shown = subprocess.run(asked, cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout
    assert [line.split()[1] for line in shown.splitlines()] == described


def test_every_command_shows_an_example() -> None:
    assert set(COMMANDS) - {name for name, _ in HELP} == set()
