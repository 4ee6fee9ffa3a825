"""The tenant and the class of a request."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.errors import ApiError
from cluster.keys import digest
from cluster.spec import CacheScope, SloClass, Tenant
from router.core.clients import KEYS_EVERY_S, Client, Clients

FAST, SLOW = SloClass(ttft_ms=500), SloClass(ttft_ms=9000)
CLASSES = {"fast": FAST, "slow": SLOW}
NOBODY: dict[str, Any] = {}


def clients(**tenants: Tenant) -> Clients:
    return Clients(CLASSES, tenants, {name: lambda name=name: (digest(name),) for name in tenants})  # type: ignore[misc]


def test_without_tenants_each_request_is_of_the_unnamed_tenant() -> None:
    here = clients()
    assert not here.closed
    assert here.tenant({"Authorization": "Bearer whatever"}, 0.0) == ""
    assert here.client("", {}) == Client()
    assert here.client("", {"x-slo-class": "fast"}) == Client("", "fast", FAST)
    assert (here.scope(""), here.shares) == ("", {})


def test_keys_are_read_again_but_not_for_every_request() -> None:
    known, reads = ["one"], []

    def read() -> tuple[str, ...]:
        reads.append(1)
        return tuple(map(digest, known))

    here = Clients({}, {"acme": Tenant()}, {"acme": read})
    for _ in range(3):
        assert here.tenant({"Authorization": "Bearer one"}, 10.0) == "acme"
    assert len(reads) == 1
    known[:] = ["two"]
    assert here.tenant({"Authorization": "Bearer two"}, 10.0 + KEYS_EVERY_S) == "acme"
    with pytest.raises(ApiError) as caught:
        here.tenant({"Authorization": "Bearer one"}, 10.0 + KEYS_EVERY_S)
    assert caught.value.status == 401
    assert "one" not in caught.value.message.split(), "a key is not repeated"


@pytest.mark.parametrize(
    ("tenant", "named", "given"),
    [
        (Tenant(), None, ""),
        (Tenant(), "slow", "slow"),
        (Tenant(classes=("slow", "fast")), None, "slow"),
        (Tenant(classes=("slow", "fast"), default_class="fast"), None, "fast"),
        (Tenant(classes=("slow", "fast"), default_class="fast"), "slow", "slow"),
    ],
)
def test_the_class_is_the_named_one_else_the_default(tenant: Tenant, named: str | None, given: str) -> None:
    headers = {} if named is None else {"x-slo-class": named}
    assert clients(acme=tenant).client("acme", headers) == Client("acme", given, CLASSES.get(given))


@pytest.mark.parametrize(("named", "status"), [("fast", 403), ("Slow", 400), ("", 400), ("x" * 9999, 400)])
def test_another_class_is_refused_naming_those_allowed(named: str, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        clients(acme=Tenant(classes=("slow",))).client("acme", {"x-slo-class": named})
    assert (caught.value.status, caught.value.param) == (status, "x-slo-class")
    assert caught.value.message.endswith("`slow`.")
    assert len(caught.value.message) < 300


def test_salts_and_scopes_keep_tenants_apart_unless_they_share() -> None:
    here = clients(
        a=Tenant(), b=Tenant(), c=Tenant(cache_scope=CacheScope.SHARED), d=Tenant(cache_scope=CacheScope.SHARED)
    )
    bodies: dict[str, dict[str, Any]] = {name: {} for name in "abcd"}
    for name, body in bodies.items():
        here.salt(name, body)
    assert bodies["c"] == bodies["d"] == {}
    assert bodies["a"] != bodies["b"]
    assert all(len(bodies[name]["cache_salt"]) == 64 for name in "ab"), "vLLM takes 128 characters at most"
    assert [here.scope(name) for name in "abcd"] == ["a", "b", None, None]
    own = {"cache_salt": "the client's, hashed"}
    here.salt("a", own)
    assert own == {"cache_salt": "the client's, hashed"}
