"""Flows between instances, and what each gets of the NICs it uses. Pure; nanoseconds, and bytes per ns (GB/s).

A flow runs from one NIC's sending side to another's receiving side. Each side is shared equally among the flows that
use it, and a flow runs at the smaller of its two parts, or at its own limit (the paths between two shapes). What one
end cannot use is not given to the others: with flows that are limited elsewhere this is slower than max-min fairness,
and equal to it among equals. Rates change when a flow on the same NIC begins or ends, and at no other time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Nic:
    """Both sides of one instance's network."""

    gb_s: float
    """Bytes per nanosecond, each way."""
    sending: dict[Flow, None] = field(default_factory=dict)
    receiving: dict[Flow, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way."""

    source: Nic
    target: Nic
    left: float
    """Bytes that are left at `since_ns`."""
    limit_gb_s: float = math.inf
    """The most it can use."""
    payload: Any = None
    rate: float = -1.0
    """Bytes per ns now; -1 before it begins."""
    since_ns: int = 0
    end_ns: int = -1
    """When its last byte arrives, if nothing changes; -1: it is not under way."""


def join(flow: Flow, now_ns: int) -> list[Flow]:
    """Begin a flow. Returns all flows whose end has changed, this one first."""
    flow.since_ns = now_ns
    flow.end_ns = now_ns
    flow.source.sending[flow] = None
    flow.target.receiving[flow] = None
    _set(flow, now_ns)
    return [flow, *_others(flow, now_ns)]


def leave(flow: Flow, now_ns: int) -> list[Flow]:
    """End a flow, or break it off. Returns all other flows whose end has changed."""
    _progress(flow, now_ns)
    flow.end_ns = -1
    del flow.source.sending[flow]
    del flow.target.receiving[flow]
    return _others(flow, now_ns)


def slowed(nic: Nic, gb_s: float, now_ns: int) -> list[Flow]:
    """Give the NIC another speed from now on. Returns all flows whose end has changed."""
    nic.gb_s = gb_s
    return [flow for flow in dict.fromkeys((*nic.sending, *nic.receiving)) if _set(flow, now_ns)]


def _others(flow: Flow, now_ns: int) -> list[Flow]:
    if len(flow.source.sending) + len(flow.target.receiving) <= 2 * (flow.end_ns >= 0):
        return []
    beside = dict.fromkeys((*flow.source.sending, *flow.target.receiving))
    return [other for other in beside if other is not flow and _set(other, now_ns)]


def _set(flow: Flow, now_ns: int) -> bool:
    """Give the flow its rate. Returns whether that changes its end."""
    source, target = flow.source, flow.target
    rate = min(flow.limit_gb_s, source.gb_s / len(source.sending), target.gb_s / len(target.receiving))
    if rate == flow.rate:
        return False
    _progress(flow, now_ns)
    flow.rate = rate
    if math.isinf(rate) or flow.left <= 0:
        end_ns = now_ns
    elif rate <= 0:
        end_ns = now_ns + (1 << 62)
    else:
        end_ns = now_ns + math.ceil(flow.left / rate)
    changed, flow.end_ns = end_ns != flow.end_ns, end_ns
    return changed


def _progress(flow: Flow, now_ns: int) -> None:
    if not math.isinf(flow.rate):
        flow.left = max(0.0, flow.left - flow.rate * (now_ns - flow.since_ns))
    flow.since_ns = now_ns
