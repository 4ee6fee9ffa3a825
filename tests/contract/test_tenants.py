"""Keys, tenants and classes of requests, at a router in front of fake engines."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from support.fleet import Fleet, Starter, eventually

from cluster.keys import digest, key_line, read_digests
from cluster.spec import CacheScope, SloClass, Tenant
from kvtransfer.keyfile import KeyFile
from router.core import clients
from router.core.clients import Keys

ASK = {"model": "fake", "prompt": "hello", "max_tokens": 5}
ACME, NIGHTLY, OPEN = "sk-baton-acme", "sk-baton-nightly", "sk-baton-open"
CLASSES = {"fast": SloClass(ttft_ms=60_000), "slow": SloClass(ttft_ms=90_000)}
TENANTS = {
    "acme": Tenant(classes=("fast", "slow"), default_class="fast", share=3),
    "nightly": Tenant(classes=("slow",)),
    "open": Tenant(cache_scope=CacheScope.SHARED),
}


def keys_of(**keys: str) -> dict[str, Keys]:
    return {name: lambda key=key: (digest(key),) for name, key in keys.items()}  # type: ignore[misc]


WITH_TENANTS: dict[str, Any] = {"tenants": TENANTS, "tenant_keys": keys_of(acme=ACME, nightly=NIGHTLY, open=OPEN)}


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in more.items()}}


async def explained(fleet: Fleet, request_id: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async with fleet.client.get(f"{fleet.admin}/explain/{request_id}", headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("sk-baton-other"),
        bearer(""),
        {"Authorization": f"Basic {ACME}"},
        bearer(digest(ACME)),
        bearer(ACME + "x"),
    ],
)
async def test_a_request_without_a_known_key_is_refused(start: Starter, headers: dict[str, str]) -> None:
    fleet = await start(**WITH_TENANTS)
    for path in ("/v1/completions", "/v1/embeddings", "/tokenize"):
        async with fleet.client.post(fleet.endpoint + path, json=ASK, headers=headers) as response:
            told = (await response.json())["error"]
            assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert (told["type"], told["code"], told["param"]) == ("AuthenticationError", 401, None)
    for path, status in (("/v1/models", 401), ("/health", 200), ("/ready", 200), ("/metrics", 403)):
        async with fleet.client.get(fleet.endpoint + path, headers=headers) as response:
            assert response.status == status, path
    assert not any(engine.generated for engine in fleet.engines.values())


@pytest.mark.parametrize("headers", [bearer(ACME), {"authorization": f"bearer  {ACME} "}, {"x-api-key": ACME}])
async def test_a_clients_key_stays_here_and_the_engines_own_goes_on(start: Starter, headers: dict[str, str]) -> None:
    fleet = await start(**WITH_TENANTS, engine_key="engines-own")
    assert (await fleet.post("/v1/completions", json=ASK, headers=headers))[0] == 200
    assert (await fleet.post("/v1/embeddings", json=ASK, headers=headers))[0] == 200
    seen = [each for engine in fleet.engines.values() for each in engine.headers]
    assert len(seen) == 3
    assert {each["Authorization"] for each in seen} == {"Bearer engines-own"}
    assert not any(ACME in value for each in seen for value in each.values())


async def test_without_tenants_the_engines_see_the_clients_key(start: Starter) -> None:
    fleet = await start(engine_key="for probes")
    assert (await fleet.post("/v1/completions", json=ASK, headers=bearer("anything")))[0] == 200
    seen = [each["Authorization"] for engine in fleet.engines.values() for each in engine.headers]
    assert seen == ["Bearer anything"] * 2


@pytest.mark.interpreted
async def test_a_key_file_that_changes_is_read_again(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "KEYS_EVERY_S", 0.0)
    file = tmp_path / "acme"
    file.write_text(key_line(ACME))
    tenants = {"acme": TENANTS["acme"]}
    fleet = await start(tenants=tenants, tenant_keys={"acme": KeyFile(file, read_digests).get})
    assert (await fleet.post("/v1/completions", json=ASK, headers=bearer(ACME)))[0] == 200
    file.write_text(key_line("sk-baton-new") + "# the old one is gone\n")
    for key, status in (("sk-baton-new", 200), (ACME, 401)):
        assert (await fleet.post("/v1/completions", json=ASK, headers=bearer(key)))[0] == status


async def test_a_class_is_the_header_or_the_tenants_usual_one(start: Starter) -> None:
    fleet = await start(classes=CLASSES, **WITH_TENANTS)
    cases = [(ACME, None, "fast"), (ACME, "slow", "slow"), (NIGHTLY, None, "slow"), (OPEN, None, None)]
    for number, (key, named, given) in enumerate(cases):
        more = {"x_request_id": f"r{number}"} | ({} if named is None else {"x_slo_class": named})
        assert (await fleet.post("/v1/completions", json=ASK, headers=bearer(key, **more)))[0] == 200
        story = (await explained(fleet, f"r{number}"))[1]
        assert story.get("slo_class") == given
        assert story["tenant"] == {ACME: "acme", NIGHTLY: "nightly", OPEN: "open"}[key]
        assert story["slo"].get("targets") == (None if given is None else dict(CLASSES[given].targets()))


async def test_a_class_that_is_not_the_tenants_is_refused_naming_those_that_are(start: Starter) -> None:
    fleet = await start(classes=CLASSES, **WITH_TENANTS)
    for named, status in (("fast", 403), ("no such", 400)):
        headers = bearer(NIGHTLY, x_slo_class=named)
        said, body = await fleet.post("/v1/completions", json=ASK, headers=headers)
        assert said == status
        assert f"`{named}`" in body["error"]["message"]
        assert body["error"]["message"].endswith("`slow`.")
    assert not any(engine.generated for engine in fleet.engines.values())


async def test_without_tenants_every_class_may_be_named_and_without_classes_the_name_is_ignored(
    start: Starter,
) -> None:
    fleet = await start(classes=CLASSES)
    named = {"x-slo-class": "fast", "x-request-id": "a"}
    assert (await fleet.post("/v1/completions", json=ASK, headers=named))[0] == 200
    assert (await explained(fleet, "a"))[1]["slo_class"] == "fast"
    assert (await fleet.post("/v1/completions", json=ASK, headers={"x-slo-class": "none"}))[0] == 400
    without = await start()
    assert (await without.post("/v1/completions", json=ASK, headers={"x-slo-class": "none"}))[0] == 200


async def test_a_tenants_key_reads_its_own_requests_and_the_operator_all(start: Starter) -> None:
    fleet = await start(**WITH_TENANTS)
    for key, name in ((ACME, "of-acme"), (NIGHTLY, "of-nightly")):
        assert (await fleet.post("/v1/completions", json=ASK, headers=bearer(key, x_request_id=name)))[0] == 200
    assert (await explained(fleet, "of-acme", bearer(ACME)))[0] == 200
    for headers, status in ((bearer(NIGHTLY), 404), (bearer("sk-baton-other"), 401), (None, 200)):
        assert (await explained(fleet, "of-acme", headers))[0] == status
    for headers, names in ((bearer(NIGHTLY), ["of-nightly"]), (None, ["of-nightly", "of-acme"])):
        async with fleet.client.get(f"{fleet.admin}/explain", headers=headers) as response:
            assert [each["client_id"] for each in (await response.json())["requests"]] == names


async def test_a_tenants_prompts_are_salted_unless_it_shares(start: Starter) -> None:
    fleet = await start(**WITH_TENANTS)
    asked = [(ACME, {}), (NIGHTLY, {}), (OPEN, {}), (ACME, {"cache_salt": "s"}), (OPEN, {"cache_salt": "s"})]
    for key, more in asked:
        assert (await fleet.post("/v1/completions", json={**ASK, **more}, headers=bearer(key)))[0] == 200
    salts = [body.get("cache_salt") for body in fleet.engines["prefill-0"].generated]
    assert salts == [body.get("cache_salt") for body in fleet.engines["decode-0"].generated], "both legs alike"
    assert salts[2] is None
    assert len(set(salts)) == len(salts)
    assert not any(salt == "s" for salt in salts)
    await fleet.post("/v1/embeddings", json=ASK, headers=bearer(ACME))
    await eventually(lambda: any(path == "/v1/embeddings" for path, _ in fleet.engines["decode-0"].bodies), "relayed")
    relayed = next(raw for path, raw in fleet.engines["decode-0"].bodies if path == "/v1/embeddings")
    assert str(salts[0]).encode() in relayed


@pytest.mark.parametrize("size", [5, 1_200_000], ids=["light", "heavy"])
async def test_a_salt_of_null_counts_as_none(start: Starter, size: int) -> None:
    fleet = await start(**WITH_TENANTS)
    body = BytesIO(json.dumps({**ASK, "prompt": "p" * size, "cache_salt": None}).encode())
    headers = bearer(ACME, content_type="application/json")
    assert (await fleet.post("/v1/completions", data=body, headers=headers))[0] == 200
    salts = [engine.generated[0].get("cache_salt") for engine in fleet.engines.values()]
    assert salts == [clients._salt("acme")] * 2
