"""The cluster file: `parse` its text, start its `instances`, `explain` what it promises. Pure.

    text ─ tree ─▶ nodes with positions ─ reader ─▶ Spec ─ rules ─▶ Parsed: the Spec, or every problem of the file

`settings` is the file's whole vocabulary. `about` and `units` describe a setting, `guess` finds the intended key for a
wrong one, `flags` makes vLLM's flags, `words` and `page` describe the file to users, `writer` turns a tree into text.
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
    RegistrySettings,
    RouterSettings,
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
    "RegistrySettings",
    "RouterSettings",
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
