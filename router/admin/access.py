"""What operators, tenants and router peers may read and change on a router's admin side. A shell: HTTP, a clock."""

from __future__ import annotations

import time
from typing import Final

from aiohttp import web

from cluster.callers import from_another_site, from_here, names_this_machine
from cluster.errors import ApiError
from cluster.keys import key_in, whose
from cluster.readable import SMALL_BYTES_MAX, too_large_here
from kvtransfer.signed import READER, SIGNATURE, TO
from router.admin.peers import RouterPeers
from router.core.clients import Clients, Keys
from router.http.bodies import read_body


class AdminAccess:
    """Callers of one router's admin side: operators, tenants, and router peers on behalf of these."""

    def __init__(self, clients: Clients, operators: Keys | None, peers: RouterPeers, body_timeout_s: float) -> None:
        """`operators`: the operators' keys; None: an operator is a caller on this machine."""
        self._clients: Final = clients
        self._operators: Final = operators
        self._peers: Final = peers
        self._body_timeout_s: Final = body_timeout_s

    def reader(self, http: web.Request, body: bytes = b"") -> str | None:
        """The tenant whose requests the caller may read, by its key; None: an operator, who may read all.

        Raises:
            ApiError: 401 for an unknown key, and for no key from another machine; 403 for a page or name of another
                site; 421 if another router is meant.
        """
        meant = http.headers.get(TO, self._peers.name)
        if meant != self._peers.name:
            raise ApiError(421, "MisdirectedError", f"This is {self._peers.name}, not {meant[:200]}.")
        if from_another_site(http.headers, http.host, changes=http.method != "GET"):
            raise ApiError(403, "PermissionDeniedError", "A page of another site asks for this: refused.")
        vouched = self._peers.vouched(http.method, http.path_qs, http.headers, body)
        found = None if vouched else self._by_key(http)
        # READER counts in every request that a peer has signed, even if the unsigned header `FROM` was removed.
        behalf = http.headers.get(READER) if vouched or self._peers.asks(http.headers) else None
        return behalf if found is None else found

    def _by_key(self, http: web.Request) -> str | None:
        """As `reader`, for a caller with a key, or on this machine without one."""
        clients, operators = self._clients, self._operators
        key, here = key_in(http.headers), from_here(http.remote)
        if here and not names_this_machine(http.host):
            message = "Ask as 127.0.0.1 or localhost: under another name it may be another site's page that asks."
            raise ApiError(403, "PermissionDeniedError", message)
        if here and (not key or (operators is None and not clients.closed)):
            return None
        if key and operators is not None and whose(key, {"": operators()}) is not None:
            return None
        if clients.closed:
            return clients.tenant(http.headers, time.monotonic())
        message = "From other machines the admin side asks for an operator's key: --admin-key-file names them."
        raise ApiError(401, "AuthenticationError", message)

    async def operators_body(self, http: web.Request) -> bytes:
        """The body of a change. Only an operator's body is read. The exception is a peer's request, whose MAC covers
        the body, so the body is read before the judgement.

        Raises:
            ApiError: as `reader`; 403 for tenants and pages of other sites; 408, 413 for a body that is slow or large.
        """
        vouched = SIGNATURE in http.headers
        if not vouched:
            self._must_be_operator(http, b"")
        too_long = too_large_here(SMALL_BYTES_MAX)
        body = await read_body(http, SMALL_BYTES_MAX, self._body_timeout_s, too_long)
        if vouched:
            self._must_be_operator(http, body)
        return body

    def _must_be_operator(self, http: web.Request, body: bytes) -> None:
        """Raises ApiError (403) unless an operator asks, and not another site's page."""
        if self.reader(http, body) is not None:
            raise ApiError(403, "PermissionDeniedError", "A tenant's key changes nothing here: ask as an operator.")
