"""A registry server for a cluster on one machine: redis-server where it is installed, else the stand-in.

This module makes the command and its files. The caller starts, watches and ends the server, and ties its life to the
parent's (redis-server has no lifeline of its own; `baton up` uses the engines' keeper).
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import UsageError

INSTALL = "apt install redis-server"

_REDIS_CONF = """\
# Written by Baton for one cluster on this machine; the password is also in {password_file}.
bind {host}
port {port}
protected-mode yes
requirepass {password}
daemonize no
dir "{directory}"
# Only heartbeats are kept here: every agent writes its own again within a second.
save ""
appendonly no
# Thousands of members fit; a fault must not eat the machine.
maxmemory 256mb
maxmemory-policy noeviction
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryCommand:
    """How to start a registry server, and how to reach it."""

    argv: tuple[str, ...]
    """The command line; holds no password."""
    ready_line: str
    """Part of the line that the server writes to stdout once it listens."""
    url: str
    """The registry's URL without the password."""
    password_file: Path
    server: str
    """Which server it is, for the user."""


def registry_command(
    directory: Path, *, host: str = "127.0.0.1", port: int = 0, standin: bool = False
) -> RegistryCommand:
    """A command for a new registry server, with a new password in files that only this user can read.

    `port` 0 takes a port that is free now (if another program takes it first, the server ends and says so). The same
    directory may be used again: a server started anew with the same command keeps its password. `standin` asks for the
    stand-in even where redis-server is installed. The directory must exist.

    Raises:
        UsageError: neither redis-server nor the stand-in's library is installed.
    """
    port = port or _free_port(host)
    password = secrets.token_urlsafe(32)
    password_file = directory / "registry.password"
    _write_private(password_file, password + "\n")
    url = f"redis://{host}:{port}"
    binary = None if standin else shutil.which("redis-server")
    if binary is None and importlib.util.find_spec("fakeredis") is None:
        raise UsageError(
            f"A cluster needs a registry, and neither redis-server nor fakeredis is installed: {INSTALL}, or "
            "pip install 'baton-serve[local]'"
        )
    if binary is None:
        words = ("--host", host, "--port", str(port), "--password-file", str(password_file))
        argv = (sys.executable, "-P", "-m", "cluster.registry.standin", *words)
        server = f"a stand-in for Redis, enough for one machine (the real one: {INSTALL})"
        return RegistryCommand(argv=argv, ready_line='"ready"', url=url, password_file=password_file, server=server)
    conf = directory / "registry.conf"
    quoted = str(directory).replace("\\", "\\\\").replace('"', '\\"')
    values = {"host": host, "port": port, "password": password, "password_file": password_file, "directory": quoted}
    _write_private(conf, _REDIS_CONF.format(**values))
    ready = "Ready to accept connections"
    return RegistryCommand(
        argv=(binary, str(conf)), ready_line=ready, url=url, password_file=password_file, server=binary
    )


def _write_private(path: Path, text: str) -> None:
    """Create a file that only its owner can read, from its first byte on."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
