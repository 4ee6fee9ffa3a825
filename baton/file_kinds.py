"""What is at a path that a user, a cluster file or an engine names: a file, a folder, or nothing that can be seen.

`Path.exists`, `Path.is_file` and `Path.is_dir` raise OSError where a folder above the path may not be entered or a name
is too long. Here such a path counts as absent; to open it gives the system's reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def exists(path: Path) -> bool:
    """Whether something is at this path."""
    return _is(path.exists)


def is_file(path: Path) -> bool:
    """Whether a file is at this path."""
    return _is(path.is_file)


def is_folder(path: Path) -> bool:
    """Whether a folder is at this path."""
    return _is(path.is_dir)


def _is(look: Callable[[], bool]) -> bool:
    try:
        return look()
    except OSError:
        return False
