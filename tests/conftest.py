"""What all tests share: pure tests cannot reach the network, live tests come last, skips are listed at the end."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from baton import compiled
from baton.signals import STOPPING

if TYPE_CHECKING:
    from support.fuzzing import Fuzzing

if os.environ.get(compiled.OFF) == "1" and (because := compiled.use()):
    pytest.exit(f"{compiled.OFF} is 1, and nothing compiled is used: {because} (make compile)", 2)

TESTS = Path(__file__).parent
NO_NETWORK = ("unit", "property", "playbook", "sim")
"""Folders whose tests decide on values alone. Sockets belong to contract, live and chaos."""

ORDER = ("unit", "property", "playbook", "sim", "contract", "fuzz", "live", "chaos")
"""Cheap tests run first, so that a failure shows early. Tests that start engines run last."""


FUZZ_S = pytest.StashKey[float]()
"""How many seconds each fuzz test of this run takes."""

UNTIMED = [HealthCheck.too_slow]
"""This health check reads the wall clock. On a fresh clone Hypothesis takes seconds for its tables of characters."""
settings.register_profile("repeatable", derandomize=True, database=None, suppress_health_check=UNTIMED)
settings.register_profile("searching", derandomize=False, suppress_health_check=UNTIMED)
settings.load_profile("repeatable")
"""Every run uses the same examples, so that only a change can break a test. `make test-long` searches for new ones."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test` runs live tests with the connector that users get; `make test-long` with the other one, too."""
    told = "what moves KV cache between the live tests' engines (default auto)"
    parser.addoption("--connector", choices=["auto", "nixl", "baton"], default="auto", help=told)
    told = "seconds that all fuzz tests together spend on fresh seeds (default: the fixed cases only)"
    parser.addoption("--fuzz-s", type=float, default=0.0, help=told)
    told = "the operator's tests run against this API server, which has no kubelet (default: the double)"
    parser.addoption("--kubeconfig", default="", help=told)
    told = "the live tests of kinds of models write what they see (docs/benchmarks/kinds.json), instead of comparing"
    parser.addoption("--publish-kinds", action="store_true", help=told)
    told = "live tests' engines compute on this machine's first GPU (default: on its cores)"
    parser.addoption("--gpu", action="store_true", help=told)
    parser.addoption("--fuzz-seed", type=int, default=None, help="fuzz tests run the one case of this seed")


def pytest_configure(config: pytest.Config) -> None:
    """Find the GPU for `--gpu`. Without one the run ends at once: tests on cores would not be what was asked for."""
    if not config.getoption("--gpu"):
        return
    from support.device import use_gpu

    from engine.vllm.hardware import find_hardware  # not above: what is compiled has to be used first

    found = find_hardware()
    if not found.gpus:
        pytest.exit(f"--gpu: no GPU was found for vLLM {found.vllm or '(not installed)'} (make setup DEVICE=gpu)", 2)
    use_gpu(found.gpus[0].id)


def pytest_collection_finish() -> None:
    """Keep the garbage collector off what was imported and collected: each of its full looks would visit all of it, for
    seconds of a run's time, and for pauses that a test of times would see.
    """
    gc.collect()
    gc.freeze()


def kind(item: pytest.Item) -> str:
    """The folder of tests/ that a test stands in."""
    return item.path.relative_to(TESTS).parts[0]


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A program that a test runs in this process ignores SIGTERM when it has ended (`baton.signals`). Processes that
    later tests start would inherit that, and never end.
    """
    before = {each: signal.getsignal(each) for each in STOPPING}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Sort tests by kind, mark those in live/ and chaos/ as live, skip tests of internals that are compiled."""
    for item in items:
        if kind(item) in {"live", "chaos"}:
            item.add_marker(pytest.mark.live)
        if os.environ.get(compiled.OFF) == "1" and item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.skip(reason="reads or replaces internals of a module that is compiled"))
    fuzzing = [item for item in items if "fuzz" in getattr(item, "fixturenames", ())]
    seconds = session.stash[FUZZ_S] = session.config.getoption("--fuzz-s") / max(1, len(fuzzing))
    for item in fuzzing if seconds else ():
        item.add_marker(pytest.mark.timeout(seconds + 300))
    items.sort(key=lambda item: ORDER.index(kind(item)) if kind(item) in ORDER else len(ORDER))


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzzing:
    """How long this test fuzzes: the fuzz tests of a run share `--fuzz-s` in equal parts."""
    from support.fuzzing import Fuzzing  # not above: it imports the router, and what is compiled has to be used first

    return Fuzzing(request.session.stash[FUZZ_S], request.config.getoption("--fuzz-seed"))


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a pure test that opens a connection, unless `@pytest.mark.sockets` says that a socket is its subject."""
    if kind(request.node) not in NO_NETWORK or request.node.get_closest_marker("sockets"):
        return

    def refuse(*args: object, **_: object) -> None:
        addresses = [arg for arg in args if not isinstance(arg, socket.socket)]
        pytest.fail(f"a test under tests/{kind(request.node)} reached for the network: {addresses}")

    for name in ("bind", "connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was not tested on this machine. The reason of a skip names what to install."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        if isinstance(report.longrepr, tuple):
            reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section("not tested on this machine")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:4d} × {reason}")
