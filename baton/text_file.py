"""Reads text files that flags name. What is wrong with one is told in words, never as Python writes it."""

from __future__ import annotations

from pathlib import Path

from cluster.errors import UsageError

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""The first bytes of a file in UTF-16."""


def text_in(path: Path, flag: str, fix: str) -> str:
    """The text of a file, which is in UTF-8. `flag` and `fix` stand in the message.

    Raises:
        UsageError: the file cannot be read, or is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} {path}: {(error.strerror or str(error)).lower()}; {fix}") from None
    return decoded(data, f"{flag} {path}")


def decoded(data: bytes, where: str) -> str:
    """The text of these bytes, without the byte order mark. `where` begins the message.

    Raises:
        UsageError: they are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if data[:2] in UTF16_MARKS:
            raise UsageError(f"{where}: the file is in UTF-16; save it as UTF-8") from None
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{where}: line {line} is not UTF-8; save the file as UTF-8") from None
