"""Which tenant sent a request, and which class the request has: keys, tenants, SLO classes. Pure; others read the
files.

Without tenants all requests belong to the tenant without a name, and need no key. With tenants, a request needs a key
of one of them. It may name a class that this tenant may use; without one it has the tenant's usual class, else none
(best effort). A tenant with prompts of its own (`cache_scope: tenant`) has its prompts salted, so that no engine serves
another tenant from their prefix cache. Salts that clients send are always kept apart by tenant.

Bodies have shares, too: one client (a tenant; without tenants an address) leaves room for the others (`OpenBodies`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cluster.errors import ApiError, bad_request, no_room, shed
from cluster.keys import key_in, whose
from cluster.spec import CacheScope, SloClass, Tenant

CLASS_HEADER: Final = "x-slo-class"

KEYS_EVERY_S: Final = 1.0
"""Seconds between checks of the key files at least: each check costs a system call."""

RECOGNISED_MAX: Final = 10_000
"""The limit of keys that are known without a new digest, until the key files are read again. (The lookup is a Python
dict's: it compares a wrong key with a known one only if both have the same hash, which has a random key.)"""

RETRY_S: Final = 1
"""Seconds (`Retry-After`) for a client with too many open requests: one of them may end at any time."""

SHARE: Final = 0.75
"""The largest share of the whole that one client may have: the rest is for others, however much the client sends."""

Keys = Callable[[], tuple[str, ...]]
"""Returns the digests of one tenant's current keys."""


@dataclass(frozen=True, slots=True)
class Client:
    """The tenant and class of a request, and what the class promises."""

    tenant: str = ""
    slo_class: str = ""
    slo: SloClass | None = None


class Clients:
    """Tenants and classes of one router."""

    def __init__(
        self, classes: Mapping[str, SloClass], tenants: Mapping[str, Tenant], keys: Mapping[str, Keys]
    ) -> None:
        """`keys`: by tenant, what returns the digests of its keys."""
        self._digests: dict[str, tuple[str, ...]] = {}
        self._known: Final[dict[tuple[str, str], Client]] = {}
        """Clients by tenant and class; without classes the class is empty."""
        self._read_at = -1.0
        self._recognised: Final[dict[str, str]] = {}
        """Tenants by key, of keys that came since the digests were read: most clients bring theirs again and again."""
        self._open: Final[dict[str, int]] = {}
        """Requests under way, by tenant."""
        self.renew(classes, tenants, keys)

    def renew(self, classes: Mapping[str, SloClass], tenants: Mapping[str, Tenant], keys: Mapping[str, Keys]) -> None:
        """Use these settings from now on. Requests under way keep their former ones."""
        self._classes = classes
        self._tenants = tenants
        self._keys = keys
        self._read_at = -1.0
        self._known.clear()
        self._salts = {name: _salt(name) for name, tenant in tenants.items() if tenant.cache_scope is CacheScope.TENANT}

    @property
    def closed(self) -> bool:
        """Whether requests need a key."""
        return bool(self._tenants)

    @property
    def shares(self) -> dict[str, float]:
        """The tenants' weights."""
        return {name: tenant.share for name, tenant in self._tenants.items()}

    # --- keys ---------------------------------------------------------------------------------------------------------

    def tenant(self, headers: Mapping[str, str], now: float) -> str:
        """The tenant whose key a request carries; empty if no key is needed. `now` in monotonic seconds.

        Raises:
            ApiError: 401 without a known key.
        """
        if not self.closed:
            return ""
        key = key_in(headers)
        if not key:
            raise _unauthorized("No API key: send `Authorization: Bearer KEY`.")
        if self._read_at < 0 or now - self._read_at >= KEYS_EVERY_S:
            self._read_at = now
            self._digests = {name: read() for name, read in self._keys.items()}
            self._recognised.clear()
        found = self._recognised.get(key) or whose(key, self._digests)
        if found is None:
            raise _unauthorized("This API key is not known here.")
        if len(self._recognised) < RECOGNISED_MAX:
            self._recognised[key] = found
        return found

    # --- open requests -----------------------------------------------------------------------------------------------

    def enter(self, tenant: str, routers: int) -> None:
        """One more request of a tenant is open, until `leave`. `routers`: the number of routers that share the tenant.

        Raises:
            ApiError: 429 if the tenant has as many as it may.
        """
        said = self._tenants.get(tenant)
        limit = None if said is None or said.open_max is None else math.ceil(said.open_max / max(1, routers))
        open_now = self._open.get(tenant, 0)
        if limit is not None and open_now >= limit:
            raise shed(f"this key has {limit} requests open here, as many as it may", RETRY_S)
        self._open[tenant] = open_now + 1

    def leave(self, tenant: str) -> None:
        """An open request of this tenant has ended."""
        left = self._open[tenant] = self._open.get(tenant, 0) - 1
        assert left >= 0, f"{tenant}: a request ended that never began"

    # --- class --------------------------------------------------------------------------------------------------------

    def client(self, tenant: str, headers: Mapping[str, str]) -> Client:
        """The client of a tenant's request, with the class that it names, or the usual one. Without classes the name is
        ignored.

        Raises:
            ApiError: 400 for a class that does not exist, 403 for one that this tenant may not use.
        """
        if not self._classes:
            return self._of(tenant, "")
        named = headers.get(CLASS_HEADER)
        if named is None:
            return self._of(tenant, self._usual(tenant))
        allowed = self._allowed(tenant)
        if named in allowed:
            return self._of(tenant, named)
        yours = ", ".join(f"`{name}`" for name in allowed)
        if named in self._classes:
            message = f"The class `{named}` is not for this key. It may use: {yours}."
            raise ApiError(403, "PermissionDeniedError", message, CLASS_HEADER)
        raise bad_request(
            f"`{CLASS_HEADER}` is `{named[:80]}`: there is no such class. Use one of {yours}.", CLASS_HEADER
        )

    def _of(self, tenant: str, slo_class: str) -> Client:
        found = self._known.get((tenant, slo_class))
        if found is None:
            found = self._known[tenant, slo_class] = Client(tenant, slo_class, self._classes.get(slo_class))
        return found

    def _allowed(self, tenant: str) -> tuple[str, ...]:
        said = self._tenants.get(tenant)
        return said.classes if said is not None and said.classes else tuple(self._classes)

    def _usual(self, tenant: str) -> str:
        said = self._tenants.get(tenant)
        if said is None:
            return ""
        return said.default_class or (said.classes[0] if said.classes else "")

    # --- prefix scope -------------------------------------------------------------------------------------------------

    def salt(self, tenant: str, body: dict[str, Any]) -> None:
        """Make engines keep this tenant's prefixes apart, unless the client asks for a stricter scope."""
        if tenant in self._salts and body.get("cache_salt") is None:
            body["cache_salt"] = self._salts[tenant]

    def scope(self, tenant: str) -> str | None:
        """The scope in which a prompt's names may match (`router.predict.chunks`); None: the scope of all tenants that
        share.
        """
        return None if self.closed and tenant not in self._salts else tenant


def _salt(tenant: str) -> str:
    """A salt that no client can have: `cluster.wire.strip` hashes clients' salts into the tenant's namespace."""
    return hashlib.sha256(f"{tenant}\0".encode()).hexdigest()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, "AuthenticationError", message)


def client_of(tenant: str, address: object) -> str:
    """The client that has a share of its own.

    Args:
        tenant: the tenant that the key names; empty if no key is needed.
        address: a socket's `peername`, or a host name.
    """
    if tenant:
        return f"tenant {tenant}"
    return f"address {address[0] if isinstance(address, tuple) and address else address}"


COUNTED_BYTES: Final = 16 << 10
"""Bodies of generation requests with fewer bytes are not counted: the connections bound them, and a request's way to
its engine stays short."""


class OpenBodies:
    """The bytes of the bodies of one router's open requests. A request keeps its body, as it came and parsed, until it
    is over: without a bound, requests that wait in the flow-control queue could take all memory.
    """

    __slots__ = ("_bytes_max", "_each_max", "_of", "bytes")

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: the bound, in bytes as the bodies came. Parsed, a body takes up to ten times that."""
        self._bytes_max: Final = bytes_max
        self._each_max: Final = bytes_max * SHARE
        self._of: Final[dict[str, int]] = {}
        """The bytes of each client's bodies."""
        self.bytes = 0
        """The bytes of all counted bodies."""

    def check(self, client: str, size: int) -> None:
        """Whether a body of `size` bytes has room; a client's only one has, unless others have taken all.

        Raises:
            ApiError: 503 if it has none.
        """
        own = self._of.get(client, 0)
        if own and own + size > self._each_max:
            raise no_room(f"the bodies of your open requests have {own} bytes, {self._each_max:.0f} at most")
        if self.bytes and self.bytes + size > self._bytes_max:
            told = f"the bodies of open requests have {self.bytes} bytes, {self._bytes_max} at most (--open-bytes-max)"
            raise no_room(told)

    def add(self, client: str, size: int) -> None:
        """A request with such a body has begun."""
        self.bytes += size
        self._of[client] = self._of.get(client, 0) + size

    def drop(self, client: str, size: int) -> None:
        """It is over."""
        self.bytes -= size
        left = self._of.get(client, 0) - size
        if left > 0:
            self._of[client] = left
        else:
            self._of.pop(client, None)  # requests without a body leave nothing to take away
