"""The configuration of a router process at its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.errors import UsageError
from cluster.instance import Instance
from cluster.spec import Limits, RouterSettings, SloClass, Tenant
from cluster.spec.about import broken_bound, flag_of, settings_of
from kvtransfer.ticket import SigningKey
from router.core.clients import Keys
from router.predict.step_model import Make

_LIMITS, _ROUTER = Limits(), RouterSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """Classes, tenants and keys of an edited cluster file."""

    classes: Mapping[str, SloClass]
    tenants: Mapping[str, Tenant]
    tenant_keys: Mapping[str, Keys]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """All settings of one router. Settings that the cluster file has, too, take their defaults and bounds from there
    (`limits` and `router` of `cluster.spec.settings`), where each default states its reason.
    """

    instances: tuple[Instance, ...] = ()
    """Engines given by URL; empty with a registry."""
    has_registry: bool = False
    """Whether instances announce themselves in a registry."""
    host: str = _ROUTER.host
    hosts_beside: tuple[str, ...] = ()
    """Further addresses at which clients' port is open."""
    port: int = _ROUTER.port
    shares_port: bool = False
    """Whether other processes of this router listen on the same port."""
    admin_host: str = _ROUTER.admin_host
    """The address that the router announces to its peers and to agents."""
    admin_hosts_beside: tuple[str, ...] = ()
    """Further addresses of the admin side."""
    admin_port: int = _ROUTER.admin_port
    policy: str = _ROUTER.policy
    body_bytes_max: int = _LIMITS.body_bytes_max
    answer_bytes_max: int = _LIMITS.answer_bytes_max
    uploads_bytes_max: int = _LIMITS.uploads_bytes_max
    open_bytes_max: int = _LIMITS.open_bytes_max
    connections_max: int = _LIMITS.connections_max
    body_timeout_s: float = _LIMITS.body_timeout_s
    head_timeout_s: float = _LIMITS.head_timeout_s
    first_token_s: float = _LIMITS.first_token_s
    stall_s: float = _LIMITS.stall_s
    client_stall_s: float = _LIMITS.client_stall_s
    whole_s: float = _LIMITS.whole_s
    drain_s: float = _LIMITS.drain_s
    explain_last: int = _ROUTER.explain_last
    tls_cert_file: str | None = _ROUTER.tls_cert_file
    tls_key_file: str | None = _ROUTER.tls_key_file
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names that clients may use for models: the model's own name, by alias."""
    renewed: Callable[[], Renewed | str | None] | None = None
    """Checks whether classes or tenants have changed, and reads the files: returns them, or why they cannot be read, or
    None if there is no change. None: they never change."""
    admin_keys: Keys | None = None
    """Returns the operators' keys, for the admin side from other machines. None: other machines are refused."""
    seeding: bool = True
    """Send clients P's first token before the hand-over, where that is exact and D's engine can be told the token."""
    decision_log: Callable[[bytes], object] | None = None
    """Takes lines for everything that choices depend on, and for each choice (`router.fleet.events`), several at a
    time. It may raise OSError if it cannot write, and returns how many bytes it took; None: all."""
    proves: bool = False
    """Whether pairs of instances are proven with prompts of the router's own (`router.fleet.pair_proofs`)."""
    ticket_keys: Callable[[], tuple[SigningKey, ...]] | None = None
    """Returns the fleet's keys for tickets; the first one signs. None: engines are not guarded."""
    engine_key: str | None = None
    """Key for engines started with ``--api-key``: for probes, and for clients' requests if tenants have Baton's keys;
    otherwise clients send the engines' own keys."""
    classes: Mapping[str, SloClass] = field(default_factory=dict)
    """The classes and their promises. Empty: best effort, no request is refused for being late."""
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    """The tenants that may use the router. Empty: every client that reaches it may, as one tenant."""
    tenant_keys: Mapping[str, Keys] = field(default_factory=dict)
    """Returns each tenant's keys."""
    makes: Callable[[Instance], Make | None] | None = None
    """What is known about an instance's speed beforehand. None: it is learned from its legs."""

    @property
    def uploads_bytes(self) -> int:
        """The limit of body bytes that are being read."""
        return self.uploads_bytes_max or max(8 * self.body_bytes_max, 64 << 20)

    @property
    def open_bytes(self) -> int:
        """The limit of body bytes of all open requests."""
        return self.open_bytes_max or max(32 * self.body_bytes_max, 4 * self.uploads_bytes)

    def __post_init__(self) -> None:
        """Raises UsageError naming the field, its value and the fix."""
        if not self.instances and not self.has_registry:
            flags = "--prefill-url, --decode-url or --both-url"
            raise UsageError(f"no instance given: name at least one with {flags}, or give --registry")
        if self.instances and self.has_registry:
            raise UsageError("both --registry and engine URLs given: instances come from one or the other")
        for section in (Limits, RouterSettings):
            for name, setting in settings_of(section).items():
                value = getattr(self, name, None)
                bound = broken_bound(setting.about, value) if isinstance(value, int | float) else None
                if bound is not None:
                    raise UsageError(f"{flag_of(name)} is {value}: it must be {bound}")
        if set(self.tenants) != set(self.tenant_keys):
            raise UsageError("tenants without keys, or keys without tenants: each tenant needs a key file")
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise UsageError("--tls-key-file without --tls-cert-file: a key alone does not prove an identity")
