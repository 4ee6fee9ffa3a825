"""The Kubernetes operator: makes clusters follow their BatonCluster resources. Needs `pip install 'baton-serve[k8s]'`.

Acts in one namespace, with a namespaced Role. Of several replicas the holder of a Lease acts. With --once --dry-run it
needs no API server: it prints what it would do for the resources of a file in an empty namespace, and the objects.

examples:
  baton operator --namespace llm
  baton operator --once --dry-run -f k8s/examples/mocks.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from baton import __version__, compiled
from baton.number_flags import port
from baton.output import emit, say
from cluster.errors import UsageError
from cluster.text_file import decoded, text_in

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
IMAGES = "baton"
LEASE = "baton-operator"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton operator`."""
    parser.add_argument("--namespace", metavar="NAME", help="where it acts (default: the pod's, else default)")
    parser.add_argument("--all-namespaces", action="store_true", help="act everywhere; needs a ClusterRole")
    add_cluster_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address of its metrics (default %(default)s)")
    parser.add_argument("--port", type=port, default=8080, help="port of its metrics, 0 = a free one (default 8080)")
    parser.add_argument("--once", action="store_true", help="plan once and end")
    parser.add_argument("--dry-run", action="store_true", help="with --once: print, change nothing")
    parser.add_argument("-f", "--file", metavar="FILE", help="with --once --dry-run: resources to plan; - = stdin")
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
    parser.add_argument("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), default="INFO")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that say which API server and which images."""
    parser.add_argument("--kubeconfig", metavar="FILE", help="default: the pod's account, else ~/.kube/config")
    tag = __version__
    images = {"image": f"{IMAGES}/engine:{tag}", "router-image": f"{IMAGES}/router:{tag}", "redis-image": "redis:8"}
    for name, image in images.items():
        what = "images of resources that name none" if name == "image" else "as --image"
        parser.add_argument(f"--{name}", default=image, metavar="IMAGE", help=f"{what} (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print a plan, or follow resources until SIGTERM."""
    if args.vllm_args:
        raise UsageError("`baton operator` takes no vLLM flags")
    if args.once != args.dry_run or args.once != (args.file is not None):
        raise UsageError("--once, --dry-run and -f FILE go together: baton operator --once --dry-run -f FILE")
    if args.once:
        return _dry_run(args)
    return asyncio.run(_follow(args))


def resources_in(name: str) -> list[dict[str, Any]]:
    """The BatonClusters of a file.

    Raises:
        UsageError: the file cannot be read, or holds none.
    """
    fix = "give a file of YAML resources"
    data = None if name != "-" else sys.stdin.buffer.read()
    text = text_in(Path(name), "-f", fix) if data is None else decoded(data, "-f -")
    try:
        documents = [each for each in yaml.safe_load_all(text) if isinstance(each, dict)]
    except yaml.YAMLError as error:
        raise UsageError(f"-f {name}: {str(error).splitlines()[0]}; {fix}") from error
    found = [each for each in documents if each.get("kind") == "BatonCluster"]
    if not found:
        raise UsageError(f"-f {name}: no BatonCluster in it; write `kind: BatonCluster`")
    return found


def _dry_run(args: argparse.Namespace) -> int:
    from baton.floor import floor_of
    from cluster.spec.tree import tree_of
    from cluster.spec.writer import written
    from k8s.crd import read_resource
    from k8s.plan import Apply, Desired, ObservedCluster, PlanLimits, plan

    wrong = False
    for thing in resources_in(args.file):
        resource = read_resource(thing, floor_of=floor_of)
        if not may_plan(resource, as_json=args.json):
            wrong = True
            continue
        actions = plan(Desired(resource=resource, images=images(args)), ObservedCluster(), PlanLimits(), 0.0)
        show(resource, actions, as_json=args.json)
        if not args.json:
            manifests = [_bare(each.manifest) for each in actions if isinstance(each, Apply)]
            print("---\n".join(written(tree_of(each), width=120) for each in manifests), end="")
    return 1 if wrong else 0


def may_plan(resource: Any, *, as_json: bool) -> bool:
    """Tell a resource's problems (`k8s.crd.Resource`). False if the operator does not act on it because of errors."""
    for problem in resource.problems:
        emit({"event": "problem", **problem.as_json()}) if as_json else say(str(problem))
    errors = len(resource.errors)
    if errors and as_json:
        emit({"event": "refused", "cluster": resource.name, "errors": errors})
    elif errors:
        name, what = resource.name or "a resource without a name", "1 error" if errors == 1 else f"{errors} errors"
        print(f"# {name}: not acted on, because of {what}: correct what stands on stderr, and run this again")
    return not errors


def _bare(manifest: Any) -> dict[str, Any]:
    """An object without its owners, which have no UIDs before they are made: `kubectl apply --dry-run` takes it."""
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "ownerReferences"}
    return {**manifest, "metadata": metadata}


def images(args: argparse.Namespace) -> Any:
    """The images that the flags name (`k8s.plan.Images`)."""
    from k8s.plan import Images

    return Images(engine=args.image, router=args.router_image, redis=args.redis_image)


def show(resource: Any, actions: Any, *, as_json: bool) -> None:
    """Print the plan of a resource (`k8s.crd.Resource`): one line an action, or one JSON object."""
    from k8s.operator.hands import shown

    name = resource.name
    for action in actions:
        if as_json:
            emit({"event": "action", "cluster": name, "action": shown(action), "because": action.because})
        else:
            print(f"# {name}: {shown(action)}: {action.because}")
    if not actions:
        because = "it is paused by kubernetes.paused" if resource.kubernetes.paused else "all is as it should be"
        if as_json:
            emit({"event": "nothing", "cluster": name, "because": because})
        else:
            print(f"# {name}: nothing to do: {because}")


def namespace_of(args: argparse.Namespace) -> str:
    """The namespace to act in: --namespace, else the pod's, else `default`; empty: all namespaces."""
    if getattr(args, "all_namespaces", False):
        return ""
    if args.namespace:
        return str(args.namespace)
    return pod_namespace() or "default"


def pod_namespace() -> str:
    """The namespace of this pod; empty: this process runs in none."""
    return SERVICE_ACCOUNT.read_text().strip() if SERVICE_ACCOUNT.exists() else ""


async def _follow(args: argparse.Namespace) -> int:
    import aiohttp

    from baton.k8s_scaling import Controllers
    from baton.signals import stopping_signals
    from cluster.telemetry import configure_logging
    from k8s.operator.client import ApiClient
    from k8s.operator.controller import Operator, OperatorSettings
    from k8s.operator.election import Election
    from k8s.operator.fleet import HttpFleet
    from k8s.operator.scaling import ScalingBoard

    configure_logging(args.log_level)
    compiled.log_it()
    stop = asyncio.Event()
    namespace = namespace_of(args)
    client = await ApiClient.open(args.kubeconfig)
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        board = ScalingBoard()
        operator = Operator(
            client,
            HttpFleet(session),
            OperatorSettings(namespace=namespace, images=images(args), pod_namespace=pod_namespace(), board=board),
            time.time,  # noqa: TID251 - labels and conditions are written in Unix time
        )
        me = f"{socket.gethostname()}_{os.getpid()}"
        home = namespace or namespace_of(argparse.Namespace(namespace=None))
        election = Election(client, home, LEASE, me, time.monotonic, time.time)  # noqa: TID251
        operator.may_act = election.holds
        server = await _serve_metrics(args, operator, election)
        try:
            with stopping_signals(stop.set):
                await _until(
                    stop, operator.run(), election.run(), Controllers(operator, board, client, time.monotonic).run()
                )
        finally:
            await server.cleanup()
            await client.close()
    return 0


async def _until(stop: asyncio.Event, *work: Any) -> None:
    """Run all coroutines until one fails or `stop` is set; then cancel them (`Election.run` releases the Lease)."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
        await stop.wait()
        for task in tasks:
            task.cancel()


async def _serve_metrics(args: argparse.Namespace, operator: Any, election: Any) -> Any:
    """Open the port of probes and metrics; the runner to clean up. Raises UsageError if the port is taken."""
    from aiohttp import web

    from baton.output import announce_ready
    from engine.agent.http import listen

    async def metrics(_: web.Request) -> web.Response:
        told = {f"baton_operator_{name}_total": value for name, value in operator.counted().items()}
        told["baton_operator_leading"] = int(election.holds())
        text = "".join(
            f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n{name} {value}\n"
            for name, value in told.items()
        )
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/health", health)])
    runner, url = await listen(app, args.host, args.port, "--port")
    announce_ready("operator", url, as_json=args.json)
    return runner
