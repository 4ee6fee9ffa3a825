"""What chance makes: the registry's passwords and the operator's own key. A shell."""

from __future__ import annotations

import secrets
from base64 import b64encode
from typing import Any

from cluster.keys import KEY_BYTES, key_line, make_key
from cluster.registry.layout import USERS, users
from k8s.crd.resource import Resource
from k8s.plan.pods import owned

PASSWORD_BYTES = 24


def internal(resource: Resource, name: str) -> dict[str, Any]:
    """The Secret that programs of one cluster share. Made once; its keys never appear in a log."""
    assert resource.spec is not None
    acl = users(resource.spec.registry.cluster)
    data: dict[str, str] = {}
    for user in USERS:
        password = secrets.token_urlsafe(PASSWORD_BYTES)
        data[f"{user}-password"] = password
        acl = acl.replace(f"{user}-PASSWORD", password)
    key = make_key(secrets.token_bytes(KEY_BYTES))
    data |= {"users.acl": acl, "operator-key": key, "operator-key-digest": key_line(key, "operator")}
    encoded = {each: b64encode(text.encode()).decode() for each, text in data.items()}
    return owned(resource, "v1", "Secret", name, "internal", type="Opaque", data=encoded)
