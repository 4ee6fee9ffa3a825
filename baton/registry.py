"""Flags for the registry, and the registry that they name: the same for every command."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Final

from baton.cluster_flag import cluster_name
from baton.clusterfile import beside
from cluster.registry.proofs import Proofs
from cluster.registry.registry import DEFAULT_CLUSTER, Registry
from cluster.spec import Spec
from kvtransfer.keyfile import KeyFile
from kvtransfer.proving import FleetProofs
from kvtransfer.ticket import SigningKey

UNIX_TIME: Final = time.time  # noqa: TID251 - heartbeats of other machines are timed by it


def add_registry_arguments(parser: argparse.ArgumentParser) -> None:
    """``--registry`` and its further flags."""
    group = parser.add_argument_group("registry")
    group.add_argument(
        "--registry", metavar="URL", help="redis://HOST:PORT, or rediss:// for TLS: where the fleet meets"
    )
    group.add_argument("--registry-password-file", type=Path, metavar="FILE", help="holds the registry's password")
    group.add_argument("--registry-ca-file", type=Path, metavar="FILE", help="certificates to trust for rediss://")
    group.add_argument(
        "--cluster", type=cluster_name, metavar="NAME", help=f"which fleet of the registry (default {DEFAULT_CLUSTER})"
    )


def fill_from_file(args: argparse.Namespace, spec: Spec, file: str) -> None:
    """Take registry flags that were not given from the cluster file. If --registry is given, nothing is taken: the
    file's password belongs to the file's registry alone.
    """
    said = spec.registry
    if args.registry is not None or said.url is None:
        return
    args.registry = said.url
    args.cluster = said.cluster if args.cluster is None else args.cluster
    for name in ("password_file", "ca_file"):
        path, flag = getattr(said, name), f"registry_{name}"
        if getattr(args, flag) is None and path is not None:
            setattr(args, flag, beside(file, path))


def cluster_of(args: argparse.Namespace) -> str:
    """The cluster that the flags name, or the default one."""
    return DEFAULT_CLUSTER if args.cluster is None else args.cluster


def open_registry(args: argparse.Namespace, proofs: Proofs | None = None) -> Registry | None:
    """The registry that the flags name; None without ``--registry``. It connects at its first call.

    `proofs`: proves this program's heartbeats and judges those of others; None without ticket keys.

    Raises:
        UsageError: the URL or a file cannot be used.
    """
    if args.registry is None:
        return None
    from cluster.registry.redis import RedisRegistry

    return RedisRegistry.open(
        args.registry,
        cluster=cluster_of(args),
        password_file=args.registry_password_file,
        ca_file=args.registry_ca_file,
        proofs=proofs,
    )


def fleet_proofs(keys: KeyFile[tuple[SigningKey, ...]] | None, *, accepts_unproven: bool = False) -> FleetProofs | None:
    """The proofs of a program with the fleet's ticket keys; None without keys."""
    return (
        None
        if keys is None
        else FleetProofs(keys.get, UNIX_TIME, accepts_unproven=accepts_unproven, steady=time.monotonic)
    )
