"""The key files of a cluster file's tenants; each is read again after a change."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from baton.clusterfile import beside
from cluster.errors import UsageError
from cluster.keys import read_digests
from cluster.spec import Spec
from kvtransfer.keyfile import KeyFile
from router.core.clients import Keys

FILE_BYTES_MAX = 1 << 20
"""Longest key file: ten thousand keys fit."""


def open_tenant_keys(spec: Spec, file: str) -> dict[str, Keys]:
    """Each tenant's keys, from files beside the cluster file `file`.

    Raises:
        UsageError: a file is missing or bad; the message names it and says how to make one.
    """
    return {name: _open(name, beside(file, spec.key_file(name))) for name in spec.tenants}


def _open(tenant: str, file: Path) -> Keys:
    return open_keys(f"tenant {tenant}", file, f"`baton key new {tenant} --file {file}` makes one")


def open_all_keys(whose: str, files: Iterable[Path]) -> Keys:
    """The keys in all these files; each file is read again after a change of it. `whose`: as `open_keys`.

    Raises:
        UsageError: a file is missing or bad.
    """
    opened = [open_keys(whose, each) for each in files]
    return lambda: tuple(key for keys in opened for key in keys())


def key_file_fault(file: Path) -> str | None:
    """What is wrong with a key file that exists; None: nothing."""
    try:
        keys = KeyFile(file, read_digests, bytes_max=FILE_BYTES_MAX).get()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    except ValueError as error:
        return str(error)
    return None if keys else "holds no key, so that no key works"


def open_keys(whose: str, file: Path, how: str = "") -> Keys:
    """The keys in a file, read again after a change. `whose` begins the message about a bad file, `how` ends it.

    Raises:
        UsageError: the file is missing or bad.
    """
    try:
        return KeyFile(file, read_digests, bytes_max=FILE_BYTES_MAX).get
    except FileNotFoundError:
        how = how or f"`baton key new NAME --file {file}` makes one"
        raise UsageError(f"{whose}: no file {file}; {how}") from None
    except OSError as error:
        raise UsageError(f"{whose}: {file}: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise UsageError(f"{whose}: {file}: {error}") from None
