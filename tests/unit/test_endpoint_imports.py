"""The endpoint runs inside vLLM's process: it imports the standard library, modules of ours that do so, and NIXL."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BLOCKED = """
import importlib.abc, sys

OURS = {"cluster", "cluster.ids", "cluster.wire", "kvtransfer"}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or name in OURS or name.startswith("kvtransfer.") or top in MORE:
            return None
        raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Blocker())
sys.path.insert(0, ROOT)
try:
    import msgspec
except ImportError:
    pass
else:
    raise SystemExit("the blocker does not block")
"""


def run(code: str, more: set[str] | None = None) -> str:
    whole = f"ROOT = {str(ROOT)!r}\nMORE = {more or set()!r}\n{BLOCKED}\n{code}"
    flags = ["-I"] if more else ["-I", "-S"]
    done = subprocess.run([sys.executable, *flags, "-c", whole], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["endpoint", "loopback", "introduction", "stamps", "layout", "pacing", "envelope"])
def test_each_module_imports_with_everything_else_blocked(module: str) -> None:
    assert run(f"import kvtransfer.{module}; print('there')") == "there"


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL's carrier (pip install nixl nixl-cu13)")
def test_the_carrier_on_nixl_needs_nixl_and_what_nixl_needs() -> None:
    needs = {"nixl", "nixl_cu13", "nixl_cu12", "nixl_rocm", "nixl_meta_utils", "numpy"}
    assert run("import kvtransfer.nixl; print('there')", needs) == "there"
