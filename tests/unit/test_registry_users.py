"""`baton key registry`: Redis' users and their passwords."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from baton.cli import main
from baton.registry_child import RegistryElsewhere
from cluster.registry.layout import USERS, users


def mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


def test_the_list_has_no_password_and_the_files_are_their_owners_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    assert main(["key", "registry", str(folder), "--cluster", "blue"]) == 0
    told = capsys.readouterr()
    assert told.out == f"{folder}/users.acl\n"
    passwords = {user: (folder / user).read_text().strip() for user in USERS}
    acl = (folder / "users.acl").read_text()
    assert len(set(passwords.values())) == len(USERS)
    assert not any(password in acl + told.out + told.err for password in passwords.values())
    plain = users("blue")
    for user, password in passwords.items():
        plain = plain.replace(f">{user}-PASSWORD", f"#{hashlib.sha256(password.encode()).hexdigest()}")
    assert acl == plain and "PASSWORD" not in acl
    assert {mode(each) for each in folder.iterdir()} == {0o600}


def test_passwords_that_are_there_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "baton-agent").write_text("mine&/\\1\n")
    assert main(["key", "registry", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passwords"]["baton-agent"] == str(tmp_path / "baton-agent")
    first = (tmp_path / "users.acl").read_text()
    assert hashlib.sha256(b"mine&/\\1").hexdigest() in first
    assert main(["key", "registry", str(tmp_path)]) == 0
    assert (tmp_path / "users.acl").read_text() == first


def test_a_file_that_holds_no_password_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "baton-reader").write_text("two\nlines\n")
    assert main(["key", "registry", str(tmp_path)]) == 2
    assert f"{tmp_path}/baton-reader: holds no password of one line" in capsys.readouterr().err
    assert not (tmp_path / "users.acl").exists()


def test_a_password_in_the_registrys_url_is_handed_on_in_a_private_file() -> None:
    with RegistryElsewhere("chat", "redis://me:p%2Fw@h:6379/1", None, None) as registry:
        assert registry.url == "redis://me@h:6379/1" and registry.password_file is not None
        assert "p/w" not in " ".join(registry.words()) and "p%2Fw" not in " ".join(registry.words())
        assert registry.password_file.read_text() == "p/w" and mode(registry.password_file) == 0o600
        kept = registry.password_file
    assert not kept.exists()
    with RegistryElsewhere("chat", "redis://h:6379", None, None) as plain:
        assert plain.words() == ["--registry", "redis://h:6379", "--cluster", "chat"]
