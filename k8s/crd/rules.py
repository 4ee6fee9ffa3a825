"""Rules between fields that the API server itself checks (CEL), so that a wrong resource is refused at once. Pure.

Each rule repeats one of `cluster/spec/rules.py` or `sides.py`, which stay the owners: whatever the rules here refuse,
`baton lint` refuses too (tests/unit/test_k8s_crd.py compares the two on a corpus). They are in core CEL, without
Kubernetes' extensions, because tests evaluate them as well. Every list and mapping that a rule iterates over is bounded
(`schema.ROOT_MAPS`, `MAP_MAX`, `LIST_MAX`), because the API server refuses a schema whose rules could cost too much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.spec.about import settings_of
from cluster.spec.settings import (
    KvTiers,
    Pool,
    Pools,
    RegistrySettings,
    RouterSettings,
    Shape,
    SloClass,
    Spec,
    Transfer,
)
from cluster.spec.sides import ROLE_PAIRS


@dataclass(frozen=True, slots=True)
class CelRule:
    """One expression over `self`, and the message if it is false."""

    rule: str
    message: str

    def as_schema(self) -> dict[str, str]:
        """The rule as an entry of ``x-kubernetes-validations``."""
        return {"rule": self.rule, "message": self.message}


def _or(path: str, default: object) -> str:
    """The value at ``self.a.b``, or a default if it or one of its parents is left out."""
    parts = path.split(".")
    steps = [".".join(parts[: at + 1]) for at in range(1, len(parts))]
    return f"({' && '.join(f'has({step})' for step in steps)} ? {path} : {default})"


_MIN = _or("self.min", settings_of(Pool)["min"].default)
_PORT = _or("self.port", settings_of(RouterSettings)["port"].default)
_ADMIN_PORT = _or("self.admin_port", settings_of(RouterSettings)["admin_port"].default)

_POOL = (
    CelRule(f"!has(self.max) || {_MIN} <= self.max", "`max` is below `min`"),
    CelRule("!has(self.max) || !has(self.start) || self.start <= self.max", "`start` is above `max`"),
    CelRule(f"!has(self.start) || {_MIN} <= self.start", "`start` is below `min`"),
    CelRule(f"has(self.max) || {_MIN} > 0 || {_or('self.start', 0)} > 0", "can never have an instance"),
)

_SHAPE = (
    CelRule(
        f"!has(self.ep) || self.ep == 1 || self.ep == {_or('self.tp', 1)} * {_or('self.dp', 1)}",
        "`ep` must be 1, or `tp` × `dp`: vLLM spreads experts over all ranks or over none",
    ),
)


def _same_tp(producer: str, consumer: str) -> CelRule:
    ours, theirs = _or(f"self.{producer}.shape.tp", 1), _or(f"self.{consumer}.shape.tp", 1)
    return CelRule(
        f"!has(self.{producer}) || !has(self.{consumer}) || {ours} % {theirs} == 0 || {theirs} % {ours} == 0",
        f"`tp` of {producer} or {consumer} must be a multiple of the other's for a handoff",
    )


_POOLS = (
    CelRule(
        "has(self.prefill) || has(self.decode) || has(self.both) || (has(self.extra) && size(self.extra) > 0)",
        "no pool: nothing would serve the model",
    ),
    CelRule(
        f"{_or('self.decode.shape.pp', 1)} == 1",
        "vLLM's NixlConnector hands no KV cache over to an instance with pipeline stages: `pp` of decode must be 1",
    ),
    CelRule(
        f"{_or('self.prefill.shape.pp', 1)} == 1 || !(has(self.decode) || has(self.both))",
        "vLLM's NixlConnector hands no KV cache over from an instance with pipeline stages: `pp` of prefill must be 1",
    ),
    *(_same_tp(producer.value, consumer.value) for producer, consumer in ROLE_PAIRS if producer is not consumer),
)

_CLASS = (
    CelRule(
        "has(self.ttft_ms) || has(self.tt2t_ms) || has(self.tpot_ms) || has(self.e2e_ms)",
        "promises nothing: write at least one of `ttft_ms`, `tt2t_ms`, `tpot_ms`, `e2e_ms`",
    ),
    CelRule("!has(self.tt2t_ms) || !has(self.tpot_ms) || self.tt2t_ms >= self.tpot_ms", "`tt2t_ms` is below `tpot_ms`"),
    CelRule("!has(self.e2e_ms) || !has(self.ttft_ms) || self.e2e_ms >= self.ttft_ms", "`e2e_ms` is below `ttft_ms`"),
    CelRule(
        "has(self.degrade_to) == (has(self.when_missed) && self.when_missed == 'degrade')",
        "`degrade_to` and `when_missed: degrade` go together",
    ),
)

_SPEC = (
    CelRule(
        "!has(self.slo) || self.slo.all(n, !has(self.slo[n].degrade_to) || self.slo[n].degrade_to in self.slo)",
        "`degrade_to` is no class under `slo`",
    ),
)

RULES: Mapping[type, tuple[CelRule, ...]] = {
    Spec: _SPEC,
    Pool: _POOL,
    Pools: _POOLS,
    Shape: _SHAPE,
    SloClass: _CLASS,
    Transfer: (
        CelRule(
            "!has(self.digests) || !self.digests || (has(self.connector) && self.connector == 'baton')",
            "`digests` needs `connector: baton`: vLLM's connector compares nothing",
        ),
    ),
    KvTiers: (
        CelRule(
            "!has(self.disk_gib) || has(self.host_gib)",
            "`disk_gib` needs `host_gib`: vLLM moves blocks to and from files through host memory",
        ),
        CelRule("!has(self.disk_folder) || has(self.disk_gib)", "`disk_folder` has no effect without `disk_gib`"),
    ),
    RegistrySettings: (
        CelRule("has(self.url) || !has(self.password_file)", "`password_file` has no effect without `url`"),
        CelRule("has(self.url) || !has(self.ca_file)", "`ca_file` has no effect without `url`"),
    ),
    RouterSettings: (
        CelRule("has(self.tls_cert_file) || !has(self.tls_key_file)", "`tls_key_file` needs `tls_cert_file`"),
        CelRule(f"{_PORT} == 0 || {_PORT} != {_ADMIN_PORT}", "`admin_port` is the same as `port`"),
    ),
}
"""By section of the cluster file."""
