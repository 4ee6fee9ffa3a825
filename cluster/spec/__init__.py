"""The cluster file: `parse` its text, `instances` to start, `explain` what it promises. Pure.

    text ─ tree ─▶ nodes with positions ─ reader ─▶ Spec ─ rules ─▶ Parsed: the Spec, or every problem there is

`settings` is the file's whole vocabulary; `about` and `units` are what a setting says of itself, `guess` what was meant
by a wrong key, `flags` what goes to vLLM, `words` and `page` what is told of it.
"""

from cluster.spec.parse import Parsed, check_outside, parse, parse_value
from cluster.spec.plan import PlannedInstance, instances
from cluster.spec.problems import Problem, Severity
from cluster.spec.rules import Floor, FloorOf
from cluster.spec.settings import (
    POLICY,
    CacheScope,
    Connector,
    Hardware,
    Limits,
    Model,
    Pool,
    Pools,
    Registry,
    Router,
    Shape,
    SloClass,
    Spec,
    Tenant,
    Transfer,
    WhenMissed,
)
from cluster.spec.words import as_json, as_text, explain

__all__ = [
    "POLICY",
    "CacheScope",
    "Connector",
    "Floor",
    "FloorOf",
    "Hardware",
    "Limits",
    "Model",
    "Parsed",
    "PlannedInstance",
    "Pool",
    "Pools",
    "Problem",
    "Registry",
    "Router",
    "Severity",
    "Shape",
    "SloClass",
    "Spec",
    "Tenant",
    "Transfer",
    "WhenMissed",
    "as_json",
    "as_text",
    "check_outside",
    "explain",
    "instances",
    "parse",
    "parse_value",
]
