"""Each start of an engine has a folder for temporary files of its own, and that is gone afterwards."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from engine.vllm.scratch import BASE_MAX, scratch

SOCKET_MAX = 107
"""Of a path, without its last zero: unix(7)."""

NAME = "0987fc45-dec2-4d97-a37b-0e3fc3644fda"
"""As vLLM names a socket."""


def test_its_own_folder_is_where_temporary_files_go() -> None:
    with TemporaryDirectory(dir="/tmp") as base:
        with scratch({"A": "b", "TMPDIR": base}) as env:
            folder = Path(env["TMPDIR"])
            assert folder.parent == Path(base)
            assert folder.stat().st_mode & 0o777 == 0o700
            assert env["BATON_SCRATCH"] == str(folder)
            assert list(env)[:2] == ["A", "TMPDIR"], "processes find their arguments by what comes first"
            (folder / NAME).touch()
        assert not folder.exists()


def test_what_torch_compiled_and_ray_stay_where_they_always_are() -> None:
    with TemporaryDirectory(dir="/tmp") as base:
        with scratch({"TMPDIR": base}) as env:
            assert Path(env["TORCHINDUCTOR_CACHE_DIR"]).parent == Path(base)
            assert env["RAY_TMPDIR"] == base
        with scratch({"TMPDIR": base, "TORCHINDUCTOR_CACHE_DIR": "/cache"}) as env:
            assert env["TORCHINDUCTOR_CACHE_DIR"] == "/cache"


def test_a_socket_in_it_has_no_path_that_is_too_long() -> None:
    with TemporaryDirectory(dir="/tmp") as base:
        deep = Path(base, "d" * (BASE_MAX - len(base) - 1))
        deep.mkdir()
        with scratch({"TMPDIR": str(deep)}) as env:
            assert env["TMPDIR"] != str(deep)
            assert len(env["TMPDIR"]) + 1 + len(NAME) <= SOCKET_MAX


def test_a_deep_base_and_one_that_is_not_there_are_left_as_they_are(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * BASE_MAX)
    deep.mkdir()
    for base in (str(deep), "/nowhere"):
        given = {"TMPDIR": base}
        with scratch(given) as env:
            assert env == given
    assert not list(deep.iterdir())
