"""What the operator writes (`Hands`) for a resource that was deleted and made again under its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

from support.k8s_objects import conditions, desired, settled

from k8s.operator.client import ApiClient, ApiFailed
from k8s.operator.fleet import ClusterPrograms
from k8s.operator.hands import Hands, OperatorCounters
from k8s.operator.secrets import Access
from k8s.plan import Action, Derive, Desired, Generate, ObservedCluster, PlanLimits, plan, status
from k8s.plan.observe import is_ours

Json = dict[str, Any]


class Server:
    """An API server that takes every write, except the creation of an object that exists."""

    def __init__(self, there: tuple[Any, ...]) -> None:
        self.there = {(each["kind"], each["metadata"]["name"]): each for each in there}
        self.written: list[Json] = []

    async def get(self, _api_version: str, kind: str, _namespace: str, name: str) -> Any:
        return self.there.get((kind, name))

    async def create(self, thing: Json) -> Json:
        if (thing["kind"], thing["metadata"]["name"]) in self.there:
            raise ApiFailed(409, "AlreadyExists", "it is there")
        return await self.apply(thing)

    async def apply(self, thing: Json) -> Json:
        self.written.append(thing)
        return {**thing, "metadata": {**thing["metadata"], "uid": "u-new", "resourceVersion": "9"}}


async def carried_out(wanted: Desired, there: ObservedCluster, actions: Iterable[Action]) -> list[Json]:
    """What the actions write; a refused action does not stop the others."""
    server = Server(there.objects)
    counters = OperatorCounters()
    hands = Hands(cast("ApiClient", server), cast("ClusterPrograms", None), lambda: 1.0, lambda _: None, counters)
    for action in actions:
        with suppress(ApiFailed):
            await hands.do(action, wanted.resource, there, Access())
    return server.written


def again() -> Desired:
    """The resource of `desired`, deleted and made again: its uid is new."""
    return dataclasses.replace(desired(), resource=dataclasses.replace(desired().resource, uid="u-2"))


async def test_a_resource_made_again_takes_no_keys_from_the_one_before() -> None:
    """The garbage collector is late. Keys in the old fleet's Secrets would be deleted with it, and not made again."""
    before = settled(desired())
    todo = (Generate("chat-ticket-keys", "not there"), Derive("chat-decode-1", "not there"))
    assert await carried_out(again(), before, todo) == []
    todo = plan(again(), ObservedCluster(), PlanLimits(), 2.0)
    assert [each.name for each in todo if isinstance(each, Generate)] == ["chat-internal", "chat-ticket-keys"]
    made = [each for each in await carried_out(again(), ObservedCluster(), todo) if each["kind"] == "Secret"]
    assert {each["metadata"]["name"] for each in made} > {"chat-internal", "chat-ticket-keys"}
    assert all(is_ours(each, "u-2") for each in made)


def test_nothing_is_made_that_would_mount_the_secrets_of_the_former_resource() -> None:
    before = settled(desired())
    for name in ("chat-internal", "chat-ticket-keys"):
        there = ObservedCluster(objects=tuple(each for each in before.objects if each["metadata"]["name"] == name))
        assert plan(again(), there, PlanLimits(), 1.0) == ()
        fact = conditions(status(again(), there, (), 1.0, {}))["Degraded"]
        assert fact["reason"] == "NameTaken"
        assert f"Secret {name} is there" in fact["message"]
