"""Faults that a user can mend name the flag to change."""

from __future__ import annotations

import errno

import pytest

from cluster.errors import cannot_listen

TAKEN = "cannot listen on h:80 (taken): choose another --admin-port"
ELSEWHERE = "cannot listen on h:80 (no such address): choose an address of this machine with --admin-host"


@pytest.mark.parametrize(
    ("number", "said", "told"),
    [
        (errno.EADDRINUSE, "taken", TAKEN),
        (errno.EACCES, "error while attempting to bind on address ('h', 80): taken", TAKEN),
        (errno.EADDRNOTAVAIL, "no such address", ELSEWHERE),
        (-2, "no such address", ELSEWHERE),  # a name that cannot be resolved
    ],
)
def test_a_server_that_cannot_be_opened_names_the_flag_that_helps(number: int, said: str, told: str) -> None:
    assert str(cannot_listen("h", 80, OSError(number, said), "--admin-port")) == told
