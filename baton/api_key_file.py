"""`--api-key-file`: the key that a command sends to a server. A file, so that no list of processes shows the key."""

from __future__ import annotations

from pathlib import Path

from cluster.errors import UsageError
from cluster.text_file import text_in


def api_key_in(path: Path | None) -> str | None:
    """The key in this file; None without a file.

    Raises:
        UsageError: the file cannot be read, or holds no key that fits into a header.
    """
    if path is None:
        return None
    key = text_in(path, "--api-key-file", "give a file with the key").strip()
    if not key:
        raise UsageError(f"--api-key-file {path}: holds no key; write it into the file, or leave the flag out")
    if not key.isprintable() or not key.isascii():
        raise UsageError(f"--api-key-file {path}: holds more than one line of printable characters")
    return key
