"""Reads text files that flags name. What is wrong with one is told in words, never as Python writes it."""

from __future__ import annotations

from pathlib import Path

from cluster.errors import UsageError

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""The first bytes of a file in UTF-16. No text in UTF-8 begins with them."""


def text_in(path: Path, flag: str, fix: str) -> str:
    """The text of a file, which is in UTF-8. `flag`, which may be empty, and `fix` stand in the message.

    Raises:
        UsageError: the file cannot be read, or is not UTF-8.
    """
    return decoded(_read(path, flag, fix), _where(path, flag))


def rows_in(path: Path, flag: str, fix: str) -> str:
    """As `text_in`, but a byte that is not UTF-8 becomes a surrogate: it spoils its own row alone.

    Raises:
        UsageError: the file cannot be read, or is in UTF-16.
    """
    data = _read(path, flag, fix)
    check_encoding(data, _where(path, flag))
    return data.decode("utf-8-sig", errors="surrogateescape")


def _read(path: Path, flag: str, fix: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, flag, error, fix) from None


def unreadable(path: Path, flag: str, error: OSError, fix: str) -> UsageError:
    """The error to raise about a file that cannot be read. `flag` may be empty: the path alone begins the message."""
    return UsageError(f"{_where(path, flag)}: {(error.strerror or str(error)).lower()}; {fix}")


def _where(path: Path, flag: str) -> str:
    return f"{flag} {path}".lstrip()


def check_encoding(data: bytes, where: str) -> None:
    """Check by a file's first two bytes or more that it is not in UTF-16. `where` begins the message.

    Raises:
        UsageError: it is.
    """
    if data[:2] in _UTF16_MARKS:
        raise UsageError(f"{where}: the file is in UTF-16; save it as UTF-8")


def decoded(data: bytes, where: str) -> str:
    """The text of these bytes, without the byte order mark. `where` begins the message.

    Raises:
        UsageError: they are not UTF-8.
    """
    check_encoding(data, where)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{where}: line {line} is not UTF-8; save the file as UTF-8") from None
