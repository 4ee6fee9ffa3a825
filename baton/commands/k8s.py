"""Looks at clusters on Kubernetes: what the operator would do now, and what it lacks.

`baton k8s diff` prints what would change if a file were applied, with the reason for each. `baton k8s doctor` checks
the API server, the resources' definitions, the operator's rights and the kinds of other operators.

examples:
  baton k8s diff -f baton.k8s.yaml --namespace llm
  baton k8s doctor --namespace llm --json
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from baton.commands.operator import add_cluster_arguments, images, namespace_of, resources_in, show
from baton.output import emit
from cluster.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton k8s`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    diff = actions.add_parser("diff", help="what the operator would do", description="What the operator would do.")
    diff.add_argument("-f", "--file", required=True, metavar="FILE", help="resources, as they would be applied")
    doctor = actions.add_parser("doctor", help="what is missing", description="What is missing on this API server.")
    for each in (diff, doctor):
        default = "the resource's, else the pod's, else default" if each is diff else "the pod's, else default"
        each.add_argument("--namespace", metavar="NAME", help=f"where to look (default: {default})")
        add_cluster_arguments(each)
        each.add_argument("--json", action="store_true", help="one JSON object a line on stdout")


def run(args: argparse.Namespace) -> int:
    """0 if nothing would change, or nothing is missing; else 1."""
    if args.vllm_args:
        raise UsageError("`baton k8s` takes no vLLM flags")
    return asyncio.run(_diff(args) if args.action == "diff" else _doctor(args))


async def _diff(args: argparse.Namespace) -> int:
    from k8s.crd import read_resource
    from k8s.operator.client import ApiClient
    from k8s.operator.inspect import observed_now
    from k8s.plan import Desired, limits_of, plan

    things, changed = resources_in(args.file), False
    client = await ApiClient.open(args.kubeconfig)
    try:
        for thing in things:
            namespace = args.namespace or thing["metadata"].get("namespace") or namespace_of(args)
            live, observed, kinds, now = await observed_now(client, namespace, thing["metadata"]["name"])
            metadata = {**thing["metadata"], "namespace": namespace, "uid": (live or {}).get("metadata", {}).get("uid")}
            resource = read_resource({**thing, "metadata": metadata})
            for problem in resource.problems:
                emit({"event": "problem", **problem.as_json()}) if args.json else print(problem)
            desired = Desired(resource=resource, images=images(args), kinds=kinds)
            actions = plan(desired, observed, limits_of(desired, observed), now)
            show(resource.name, actions, as_json=args.json)
            changed |= bool(actions) or bool(resource.errors)
    finally:
        await client.close()
    return 1 if changed else 0


async def _doctor(args: argparse.Namespace) -> int:
    from k8s.operator.client import ApiClient
    from k8s.operator.inspect import checks

    client = await ApiClient.open(args.kubeconfig)
    missing = False
    try:
        async for check in checks(client, namespace_of(args)):
            _show_check(check, as_json=args.json)
            missing |= not check.good and not check.optional
    finally:
        await client.close()
    return 1 if missing else 0


def _show_check(check: Any, *, as_json: bool) -> None:
    if as_json:
        emit(
            {"event": "check", "what": check.what, "ok": check.good, "optional": check.optional, "detail": check.detail}
        )
    else:
        mark = "ok  " if check.good else "info" if check.optional else "FAIL"
        print(f"{mark} {check.what}: {check.detail}")
