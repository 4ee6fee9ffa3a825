"""Each start of an engine has a folder of its own for sockets, which is removed afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engine.vllm import scratch as module
from engine.vllm.scratch import BASE_BYTES_MAX, SOCKETS, scratch

SOCKET_MAX = 107
"""The most bytes in the path of a socket, without its last zero byte: unix(7)."""

NAME = "0987fc45-dec2-4d97-a37b-0e3fc3644fda"
"""A name as vLLM gives to a socket."""


def private(folder: Path) -> bool:
    """Whether the folder is there, for its owner alone."""
    return folder.exists() and folder.stat().st_mode & 0o777 == 0o700


def folder_below(base: str, name: str) -> Path:
    made = Path(base, name)
    made.mkdir()
    return made


async def test_only_the_sockets_variable_points_to_the_new_folder() -> None:
    with TemporaryDirectory(dir="/tmp") as base:  # pytest's own is too deep for sockets
        async with scratch({"A": "b", "TMPDIR": base}) as env:
            folder = Path(env[SOCKETS])
            assert folder.parent == Path(base)
            assert private(folder)
            assert env == {
                "A": "b",
                "TMPDIR": base,
                SOCKETS: str(folder),
                "BATON_SCRATCH": json.dumps({str(folder): None}),
            }
            (folder / NAME).touch()
        assert not private(folder), "it is gone"


async def test_the_folder_is_below_the_users_own_sockets_folder() -> None:
    with TemporaryDirectory(dir="/tmp") as base:
        async with scratch({"TMPDIR": "/nowhere", SOCKETS: base}) as env:
            assert Path(env[SOCKETS]).parent == Path(base)


async def test_the_path_of_a_socket_in_it_is_short_enough() -> None:
    with TemporaryDirectory(dir="/tmp") as base:
        deep = folder_below(base, "d" * (BASE_BYTES_MAX - len(base) - 1))
        async with scratch({"TMPDIR": str(deep)}) as env:
            assert Path(env[SOCKETS]).parent == deep
            assert len(env[SOCKETS]) + 1 + len(NAME) <= SOCKET_MAX


async def test_below_a_deep_or_missing_base_no_folder_is_made(tmp_path: Path) -> None:
    deep = tmp_path / ("ü" * (BASE_BYTES_MAX // 2))
    deep.mkdir()
    for base in (str(deep), "/nowhere"):
        given = {"TMPDIR": base}
        async with scratch(given) as env:
            assert env == given
    assert not list(deep.iterdir())


async def test_where_no_thread_can_be_started_the_folder_is_removed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module.asyncio, "to_thread", none_left)
    with TemporaryDirectory(dir="/tmp") as base:
        async with scratch({"TMPDIR": base}) as env:
            folder = Path(env[SOCKETS])
            assert private(folder)
        assert not private(folder)
