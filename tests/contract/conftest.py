"""A router in front of fake engines, on loopback."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import pytest
from support.fake_engine import FakeEngine
from support.fleet import Fleet, Starter
from support.hands_over import hands_over
from support.served import served

from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from router.api.config import RouterConfig


@pytest.fixture(scope="session", autouse=True)
def real_server_left_clean(pytestconfig: pytest.Config) -> Iterator[None]:
    """With --kubeconfig: after the last test, delete what the operator's scenarios made on that API server."""
    yield
    if kubeconfig := pytestconfig.getoption("kubeconfig", ""):
        from support.k8s_stage import swept  # the client is an optional extra

        asyncio.run(swept(kubeconfig))


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Paths of a certificate for 127.0.0.1 and of its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "baton")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    now = dt.datetime.now(tz=dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )
    (folder / "locked.pem").write_bytes(locked)
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture
async def start() -> AsyncIterator[Starter]:
    """`await start(prefill=1, decode=1, **router settings)` gives a fleet, once its last engine is up for the router.

    `prepare` may change the engines before the router sees them; `reserved` gives the tenants of an instance; `deaf`
    are engines that cannot be told their first token, where others can."""
    async with AsyncExitStack() as stack:

        async def starter(
            *,
            prefill: int = 1,
            decode: int = 1,
            both: int = 0,
            pins: bool = False,
            early: bool = False,
            deaf: frozenset[str] = frozenset(),
            reserved: Mapping[str, frozenset[str]] = MappingProxyType({}),
            prepare: Callable[[dict[str, FakeEngine]], None] | None = None,
            **settings: Any,
        ) -> Fleet:
            engines: dict[str, FakeEngine] = {}
            instances = []
            for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.BOTH, both)):
                for number in range(count):
                    engine = await stack.enter_async_context(FakeEngine(f"{role.value}-{number}"))
                    engine.peers = engines
                    engines[engine.name] = engine
                    tenants = reserved.get(engine.name, frozenset())
                    name, can = InstanceId(engine.name), pins and engine.name not in deaf
                    instances.append(
                        Instance(id=name, role=role, url=engine.url, pins=can, early=early, tenants=tenants)
                    )
            if prepare is not None:
                prepare(engines)
            config = RouterConfig(
                instances=tuple(instances), port=0, admin_port=0, **{"drain_s": 1.0, **hands_over(settings)}
            )
            stop = asyncio.Event()
            endpoint, admin = await stack.enter_async_context(served(config, stop=stop))
            client = await stack.enter_async_context(aiohttp.ClientSession())
            fleet = Fleet(endpoint, admin, engines, client, stop)
            async with asyncio.timeout(5):
                while await _last_state(fleet) != "up":
                    await asyncio.sleep(0.01)
            return fleet

        yield starter


async def _last_state(fleet: Fleet) -> str:
    """State of the last engine in the configuration. The admin side answers, because it uses no TLS."""
    async with fleet.client.get(fleet.admin + "/ready") as response:
        state: str = (await response.json())["instances"][-1]["state"]
    return state
