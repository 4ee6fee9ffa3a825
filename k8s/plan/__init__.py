"""Plans what a cluster should be and what to do for it: manifests, rollouts, drains, keys, status. Pure."""

from k8s.plan.observe import ObservedCluster
from k8s.plan.plan import Desired, limits_of, look, missing_kinds, plan
from k8s.plan.pods import Images
from k8s.plan.readiness import Known
from k8s.plan.status import deciding, external_sizes, misnamed, obstacle, pool_status, status, stray_status
from k8s.plan.values import (
    Action,
    Admit,
    Apply,
    Delete,
    Derive,
    Drain,
    Generate,
    KeyStage,
    Park,
    PlanLimits,
    Rekey,
    RenewUsers,
    Resume,
    Unpark,
)

__all__ = [
    "Action",
    "Admit",
    "Apply",
    "Delete",
    "Derive",
    "Desired",
    "Drain",
    "Generate",
    "Images",
    "KeyStage",
    "Known",
    "ObservedCluster",
    "Park",
    "PlanLimits",
    "Rekey",
    "RenewUsers",
    "Resume",
    "Unpark",
    "deciding",
    "external_sizes",
    "limits_of",
    "look",
    "misnamed",
    "missing_kinds",
    "obstacle",
    "plan",
    "pool_status",
    "status",
    "stray_status",
]
