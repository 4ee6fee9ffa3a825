"""Keys of tenants, and keys that tickets are signed with.

`baton key new TENANT` prints a fresh key, once: only its SHA-256 is kept, as one more line of the tenant's key file, so
that older keys keep working until their lines are removed. The key alone is on stdout.

`baton key tickets FILE` makes the file by which routers sign and engines check what goes between prefill and decode
(docs/security.md), or adds one more key to it; with --instance it makes the file of one engine.

`baton key registry FOLDER` makes Redis' list of users, one for each kind of program, and the files with their passwords
(docs/operations.md). The list has the passwords' SHA-256 alone. Passwords that are in the folder already are kept.

examples:
  baton key new acme                       # appends to keys/acme
  baton key new acme --file /etc/baton/acme
  baton key new ada --operator             # appends to keys/admin, for `admin_key_file`
  baton key tickets keys/tickets                          # for `baton router --ticket-keys-file`
  baton key tickets keys/tickets --instance decode-0      # keys/tickets.decode-0, for that instance's engine
  baton key registry keys                                 # keys/users.acl for Redis, and a password file for each user
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import stat
from datetime import UTC, datetime
from pathlib import Path

from baton.cluster_flag import cluster_name
from baton.file_kinds import exists
from baton.output import emit, say
from baton.tenant_keys import FILE_BYTES_MAX
from baton.ticket_keys import add_fleet_key, write_instance_file, write_private
from cluster.errors import UsageError
from cluster.keys import KEY_BYTES, NotAKeyFile, key_line, make_key, owners, read_digests
from cluster.registry.layout import USERS, users
from cluster.registry.registry import DEFAULT_CLUSTER
from cluster.spec.about import NAME
from cluster.text_file import text_in

PASSWORD_BYTES = 24
"""Random bytes of a registry's password."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton key`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="make a key for a tenant", description="Print a fresh key, once.")
    new.add_argument("tenant", metavar="TENANT", help="its name in the cluster file")
    new.add_argument("--file", type=Path, metavar="FILE", help="its key file (default: keys/TENANT, or keys/admin)")
    new.add_argument(
        "--operator", action="store_true", help="TENANT is an operator: a file of operators' keys has several names"
    )
    new.add_argument("--json", action="store_true", help="one JSON object on stdout")
    tickets = actions.add_parser(
        "tickets", help="make keys for tickets", description="Make or extend a fleet's key file, or an engine's."
    )
    tickets.add_argument("file", type=Path, metavar="FILE", help="the fleet's key file")
    tickets.add_argument("--instance", metavar="NAME", help="make this engine's file from it: FILE.NAME")
    tickets.add_argument("--json", action="store_true", help="one JSON object on stdout")
    registry = actions.add_parser(
        "registry", help="make users of a Redis", description="Make Redis' list of users and their password files."
    )
    registry.add_argument("folder", type=Path, metavar="FOLDER", help="where the files are written")
    registry.add_argument(
        "--cluster",
        type=cluster_name,
        default=DEFAULT_CLUSTER,
        metavar="NAME",
        help="the cluster (default %(default)s)",
    )
    registry.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Make the key, write its line down, print it."""
    if args.vllm_args:
        raise UsageError("`baton key` takes no vLLM flags")
    if args.action == "tickets":
        return _tickets(args)
    if args.action == "registry":
        return _registry(args)
    if not NAME.fullmatch(args.tenant):
        raise UsageError(f"TENANT {args.tenant!r}: write letters, digits, `.`, `_`, `-`, up to 63")
    file = args.file or Path("keys") / ("admin" if args.operator else args.tenant)
    key = make_key(secrets.token_bytes(KEY_BYTES))
    try:
        line = key_line(key, f"{args.tenant}, {datetime.now(tz=UTC):%Y-%m-%d}")
        keys = append(file, line, None if args.operator else args.tenant)
    except OSError as error:
        raise UsageError(f"--file {file}: {(error.strerror or str(error)).lower()}; name another file") from error
    if args.json:
        emit({"event": "key", "tenant": args.tenant, "key": key, "file": str(file), "keys": keys})
        return 0
    print(key)
    of = "operators" if args.operator else args.tenant
    say(f"{file} has {keys} key{'' if keys == 1 else 's'} of {of}. This one is shown only now: keep it.")
    return 0


def _tickets(args: argparse.Namespace) -> int:
    """Make or extend the fleet's key file, or with ``--instance`` make one engine's; print its path."""
    try:
        if args.instance is not None:
            file = write_instance_file(args.file, args.instance)
            told: dict[str, object] = {"file": str(file), "instance": args.instance}
            words = f"{file}: for `baton engine --name {args.instance} --ticket-keys-file {file}`"
        else:
            keys = add_fleet_key(args.file)
            file, told = args.file, {"file": str(args.file), "keys": [key.id for key in keys], "signs": keys[0].id}
            words = f"{file}: for routers. {keys[0].id} signs, {', '.join(key.id for key in keys)} will be accepted"
    except OSError as error:
        raise UsageError(f"FILE {args.file}: {(error.strerror or str(error)).lower()}; name another file") from error
    if args.json:
        emit({"event": "ticket_keys", **told})
    else:
        print(file)
        say(words)
    return 0


def _registry(args: argparse.Namespace) -> int:
    """Make the registry's users; print the path of their list."""
    acl = users(args.cluster)
    files: dict[str, str] = {}
    try:
        for user in USERS:
            file = args.folder / user
            made = not exists(file)
            fix = "remove it, and run this again"
            password = secrets.token_urlsafe(PASSWORD_BYTES) if made else text_in(file, "password file", fix).strip()
            if not password or not password.isprintable() or " " in password:
                raise UsageError(f"{file}: holds no password of one line; {fix}")
            files[user] = str(write_private(file, f"{password}\n") if made else file)
            acl = acl.replace(f">{user}-PASSWORD", f"#{hashlib.sha256(password.encode()).hexdigest()}")
        listed = write_private(args.folder / "users.acl", acl)
    except (OSError, UnicodeError) as error:
        said = (getattr(error, "strerror", None) or str(error)).lower()
        raise UsageError(f"FOLDER {args.folder}: {said}; name another folder") from error
    if args.json:
        emit({"event": "registry_users", "file": str(listed), "passwords": files})
        return 0
    print(listed)
    say(f"{listed}: for Redis (`aclfile`). Passwords, for --registry-password-file: {', '.join(files.values())}")
    return 0


def append(file: Path, line: str, tenant: str | None = None) -> int:
    """Add a line to a key file; return how many keys it has then. New files and folders can be read by the owner alone.

    An existing file is never overwritten. A symbolic link is refused, since it may lead anywhere. Keys of one file have
    one identity: with a `tenant`, a file of another one's keys is refused.

    Raises:
        UsageError: the file holds anything but keys, or another tenant's keys, or is too long.
        OSError: it cannot be written, or is a link.
    """
    for folder in reversed(file.absolute().parents):  # mkdir(parents=True) gives only the last folder this mode
        folder.mkdir(mode=0o700, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    with os.fdopen(os.open(file, flags, 0o600), "rb+", buffering=0) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise UsageError(f"--file {file}: no ordinary file; name another one")
        before = opened.read(FILE_BYTES_MAX + 1)
        try:
            known = read_digests(before.decode())
            others = (
                {} if tenant is None else {name: at for name, at in owners(before.decode()).items() if name != tenant}
            )
        except NotAKeyFile as error:
            raise UsageError(f"--file {file}: {error}; name another file, nothing was written") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"--file {file}: no key file; name another one, nothing was written") from error
        if len(before) > FILE_BYTES_MAX:
            raise UsageError(f"--file {file}: more than {FILE_BYTES_MAX} bytes; name another one")
        for other, at in others.items():
            raise UsageError(
                f"--file {file}: line {at} is a key of {other}, and all keys of a file are one tenant's: name "
                f"another file for {tenant} (without --file it is keys/{tenant}), or give --operator if its keys are "
                "operators'; nothing was written"
            )
        broken = b"\n" if before and not before.endswith(b"\n") else b""
        opened.write(broken + line.encode())
        os.fsync(opened.fileno())
    return len(known) + 1
