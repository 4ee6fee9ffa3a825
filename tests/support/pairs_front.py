"""Routers of a test's own in front of real engines: one that hands over wherever a pair can serve, and one by URLs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from support.cluster import Cluster, with_support, within

from bench.router_front import PAIRS_ROUTER, ROUTER, Front, registered, started


@contextmanager
def pairs_only(cluster: Cluster, pairs: int) -> Iterator[Front]:
    """The router, once it has proven so many pairs."""
    words = [*PAIRS_ROUTER, *ROUTER, "--policy", "workload", *registered(cluster.state)]
    with started(words, with_support()) as front:
        within(120, lambda: front.proven(pairs))
        yield front


@contextmanager
def as_it_starts(cluster: Cluster, pairs: int) -> Iterator[Front]:
    """`baton router` with the cluster's registry and keys alone, once it knows of so many proven pairs."""
    with started([sys.executable, "-m", "baton", *ROUTER, *registered(cluster.state)], with_support()) as front:
        within(120, lambda: front.proven(pairs))
        yield front


@contextmanager
def by_url(*words: str, pairs: int) -> Iterator[Front]:
    """`baton router` with these words, once it has proven so many pairs."""
    with started([sys.executable, "-m", "baton", *ROUTER, *words], with_support()) as front:
        within(120, lambda: front.proven(pairs))
        yield front
