"""The part of `--on ray` that runs in a worker of the cluster: the driver's own source, compiled if the driver is.

A worker imports this module and nothing else of Baton before it knows whether to use compiled modules: objects of
compiled modules do not fit interpreted ones. Only then does it unpack its task.
"""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

import baton
from baton import compiled
from baton.packing import packed, unpacked

PACKAGES: Final = (
    "baton", "cluster", "costs", "decode", "engine", "goodput", "kvtransfer", "loadgen", "prefill", "router", "sim",
)  # fmt: skip
"""Packages whose source a simulation may depend on."""


class OtherSource(Exception):
    """A node runs another Baton than the driver; the message says which, and how it differs."""


@cache
def digest() -> str:
    """A digest of everything that simulations depend on: Baton's source, Python's and numpy's versions."""
    root = Path(baton.__file__).resolve().parent.parent
    found = hashlib.sha256(f"{platform.python_version()} {np.__version__}".encode())
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            found.update(str(path.relative_to(root)).encode())
            found.update(path.read_bytes())
    return found.hexdigest()


_contexts: dict[str, Any] = {}
"""The context of this worker's tasks by key, unpacked once."""


def there(wanted: str, with_compiled: bool, key: str, held: list[Any], asked: bytes) -> bytes:  # noqa: FBT001 - Ray's
    """On a worker: the result of one task, `packed`.

    Args:
        wanted: the driver's `digest`.
        with_compiled: whether the driver uses compiled modules.
        key: names the context.
        held: Ray's reference of the context, `packed`, alone in a list.
        asked: the function and its further arguments, `packed`.

    Raises:
        OtherSource: this node has other source, or cannot use the compiled modules that the driver uses.
    """
    import ray

    here = str(ray.util.get_node_ip_address())
    if digest() != wanted:
        raise OtherSource(f"{here} runs another Baton, Python or numpy than this one: install the same there")
    if with_compiled and (because := compiled.use()):
        raise OtherSource(
            f"{here} cannot use the compiled modules that this process uses ({because}): "
            f"compile there, too, or set {compiled.OFF}=0 here"
        )
    call, args = unpacked(asked)
    if key not in _contexts:
        _contexts.clear()
        _contexts[key] = unpacked(ray.get(held[0]))
    return packed(call(_contexts[key], *args))
