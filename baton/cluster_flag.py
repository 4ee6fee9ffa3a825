"""`--cluster NAME`: the name of a cluster on the command line. It stands in file names and in the registry's keys."""

from __future__ import annotations

import argparse

from cluster.spec.about import NAME


def cluster_name(text: str) -> str:
    """For argparse: a cluster's name."""
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}: write letters, digits, `.`, `_`, `-`, up to 63")
    return text
