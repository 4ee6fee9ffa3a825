"""schemathesis sends the router requests that docs/openapi.json allows, and many that it does not: `make fuzz-api`."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.fake_engine import FakeEngine
from support.mock import mock_settings
from support.served import served

from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from engine.mock.fleet import MockFleet
from router.api.config import RouterConfig
from router.api.paths import PATHS, How

ROOT = Path(__file__).resolve().parents[2]
SCHEMATHESIS = ROOT / ".bench" / "fuzz" / "bin" / "schemathesis"

CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
WITHIN_S = 10
"""In s. A request that takes longer counts as a hang, and fails."""


def _everything_else() -> FakeEngine:
    """An engine of another model, with the paths that the router relays and a mock lacks."""
    echo = FakeEngine("both-0", model="echo")
    echo.paths = [path.template for path in PATHS if path.how in {How.PASSTHROUGH, How.OWNER}]
    return echo


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="schemathesis is not installed: make fuzz-api")
@pytest.mark.parametrize("seed", [1])
async def test_no_server_error_and_no_hang(seed: int, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        settings = [mock_settings("prefill-0", Role.PREFILL), mock_settings("decode-0", Role.DECODE)]
        mocks = await stack.enter_async_context(MockFleet(settings))
        echo = await stack.enter_async_context(_everything_else())
        instances = [
            *(Instance(id=InstanceId(n), role=e.settings.role, url=e.url) for n, e in mocks.instances.items()),
            Instance(id=InstanceId(echo.name), role=Role.BOTH, url=echo.url),
        ]
        config = RouterConfig(instances=tuple(instances), port=0, admin_port=0, drain_s=1.0, body_timeout_s=5.0)
        endpoint, _ = await stack.enter_async_context(served(config))
        await asyncio.sleep(0.5)  # engines are probed: a request before that is a rightful 503
        words = [str(ROOT / "docs" / "openapi.json"), "--url", endpoint, "--seed", str(seed), "--max-examples", "20"]
        words += ["--checks", ",".join(CHECKS), "--request-timeout", str(WITHIN_S), "--suppress-health-check", "all"]
        child = await asyncio.create_subprocess_exec(
            str(SCHEMATHESIS), "run", *words, "--no-color", "--warnings", "off",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path,
        )  # fmt: skip
        said, _ = await child.communicate()
    assert child.returncode == 0, said.decode()[-8000:]
    assert f"{len(_operations())} passed" in said.decode()
    print(said.decode()[-1500:])


def _operations() -> list[tuple[str, str]]:
    offered = [path for path in PATHS if path.how is not How.REFUSED]
    return [(path.template, method) for path in offered for method in path.methods]
