"""Each start of an engine has a folder of its own for sockets, and that is gone afterwards."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from engine.vllm.scratch import BASE_BYTES_MAX, SOCKETS, scratch

SOCKET_MAX = 107
"""Bytes of a path, without its last zero: unix(7)."""

NAME = "0987fc45-dec2-4d97-a37b-0e3fc3644fda"
"""As vLLM names a socket."""


def test_its_own_folder_is_where_sockets_go_and_nothing_else() -> None:
    with TemporaryDirectory(dir="/tmp") as base:  # pytest's own is too deep for sockets
        with scratch({"A": "b", "TMPDIR": base}) as env:
            folder = Path(env[SOCKETS])
            assert folder.parent == Path(base)
            assert folder.stat().st_mode & 0o777 == 0o700
            assert env == {"A": "b", "TMPDIR": base, SOCKETS: str(folder), "BATON_SCRATCH": str(folder)}
            (folder / NAME).touch()
        assert not folder.exists()


def test_it_is_below_the_folder_that_somebody_chose() -> None:
    with TemporaryDirectory(dir="/tmp") as base, scratch({"TMPDIR": "/nowhere", SOCKETS: base}) as env:
        assert Path(env[SOCKETS]).parent == Path(base)


def test_a_socket_in_it_has_no_path_that_is_too_long() -> None:
    with TemporaryDirectory(dir="/tmp") as base:
        deep = Path(base, "d" * (BASE_BYTES_MAX - len(base) - 1))
        deep.mkdir()
        with scratch({"TMPDIR": str(deep)}) as env:
            assert Path(env[SOCKETS]).parent == deep
            assert len(env[SOCKETS]) + 1 + len(NAME) <= SOCKET_MAX


def test_a_deep_base_and_one_that_is_not_there_are_left_as_they_are(tmp_path: Path) -> None:
    deep = tmp_path / ("ü" * (BASE_BYTES_MAX // 2))
    deep.mkdir()
    for base in (str(deep), "/nowhere"):
        given = {"TMPDIR": base}
        with scratch(given) as env:
            assert env == given
    assert not list(deep.iterdir())
