"""Law 1 (cores decide, shells do) and the other rules about the shape of the code, held by reading the code.

The allow-list of shells and the list of what a pure module may import stand in pyproject.toml under [tool.baton].
Import direction is `lint-imports`' business, style is ruff's; both run in `make check`.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHELLS: dict[str, str] = PROJECT["tool"]["baton"]["shells"]
PURE_IMPORTS = frozenset(PROJECT["tool"]["baton"]["pure_imports"])
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]
OURS = frozenset(name.partition(".")[0] for name in PACKAGES)

NOT_PRODUCT = {"bench", "build", "dist", "docs", "requirements", "tests", "tools"}
FUNCTION_LINES_MAX = 70
ASKS_THE_WORLD = {  # calls a pure module may not make even where the import is harmless
    "open": "opens a file",
    "print": "writes to the terminal",
    "input": "reads from the terminal",
    "now": "reads a clock",
    "utcnow": "reads a clock",
    "today": "reads a clock",
}


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {
    module_name(path): path
    for top in sorted(ROOT.iterdir())
    if top.is_dir() and not top.name.startswith(".") and top.name not in NOT_PRODUCT and not top.suffix
    for path in sorted(top.rglob("*.py"))
}
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def is_shell(module: str) -> bool:
    parents = [".".join(module.split(".")[:depth]) for depth in range(1, module.count(".") + 2)]
    return module in SHELLS or any(f"{parent}.*" in SHELLS for parent in parents)


def for_types_only(tree: ast.Module) -> set[ast.AST]:
    """Every node under `if TYPE_CHECKING:`."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def imported(node: ast.AST) -> list[str]:
    """What an import statement names: for `from a import b` both `a` and `a.b`, as b may be a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "")] + [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def import_fault(names: list[str]) -> str | None:
    """Why a pure module may not import this."""
    for name in names:
        if name.startswith("."):
            return "imports relatively; say the whole name"
        if name.partition(".")[0] in OURS and is_shell(name):
            return f"imports the shell {name}"
    name = names[0]
    first = name.partition(".")[0]
    if first in OURS or first in PURE_IMPORTS or any(known in PURE_IMPORTS for known in names):
        return None
    return f"imports {name}, which [tool.baton] pure_imports does not name"


def impurities(source: str) -> Iterator[str]:
    """What in this source breaks law 1, one line each."""
    tree = ast.parse(source)
    skipped = for_types_only(tree)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        fault = None
        if isinstance(node, ast.Import | ast.ImportFrom):
            fault = import_fault(imported(node))
        elif isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            fault = "waits (async)"
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            fault = ASKS_THE_WORLD.get(called)
        if fault:
            yield f"line {node.lineno}: {fault}"


@pytest.mark.parametrize("module", [name for name in MODULES if not is_shell(name)])
def test_pure_module_touches_nothing(module: str) -> None:
    found = list(impurities(MODULES[module].read_text()))
    assert not found, f"{module} is not a shell in pyproject.toml [tool.baton.shells], so it may not do this: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio",
        "import os",
        "from os import environ",
        "import time as clock",
        "import random",
        "from socket import create_connection",
        "import urllib.request",
        "from pathlib import Path",
        "import aiohttp.web",
        "def f():\n    import subprocess",
        "try:\n    import threading\nexcept ImportError:\n    pass",
        "from . import sibling",
        "from baton import cli",
        "from cluster import telemetry",
        "import cluster.telemetry",
        "async def f(): ...",
        "open('/etc/passwd')",
        "path.open()",
        "print('hello')",
        "import datetime\ndatetime.datetime.now()",
    ],
)
def test_impurity_is_found(source: str) -> None:
    assert list(impurities(source))


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations",
        "from collections.abc import Iterable",
        "from urllib.parse import urlsplit",
        "import msgspec",
        "from cluster import ids",
        "from cluster.ids import RequestId",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pathlib import Path\n    import asyncio",
        "def opened(now): return now + 1",
    ],
)
def test_purity_is_not_mistaken(source: str) -> None:
    assert not list(impurities(source))


def test_every_listed_shell_exists_and_says_what_it_touches() -> None:
    for shell, reason in SHELLS.items():
        name = shell.removesuffix(".*")
        assert name in MODULES, f"[tool.baton.shells] names {shell}, which does not exist"
        assert reason.strip(), f"[tool.baton.shells] gives no reason for {shell}"


def test_no_package_is_forgotten() -> None:
    folders = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert folders == set(PACKAGES), "pyproject.toml [tool.setuptools] packages"
    assert set(PROJECT["tool"]["importlinter"]["root_packages"]) == OURS, "pyproject.toml [tool.importlinter]"
    assert set(PROJECT["tool"]["mypy"]["files"]) >= OURS, "pyproject.toml [tool.mypy] files"
    layers = " | ".join(PROJECT["tool"]["importlinter"]["contracts"][0]["layers"])
    for name in OURS:
        assert re.search(rf"(?<![\w(]){name}(?![\w)])", layers), (
            f"{name} exists: take it out of its brackets in the layers"
        )


def test_one_package_reads_http_messages() -> None:
    """Limits and refusals stand in one place. `bench/` is not checked: its relay and engine may check less."""
    sources = {name: text for name, path in MODULES.items() if "httptools" in (text := path.read_text())}
    trees = {name: ast.walk(ast.parse(text)) for name, text in sources.items()}
    users = {name for name, tree in trees.items() if any("httptools" in imported(node) for node in tree)}
    assert users == {"cluster.http.answers", "cluster.http.heads"}


def functions(path: Path) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    """The functions of a file. Its tree is not cached: the garbage collector would scan so many trees each time."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return tuple(node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_functions_stay_short() -> None:
    paths = [*MODULES.values(), *TESTS, *(ROOT / "tools").glob("*.py")]
    long = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name} ({lines} lines)"
        for path in paths
        for function in functions(path)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not long


CHECKS = re.compile(r"raises|assert|check|expect|verify|fail")


def blind_tests(path: Path) -> Iterator[str]:
    """Tests that fail only by an error: no assert, no `raises`, and no call of what asserts or has a checking name."""
    own = functions(path)
    asserting = {function.name for function in own if any(isinstance(n, ast.Assert) for n in ast.walk(function))}
    for function in own:
        called = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
        sighted = function.name in asserting or called & asserting or any(CHECKS.search(name) for name in called)
        if function.name.startswith("test_") and not sighted:
            yield f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"


def test_every_test_checks_something() -> None:
    assert not [test for path in TESTS for test in blind_tests(path)]


def test_tests_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py")), (
        "tests run with --import-mode=importlib and have no __init__.py"
    )


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other in a ring, however long (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        path.append(name)
        for target in sorted(arrows[name]):
            if target not in number:
                visit(target)
            if target in path:
                lowest[name] = min(lowest[name], lowest[target])
        if lowest[name] == number[name]:
            ring = path[path.index(name) :]
            del path[path.index(name) :]
            if len(ring) > 1:
                found.append(sorted(ring))

    for name in arrows:
        if name not in number:
            visit(name)
    return found


def arrows_in(top: str) -> dict[str, set[str]]:
    """By module of a package, the package's modules that it imports, also those imported for types only."""
    inside = {name: path for name, path in MODULES.items() if name.partition(".")[0] == top}
    return {
        name: {each for node in ast.walk(ast.parse(path.read_text())) for each in imported(node) if each in inside}
        - {name}
        for name, path in inside.items()
    }


def test_no_circle_in_the_router() -> None:
    """import-linter does not see rings within a room, and rings of imports for types only."""
    assert circles(arrows_in("router")) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
