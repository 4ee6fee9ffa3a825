"""Clients' keys: made, written down as SHA-256, recognised. Pure: chance comes in, files are read by whoever calls.

A key is 256 random bits, so one round of SHA-256 keeps it: nobody can try enough of them, unlike passwords. What must
not leak is which digest a guess came near to, hence every line is compared, each in constant time.

A key file holds one digest a line, as ``sha256sum`` would write it; what follows ``#`` is a remark. Several lines are
several keys of one tenant, so a key can be replaced while the old one still works.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping

PREFIX = "sk-baton-"
"""Tells people and secret scanners what it is."""

KEY_BYTES = 32

KEY_CHARS_MAX = 256
"""Longest text that is hashed as a key; ours have 52, and headers may have kilobytes."""

KEY_HEADERS = ("authorization", "x-api-key")
"""Where clients of OpenAI's API and of Anthropic's put their keys."""

_SCHEME = "bearer "

_DIGEST = re.compile(r"[0-9a-f]{64}")


class NotAKeyFile(ValueError):
    """A line that is no digest. The message names the line and never shows it: it may be a key."""


def make_key(chance: bytes) -> str:
    """A key from 32 random bytes: ``sk-baton-`` and 43 characters."""
    assert len(chance) == KEY_BYTES
    return PREFIX + base64.urlsafe_b64encode(chance).decode().rstrip("=")


def digest(key: str) -> str:
    """What is kept of a key: SHA-256 in hexadecimal."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def key_line(key: str, remark: str = "") -> str:
    """The line of a key file for `key`."""
    return f"{digest(key)}{f'  # {remark}' if remark else ''}\n"


def read_digests(text: str) -> tuple[str, ...]:
    """The digests in a key file.

    Raises:
        NotAKeyFile: something else stands in it.
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


def is_known(key: str, digests: Iterable[str]) -> bool:
    """Whether `key` is one of those kept as `digests`. Takes as long for a wrong key as for a right one."""
    return whose(key, {"": digests}) is not None


def whose(key: str, digests: Mapping[str, Iterable[str]]) -> str | None:
    """The tenant that `key` belongs to, of those whose digests are given; None for nobody's.

    Takes as long whoever's it is. A key of two tenants is the last one's.
    """
    mine = digest(key[:KEY_CHARS_MAX])
    owner = None
    for tenant, theirs in digests.items():
        for each in theirs:
            if hmac.compare_digest(mine, each):
                owner = tenant
    return owner if len(key) <= KEY_CHARS_MAX else None


def key_in(headers: Mapping[str, str]) -> str:
    """The key that a request brings; empty where it brings none."""
    said = headers.get("Authorization", "")
    if said[: len(_SCHEME)].lower() == _SCHEME:
        return said[len(_SCHEME) :].strip()
    return headers.get("x-api-key", "").strip()
