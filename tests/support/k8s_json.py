"""Objects of an API server are JSON: copied as such, five times as fast as by `copy.deepcopy`."""

from __future__ import annotations

from typing import Any

import msgspec


def copied(thing: Any) -> Any:
    """A copy that shares nothing with the original."""
    return msgspec.json.decode(msgspec.json.encode(thing))


NS = "baton-operator-test"
"""The namespace of all scenarios: on a real API server it is emptied after each of them, and deleted at the end."""
