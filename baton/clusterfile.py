"""Reads cluster files for the commands that take one."""

from __future__ import annotations

import sys
from pathlib import Path

from baton.file_kinds import exists, is_file
from cluster.errors import UsageError
from cluster.spec import Model, Parsed, Spec, check_outside, parse
from cluster.spec.tree import TEXT_CHARS_MAX
from cluster.text_file import decoded

DEFAULT = "baton.yaml"
"""The file that is read if none is named."""

_BYTES_MAX = 4 * TEXT_CHARS_MAX + 4
"""Longest read: UTF-8 takes at most four bytes a character; one character more shows that a file is too long."""


def read(name: str) -> Parsed:
    """A cluster file (`-` for standard input) with all its problems; paths in it are relative to its folder.

    Raises:
        UsageError: the file cannot be read at all.
    """
    from baton.floor import floor_of
    from router.scheduler.scoring.policies import POLICIES

    parsed = parse(_text(name), name, floor_of=floor_of)
    return check_outside(
        parsed,
        exists=lambda path: exists(Path(path)),
        fault=_fault,
        policies=POLICIES,
        beside=lambda path: str(beside(name, path)),
    )


def named_model(spec: Spec, wanted: str | None, file: str) -> Model:
    """The model that --model names, by its name in the API, else by its `name`; the file's first if `wanted` is None.

    Raises:
        UsageError: no model has this name, or several have this `name`.
    """
    if wanted is None:
        return spec.models[0]
    names = ", ".join(each.api_name for each in spec.models)
    for found in (
        [each for each in spec.models if each.api_name == wanted],
        [each for each in spec.models if each.name == wanted],
    ):
        if len(found) > 1:
            names = ", ".join(each.api_name for each in found)
            raise UsageError(f"--model {wanted}: {file} has several models of this name: give one of {names}")
        if found:
            return found[0]
    raise UsageError(f"--model {wanted}: {file} has {names}")


def beside(name: str, path: str) -> Path:
    """The path of a file named in the cluster file `name`: relative paths begin in the cluster file's folder."""
    folder = Path() if name == "-" else Path(name).parent
    return folder / Path(path).expanduser()


def _fault(setting: str, path: str) -> str | None:
    """What is wrong with a file that a cluster file names, by the setting that names it; None: nothing."""
    from baton.tenant_keys import key_file_fault

    file = Path(path)
    if not is_file(file):
        return "no ordinary file"
    if setting in {"key_file", "admin_key_file"}:
        return key_file_fault(file)
    try:
        data = file.read_bytes()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    if setting == "password_file":
        return None if data.strip() else "holds no password"
    return None if b"-----BEGIN " in data else "holds nothing in PEM format"


def _text(name: str) -> str:
    try:
        if name == "-":
            data = sys.stdin.buffer.read(_BYTES_MAX)
        else:
            with Path(name).open("rb") as file:
                data = file.read(_BYTES_MAX)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{name}: {reason}; give the path of a cluster file (docs/cluster-file.md)") from error
    return decoded(data, name)
