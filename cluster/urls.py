"""How an address is written in a URL. Pure."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote, urlsplit

PORT_MAX: Final = 65535
"""The largest number of a port."""


def netloc(host: str, port: int | str) -> str:
    """Host and port as a URL has them: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parted(url: str) -> tuple[str, str]:
    """A registry's URL without its password, and the password; empty: it has none. Raises ValueError for no URL."""
    parts = urlsplit(url)
    if parts.password is None:
        return url, ""
    user, host = parts.username or "", parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{user}@{host}" if user else host).geturl(), unquote(parts.password)
