"""Any patch of the pod templates is merged, or refused with a condition; the plan never raises an error for it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.k8s_objects import SMALL, desired, settled

from k8s.plan import ObservedCluster, limits_of, plan, status

WORDS = st.sampled_from(["engine", "router", "a", "name", "/tmp", "http"])
FIELDS = st.sampled_from(
    "metadata labels annotations spec containers initContainers volumes env ports volumeMounts name mountPath "
    "containerPort protocol readinessGates topologySpreadConstraints topologyKey tolerations securityContext "
    "resources limits".split()
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9000) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=12,
)
ENTRIES = st.lists(st.fixed_dictionaries({}, optional={"name": WORDS, "mountPath": WORDS, "x": VALUES}), max_size=3)
CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["engine", "router", "side"])},
        optional={"env": ENTRIES | VALUES, "ports": ENTRIES | VALUES, "volumeMounts": ENTRIES | VALUES},
    ),
    max_size=2,
)
PODS = st.fixed_dictionaries(
    {},
    optional={
        "metadata": VALUES,
        "spec": VALUES | st.fixed_dictionaries({}, optional={"containers": CONTAINERS, "volumes": ENTRIES | VALUES}),
    },
)


@given(PODS | st.dictionaries(FIELDS, VALUES, max_size=3))
@settings(max_examples=150, deadline=timedelta(seconds=5))
def test_any_patch_of_pods(patch: dict[str, Any]) -> None:
    kubernetes = {"pools": {"decode": {"pod_template": patch}}, "router_template": patch}
    wanted = desired({**SMALL, "kubernetes": kubernetes})
    for observed in (ObservedCluster(), settled(desired())):
        actions = plan(wanted, observed, limits_of(wanted, observed), 0.0)
        said = status(wanted, observed, actions, 0.0, {})
        assert (wanted.resource.spec is None) == ("InvalidSpec" in str(said["conditions"]))
        if not observed.objects:
            assert actions or wanted.resource.errors
