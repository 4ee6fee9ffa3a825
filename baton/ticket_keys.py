"""Key files for tickets: named by a flag or the environment, made by `baton up` or `baton key tickets`."""

from __future__ import annotations

import argparse
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from cluster.errors import UsageError
from cluster.ids import InstanceId
from kvtransfer.keyfile import KeyFile
from kvtransfer.keys import (
    FILE_VARIABLE,
    KEYS_MAX,
    SECRET_BYTES,
    InstanceKeys,
    fleet_text,
    instance_text,
    read_fleet,
    read_instance,
)
from kvtransfer.seal import Identity, NotAnIdentity, identity_text, read_identity
from kvtransfer.ticket import SigningKey

T = TypeVar("T")

FLEET_FILE = "tickets"
"""Name of the fleet's key file in the private folder of `baton up`; an engine's is ``tickets.NAME``."""


def add_ticket_keys_argument(parser: argparse.ArgumentParser, whose: str, otherwise: str = "no tickets") -> None:
    """Add ``--ticket-keys-file``: keys themselves are never in an argument list, which other users can read.

    `whose` begins the help text, `otherwise` ends it: what happens without a file.
    """
    parser.add_argument(
        "--ticket-keys-file",
        type=Path,
        metavar="FILE",
        help=f"{whose} keys for tickets, made by `baton key tickets` (default: ${FILE_VARIABLE}, or {otherwise})",
    )


def named_file(args: argparse.Namespace, environ: Mapping[str, str]) -> Path | None:
    """The key file that the flag, else the environment names, as an absolute path; None: neither does."""
    given: Path | None = args.ticket_keys_file
    if given is None and environ.get(FILE_VARIABLE):
        given = Path(environ[FILE_VARIABLE])
    return None if given is None else given.absolute()


def open_fleet_keys(path: Path | None) -> KeyFile[tuple[SigningKey, ...]] | None:
    """A router's keys, read anew when the file changes.

    Raises:
        UsageError: the file cannot be used.
    """
    return None if path is None else _open(path, read_fleet)


def open_instance_keys(path: Path | None) -> KeyFile[InstanceKeys] | None:
    """One instance's keys, read anew when the file changes.

    Raises:
        UsageError: the file cannot be used.
    """
    return None if path is None else _open(path, read_instance)


def open_identity(ticket_keys: Path | None, instance: InstanceId) -> Callable[[], Identity] | None:
    """A function that gives the identity that an instance proves to others, from the file beside its ticket keys, read
    anew when the file changes. None: there is no such file.

    Raises:
        UsageError: the file cannot be used, or is another instance's.
    """
    if ticket_keys is None or not has_identity(ticket_keys):
        return None

    def read(text: str) -> Identity:
        found = read_identity(text)
        if found.me != instance:
            raise NotAnIdentity(f"is the identity of {found.me}, and this is {instance}")
        return found

    return _open(_identity_file(ticket_keys), read).get


def has_identity(ticket_keys: Path | None) -> bool:
    """Whether an identity file is beside these ticket keys."""
    return ticket_keys is not None and _identity_file(ticket_keys).exists()


def _identity_file(ticket_keys: Path) -> Path:
    return ticket_keys.with_name(f"{ticket_keys.name}.identity")


def check_instance_keys(path: Path | None, instance: InstanceId) -> None:
    """Check that the guard of this instance's engine can use the file.

    Raises:
        UsageError: it cannot be read, or is another instance's.
    """
    if path is None:
        return
    found = _open(path, read_instance).get().instance
    if found != instance:
        raise UsageError(f"--ticket-keys-file {path}: has the keys of {found}, and this is {instance}; see --name")


def _open(path: Path, read: Callable[[str], T], field: str = "--ticket-keys-file") -> KeyFile[T]:
    try:
        return KeyFile(path, read)
    except (OSError, ValueError) as error:
        said = (error.strerror or str(error)).lower() if isinstance(error, OSError) else error
        raise UsageError(f"{field} {path}: {said}") from None


@contextmanager
def files_for(names: Iterable[str], fleet: Path | None) -> Iterator[tuple[Path, dict[str, Path]]]:
    """The router's key file, and one for each engine by name, in a private folder that is removed after the block.

    The router's file is `fleet` if that is given, else a new one.

    Raises:
        UsageError: `fleet` cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="baton-tickets-") as folder:
        keys = (_new_key(()),) if fleet is None else _open(fleet, read_fleet).get()
        router = fleet or write_private(Path(folder) / FLEET_FILE, fleet_text(keys))
        engines = {name: _write_instance(Path(folder) / f"{FLEET_FILE}.{name}", keys, name) for name in names}
        yield router, engines


def later_files(router: Path, folder: Path) -> Callable[[str], Path]:
    """A function that makes a later engine's key file in `folder`, by its name, from the router's file of that time."""
    return lambda name: _write_instance(folder / f"{FLEET_FILE}.{name}", _open(router, read_fleet).get(), name)


def add_fleet_key(path: Path) -> tuple[SigningKey, ...]:
    """Make the fleet's file with a first key, or add a key that checks tickets and does not sign yet.

    Returns all keys, the new one last.

    Raises:
        UsageError: the file is no key file, or is full.
        OSError: it cannot be written.
    """
    known = _open(path, read_fleet, "FILE").get() if path.exists() else ()
    if len(known) >= KEYS_MAX:
        raise UsageError(f"FILE {path}: holds {len(known)} keys already; remove those that are not used")
    keys = (*known, _new_key(known))
    write_private(path, fleet_text(keys))
    return keys


def write_instance_file(fleet: Path, instance: str) -> Path:
    """Write the key file of one instance's engine beside the fleet's, of the keys that the fleet's file has now.

    Raises:
        UsageError: the fleet's file or the name cannot be used.
        OSError: it cannot be written.
    """
    keys = _open(fleet, read_fleet, "FILE").get()
    try:
        return _write_instance(fleet.with_name(f"{fleet.name}.{instance.replace('/', '_')}"), keys, instance)
    except ValueError as error:
        raise UsageError(f"--instance: {error}") from None


def _write_instance(path: Path, keys: tuple[SigningKey, ...], instance: str) -> Path:
    """Write an engine's key file, and its agent's identity beside it."""
    text, identity = instance_text(keys, InstanceId(instance)), identity_text(keys, InstanceId(instance))
    write_private(_identity_file(path), identity)
    return write_private(path, text)


def write_private(path: Path, text: str) -> Path:
    """Write a file that only its owner can read. Other processes see the old file, or all of the new one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return path


def _new_key(known: tuple[SigningKey, ...]) -> SigningKey:
    taken = {key.id for key in known}
    name = next(name for number in range(1, KEYS_MAX + 2) if (name := f"k{number}") not in taken)
    return SigningKey(name, secrets.token_bytes(SECRET_BYTES))
