"""Keys by which routers and instances of one cluster prove themselves: which Secrets exist, and when they change.

There are two kinds. The *fleet's* Secret is random and made once; only routers mount it. Each *instance's* Secret is
derived from the fleet's and from the instance's name, so that an instance knows its own key and no other's; it is made
before the workload and deleted after it. A lost fleet key is not replaced by itself while instances have keys that are
derived from it: routers would believe none of them. A condition reports the loss, and another value of
`kubernetes.ticket_keys` asks for new keys.

A key is replaced in three steps (`kvtransfer.keys`), each of which has reached all pods before the next: the new key is
added below the old one; it signs; the old key is removed. The pods are rolled meanwhile, because an agent reads its
identity when it starts; the old key is removed once every pod was made for the new one. If another key is asked for
meanwhile, the steps begin again. If its name was used before, pods of the earlier use have the same template as new
pods; their age tells them apart (`is_before_key`). Labels of the fleet's Secret have the present step. Pure: this
module reads no key; digests of Secrets' contents show whether they belong together.
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
"""Seconds by which the operator's clock (a key's time) and the API server's (a pod's time) may differ."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySecrets:
    """The key Secrets that exist."""

    fleet: Json | None
    of_instances: Mapping[str, Json]
    """By the Secret's name."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all key Secrets."""
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
    """Digest of a Secret's content. A key has 256 random bits: ten digits of its hash reveal nothing of it."""
    return digest(json.dumps(secret.get("data") or {}, sort_keys=True))


def are_lost(resource: Resource, secrets: KeySecrets) -> bool:
    """Whether the fleet's key is gone while instances have keys derived from it, and no other keys are asked for."""
    wanted = resource.kubernetes.ticket_keys
    return secrets.fleet is None and any(made_for(each) == wanted for each in secrets.of_instances.values())


def may_start(resource: Resource, secrets: KeySecrets, now: float) -> bool:
    """Whether an instance may start now: not while the fleet's key is lost, not the wanted one, or newer than `now`."""
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
    """Actions on key Secrets. `instances`: names of those that exist and of those that are about to start."""
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
    """Why an instance's Secret must be written; empty: it is right."""
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
    """The value of `kubernetes.ticket_keys` for which a Secret or a pod was made."""
    return str(thing["metadata"].get("labels", {}).get(LABEL_KEYS, ""))


def stage_of(fleet: Json) -> KeyStage:
    """The stage of a replacement, by the Secret's label."""
    said = fleet["metadata"].get("labels", {}).get(LABEL_STAGE, "")
    return KeyStage(said) if said in set(KeyStage) else KeyStage.NONE


def key_begins(now: float) -> int:
    """Unix time at which a key that is added now counts as made: the next whole second, as pods' times are whole."""
    return int(now) + 1


def _since(fleet: Json) -> float:
    """The Unix time at which a replacement began; 0: none."""
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
    """Whether every instance's pod has read the new key at its start: it was made for this key, and after it.

    Both are checked: the times are of two clocks, and the key's name may have been used before.
    """
    pods: Iterable[Json] = pods_by_instance(observed.pods).values()
    return all(made_for(each) == made_for(fleet) and not _is_older(each, _since(fleet)) for each in pods)


def is_before_key(pod: Json, fleet: Json | None) -> bool:
    """Whether a pod was made for an earlier use of the wanted keys' name, and so has not the key that is coming in."""
    if fleet is None or stage_of(fleet) is KeyStage.NONE:
        return False
    return made_for(pod) == made_for(fleet) and _is_older(pod, _since(fleet))


def _is_older(pod: Json, key_since: float) -> bool:
    """Whether a pod was surely made before a key, with `SKEW_S` between the two clocks."""
    return (unix(pod["metadata"].get("creationTimestamp")) or 0.0) < key_since - SKEW_S
