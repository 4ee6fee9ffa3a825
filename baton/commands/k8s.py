"""Looks at clusters on Kubernetes: what the operator would do now, and what it lacks.

`baton k8s diff` prints what would change if a file were applied, with the reason for each, and what keeps the operator
from following a resource. It ends with 1 if there is either. `baton k8s doctor` checks the API server, the resources'
definitions, the operator's rights and the kinds of other operators.

examples:
  baton k8s diff -f baton.k8s.yaml --namespace llm
  baton k8s doctor --namespace llm --json
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from typing import Any

from baton.commands.operator import add_cluster_arguments, images, may_plan, namespace_of, resources_in, show
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
    """0 if nothing would change, or nothing is missing; else 1, also for a resource that the operator cannot follow."""
    if args.vllm_args:
        raise UsageError("`baton k8s` takes no vLLM flags")
    return asyncio.run(_diff(args) if args.action == "diff" else _doctor(args))


async def _diff(args: argparse.Namespace) -> int:
    from k8s.crd import read_resource
    from k8s.operator.client import ApiClient, ApiFailed

    changed = False
    things = resources_in(args.file)
    client = await ApiClient.open(args.kubeconfig)
    try:
        for thing in things:
            resource = read_resource(thing)
            if not may_plan(resource, as_json=args.json):
                changed = True
                continue
            namespace = args.namespace or thing["metadata"].get("namespace") or namespace_of(args)
            try:
                changed |= await _differs(client, replace(resource, namespace=namespace), args)
            except ApiFailed as refusal:
                changed = True
                because = f"the API server refuses a request: {refusal}; `baton k8s doctor` names missing rights"
                _show_obstacle(resource.name, "Refused", because, as_json=args.json)
    finally:
        await client.close()
    return 1 if changed else 0


async def _differs(client: Any, resource: Any, args: argparse.Namespace) -> bool:
    """Print what one resource (`k8s.crd.Resource`) would change, and what keeps the operator from it.

    Returns whether there is either.

    Raises:
        ApiFailed: the server refused a request.
        ApiAway: it cannot be reached.
    """
    from k8s.operator.inspect import observed_now
    from k8s.plan import Desired, limits_of, look, obstacle, plan

    live, observed, kinds, now = await observed_now(client, resource.namespace, resource.name)
    resource = replace(resource, uid=str((live or {}).get("metadata", {}).get("uid") or ""))
    desired = Desired(resource=resource, images=images(args), kinds=kinds)
    actions = plan(desired, observed, limits_of(desired, observed), now)
    in_the_way = None if resource.kubernetes.paused else obstacle(look(desired, observed), desired)
    if in_the_way is not None:
        _show_obstacle(resource.name, in_the_way.reason, in_the_way.message, as_json=args.json)
    if actions or in_the_way is None:
        show(resource, actions, as_json=args.json)
    return bool(actions) or in_the_way is not None


def _show_obstacle(name: str, reason: str, because: str, *, as_json: bool) -> None:
    """Print why a plan lacks actions, or why there is none."""
    if as_json:
        emit({"event": "obstacle", "cluster": name, "reason": reason, "because": because})
    else:
        print(f"# {name}: cannot be followed in full ({reason}): {because}")


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
