"""Inside vLLM's process the guard imports the standard library, `kvtransfer`, and a few modules of `cluster` alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BLOCKED = """
import importlib.abc, json, sys

OURS = {"cluster", "cluster.ids", "cluster.scan", "cluster.wire", "kvtransfer"}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or name in OURS or name.startswith("kvtransfer."):
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

USE = """
import asyncio, os
from kvtransfer.guard import Guard

sent = []

async def receive():
    return {"type": "http.request", "body": b'{"kv_transfer_params": {"a": 1}}', "more_body": False}

async def send(message):
    sent.append(message.get("status"))

asyncio.run(Guard(None)({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send))
print(sent[0])
"""


def run(code: str) -> str:
    """A Python of its own, without this environment's packages."""
    whole = f"ROOT = {str(ROOT)!r}\n{BLOCKED}\n{code}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", whole], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_guard_works_with_everything_else_blocked() -> None:
    assert run(USE) == "403"


@pytest.mark.parametrize("module", ["kvtransfer.guard", "kvtransfer.keyfile", "kvtransfer.screen", "kvtransfer.keys"])
def test_each_module_of_the_guard_imports_alone(module: str) -> None:
    assert run(f"import {module}; print('there')") == "there"


def test_the_guard_is_found_by_the_name_that_vllm_is_given() -> None:
    """vLLM splits at the last dot and imports what is before it."""
    from engine.vllm.command import GUARD

    module, name = GUARD.rsplit(".", 1)
    assert run(
        f"import importlib; print(isinstance(getattr(importlib.import_module({module!r}), {name!r}), type))"
    ) == ("True")
