"""Text files that flags name: what is wrong with one is told in words."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from baton.api_key_file import api_key_in
from baton.cli import main
from baton.model_sizes import sizes_of
from baton.workload import workload
from cluster.errors import UsageError
from cluster.registry.redis_link import read_password
from cluster.text_file import text_in
from engine.tiny import model_path


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


TABLE_HEADING = (
    "exp_id,model,hardware,tp,workload,max_num_batched_tokens,cpu_offload,e2e_mean,e2e_p90,e2e_p99,itl_mean,ttft_mean,"
    "ttft_p90,ttft_p99\n1,m,h,1,w,1,0,1,1,1,1,1,1,1\n"
)
CHANGES = ("simulate", "--requests", "1", "--changes")
TABLE = ("validate", "--profile")
WRONG = {
    "folder": None,
    "utf-16": "[]\n".encode("utf-16"),
    "binary": b"\xff\x80\n",
}


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (CHANGES, "folder", "--changes {file}: is a directory; give a file of changes"),
        (CHANGES, "missing", "--changes {file}: no such file or directory; give a file of changes"),
        (CHANGES, "utf-16", "--changes {file}: the file is in UTF-16; save it as UTF-8"),
        (CHANGES, "binary", "--changes {file}: line 1 is not UTF-8; save the file as UTF-8"),
        (TABLE, "folder", "--profile {file}: is a directory; give a file of fits like those in costs/profiles/"),
        (TABLE, "utf-16", "--profile {file}: the file is in UTF-16; save it as UTF-8"),
        (("validate",), "utf-16", "{file}: the file is in UTF-16; save it as UTF-8"),
        (
            ("load", "--trace"),
            "missing",
            "{file}: no such file or directory; give a trace file, or a folder of ServeGen",
        ),
        (("load", "--compare"), "missing", "--compare {file}: no such file or directory; give a file of `baton load"),
        (("load", "--compare"), "utf-16", "--compare {file}: the file is in UTF-16; save it as UTF-8"),
        (("load", "--compare"), "binary", "--compare {file}: holds no record of `baton load --out`"),
        (("simulate", "--replay"), "folder", "--replay {file}: is a directory; give a file of `baton router"),
    ],
)
def test_a_command_names_the_file_what_is_wrong_and_the_fix(
    words: tuple[str, ...], kind: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line. Some told it as Python does: "[Errno 21] Is a directory: 'f'"."""
    file = tmp_path / "f.csv"
    if kind == "folder":
        file.mkdir()
    elif kind != "missing":
        file.write_bytes(WRONG[kind] or b"")
    table = tmp_path / "table.csv"
    table.write_text(TABLE_HEADING)
    more = {"--profile": [str(table)], "--compare": [str(file)], "--trace": ["--dry-run"]}.get(words[-1], [])
    assert main([*words, str(file), *more]) == 2
    told = capsys.readouterr().err
    assert said.format(file=file) in told
    assert told.count("\n") == 1
    assert "Errno" not in told and "codec" not in told


def test_a_trace_with_a_byte_order_mark_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.jsonl"
    row = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}\n'
    file.write_text(row, encoding="utf-8-sig")
    assert main(["load", "--trace", str(file), "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "utf-16", "mark"])
def test_the_registrys_password_files(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`baton key registry` and the programs that read the file afterwards take the same password from it."""
    file = tmp_path / "baton-router"
    if kind == "folder":
        file.mkdir()
    else:
        file.write_text("secret\n", encoding={"utf-16": "utf-16", "mark": "utf-8-sig"}[kind])
    if kind == "mark":
        assert main(["key", "registry", str(tmp_path)]) == 0
        assert f"#{hashlib.sha256(b'secret').hexdigest()}" in (tmp_path / "users.acl").read_text()
        assert read_password(file) == "secret"
        return
    assert main(["key", "registry", str(tmp_path)]) == 2
    said = {
        "folder": "is a directory; remove it, and run this again",
        "utf-16": "the file is in UTF-16; save it as UTF-8",
    }
    assert capsys.readouterr().err == f"baton: password file {file}: {said[kind]}\n"
    with pytest.raises(UsageError, match=f"--registry-password-file {file}: {said[kind].partition(';')[0]}"):
        read_password(file)


def test_a_models_configuration_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\x80")
    with pytest.raises(UsageError, match=f"^{tmp_path}/config.json: .*; give a model's folder, or its config.json$"):
        sizes_of(str(tmp_path))


def test_a_models_configuration_in_another_encoding_is_read(tmp_path: Path) -> None:
    config = (Path(str(model_path())) / "config.json").read_text()
    (tmp_path / "config.json").write_text(config, encoding="utf-8-sig")
    assert sizes_of(str(tmp_path)) is not None


@pytest.mark.parametrize(
    "words", [["operator", "--once", "--dry-run", "-f"], ["simulate", "--requests", "1", "--faults"]]
)
def test_commands_tell_it_too(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f").write_bytes(b"\xff\x80")
    assert main([*words, str(tmp_path / "f")]) == 2
    assert "line 1 is not UTF-8" in capsys.readouterr().err
