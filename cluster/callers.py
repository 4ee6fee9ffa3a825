"""Whether a request to an admin port comes from this machine, or from a page of another site in a browser here. Pure.

A port on loopback asks for no key, and a browser on this machine reaches it, too. Pages of other sites can use
that in two ways, and each way shows: a page that sends a request names its site in `Origin` or `Sec-Fetch-Site`; a site
whose name was made to lead to this machine (DNS rebinding) has that name in `Host`. Programs send neither header.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})
"""Where connections of this machine's programs come from."""

_OTHER_SITES: Final = frozenset({"cross-site", "same-site"})
"""`same-site` is another port of this very name: any web application on this machine."""


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is reached from this machine only. A name other than localhost is not."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def from_here(remote: str | None) -> bool:
    """Whether a connection with this remote address is from this machine."""
    return remote in LOOPBACK


def names_this_machine(host: str, bound: str = "") -> bool:
    """Whether a `Host` header can be no other site's name: an address, localhost, or `bound`, where the port is."""
    with contextlib.suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or name.endswith(".localhost") or (bound and name == bound.lower()):
            return True
        return bool(ipaddress.ip_address(name))
    return False


def from_another_site(headers: Mapping[str, str], host: str, *, changes: bool) -> bool:
    """Whether a page of another site sends this, by the browser's own word. `host`: the request's `Host`.

    A link on another site that a person follows to look at something is no such request; `changes`: whether the
    request is to change something, which no link does.
    """
    origin = headers.get("Origin")
    if origin is not None and _netloc(origin) != host:
        return True
    follows = not changes and headers.get("Sec-Fetch-Mode") == "navigate"
    return headers.get("Sec-Fetch-Site") in _OTHER_SITES and not follows


def _netloc(origin: str) -> str:
    """Host and port of an `Origin`; empty for `null` and for what is no URL."""
    with contextlib.suppress(ValueError):
        return urlsplit(origin).netloc
    return ""
