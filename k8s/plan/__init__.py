"""What a cluster should be and what is to be done for it: manifests, rollouts, drains, status. Pure."""

from k8s.plan.observe import Observed
from k8s.plan.plan import Desired, limits_of, look, plan
from k8s.plan.pods import Images
from k8s.plan.readiness import Known
from k8s.plan.status import pool_status, status
from k8s.plan.values import Action, Admit, Apply, Delete, Drain, Generate, Limits, Park, Resume, Unpark

__all__ = [
    "Action",
    "Admit",
    "Apply",
    "Delete",
    "Desired",
    "Drain",
    "Generate",
    "Images",
    "Known",
    "Limits",
    "Observed",
    "Park",
    "Resume",
    "Unpark",
    "limits_of",
    "look",
    "plan",
    "pool_status",
    "status",
]
