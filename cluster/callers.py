"""Tells whether a request to an admin port comes from this machine, or from another site's page in a browser here.
Pure.

A port on loopback asks for no key, and a browser on this machine reaches the port, too. Pages of other sites can abuse
this in two ways, and both can be seen. A page that sends a request names its site in `Origin` or `Sec-Fetch-Site`. A
site whose name was made to resolve to this machine (DNS rebinding) has its name in `Host`. Programs send neither
header.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})
"""Remote addresses of connections from this machine's own programs."""

_OTHER_SITES: Final = frozenset({"cross-site", "same-site"})
"""`same-site` is another port of the same host name: any web application on this machine."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`. Of names, only localhost counts."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def from_here(remote: str | None) -> bool:
    """Whether a connection with this remote address is from this machine."""
    return remote in LOOPBACK


def names_this_machine(host: str, bound: str = "") -> bool:
    """Whether no other site can own this `Host` header: an address, localhost, or `bound` (the listening address)."""
    with contextlib.suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or name.endswith(".localhost") or (bound and name == bound.lower()):
            return True
        return bool(ipaddress.ip_address(name))
    return False


def from_another_site(headers: Mapping[str, str], host: str, *, changes: bool) -> bool:
    """Whether the browser's headers say that another site's page sent this request.

    False for a link on another site that the user follows: it only shows a page.

    Args:
        headers: the request's.
        host: the request's `Host`.
        changes: whether the request is to change something, which a link never does.
    """
    origin = headers.get("Origin")
    if origin is not None and _netloc(origin) != host:
        return True
    follows = not changes and headers.get("Sec-Fetch-Mode") == "navigate"
    return headers.get("Sec-Fetch-Site") in _OTHER_SITES and not follows


def _netloc(origin: str) -> str:
    """Host and port of an `Origin`; empty for `null` and for a text that is no URL."""
    with contextlib.suppress(ValueError):
        return urlsplit(origin).netloc
    return ""
