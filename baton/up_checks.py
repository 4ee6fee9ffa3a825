"""What `baton up` checks before it starts its first program: the router's addresses, and folders of models."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

from baton.file_kinds import exists
from baton.router_child import LocalRouter
from cluster.errors import UsageError
from cluster.urls import PORT_MAX


def check_router(front: LocalRouter) -> None:
    """Check the router's hosts and ports.

    Raises:
        UsageError: both ports are the same, or a host is no address of this machine.
    """
    if front.port == front.admin_port != 0:
        other = front.port % PORT_MAX + 1
        raise UsageError(f"--admin-port {front.admin_port}: the same as --port; give another one, such as {other}")
    for flag, host in (("--host", front.host), ("router.admin_host", front.admin_host)):
        if problem := _cannot_open(host):
            raise UsageError(f"{flag} {host!r}: {problem}; give an address of this machine, such as 127.0.0.1")


def check_model_folders(models: Iterable[str | None]) -> None:
    """Check models that are named by paths.

    Raises:
        UsageError: nothing is at such a path.
    """
    for model in models:
        if model is not None and model.startswith(("/", "./", "../", "~")) and not exists(Path(model).expanduser()):
            raise UsageError(f"MODEL {model}: no such folder; give a model's folder, or its name on Hugging Face")


def _cannot_open(host: str) -> str | None:
    """Why a server cannot listen at a host; None if it can."""
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        return (getattr(error, "strerror", None) or str(error)).lower()
    return None
