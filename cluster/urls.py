"""How an address is written in a URL. Pure."""

from __future__ import annotations


def netloc(host: str, port: int | str) -> str:
    """Host and port as a URL has them: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
