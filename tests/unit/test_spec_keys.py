"""Keys of tenants: made once, kept as digests, and recognised; and the command that appends them to a file."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli import main
from cluster.keys import NotAKeyFile, digest, key_line, make_key, read_digests, whose

KEY = make_key(bytes(range(32)))


def test_a_key_is_256_bits_with_a_prefix() -> None:
    assert KEY == "sk-baton-AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    assert len(make_key(b"\xff" * 32)) == len(KEY)


def test_a_file_keeps_digests_only() -> None:
    line = key_line(KEY, "acme, today")
    assert line == f"{digest(KEY)}  # acme, today\n"
    assert "sk-" not in line
    assert read_digests(f"# keys\n\n{line}{digest('other').upper()}\r\n") == (digest(KEY), digest("other"))


@pytest.mark.parametrize("line", [KEY, "sk-abc", "abc", "0" * 63, "0" * 65, "g" * 64])
def test_a_line_that_is_no_digest_is_refused_and_not_repeated(line: str) -> None:
    with pytest.raises(NotAKeyFile, match="line 2") as caught:
        read_digests(f"{digest(KEY)}\n{line}\n")
    assert line not in str(caught.value)


def test_keys_are_recognised() -> None:
    digests = {"acme": (digest("one"), digest(KEY))}
    assert whose(KEY, digests) == "acme"
    for other in (KEY + "x", "", "\ud800é"):
        assert whose(other, digests) is None
    assert whose(KEY, {"acme": ()}) is None


def test_a_key_that_is_too_long_is_not_recognised() -> None:
    long = "x" * 257
    assert whose(long, {"acme": (digest(long[:256]), digest(long))}) is None
    assert whose(long[:256], {"acme": (digest(long[:256]),)}) == "acme"


def test_every_line_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def spy(one: str, other: str) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr("cluster.keys.hmac.compare_digest", spy)
    digests = {"acme": (digest(KEY), digest("a")), "beta": (digest("b"),)}
    assert whose(KEY, digests) == "acme"
    assert compared == [digest(KEY), digest("a"), digest("b")]
    assert whose("nobody", digests) is None
    assert len(compared) == 6


# -- the command --


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, in a process with umask 0: new files are readable for all users by default."""
    monkeypatch.chdir(tmp_path)
    before = os.umask(0)
    yield tmp_path
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_key(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "acme"]) == 0
    captured = capsys.readouterr()
    key = captured.out.strip()
    file = here / "keys" / "acme"
    assert captured.out == f"{key}\n"
    assert captured.err == "keys/acme has 1 key of acme. This one is shown only now: keep it.\n"
    assert whose(key, {"acme": read_digests(file.read_text())}) == "acme"
    assert key not in file.read_text()
    assert (mode(file), mode(file.parent)) == (0o600, 0o700)


def test_another_key_leaves_the_first_one_valid(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = here / "a" / "b" / "acme"
    keys = []
    for _ in range(3):
        assert main(["key", "new", "acme", "--file", str(file)]) == 0
        keys.append(capsys.readouterr().out.strip())
        file.write_text(file.read_text().rstrip("\n"))  # an editor may have left no line end
    digests = read_digests(file.read_text())
    assert len(set(keys)) == len(digests) == 3
    assert all(whose(key, {"acme": digests}) == "acme" for key in keys)
    assert mode(here / "a") == mode(here / "a" / "b") == 0o700


def test_a_file_of_another_tenants_keys_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "acme"]) == 0
    before = (here / "keys" / "acme").read_text()
    capsys.readouterr()
    assert main(["key", "new", "beta", "--file", "keys/acme"]) == 2
    told = capsys.readouterr()
    assert "--file keys/acme: line 1 is a key of acme" in told.err
    assert "name another file for beta" in told.err
    assert told.out == ""
    assert (here / "keys" / "acme").read_text() == before
    (here / "keys" / "acme").write_text(f"{digest(KEY)}  # written by hand, for beta\n{digest('b')}\n")
    assert main(["key", "new", "beta", "--file", "keys/acme"]) == 0


def test_operators_share_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "ada", "--operator"]) == main(["key", "new", "bob", "--operator"]) == 0
    assert "keys/admin has 2 keys of operators" in capsys.readouterr().err
    assert len(read_digests((here / "keys" / "admin").read_text())) == 2


def test_a_new_key_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "acme", "--json"]) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert captured.err == ""
    assert told == {"event": "key", "tenant": "acme", "key": told["key"], "file": "keys/acme", "keys": 1}


@pytest.mark.parametrize("tenant", ["", "../etc/passwd", "a b", ".hidden", "x" * 64, "a/b", "ä"])
def test_an_invalid_tenant_name_is_refused(here: Path, capsys: pytest.CaptureFixture[str], tenant: str) -> None:
    assert main(["key", "new", tenant]) == 2
    assert "TENANT" in capsys.readouterr().err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("content", [b"export PATH=/bin\n", b"\xff\xfe", KEY.encode()])
def test_a_file_that_is_no_key_file_is_left_unchanged(
    here: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    file = here / "profile"
    file.write_bytes(content)
    assert main(["key", "new", "acme", "--file", "profile"]) == 2
    captured = capsys.readouterr()
    assert "nothing was written" in captured.err
    assert captured.out == ""
    assert file.read_bytes() == content


def test_links_folders_and_pipes_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "target").write_text("")
    (here / "link").symlink_to("target")
    (here / "folder").mkdir()
    os.mkfifo(here / "pipe")
    for name in ("link", "folder", "pipe", "target/below"):
        assert main(["key", "new", "acme", "--file", name]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"baton: --file {name}: ")
        assert captured.out == ""
    assert (here / "target").read_text() == ""
