"""Copies of an API server's objects. They are JSON: encoding and decoding is five times as fast as `copy.deepcopy`."""

from __future__ import annotations

from typing import Any

import msgspec


def copied(thing: Any) -> Any:
    """A copy that shares nothing with the original."""
    return msgspec.json.decode(msgspec.json.encode(thing))


NS = "baton-operator-test"
"""The namespace of all scenarios. On a real API server it is emptied after each scenario, and deleted at the end."""
