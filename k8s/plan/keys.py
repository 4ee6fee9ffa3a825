"""Keys by which routers and instances of one cluster prove themselves: which Secrets there are, and when they change.

Two kinds. The *fleet's* Secret is chance, made once; routers alone mount it. Each *instance's* Secret follows from the
fleet's and from the instance's name, so that an instance knows its own key and no other's; it is made before the
workload and goes after it. A fleet's key that is lost is not made anew by itself while instances have keys that follow
from it, because then routers would believe none of them: the condition says so, and another value of
`kubernetes.ticket_keys` asks for new ones.

A key is replaced in three steps (`kvtransfer.keys`), each of which has reached all pods before the next: the new key is
added below the old one, it signs, the old one goes. The pods are rolled meanwhile, because an agent reads its identity
when it starts; the old key goes when every pod was made for the new one. If another key is asked for meanwhile, the
steps begin again. If its name was used before, pods of the earlier use have the same template as new pods; their age
tells them apart (`is_before_key`). The steps are told from labels of the fleet's Secret. Pure: nothing
here reads a key, digests of what Secrets hold tell whether they belong together.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from k8s.crd.names import CONTENT, LABEL_KEYS, LABEL_PART, LABEL_STAGE, LABEL_STAGE_SINCE, MADE_FROM, digest
from k8s.crd.resource import Resource
from k8s.plan.observe import ObservedCluster, is_ours, pods_by_instance, unix
from k8s.plan.pods import fleet_secret, instance_secret
from k8s.plan.values import Delete, Derive, Generate, KeyStage, PlanLimits, Rekey

FLEET_PART: Final = "ticket-keys"
INSTANCE_PART: Final = "instance-keys"
SKEW_S: Final = 60.0
"""The operator's clock and the API server's may differ by this: the one says when a key was made, the other when a pod
was."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySecrets:
    """Key Secrets as they are."""

    fleet: Json | None
    of_instances: Mapping[str, Json]
    """By the Secret's name."""

    @property
    def names(self) -> frozenset[str]:
        """Of all of them."""
        fleet = () if self.fleet is None else (self.fleet["metadata"]["name"],)
        return frozenset({*fleet, *self.of_instances})


def key_secrets(resource: Resource, observed: ObservedCluster) -> KeySecrets:
    """The key Secrets of one cluster."""
    ours = [each for each in observed.objects if each["kind"] == "Secret" and is_ours(each, resource.uid)]
    parts = [(each["metadata"].get("labels", {}).get(LABEL_PART), each) for each in ours]
    name = fleet_secret(resource)
    return KeySecrets(
        fleet=next((each for part, each in parts if part == FLEET_PART and each["metadata"]["name"] == name), None),
        of_instances={each["metadata"]["name"]: each for part, each in parts if part == INSTANCE_PART},
    )


def content_of(secret: Json) -> str:
    """Digest of what a Secret holds. A key has 256 bits of chance: ten digits of its hash tell nothing of it."""
    return digest(json.dumps(secret.get("data") or {}, sort_keys=True))


def are_lost(resource: Resource, secrets: KeySecrets) -> bool:
    """Whether the fleet's key is gone while instances live by it, and its owner has not asked for another."""
    wanted = resource.kubernetes.ticket_keys
    return secrets.fleet is None and any(made_for(each) == wanted for each in secrets.of_instances.values())


def may_start(resource: Resource, secrets: KeySecrets, now: float) -> bool:
    """Whether an instance that starts now gets the keys that it is to have: not while lost or just replaced."""
    if secrets.fleet is None:
        return not are_lost(resource, secrets)
    return made_for(secrets.fleet) == resource.kubernetes.ticket_keys and now >= _since(secrets.fleet)


def key_actions(
    resource: Resource,
    observed: ObservedCluster,
    secrets: KeySecrets,
    instances: Collection[str],
    limits: PlanLimits,
    now: float,
) -> Iterator[Generate | Rekey | Derive | Delete]:
    """What is to be done for keys. `instances`: names of those that are there and of those that are about to start."""
    if secrets.fleet is None:
        if are_lost(resource, secrets):
            return
        yield Generate(fleet_secret(resource), "the keys that routers and instances prove themselves by are not there")
    else:
        yield from _replaced(resource, secrets.fleet, observed, limits, now)
    for name in sorted(instances):
        because = _stale(secrets.of_instances.get(instance_secret(name)), secrets.fleet, resource)
        if because:
            yield Derive(name, because)
    kept = {instance_secret(name) for name in instances}
    for name, thing in sorted(secrets.of_instances.items()):
        if name not in kept and not thing["metadata"].get("deletionTimestamp"):
            yield Delete("v1", "Secret", name, thing["metadata"].get("uid", ""), "its instance is gone")


def _stale(secret: Json | None, fleet: Json | None, resource: Resource) -> str:
    """Why an instance's Secret is to be written; empty: it is as it should be."""
    if secret is None:
        return "its keys are not there"
    noted = secret["metadata"].get("annotations") or {}
    if fleet is None or noted.get(MADE_FROM) != content_of(fleet):
        return "the fleet's keys have changed"
    if noted.get(CONTENT) != content_of(secret):
        return "its keys are not as they were made"
    if made_for(secret) != resource.kubernetes.ticket_keys:
        return "they are of the wanted keys now"
    return ""


def made_for(thing: Json) -> str:
    """For which value of `kubernetes.ticket_keys` a Secret or a pod was made."""
    return str(thing["metadata"].get("labels", {}).get(LABEL_KEYS, ""))


def stage_of(fleet: Json) -> KeyStage:
    """How far a replacement is, by the Secret's label."""
    said = fleet["metadata"].get("labels", {}).get(LABEL_STAGE, "")
    return KeyStage(said) if said in set(KeyStage) else KeyStage.NONE


def key_begins(now: float) -> int:
    """When a key that is added now counts as made: the next whole second, as pods' times are whole seconds, too."""
    return int(now) + 1


def _since(fleet: Json) -> float:
    """When a replacement began, Unix time."""
    text = fleet["metadata"].get("labels", {}).get(LABEL_STAGE_SINCE, "")
    return float(text) if text.isdecimal() else 0.0


def _replaced(
    resource: Resource, fleet: Json, observed: ObservedCluster, limits: PlanLimits, now: float
) -> Iterator[Rekey]:
    name, age_s, wanted = fleet["metadata"]["name"], now - _since(fleet), resource.kubernetes.ticket_keys
    if made_for(fleet) != wanted:
        if any(made_for(each) == wanted and not _is_older(each, key_begins(now)) for each in observed.pods):
            return  # pods of an earlier use of the name, too young to be told from pods that read the new key
        yield Rekey(name, KeyStage.ADDED, f"keys `{wanted}` are wanted")
        return
    match stage_of(fleet):
        case KeyStage.ADDED:
            if age_s >= limits.keys_s:
                yield Rekey(name, KeyStage.SIGNS, "every program has the new key")
        case KeyStage.SIGNS:
            if age_s >= 2 * limits.keys_s and _all_have(observed, fleet):
                yield Rekey(name, KeyStage.NONE, "nothing needs the old key any more")
        case KeyStage.NONE:
            pass


def _all_have(observed: ObservedCluster, fleet: Json) -> bool:
    """Whether every instance's pod has read the new key when it started: it was made for it, and after it.

    The time alone would not do, as it is of two clocks, nor the name alone, which may have been used before.
    """
    pods: Iterable[Json] = pods_by_instance(observed.pods).values()
    return all(made_for(each) == made_for(fleet) and not _is_older(each, _since(fleet)) for each in pods)


def is_before_key(pod: Json, fleet: Json | None) -> bool:
    """Whether a pod has the wanted name of keys from an earlier use of it, and not the key that is coming in."""
    if fleet is None or stage_of(fleet) is KeyStage.NONE:
        return False
    return made_for(pod) == made_for(fleet) and _is_older(pod, _since(fleet))


def _is_older(pod: Json, key_since: float) -> bool:
    """Whether a pod was surely made before a key was, by the two clocks."""
    return (unix(pod["metadata"].get("creationTimestamp")) or 0.0) < key_since - SKEW_S
