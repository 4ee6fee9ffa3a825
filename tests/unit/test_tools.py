"""The scripts in tools/ for set-up, locks, licences and audits: their decisions and messages."""

from __future__ import annotations

import importlib.util
import os
import re
import threading
import time
from email.message import Message
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/setup.py on an empty project."""
    module = load("setup")
    venv = tmp_path / ".venv"
    python = venv / "bin" / "python"
    for path, text in (
        (tmp_path / "pyproject.toml", ""),
        (tmp_path / "requirements" / "cpu.txt", "torch==1.0+cpu  # vllm\n"),
        (python, ""),
        (venv / "lib" / "python3.11" / "site-packages" / "a.py", ""),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, value in {
        "ROOT": tmp_path,
        "VENV": venv,
        "PYTHON": python,
        "STAMP": venv / "stamp",
        "UNPACKING": venv / "unpacking",
        "LOG": venv / "log",
    }.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("sys.argv", ["setup.py", "--device", "cpu"])
    return module


def installs(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that one run of set-up installs for."""
    done: list[str] = []
    monkeypatch.setattr(setup, "install", done.append)
    setup.main()
    return done


def test_setup_runs_once_for_the_same_inputs(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installs(setup, monkeypatch) == ["cpu"]
    setup.STAMP.write_text(f"cpu {setup.key('cpu')}")
    assert installs(setup, monkeypatch) == []


@pytest.mark.parametrize("change", ["requirements/cpu.txt", "pyproject.toml"])
def test_setup_runs_again_when_an_input_changes(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    setup.STAMP.write_text(f"cpu {setup.key('cpu')}")
    (setup.ROOT / change).write_text("changed")
    assert installs(setup, monkeypatch) == ["cpu"]


def test_setup_runs_again_when_python_is_gone(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.STAMP.write_text(f"cpu {setup.key('cpu')}")
    setup.PYTHON.unlink()
    assert installs(setup, monkeypatch) == ["cpu"]


def test_setup_keeps_the_device_it_was_made_for(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    (setup.ROOT / "requirements" / "gpu.txt").write_text("torch==1.0\n")
    setup.STAMP.write_text("gpu old")
    monkeypatch.setattr("sys.argv", ["setup.py"])
    assert installs(setup, monkeypatch) == ["gpu"]


def test_setup_needs_room(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    setup.UNPACKING.touch()
    monkeypatch.setitem(setup.DISK_GB, "cpu", 10**9)
    with pytest.raises(SystemExit, match="2"):
        setup.make_venv("cpu")
    assert "GB of free disk are needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("sys.platform", "darwin", "Baton runs on Linux"),
        ("sys.version_info", (3, 10, 1), "Python 3.11 or 3.12 is needed"),
        ("platform.machine", lambda: "riscv64", "this machine is riscv64"),
        ("importlib.util.find_spec", lambda _: None, "apt install python3."),
    ],
)
def test_setup_says_what_is_missing(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, attribute, value, message
) -> None:
    monkeypatch.setattr(attribute, value)
    with pytest.raises(SystemExit, match="2"):
        setup.check_machine()
    assert message in capsys.readouterr().err


def test_setup_says_how_to_compile_or_that_a_compiler_is_missing(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.about_compiling() == (
        "no C compiler (cc): routers are interpreted; apt install gcc, or CC=clang, then `make compile`"
    )
    (tmp_path / "mycc").write_text("")
    (tmp_path / "mycc").chmod(0o755)
    monkeypatch.setenv("CC", "mycc -m64")
    assert setup.about_compiling().startswith("`make compile` (two minutes) saves")


def test_lines_of_two_slow_pipes(setup: ModuleType) -> None:
    pipes = [os.pipe() for _ in range(2)]

    def speak(write: int, *parts: bytes) -> None:
        for part in parts:
            os.write(write, part)
            time.sleep(0.2)
        os.close(write)

    said = ((b"one\ntw", b"o\n"), (b"thr", b"ee\n"))
    speakers = [
        threading.Thread(target=speak, args=(write, *parts)) for (_, write), parts in zip(pipes, said, strict=True)
    ]
    for speaker in speakers:
        speaker.start()
    with os.fdopen(pipes[0][0], "rb") as first, os.fdopen(pipes[1][0], "rb") as second:
        lines = list(setup.lines([first, second], every_s=0.05))
    for speaker in speakers:
        speaker.join()
    assert [line for number, line in lines if number == 0 and line] == ["one", "two"]
    assert [line for number, line in lines if number == 1] == ["three"]
    assert (0, "") in lines


@pytest.mark.parametrize(
    ("asked", "good", "half_written"),
    [
        (["fine", "fine"], True, False),
        (["fine", "missing"], False, False),  # a package that was never found was never being written
        (["fine", "torn"], False, True),
        (["nothing-to-do", "fine"], True, False),
    ],
)
def test_a_pip_that_fails_while_it_writes_is_remembered(
    setup: ModuleType, tmp_path: Path, asked: list[str], good: bool, half_written: bool
) -> None:
    """If a pip process fails while it writes, the marker file UNPACKING stays. Only then does the next set-up start
    over.
    """
    setup.PYTHON = tmp_path / "pip"
    setup.PYTHON.write_text(
        """#!/bin/sh
for last; do :; done
case $last in
    missing) exit 1 ;;
    nothing-to-do) exit 0 ;;
esac
echo "Installing collected packages: a, b"
[ "$last" = fine ]
"""
    )
    setup.PYTHON.chmod(0o755)
    assert setup.run_pips("packages", [[each] for each in asked], count=4) is good
    assert setup.UNPACKING.exists() is half_written


def test_lock_reads_what_the_resolver_prints() -> None:
    text = """
        a-b==1.0+x  # via baton-serve (pyproject.toml:dev), c
        # a comment
        c==2  # via -r requirements/cpu-torch.in
        d==3
    """
    assert load("lock").parse(text) == {"a-b": ("1.0+x", "baton:dev, c"), "c": ("2", "torch"), "d": ("3", "")}


def test_lock_adds_markers_to_packages_that_only_some_targets_need() -> None:
    lock = load("lock")
    sets = {target: {"everywhere": ("1", "")} for target in lock.TARGETS}
    sets["3.11", "x86_64"] |= {"intel": ("2", ""), "old": ("3", "")}
    sets["3.12", "x86_64"] |= {"intel": ("2", "")}
    sets["3.11", "aarch64"] |= {"old": ("3", "")}
    assert lock.merge(sets) == [
        "everywhere==1",
        'intel==2 ; platform_machine == "x86_64"',
        'old==3 ; python_version == "3.11"',
    ]


def test_each_pin_has_its_hashes_and_set_up_reads_them() -> None:
    lock, setup = load("lock"), load("setup")
    one, two = (f"sha256:{digit * 64}" for digit in "12")
    text = "\n".join(
        [
            "# head",
            lock.with_hashes("a==1 ; python_version == '3.11'   # b, c", [one, two]),
            lock.with_hashes("b==2", [one]),
        ]
    )
    assert setup.pins(text) == [
        f"a==1 ; python_version == '3.11' \\\n    --hash={one} \\\n    --hash={two}",
        f"b==2 \\\n    --hash={one}",
    ]
    assert lock.parse_hashes(text) == {"": [], "a": [one, two], "b": [one]}
    with pytest.raises(SystemExit, match="a==1: no hash of it"):
        lock.with_hashes("a==1  # b", [])


def test_a_changed_wheel_is_reported_in_one_line(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    setup.LOG.write_text(
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If ...\n"
        "    aiohttp==3.14.5 from https://example.org/a.whl (from -r x.txt (line 1)):\n        Expected sha256 12\n"
    )
    with pytest.raises(SystemExit, match="2"):
        setup.pip_failed("packages")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("setup: aiohttp==3.14.5 is not the file that the lock was made with")


def test_lock_refuses_versions_and_targets_that_one_marker_cannot_express() -> None:
    lock = load("lock")
    targets = list(lock.TARGETS)
    with pytest.raises(SystemExit, match="a differs"):
        lock.merge({targets[0]: {"a": ("1", "")}, targets[1]: {"a": ("2", "")}})
    with pytest.raises(SystemExit, match="no single marker"):
        lock.marker([targets[0], targets[3]], targets)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_locks_pin_everything_and_name_no_index(device: str) -> None:
    text = (TOOLS.parent / "requirements" / f"{device}.txt").read_text()
    pins = load("setup").pins(text)
    assert all("==" in pin and re.search(r"--hash=sha256:[0-9a-f]{64}$", pin) for pin in pins)
    rest = [line for line in "\n".join(pins).splitlines() if line not in text.splitlines()]
    assert not rest and len(pins) == len(re.findall(r"^\S+==", text, flags=re.MULTILINE))
    assert "://" not in text
    assert any(line.startswith("torch==2.13.0+cpu " if device == "cpu" else "torch==2.13.0 ") for line in pins)


@pytest.mark.parametrize(
    ("fields", "licence", "mark"),
    [
        ({"License-Expression": "Apache-2.0"}, "Apache-2.0", ""),
        ({"License-Expression": "MPL-2.0 AND MIT", "License": "x"}, "MPL-2.0 AND MIT", "copyleft"),
        (
            {"Classifier": "License :: OSI Approved :: GNU Lesser General Public License v3 (LGPLv3)"},
            "GNU Lesser General Public License v3 (LGPLv3)",
            "copyleft",
        ),
        ({"License": "BSD\nCopyright (c) somebody"}, "BSD", ""),
        ({"License": "UNKNOWN", "Classifier": "License :: OSI Approved"}, "", "unknown"),
    ],
)
def test_a_licence_is_read_from_the_metadata(fields: dict[str, str], licence: str, mark: str) -> None:
    tool, metadata = load("licences"), Message()
    for name, value in fields.items():
        metadata[name] = value
    assert tool.licence_in(metadata) == licence
    assert tool.Licence("a", "1", licence).mark == mark


def test_packages_that_were_not_audited_make_the_audit_fail(capsys: pytest.CaptureFixture) -> None:
    tool = load("audit")
    assert tool.not_audited("No known vulnerabilities found\n", "a==1 \\\nb==2\n") == 0
    assert tool.not_audited("a  Dependency not found and could not be audited: a (1)\n", "a==1 \\\nb==2\n") == 2
    assert "1 of 2 packages were not checked" in capsys.readouterr().err
