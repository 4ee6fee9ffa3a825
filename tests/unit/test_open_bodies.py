"""The bound on the bodies of open requests."""

from __future__ import annotations

import pytest

from cluster.errors import ApiError
from router.core.clients import OpenBodies


def test_one_client_leaves_room_for_others() -> None:
    bodies = OpenBodies(100)
    bodies.check("a", 500)
    for _ in range(3):
        bodies.check("a", 25)
        bodies.add("a", 25)
    with pytest.raises(ApiError, match="your open requests have 75 bytes, 75 at most"):
        bodies.check("a", 1)
    bodies.check("b", 25)
    bodies.add("b", 25)
    with pytest.raises(ApiError, match="--open-bytes-max"):
        bodies.check("c", 1)
    bodies.drop("a", 25)
    bodies.check("c", 25)
    for client, size in (("a", 25), ("a", 25), ("b", 25)):
        bodies.drop(client, size)
    assert (bodies.bytes, bodies._of) == (0, {})


def test_requests_without_a_body_leave_nothing_behind() -> None:
    """Before, the second of two at once ended with a KeyError: a 404 became a 500."""
    bodies = OpenBodies(100)
    for size in (0, 0, 9):
        bodies.add("a", size)
    for size in (9, 0, 0):
        bodies.drop("a", size)
    assert (bodies.bytes, bodies._of) == (0, {})
