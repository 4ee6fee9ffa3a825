"""More changes of a cluster on Kubernetes: sizes, SLO targets, models, other leaders, uninstalls, evictions."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.k8s_api import Kind, Refused
from support.k8s_stage import IMAGES, MODE, NS, REAL_LIMIT_S, Stage, image, quicken, spec, staged

pytest.importorskip("kubernetes", reason="the kubernetes client is not installed: pip install kubernetes==37.0.2")

from k8s.crd import read_resource
from k8s.crd.names import API_VERSION, GROUP, LABEL_CLUSTER, LABEL_PART, LABEL_REVISION
from k8s.operator import controller
from k8s.operator.client import ApiFailed
from k8s.operator.election import Election
from k8s.operator.inspect import observed_now
from k8s.plan import Desired, limits_of, plan
from k8s.plan.observe import INSTANCE
from k8s.plan.rights import RIGHTS


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture(autouse=True)
def mode(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODE, "kubeconfig", pytestconfig.getoption("kubeconfig", ""))


async def pool(stage: Stage, name: str, replicas: int, cluster: str = "chat") -> None:
    wanted = {"cluster": cluster, "pool": name, "replicas": replicas}
    metadata = {"name": f"chat-{name}", "namespace": NS}
    thing = {"apiVersion": API_VERSION, "kind": "BatonPool", "metadata": metadata, "spec": wanted}
    if stage.server.get("batonpools", f"chat-{name}") is None:
        await stage.client.create(thing)
    else:
        await stage.client.merge(API_VERSION, "BatonPool", NS, f"chat-{name}", {"spec": {"replicas": replicas}})


def uids(stage: Stage, part: str = "") -> set[str]:
    return {each["metadata"]["uid"] for each in stage.server.all("pods") if part in each["metadata"]["name"]}


async def test_each_pool_is_resized_by_itself() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        sizes = {"prefill": 1, "decode": 1}
        for name, replicas in (("prefill", 3), ("decode", 2), ("prefill", 1), ("decode", 1)):
            other = "decode" if name == "prefill" else "prefill"
            kept = uids(stage, f"-{other}-")
            sizes[name] = replicas
            await pool(stage, name, replicas)
            await stage.until(lambda: stage.settled(sizes["prefill"], sizes["decode"]))
            assert uids(stage, f"-{other}-") == kept


async def test_a_changed_slo_target_restarts_no_engine() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        engines, routers = uids(stage, "-decode-") | uids(stage, "-prefill-"), uids(stage, "-router-")
        await stage.change({"slo": {"fast": {"ttft_ms": 500}}})
        await stage.until(lambda: not uids(stage, "-router-") & routers and stage.settled())
        assert uids(stage, "-decode-") | uids(stage, "-prefill-") == engines


async def test_another_model_of_the_same_name_rolls_out_in_pairs() -> None:
    async with staged() as stage:
        stage.operate()
        wanted = spec(2, 2)
        wanted["models"][0]["served_name"] = "chat"
        await stage.make(wanted)
        await stage.until(lambda: stage.settled(2, 2))
        stage.nodes.down.clear()
        before = set(stage.instances())
        other = copy.deepcopy(wanted["models"])
        other[0]["name"] = "m2"
        await stage.change({"models": other})
        await stage.until(lambda: stage.settled(2, 2) and not set(stage.instances()) & before)
        commands = [
            str(each["spec"]["template"]["spec"]["containers"][0]["command"]) for each in stage.instances().values()
        ]
        assert all("'m2'" in each for each in commands)
        assert min(stage.nodes.down) >= 4


async def test_a_model_of_another_name_is_another_model_and_the_old_one_drains_at_once() -> None:
    """Routers serve the old name no more, so its instances drain before the new model is up."""
    async with staged() as stage:
        stage.operate()
        await stage.make(spec(1, 2))
        await stage.until(lambda: stage.settled(1, 2))
        old = set(stage.instances())
        stage.nodes.broken = {"engine:2"}  # the new one does not come up yet
        stage.fleet.streams = {"chat-decode-0": 1 << 30}
        other = copy.deepcopy(spec(1, 2)["models"])
        other[0]["name"] = "m2"
        await stage.change({"models": other, **image("engine:2")})
        await stage.until(lambda: {name for what, name in stage.fleet.told if what == "drain"} == old)
        await stage.until(lambda: old & set(stage.instances()) == {"chat-decode-0"})
        await stage.until(lambda: stage.condition("Available").get("status") == "False")
        stage.fleet.streams = {}
        stage.nodes.broken = set()
        await stage.until(lambda: stage.settled(1, 2) and not set(stage.instances()) & old)
        assert stage.cluster()["status"]["model"] == "m2"


async def test_an_old_pod_stays_until_every_router_knows_the_new_one() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        before = set(stage.instances())
        stage.fleet.unknown = {f"chat-{name}-{number}" for name in ("prefill", "decode") for number in range(1, 9)}
        await stage.change(image("engine:2"))
        await stage.until(lambda: len(stage.instances()) == 4)
        await asyncio.sleep(0.5)
        assert stage.fleet.told == [], "nothing is drained for one that routers do not know"
        assert before <= set(stage.nodes.serving())
        stage.fleet.unknown = set()
        await stage.until(lambda: stage.settled() and not set(stage.instances()) & before)


async def test_a_deleted_cluster_lets_streams_end() -> None:
    """Each engine's pod gets a grace period that is no shorter than its drain."""
    async with staged() as stage:
        stage.operate()
        await stage.make(spec(kubernetes={"drain_s": 120}))
        await stage.until(stage.settled)
        given = {}
        double = stage.double
        remove = double.remove

        def watched(plural: str, thing: Any) -> Any:
            if plural == "pods":
                given[thing["metadata"]["name"]] = thing["metadata"].get("deletionGracePeriodSeconds")
            return remove(plural, thing)

        double.remove = watched  # type: ignore[method-assign]
        await stage.client.delete(API_VERSION, "BatonCluster", NS, "chat")
        async with asyncio.timeout(10):
            while stage.server.all("pods"):
                await asyncio.sleep(0.02)
        engines = [grace for name, grace in given.items() if "-decode-" in name or "-prefill-" in name]
        assert len(engines) == 2
        assert all(grace is not None and grace >= 120 for grace in engines), given


@pytest.mark.parametrize("operates", [True, False], ids=["operator", "no operator"])
async def test_a_deleted_clusters_routers_end_before_its_instances_are_told_to(operates: bool) -> None:
    """A request between its legs, or in the queue, still needs an instance that takes legs, so routers end first. The
    garbage collector keeps this order, so it also holds without an operator."""
    async with staged() as stage:
        task = stage.operate()
        await stage.make(spec(2, 2))
        await stage.until(lambda: stage.settled(2, 2))
        await stage.until(lambda: len(owners(stage, "chat-order")) == 3)  # of the resource and of two routers' pods
        if not operates:
            task.cancel()
            await asyncio.wait([task])
            stage.tasks.remove(task)
        stage.nodes.stop_steps = 10
        await stage.client.delete(API_VERSION, "BatonCluster", NS, "chat")
        seen = []
        async with asyncio.timeout(REAL_LIMIT_S):
            while stage.server.all("pods"):
                ending = {}
                for each in stage.server.all("pods"):
                    ending.setdefault(each["metadata"]["labels"][LABEL_PART], set()).add(
                        "deletionTimestamp" in each["metadata"]
                    )
                seen.append(ending)
                await asyncio.sleep(0.02)
        assert any(each.get("router") == {True} for each in seen)
        for each in seen:
            if "router" in each:
                assert {True} not in (each["instance"], each["registry"]), "behind a router everything still runs"


def owners(stage: Stage, name: str) -> list[Any]:
    found = stage.server.get("configmaps", name, NS)
    return [] if found is None else found["metadata"]["ownerReferences"]


async def stop_operator(stage: Stage) -> None:
    task = stage.tasks.pop()
    task.cancel()
    await asyncio.wait([task])


async def delete_resource(stage: Stage) -> None:
    await stage.client.delete(API_VERSION, "BatonCluster", NS, "chat")


async def delete_definition(stage: Stage) -> None:
    double = stage.double
    for plural in ("batonclusters", "batonpools"):
        for each in double.all(plural):
            double.delete(double.kinds[plural], each, {})
        double.kinds.pop(plural, None)


async def delete_rights(stage: Stage) -> None:
    def refuse(_method: str, _path: str) -> None:
        raise Refused(403, "Forbidden", "the Role is gone")

    stage.double.refuse = refuse


async def give_rights_back(stage: Stage) -> None:
    """The rights of the person who uninstalls, which still let the later steps delete objects."""
    stage.double.refuse = None


Step = Callable[[Stage], Awaitable[None]]


@pytest.mark.parametrize(
    "steps",
    [
        (stop_operator, delete_resource, delete_definition),
        (stop_operator, delete_definition),
        (delete_resource, stop_operator, delete_definition),
        (delete_resource, delete_definition, stop_operator),
        (delete_definition, stop_operator),
        (delete_rights, give_rights_back, delete_resource, delete_definition, stop_operator),
    ],
    ids=lambda steps: "-".join(each.__name__.rpartition("_")[2] for each in steps),
)
async def test_every_order_of_uninstall_ends(steps: tuple[Step, ...]) -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        for step in steps:
            await step(stage)
            await asyncio.sleep(0.1)
        stage.tasks[:] = [each for each in stage.tasks if not each.done()]
        async with asyncio.timeout(15):
            while any(
                stage.double.all(plural) for plural in ("pods", "deployments", "secrets", "services", "configmaps")
            ):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        assert stage.double.all("deployments") == [], "nothing comes back"


async def test_another_operator_takes_over_in_the_middle_of_a_rollout() -> None:
    async with staged() as stage:
        leads = ["a"]
        for name in "ab":
            stage.operate(lambda name=name: leads[0] == name)  # type: ignore[misc]
        await stage.make(spec(2, 2))
        await stage.until(lambda: stage.settled(2, 2))
        stage.nodes.down.clear()
        await stage.change(image("engine:2"))
        await stage.until(lambda: len(stage.instances()) > 4)
        counts = [each.counters.actions for each in stage.operators]
        leads[0] = "b"
        await stage.until(lambda: stage.settled(2, 2))
        assert stage.operators[0].counters.actions <= counts[0] + 1, "at most the action that was under way"
        assert stage.operators[1].counters.actions > 0
        assert counts[1] == 0, "only one acts"
        assert min(stage.nodes.down) >= 4
        images = [each["spec"]["template"]["spec"]["containers"][0]["image"] for each in stage.instances().values()]
        assert set(images) == {"engine:2"}


async def test_a_foreign_workload_of_an_instances_name_is_left_alone() -> None:
    async with staged() as stage:
        labels = {"app": "theirs"}
        pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "x", "image": "theirs"}]}}
        theirs = {"replicas": 0, "selector": {"matchLabels": labels}, "template": pod}
        metadata = {"name": "chat-decode-0", "namespace": NS}
        thing = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": theirs}
        before = await stage.client.create(thing)
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        kept = stage.server.get("deployments", "chat-decode-0")
        assert kept is not None
        assert kept["spec"] == before["spec"]
        assert sorted(stage.instances()) == ["chat-decode-1", "chat-prefill-0"]


async def test_two_clusters_whose_objects_would_have_one_name_take_nothing_from_each_other() -> None:
    """The model `v2` of the cluster `chat`, and the cluster `chat-v2`. An apply would take the other's object over."""
    async with staged() as stage:
        stage.operate()
        await stage.make(spec(), "chat-v2")
        await stage.until(lambda: told(stage, "chat-v2", "Progressing") == ("False", "AsWanted"))
        before = {name: each["metadata"]["uid"] for name, each in stage.instances().items()}
        pools = spec()["models"][0]["pools"]
        await stage.make({"models": [{"name": "m", "pools": pools}, {"name": "v2", "pools": pools}]})
        await stage.until(lambda: stage.settled(2, 2))
        assert sorted(stage.instances()) == [
            "chat-m-decode-0",
            "chat-m-prefill-0",
            "chat-v2-decode-0",
            "chat-v2-decode-1",
            "chat-v2-prefill-0",
            "chat-v2-prefill-1",
        ]
        kept = {name: each for name, each in stage.instances().items() if name in before}
        assert {name: each["metadata"]["uid"] for name, each in kept.items()} == before
        assert {each["metadata"]["labels"][LABEL_CLUSTER] for each in kept.values()} == {"chat-v2"}
        assert stage.condition("Degraded")["message"].startswith("PodDisruptionBudget chat-v2-")
        assert told(stage, "chat-v2", "Degraded") == ("False", "Healthy")
        assert told(stage, "chat-v2", "Progressing") == ("False", "AsWanted")


def told(stage: Stage, cluster: str, kind: str) -> tuple[str, str]:
    """Status and reason of a cluster's condition."""
    said = stage.cluster(cluster).get("status", {}).get("conditions", ())
    return next(((each["status"], each["reason"]) for each in said if each["type"] == kind), ("", ""))


async def test_a_pod_that_is_evicted_is_replaced_under_another_name() -> None:
    """A drained node evicts its pods. The old agent keeps its name in the registry while it ends its streams."""
    async with staged() as stage:
        stage.operate()
        await stage.make(spec(1, 2))
        await stage.until(lambda: stage.settled(1, 2))
        stage.nodes.stop_steps = 50
        await evicted(stage, "chat-decode-1")
        with pytest.raises(ApiFailed, match=r"429 TooManyRequests.*disruption budget"):
            await evict(stage, "chat-decode-0")
        await stage.until(lambda: "chat-decode-1" not in stage.instances() and stage.settled(1, 2))
        assert sorted(stage.instances()) == ["chat-decode-0", "chat-decode-2", "chat-prefill-0"]


async def evict(stage: Stage, instance: str) -> None:
    pods = (each for each in stage.server.all("pods") if each["metadata"]["labels"].get(INSTANCE) == instance)
    name = next(each["metadata"]["name"] for each in pods if not each["metadata"].get("deletionTimestamp"))
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NS}}
    await stage.client.request("POST", f"/api/v1/namespaces/{NS}/pods/{name}/eviction", body=body)


async def evicted(stage: Stage, instance: str) -> None:
    """Evict as `kubectl drain` does: try again while the disruption budget refuses, or is not counted yet."""
    async with asyncio.timeout(REAL_LIMIT_S):
        while True:
            try:
                return await evict(stage, instance)
            except ApiFailed as refusal:
                if refusal.status != 429:
                    raise
                await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("cluster", "name", "said"),
    [("chat", "decod", "did you mean 'decode'?"), ("chatt", "decode", "there is no BatonCluster 'chatt'")],
)
async def test_a_batonpool_that_names_nothing_says_so(cluster: str, name: str, said: str) -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        pods = uids(stage)
        await pool(stage, name, 3, cluster)

        def told() -> str:
            (thing,) = stage.server.all("batonpools")
            (condition,) = thing.get("status", {}).get("conditions") or [{"message": ""}]
            return str(condition["message"])

        await stage.until(lambda: said in told())
        await stage.until(lambda: any(said in each["message"] for each in stage.server.all("events")))
        event = next(each for each in stage.server.all("events") if said in each["message"])
        assert event["involvedObject"]["kind"] == "BatonPool"
        assert uids(stage) == pods
        if cluster != "chat":
            await stage.make(spec(), cluster)
            await stage.until(lambda: "it sizes decode" in told())
            await stage.until(lambda: stage.server.all("batonpools")[0]["status"].get("readyReplicas") == 3)


async def test_diff_knows_the_sizes_that_batonpools_want() -> None:
    """`decode` has no `max`: by the resource alone it has one instance, so `baton k8s diff` told of two drains."""
    async with staged() as stage:
        stage.operate()
        await stage.make({"models": [{"name": "m", "pools": {"prefill": {}, "decode": {}}}]})
        await pool(stage, "decode", 3)
        await stage.until(lambda: stage.settled(1, 3))
        live, observed, kinds, now = await observed_now(stage.client, NS, "chat")
        assert live is not None
        desired = Desired(resource=read_resource(live), images=IMAGES, kinds=kinds)
        assert plan(desired, observed, limits_of(desired, observed), now) == ()


async def test_of_two_batonpools_of_one_pool_the_older_decides_and_the_other_says_so() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        for number, name in ((2, "older"), (3, "a-newer")):
            wanted = {"cluster": "chat", "pool": "decode", "replicas": number}
            thing = {"apiVersion": API_VERSION, "kind": "BatonPool", "metadata": {"name": name, "namespace": NS}}
            await stage.client.create({**thing, "spec": wanted})
            await asyncio.sleep(1.5)  # times are told in seconds

        def said(name: str) -> tuple[str, str]:
            thing = stage.server.get("batonpools", name) or {}
            (condition,) = thing.get("status", {}).get("conditions") or [{"reason": "", "message": ""}]
            return condition["reason"], condition["message"]

        ignored = "BatonPool older is older and sizes decode: delete one of the two"
        await stage.until(lambda: stage.settled(1, 2) and said("a-newer") == ("Ignored", ignored))
        assert said("older") == ("Found", "it sizes decode")
        await stage.client.delete(API_VERSION, "BatonPool", NS, "older")
        await stage.until(lambda: stage.settled(1, 3) and said("a-newer") == ("Found", "it sizes decode"))


async def test_the_api_server_away_for_a_minute_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that make up a minute are shortened. Nothing restarts, and the operator follows the next change."""
    monkeypatch.setattr(controller.asyncio, "sleep", asyncio.sleep)
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        pods, stage.double.away = uids(stage), True
        assert stage.wire is not None
        stage.wire.end_watches()
        await asyncio.sleep(1.0)  # twenty of the waits that are ten seconds each in a cluster
        stage.double.away = False
        await asyncio.sleep(0.3)
        assert uids(stage) == pods
        await pool(stage, "decode", 2)
        await stage.until(lambda: stage.settled(1, 2))
        assert uids(stage) > pods


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_an_operator_killed_at_each_write_of_a_life_recovers() -> None:
    """The operator dies at each of its writes in turn, while it makes a cluster and then rolls out an image."""
    number, killed = 0, True
    while killed:
        number += 1
        killed = await life_with_a_death_at(number)
    assert number > 40, "each object takes at least one write"


async def life_with_a_death_at(number: int) -> bool:
    """Let the operator die at this write. Returns False if there were fewer writes."""
    async with staged() as stage:
        left = number

        def refuse(_method: str, path: str) -> None:
            nonlocal left
            if "/batonclusters" in path and not path.endswith("/status"):
                return  # the test's own
            left -= 1
            if left <= 0:
                raise Refused(500, "InternalError", "killed")

        stage.operate()
        stage.double.refuse = refuse
        await stage.make(spec(1, 2))
        await stage.until(lambda: left <= 0 or stage.settled(1, 2))
        await stage.change({"models": [{**spec(1, 1)["models"][0]}], "kubernetes": {"image": "engine:2"}})
        await stage.until(lambda: left <= 0 or (stage.settled(1, 2) and len(stage.instances()) == 3))
        died = left <= 0
        if died:
            await stop_operator(stage)
            stage.double.refuse = None
            stage.operate()
            sizes = [len(stage.instances())]
            await stage.until(lambda: stage.settled(1, 2) or stage.settled(1, 1))
            sizes.append(len(stage.instances()))
            images = {each["spec"]["template"]["spec"]["containers"][0]["image"] for each in stage.instances().values()}
            assert images == {"engine:2"}, (number, sizes)
            keys = {each["metadata"]["name"] for each in stage.server.all("secrets")}
            assert keys == {"chat-internal", "chat-ticket-keys", *(f"{name}-keys" for name in stage.instances())}
        return died


OPTIONAL_KINDS = {
    "podmonitors": ("monitoring.coreos.com/v1", "PodMonitor"),
    "httproutes": ("gateway.networking.k8s.io/v1", "HTTPRoute"),
}


def know(stage: Stage) -> None:
    """Install the definitions of the optional kinds."""
    for plural, (group, kind) in OPTIONAL_KINDS.items():
        stage.double.kinds[plural] = Kind(group, kind, plural, has_status=False)


async def forget_monitors(stage: Stage) -> None:
    """Delete the definition of PodMonitor, and every PodMonitor with it."""
    for each in stage.double.all("podmonitors"):
        stage.double.remove("podmonitors", each)
    del stage.double.kinds["podmonitors"]
    async with stage.double.changed:
        stage.double.changed.notify_all()


async def test_a_kind_that_is_uninstalled_stops_nothing_else() -> None:
    async with staged() as stage:
        know(stage)
        stage.operate()
        await stage.make(spec(kubernetes={"pod_monitor": True}))
        await stage.until(lambda: stage.settled() and bool(stage.double.all("podmonitors")))
        await forget_monitors(stage)
        await stage.change(image("engine:2"))
        await stage.until(lambda: stage.settled() and engines(stage) == {"engine:2"})
        await stage.until(lambda: stage.condition("Degraded").get("reason") == "KindMissing")
        assert "does not know PodMonitor" in stage.condition("Degraded")["message"]
        know(stage)
        await stage.until(lambda: stage.condition("Degraded").get("status") == "False")
        assert stage.double.all("podmonitors")


def engines(stage: Stage) -> set[str]:
    containers = [each["spec"]["template"]["spec"]["containers"][0] for each in stage.instances().values()]
    return {str(each["image"]) for each in containers}


async def test_a_kind_is_kept_once_although_the_server_could_not_say_for_a_while() -> None:
    """If the operator watched a kind twice, it would count each object of it twice."""
    async with staged() as stage:
        know(stage)
        stage.operate()
        (operator,) = stage.operators
        await stage.make(spec(kubernetes={"pod_monitor": True}))
        await stage.until(stage.settled)
        stage.double.unsure = {OPTIONAL_KINDS["httproutes"][0]}
        await forget_monitors(stage)  # this makes the operator ask again which kinds exist
        await stage.until(lambda: stage.condition("Degraded").get("reason") == "KindMissing")
        await asyncio.sleep(2.0)  # several times
        assert "HTTPRoute" in operator._kinds.known
        stage.double.unsure = set()
        know(stage)
        await stage.until(lambda: stage.condition("Degraded").get("status") == "False")
        kinds = [each.kind for each in operator._watched.children]
        assert sorted(kinds) == sorted(set(kinds))


async def test_a_kind_that_the_role_hides_keeps_no_cluster_waiting() -> None:
    async with staged() as stage:
        know(stage)
        stage.double.hidden = {"podmonitors", "httproutes"}
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        assert stage.condition("Degraded")["status"] == "False", "it asks for none of the two"
        await stage.change({"kubernetes": {"pod_monitor": True}})
        await stage.until(lambda: stage.condition("Degraded").get("reason") == "KindMissing")
        assert stage.condition("Degraded")["message"].startswith("the operator cannot list PodMonitor: give its Role")
        assert not stage.double.all("podmonitors")
        stage.double.hidden = set()
        await stage.until(lambda: stage.condition("Degraded").get("status") == "False")
        assert stage.double.all("podmonitors")


async def test_the_role_is_what_the_operator_uses() -> None:
    """Compares the Role with all requests of a cluster's life. A verb that is unused or missing fails the test."""
    async with staged() as stage:
        double = stage.double
        know(stage)
        double.verbs.clear()
        stage.operate()
        await stage.make(spec(1, 2, kubernetes={"pod_monitor": True, "http_route": {"gateway": "edge"}}))
        election = Election(stage.client, NS, "baton", "me", time.monotonic, time.time)
        await election._once()
        await election._once()
        await pool(stage, "decode", 1)
        await stage.until(stage.settled)
        await stage.change({"kubernetes": {"ticket_keys": "2"}})
        await stage.until(lambda: len(stage.instances()) == 2 and stage.settled())
        both = {"both": {"min": 1, "max": 1}}
        fewer = {"pod_monitor": None, "http_route": None}
        registry = {"url": "redis://redis.example:6379"}
        await stage.change({"models": [{"name": "m", "pools": both}], "kubernetes": fewer, "registry": registry})
        await stage.until(
            lambda: (
                not [*double.all("podmonitors"), *double.all("httproutes")]
                and not [each for each in stage.instances() if "decode" in each]
                and {each["metadata"]["name"] for each in double.all("poddisruptionbudgets")}
                == {"chat-both", "chat-router"}
            )
        )
        own = {(GROUP, "batonclusters", "create"), (GROUP, "batonclusters", "patch"), (GROUP, "batonpools", "create")}
        used = set(double.verbs) - own
        granted = {(group, resource, verb) for (group, resource), verbs in RIGHTS.items() for verb in verbs}
        assert used - granted == set(), "missing in the Role"
        assert granted - used == set(), "nothing uses it"


async def test_the_status_names_the_revision_in_each_instances_label() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        said = stage.cluster()["status"]["pools"]
        for name, each in stage.instances().items():
            stem = name.split("-")[1]
            assert each["metadata"]["labels"][LABEL_REVISION] == said[stem]["revision"]
