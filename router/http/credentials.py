"""Which keys go to engines: a client's own, the router's, or none. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cluster import wire
from cluster.keys import KEY_HEADERS
from router.core.clients import Clients


class Credentials:
    """The credentials of one router."""

    def __init__(self, clients: Clients, engine_key: str | None, *, trusts: bool) -> None:
        """What engines may see.

        Args:
            clients: whether clients have Baton's keys.
            engine_key: opens engines; None: they need none, or clients send it.
            trusts: whether engines are known to be genuine: named by URL, or proven by their agents' ticket keys.
                Others get no key at all.
        """
        self._clients: Final = clients
        self._engine_key: Final = engine_key
        self.trusts: Final = trusts

    @property
    def own(self) -> dict[str, str]:
        """Headers of the router's own requests to engines."""
        return {"Authorization": f"Bearer {self._engine_key}"} if self._engine_key and self.trusts else {}

    def headers_for(self, given: Mapping[str, str]) -> dict[str, str]:
        """A client's headers that an engine may see. A Baton key never goes to an engine, which has a key of its own.
        An engine that may not be genuine sees no key at all.
        """
        headers = wire.forwarded_headers(given)
        if not self._clients.closed and self.trusts:
            return headers
        headers = {name: value for name, value in headers.items() if name.lower() not in KEY_HEADERS}
        if self._engine_key and self.trusts:
            headers["Authorization"] = f"Bearer {self._engine_key}"
        return headers
