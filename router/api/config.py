"""What a router process is told at its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.errors import UsageError
from cluster.instance import Instance
from cluster.spec import POLICY, SloClass, Tenant
from kvtransfer.ticket import Key
from router.core.clients import Keys
from router.predict.step_model import Make


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """What an edited cluster file says of classes, tenants and their keys."""

    classes: Mapping[str, SloClass]
    tenants: Mapping[str, Tenant]
    tenant_keys: Mapping[str, Keys]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """All settings of one router; every default says why."""

    instances: tuple[Instance, ...] = ()
    """Engines given by URL; with a registry, none."""
    has_registry: bool = False
    """Whether instances announce themselves in a registry."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 = a free port."""
    shares_port: bool = False
    """Whether other processes of this router listen there, too."""
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    policy: str = POLICY
    """Knows prefixes and what is under way where; assumes costs until it has learned them."""
    body_bytes_max: int = 32 << 20
    """32 MiB holds a two-million-token prompt with room to spare."""
    answer_bytes_max: int = 64 << 20
    """Most of one answer that is kept to be read: 64 MiB is 100,000 tokens with the log probabilities of six others
    each. What is passed on as it comes has no limit."""
    uploads_bytes_max: int = 0
    """So many bytes of bodies are read at once; beyond it uploads wait, the oldest goes on. 0: eight of the largest
    bodies, 64 MiB at least: more than honest clients have under way on any network, and less than a router's memory."""
    connections_max: int = 0
    """Connections that clients may have open. 0: as many as descriptors allow, with one to an engine for each, and
    16,384 at most, which one process cannot serve."""
    body_timeout_s: float = 30.0
    """A client that announced a body and does not send it is cut off after this; it holds a place until then."""
    head_timeout_s: float = 15.0
    """The same for a client that opened a connection and sends no complete request head."""
    first_token_s: float = 300.0
    """Deadline for the first token; generous, since without SLO classes nothing better is known."""
    stall_s: float = 120.0
    """Longest silence between two chunks of a stream; an engine that another can take over from has half of it."""
    whole_s: float = 1800.0
    """Longest time to an answer that is not streamed: nobody can tell a long one from an engine that hangs. Half an
    hour is what vllm-router gives any request."""
    client_stall_s: float = 60.0
    """A client that takes nothing of what was sent to it for this long is cut off: its answer's buffers are held, and
    its engine is paused, until then. Browsers and SDKs read as fast as the network does."""
    tls_cert_file: str | None = None
    """Certificate chain (PEM) for the clients' port. None: plain HTTP, for whatever ends TLS before it."""
    tls_key_file: str | None = None
    """Its private key. None: it is in the certificate's file."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names that clients may use for models: the model's own name, by alias."""
    renewed: Callable[[], Renewed | str | None] | None = None
    """Looks whether classes or tenants have changed, and reads files for it: them, or why they cannot be read, or None
    where nothing is new. None: they never change."""
    admin_keys: Keys | None = None
    """Tells the operators' keys: who reads the admin side from another machine. None: nobody does."""
    seeding: bool = True
    """Give clients P's first token before the handoff, where that is exact and D's engine can be told."""
    drain_s: float = 30.0
    """How long open requests may take once SIGTERM has come."""
    decision_log: Callable[[bytes], object] | None = None
    """Gets lines for everything that choices depend on, and for each choice (`router.fleet.events`), some at a
    time. It may raise OSError where it cannot write, and returns how many bytes it took; None: all."""
    proves: bool = False
    """Whether pairs of instances are proven with prompts of our own (`router.fleet.pair_proofs`)."""
    explain_last: int = 1000
    """Finished requests that ``/explain`` remembers: about 3 KB each, 16 MiB in all at most."""
    ticket_keys: Callable[[], tuple[Key, ...]] | None = None
    """Tells the fleet's keys for tickets, the first one for signing. None: engines are not guarded."""
    engine_key: str | None = None
    """Key for engines started with ``--api-key``: for probes, and for clients' requests where tenants have keys of
    ours; elsewhere clients bring the engines' own."""
    classes: Mapping[str, SloClass] = field(default_factory=dict)
    """What classes of requests are promised. None: best effort, nothing is ever refused for being late."""
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    """Who may use it. None: everybody who reaches it, as one tenant."""
    tenant_keys: Mapping[str, Keys] = field(default_factory=dict)
    """Tells each tenant's keys."""
    makes: Callable[[Instance], Make | None] | None = None
    """What is known beforehand of an instance's speed. None: it is learned from its legs."""

    @property
    def uploads_bytes(self) -> int:
        """Bytes of bodies that are read at once."""
        return self.uploads_bytes_max or max(8 * self.body_bytes_max, 64 << 20)

    def __post_init__(self) -> None:
        """Raises UsageError naming the field, its value and the fix."""
        if not self.instances and not self.has_registry:
            flags = "--prefill-url, --decode-url or --both-url"
            raise UsageError(f"no instance given: name at least one with {flags}, or give --registry")
        if self.instances and self.has_registry:
            raise UsageError("both --registry and engine URLs given: instances come from one or the other")
        for name in (
            "body_bytes_max",
            "answer_bytes_max",
            "body_timeout_s",
            "head_timeout_s",
            "first_token_s",
            "stall_s",
            "whole_s",
            "client_stall_s",
        ):
            if getattr(self, name) <= 0:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be above 0")
        for name in ("port", "admin_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}: a port is 0 (a free one) to 65535"
                )
        if set(self.tenants) != set(self.tenant_keys):
            raise UsageError("tenants without keys, or keys without tenants: each tenant needs a key file")
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise UsageError("--tls-key-file without --tls-cert-file: a key alone shows nobody who this is")
        for name, none in (
            ("explain_last", "remember none"),
            ("uploads_bytes_max", "eight of the largest bodies"),
            ("connections_max", "as many as descriptors allow"),
        ):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}: give 0 ({none}) or more")
