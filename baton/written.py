"""Refuses, before a command begins its work, results that could not be written, or would be written over each other or
over what the command reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path

from cluster.errors import UsageError

PICTURES = (".png", ".svg", ".pdf")
"""Endings of pictures: matplotlib knows their formats everywhere."""

LIKE = "like:"
"""What `like:FILE` begins with, in flags that take a distribution or the lengths of a trace."""


def check_written(written: Mapping[str, Path | None], read: Iterable[tuple[str, str | Path | None]] = ()) -> None:
    """Refuse two results in one file, and a result in place of what is read.

    Args:
        written: paths of results, by flag; None where the flag is not given.
        read: flags with the paths of what is read, None where there is none. `like:FILE` names a path, too.

    Raises:
        UsageError: the message names both flags and the path.
    """
    given = {flag: path for flag, path in written.items() if path is not None}
    for (flag, path), (other, same) in combinations(given.items(), 2):
        if path.absolute() == same.absolute() or _is_same(path, same):
            raise UsageError(f"{flag} and {other} name one file: {path}")
    inputs = [(flag, Path(str(path).removeprefix(LIKE))) for flag, path in read if path is not None]
    for flag, path in given.items():
        for other, kept in inputs:
            if _is_same(path, kept):
                raise UsageError(f"{flag} {path} is the {other} itself, and would be overwritten")


def check_folders(written: Mapping[str, Path | None]) -> None:
    """Refuse results in folders that do not exist or may not be entered, and results that are folders. `written` as for
    `check_written`.

    Raises:
        UsageError: the message names the flag and the path.
    """
    for flag, path in written.items():
        if path is None:
            continue
        try:
            folder, above = path.is_dir(), path.absolute().parent.is_dir()
        except OSError as error:
            raise UsageError(f"{flag} {path}: {error.strerror}; name a file that can be written") from None
        if folder:
            raise UsageError(f"{flag} {path} is a folder: name a file in it")
        if not above:
            raise UsageError(f"{flag} {path}: there is no folder {path.parent}")


def check_picture(flag: str, path: Path | None) -> None:
    """Refuse a picture's name if its ending is no format.

    Raises:
        UsageError: the message names the endings.
    """
    if path is not None and path.suffix not in PICTURES:
        raise UsageError(f"{flag} {path}: name it {', '.join(PICTURES)}")


def _is_same(one: Path, other: Path) -> bool:
    """Whether both exist and are one file, by whatever names."""
    try:
        return one.is_file() and one.samefile(other)
    except OSError:
        return False
