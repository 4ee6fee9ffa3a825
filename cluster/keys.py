"""Makes clients' keys, writes them down as SHA-256, recognises them. Pure: random bytes and files' text are arguments.

A key is 256 random bits, so one round of SHA-256 protects it: unlike passwords, keys are too many to try. A comparison
must not leak which digest a guess came near to. So a key is compared with every line, each time in constant time.

A key file holds one digest a line, as ``sha256sum`` would write it; text after ``#`` is a remark. Several lines are
several keys of one tenant, so a key can be replaced while the old one still works.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping

PREFIX = "sk-baton-"
"""Tells people and secret scanners that this text is a key."""

KEY_BYTES = 32

KEY_CHARS_MAX = 256
"""Longest text that is hashed as a key. Baton's keys have 52 characters; headers may have kilobytes."""

KEY_HEADERS = ("authorization", "x-api-key")
"""Where clients of OpenAI's API and of Anthropic's put their keys."""

_SCHEME = "bearer "

_OWNED = re.compile(r"[^#]+#\s*([A-Za-z0-9][A-Za-z0-9._-]*), \d{4}-\d\d-\d\d\s*")
"""A key's line with the remark that `baton key new` writes: NAME, date."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class NotAKeyFile(ValueError):
    """A line of a key file is no digest. The message names the line but never shows it: it may be a key."""


def make_key(chance: bytes) -> str:
    """A key from 32 random bytes: ``sk-baton-`` and 43 characters."""
    assert len(chance) == KEY_BYTES
    return PREFIX + base64.urlsafe_b64encode(chance).decode().rstrip("=")


def digest(key: str) -> str:
    """The form in which a key is stored: SHA-256 in hexadecimal."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def key_line(key: str, remark: str = "") -> str:
    """The line of a key file for `key`."""
    return f"{digest(key)}{f'  # {remark}' if remark else ''}\n"


def read_digests(text: str) -> tuple[str, ...]:
    """The digests in a key file.

    Raises:
        NotAKeyFile: a line is neither a digest nor a remark.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip().lower()
        if not word:
            continue
        if not _DIGEST.fullmatch(word):
            what = "a key itself; only its SHA-256 belongs here" if word.startswith("sk-") else "no SHA-256"
            raise NotAKeyFile(f"line {number} is {what}: `baton key new` writes such a line")
        found.append(word)
    return tuple(found)


def owners(text: str) -> dict[str, int]:
    """The names in the remarks of a key file, as `baton key new` writes them, each with its first line's number."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if owned := _OWNED.fullmatch(line):
            found.setdefault(owned[1], number)
    return found


def whose(key: str, digests: Mapping[str, Iterable[str]]) -> str | None:
    """The tenant that `key` belongs to, among those whose digests are given; None if it belongs to none.

    The time does not depend on the result. A key that two tenants share belongs to the last one.
    """
    mine = digest(key[:KEY_CHARS_MAX])
    owner = None
    for tenant, theirs in digests.items():
        for each in theirs:
            if hmac.compare_digest(mine, each):
                owner = tenant
    return owner if len(key) <= KEY_CHARS_MAX else None


def key_in(headers: Mapping[str, str]) -> str:
    """The key in a request's headers; empty if there is none."""
    said = headers.get("Authorization", "")
    if said[: len(_SCHEME)].lower() == _SCHEME:
        return said[len(_SCHEME) :].strip()
    return headers.get("x-api-key", "").strip()
