"""Which keys go to engines: a client's own, ours, or none. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cluster import wire
from cluster.keys import KEY_HEADERS
from router.core.clients import Clients


class Credentials:
    """Of one router."""

    def __init__(self, clients: Clients, engine_key: str | None, *, trusts: bool) -> None:
        """What engines may be told.

        Args:
            clients: whether these have keys of ours.
            engine_key: opens engines; None: they need none, or clients bring it.
            trusts: engines are those they say they are: named by URL, or proven by their agents' ticket keys. Others
                get no key at all.
        """
        self._clients: Final = clients
        self._engine_key: Final = engine_key
        self.trusts: Final = trusts

    @property
    def own(self) -> dict[str, str]:
        """Headers of what the router asks engines for itself."""
        return {"Authorization": f"Bearer {self._engine_key}"} if self._engine_key and self.trusts else {}

    def headers_for(self, given: Mapping[str, str]) -> dict[str, str]:
        """A client's headers that an engine may see. A key of ours is none of an engine's business: it has its own. An
        engine that may be a stranger's sees no key at all.
        """
        headers = wire.forwarded_headers(given)
        if not self._clients.closed and self.trusts:
            return headers
        headers = {name: value for name, value in headers.items() if name.lower() not in KEY_HEADERS}
        if self._engine_key and self.trusts:
            headers["Authorization"] = f"Bearer {self._engine_key}"
        return headers
