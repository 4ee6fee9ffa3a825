"""Text files that flags name: what is wrong with one is told in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.api_key_file import api_key_in
from baton.cli import main
from baton.text_file import text_in
from baton.workload import workload
from cluster.errors import UsageError


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file or directory; fix"),
        (b"a\n\xff\x80", "line 2 is not UTF-8; save the file as UTF-8"),
        ("a".encode("utf-16"), "the file is in UTF-16; save it as UTF-8"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_in_words(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "f"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        text_in(file, "--flag", "fix")
    assert str(caught.value) == f"--flag {file}: {said}"
    for read in (api_key_in, lambda path: workload(path, 0)):
        with pytest.raises(UsageError) as caught:
            read(file)
        assert "Errno" not in str(caught.value) and "codec" not in str(caught.value)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\xef\xbb\xbfkey\n")
    assert api_key_in(tmp_path / "f") == "key"


def test_an_empty_file_holds_no_key(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("\n")
    with pytest.raises(UsageError, match="holds no key"):
        api_key_in(tmp_path / "f")


def test_a_trace_in_utf_16_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}\n', encoding="utf-16")
    assert main(["load", "--trace", str(file), "--dry-run"]) == 2
    assert f"{file}: the file is in UTF-16; save it as UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["operator", "--once", "--dry-run", "-f"], ["simulate", "--requests", "1", "--faults"]]
)
def test_commands_tell_it_too(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f").write_bytes(b"\xff\x80")
    assert main([*words, str(tmp_path / "f")]) == 2
    assert "line 1 is not UTF-8" in capsys.readouterr().err
