"""Ticket keys: one secret for a fleet, and one for each instance that follows from it. Pure.

A key file has one key a line, ``ID SECRET`` for a fleet (routers have it) and ``ID SECRET INSTANCE`` for one instance
(its engine has it). A secret is 64 hexadecimal digits; what follows ``#`` is a remark. An instance's secret is an HMAC
of its name under the fleet's, so a router knows all of them, and an instance only its own. An instance could sign the
tickets that it checks itself, but none for another instance.

The first line signs, all lines check. A key is replaced in three steps: add its successor *below* it in the engines'
files, then above it in the routers' files, and remove the old lines once the last ticket has expired. Guards and
routers read their files again when these change.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass

from cluster.ids import InstanceId, engine_of
from kvtransfer.ticket import SigningKey

FILE_VARIABLE = "BATON_TICKET_KEYS_FILE"
"""The environment variable that names a key file: the fleet's for a router, the engine's own for an engine."""
SECRET_BYTES = 32
_SECRET = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[^\s#]{1,255}")
_DOMAIN = b"baton-instance-key\x00"
"""Separates an instance's key from MACs made for another purpose."""
KEYS_MAX = 8
"""Two are needed while one is replaced. A guard tries all of them."""


class NotATicketKeyFile(ValueError):
    """The text is no key file. The message names the line and never shows it, as it may hold a secret."""


@dataclass(frozen=True, slots=True)
class InstanceKeys:
    """The keys that an engine's guard has."""

    instance: InstanceId
    keys: tuple[SigningKey, ...]


def instance_key(fleet: SigningKey, instance: InstanceId) -> SigningKey:
    """The key of one instance: its engine's, which all of its ranks have. It has the id of the fleet's key that it
    follows from.
    """
    name = engine_of(instance).encode("utf-8", "surrogatepass")
    return SigningKey(fleet.id, hmac.digest(fleet.secret, _DOMAIN + name, hashlib.sha256))


def fleet_text(keys: tuple[SigningKey, ...]) -> str:
    """A key file for routers."""
    return "".join(f"{key.id} {key.secret.hex()}\n" for key in keys)


def instance_text(keys: tuple[SigningKey, ...], instance: InstanceId) -> str:
    """A key file for the engine of one instance, made from the fleet's keys.

    Raises:
        ValueError: the name cannot stand in such a file.
    """
    if not _NAME.fullmatch(instance):
        raise ValueError(f"{instance!r} cannot stand in a key file: an instance's name has no spaces and no `#` there")
    mine = (instance_key(key, instance) for key in keys)
    return "".join(f"{key.id} {key.secret.hex()} {instance}\n" for key in mine)


def read_fleet(text: str) -> tuple[SigningKey, ...]:
    """The keys in a router's file; the first one signs.

    Raises:
        NotATicketKeyFile: the text is not one.
    """
    found = _read(text)
    for number, (_, instance) in found.items():
        if instance is not None:
            raise NotATicketKeyFile(
                f"line {number} is the key of one instance ({instance}); routers need the fleet's own file"
            )
    return tuple(key for key, _ in found.values())


def read_instance(text: str) -> InstanceKeys:
    """The keys in an engine's file.

    Raises:
        NotATicketKeyFile: the text is not one.
    """
    found = _read(text)
    names = {instance for _, instance in found.values()}
    for number, (_, instance) in found.items():
        if instance is None:
            raise NotATicketKeyFile(
                f"line {number} is a fleet's key; `baton key tickets FILE --instance NAME` makes an engine's"
            )
    if len(names) != 1:
        raise NotATicketKeyFile(f"its lines are for {len(names)} instances; an engine is one")
    return InstanceKeys(names.pop() or InstanceId(""), tuple(key for key, _ in found.values()))


def _read(text: str) -> dict[int, tuple[SigningKey, InstanceId | None]]:
    """The keys by line number, each with its instance."""
    found: dict[int, tuple[SigningKey, InstanceId | None]] = {}
    ids: set[tuple[str, str | None]] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        instance = InstanceId(words[2]) if len(words) == 3 else None
        if len(words) not in {2, 3} or not _SECRET.fullmatch(words[1]):
            raise NotATicketKeyFile(
                f"line {number} is not `ID SECRET` or `ID SECRET INSTANCE` with a secret of 64 hex digits"
            )
        try:
            key = SigningKey(words[0], bytes.fromhex(words[1]))
        except ValueError:
            raise NotATicketKeyFile(f"line {number}: a key's id is 1 to 16 of A-Z a-z 0-9 _ -") from None
        if (key.id, instance) in ids:
            raise NotATicketKeyFile(f"line {number} has the id of a line before it")
        ids.add((key.id, instance))
        found[number] = (key, instance)
    if not found:
        raise NotATicketKeyFile("it holds no key")
    if len(found) > KEYS_MAX:
        raise NotATicketKeyFile(f"it holds {len(found)} keys, at most {KEYS_MAX} are read")
    return found
