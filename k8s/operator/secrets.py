"""Random secrets and those derived from them: passwords, the operator's key, ticket keys. A shell.

Only this module of the operator reads and writes keys; none of its texts goes into a log or an action.
"""

from __future__ import annotations

import secrets
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.ids import InstanceId
from cluster.keys import KEY_BYTES, key_line, make_key
from cluster.registry.layout import USERS, users
from k8s.crd.names import CONTENT, LABEL_KEYS, LABEL_STAGE, LABEL_STAGE_SINCE, LABEL_USERS, MADE_FROM
from k8s.crd.resource import Resource
from k8s.plan import KeyStage
from k8s.plan.keys import FLEET_PART, INSTANCE_PART, content_of, key_begins, stage_of
from k8s.plan.pods import KEYS_FILE, fleet_secret, instance_secret, owned, users_digest
from kvtransfer.keys import KEYS_MAX, SECRET_BYTES, fleet_text, instance_text, read_fleet
from kvtransfer.seal import identity_text
from kvtransfer.ticket import SigningKey

PASSWORD_BYTES: Final = 24
"""Random bytes of a password."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Access:
    """The operator's own credentials for one cluster."""

    admin: str = field(default="", repr=False)
    """Key for routers' admin side; empty: unknown."""
    fleet: tuple[SigningKey, ...] = field(default=(), repr=False)
    """Ticket keys, with which requests to agents are signed; empty: no agent is asked."""


def access(internal_secret: Json | None, fleet: Json | None) -> Access:
    """The credentials in the two Secrets, as far as these exist."""
    return Access(text_in(internal_secret, "operator-key"), () if fleet is None else keys_in(fleet))


def internal(resource: Resource, name: str, kept: Json | None = None) -> dict[str, Any]:
    """The Secret with registry passwords and the operator's key: new ones, or those of `kept`. Each pod mounts only
    what is its own.
    """
    assert resource.spec is not None
    acl = users(resource.spec.registry.cluster)
    data: dict[str, str] = {}
    for user in USERS:
        password = text_in(kept, f"{user}-password") or secrets.token_urlsafe(PASSWORD_BYTES)
        data[f"{user}-password"] = password
        acl = acl.replace(f"{user}-PASSWORD", password)
    key = text_in(kept, "operator-key") or make_key(secrets.token_bytes(KEY_BYTES))
    digest = text_in(kept, "operator-key-digest") or key_line(key, "operator")
    data |= {"users.acl": acl, "operator-key": key, "operator-key-digest": digest}
    made = owned(resource, "v1", "Secret", name, "internal", type="Opaque", data=_encoded(data))
    made["metadata"]["labels"][LABEL_USERS] = users_digest(resource)
    return made


def fleet(resource: Resource) -> dict[str, Any]:
    """The Secret with the fleet's ticket keys: a first one."""
    return _fleet(resource, (_new_key(()),), resource.kubernetes.ticket_keys, KeyStage.NONE, 0)


def replaced(resource: Resource, live: Json, stage: KeyStage, now: float) -> dict[str, Any]:
    """The fleet's Secret at `stage`. It carries the resourceVersion that was read, so that no step is made twice.

    `now`: Unix seconds.
    """
    keys = keys_in(live)
    labels = live["metadata"].get("labels", {})
    since, made_for = int(labels.get(LABEL_STAGE_SINCE) or 0), labels.get(LABEL_KEYS, "")
    match stage:
        case KeyStage.ADDED:
            kept = keys[:-1] if stage_of(live) is KeyStage.ADDED else keys[: KEYS_MAX - 1]  # not one that never signed
            keys, since, made_for = (*kept, _new_key(keys)), key_begins(now), resource.kubernetes.ticket_keys
        case KeyStage.SIGNS:
            keys = (keys[-1], *keys[:-1])
        case KeyStage.NONE:
            keys, since = keys[:1], 0
    made = _fleet(resource, keys, made_for, stage, since)
    made["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"]
    return made


def of_instance(resource: Resource, live: Json, name: str) -> dict[str, Any]:
    """One instance's key Secret, derived from the fleet's (`live`)."""
    keys, instance = keys_in(live), InstanceId(name)
    data = {
        KEYS_FILE: instance_text(keys, instance),
        f"{KEYS_FILE}.identity": identity_text(keys, instance),
    }
    made = owned(resource, "v1", "Secret", instance_secret(name), INSTANCE_PART, type="Opaque", data=_encoded(data))
    made["metadata"]["labels"][LABEL_KEYS] = resource.kubernetes.ticket_keys
    made["metadata"]["annotations"] = {MADE_FROM: content_of(live), CONTENT: content_of(made)}
    return made


def keys_in(live: Json) -> tuple[SigningKey, ...]:
    """The fleet's keys, the signing one first; empty if the Secret holds no valid key file."""
    try:
        return read_fleet(text_in(live, KEYS_FILE))
    except ValueError:
        return ()


def _fleet(
    resource: Resource, keys: tuple[SigningKey, ...], made_for: str, stage: KeyStage, since: int
) -> dict[str, Any]:
    data = _encoded({KEYS_FILE: fleet_text(keys)})
    made = owned(resource, "v1", "Secret", fleet_secret(resource), FLEET_PART, type="Opaque", data=data)
    made["metadata"]["labels"] |= {LABEL_KEYS: made_for, LABEL_STAGE: stage.value, LABEL_STAGE_SINCE: str(since)}
    return made


def _new_key(known: tuple[SigningKey, ...]) -> SigningKey:
    taken = {key.id for key in known}
    name = next(name for number in range(1, len(taken) + 2) if (name := f"k{number}") not in taken)
    return SigningKey(name, secrets.token_bytes(SECRET_BYTES))


def _encoded(data: Mapping[str, str]) -> dict[str, str]:
    return {each: b64encode(text.encode()).decode() for each, text in data.items()}


def text_in(secret: Json | None, key: str) -> str:
    """The text under a key of a Secret; empty: there is none, or it is no text."""
    try:
        return b64decode(((secret or {}).get("data") or {}).get(key, "")).decode()
    except ValueError:
        return ""
