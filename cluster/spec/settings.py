"""The cluster file as values: every field, its unit, its default and the reason for it.

`docs/cluster-file.md` is made from this module, and the reader checks what it says. Names carry their unit last.
Only `models` is required, and of a model only its `name`.

The settings are dataclasses and use no validation library. All wrong values are reported at once, each with line,
column and what to write instead. Only the file's own tree has these; a library would do only the easy half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cluster.instance import Role
from cluster.spec.about import ENV_NAME, NAME, about

POOL_MAX = 1000
"""Most instances of a pool: as many as the router's decisions are measured with."""

TIER_GIB_MAX = 1e6
"""Largest tier of one instance; more is a slip."""

POLICY = "workload"
"""The policy if the file names none. All commands use this default: with and without targets, by URL, from a registry,
on mocks and simulated."""


class WhenMissed(StrEnum):
    """What happens to a request whose targets cannot be met any more."""

    QUEUE = "queue"
    DEGRADE = "degrade"
    SHED = "shed"


class CacheScope(StrEnum):
    """Which tenants may reuse the KV cache of a tenant's prompts."""

    TENANT = "tenant"
    SHARED = "shared"


class Connector(StrEnum):
    """What moves the KV cache from one engine to the other."""

    AUTO = "auto"
    NIXL = "nixl"
    BATON = "baton"


MEANINGS: Mapping[type[StrEnum], Mapping[str, str]] = {
    WhenMissed: {
        "queue": "it waits its turn and is served late.",
        "degrade": "it is served by the targets of another class, `degrade_to`.",
        "shed": "it is refused at once with 429 and `Retry-After`.",
    },
    CacheScope: {"tenant": "its own only.", "shared": "those of all tenants with `shared`."},
    Role: {
        "prefill": "computes prompts.",
        "decode": "generates.",
        "both": "runs either leg, and whole requests.",
    },
    Connector: {
        "auto": "ours with a vLLM that it is written for, else vLLM's.",
        "nixl": "vLLM's own NixlConnector.",
        "baton": "ours, built on it.",
    },
}
"""The meaning of each choice, one sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many GPUs one instance uses, and how they share the work: `tp` × `pp` × `dp` of them."""

    tp: int = field(
        default=1,
        metadata=about(
            text="Tensor parallelism: GPUs that compute each layer together.",
            why="one GPU needs no network between GPUs",
            at_least=1,
            at_most=1024,
            aka=("tensor_parallel_size", "tensor_parallel", "gpus"),
        ),
    )
    dp: int = field(
        default=1,
        metadata=about(
            text="Data parallelism: copies of the attention layers behind one address, each chosen as an instance.",
            why="more instances do the same and fail one by one",
            at_least=1,
            at_most=1024,
            aka=("data_parallel_size", "data_parallel"),
        ),
    )
    ep: int = field(
        default=1,
        metadata=about(
            text="Expert parallelism: ranks that a mixture's experts are spread over; 1, or `tp` × `dp`.",
            why="only models with experts have a use for it",
            at_least=1,
            at_most=1024,
            aka=("expert_parallel_size", "expert_parallel"),
        ),
    )
    pp: int = field(
        default=1,
        metadata=about(
            text="Pipeline parallelism: stages of layers. vLLM's NixlConnector hands nothing over with more than 1.",
            why="stages add latency to every token",
            at_least=1,
            at_most=1024,
            aka=("pipeline_parallel_size", "pipeline_parallel"),
        ),
    )

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The instances of one role: how many there may be, and what each one is."""

    min: int = field(
        default=1,
        metadata=about(
            text="Fewest instances.",
            why="a pool that is empty makes the next request wait for an engine's start, which takes minutes",
            at_least=0,
            at_most=POOL_MAX,
            aka=("min_replicas", "minimum", "at_least"),
        ),
    )
    max: int | None = field(
        default=None,
        metadata=about(
            text="Most instances. Left out: as many as at the start.",
            why="GPUs cost money: nothing grows until you say how far",
            at_least=1,
            at_most=POOL_MAX,
            aka=("max_replicas", "maximum", "at_most"),
        ),
    )
    start: int | None = field(
        default=None,
        metadata=about(
            text="Instances at the start. Left out: `min`.",
            why="what is not needed yet is not paid for",
            at_least=0,
            at_most=POOL_MAX,
            aka=("replicas", "count", "instances", "size", "initial", "num"),
        ),
    )
    shape: Shape = field(
        default=Shape(),
        metadata=about(text="The GPUs of one instance.", why="one GPU each", aka=("parallelism", "parallel")),
    )
    gpu: str | None = field(
        default=None,
        metadata=about(
            text="Type of GPU, by its name under `hardware`. Left out: whatever is found.",
            why="most clusters have one type",
            aka=("gpu_type", "device", "accelerator"),
        ),
    )
    engine_args: Mapping[str, Any] = field(
        default_factory=dict,
        metadata=about(
            text="Flags of vLLM, without the leading dashes, verbatim. `true` gives `--flag`, `false` gives "
            "`--no-flag`, a list several words, a mapping JSON.",
            why="vLLM's own defaults",
            aka=("args", "extra_args", "vllm_args", "engine_arguments", "flags", "vllm"),
        ),
    )
    env: Mapping[str, str] = field(
        default_factory=dict,
        metadata=about(
            text="Environment of the engine, verbatim. Secrets belong into the environment of `baton up`, which the "
            "engines inherit.",
            why="the environment of `baton up`",
            keys=ENV_NAME,
            aka=("environment", "envs", "env_vars"),
        ),
    )
    flips: bool = field(
        default=False,
        metadata=about(
            text="Whether its instances may take another role while they run (`POST /role` to their agents): their "
            "engines are started for both kinds of leg.",
            why="an engine for one kind of leg is the way that vLLM is run and tested most",
            aka=("role_flips", "flip", "can_flip"),
        ),
    )

    power_cap_w: float | None = field(
        default=None,
        metadata=about(
            text="What each of its GPUs is capped to. Baton does not set it: your machines do (`nvidia-smi "
            "--power-limit`). Times and watts are reckoned with it.",
            why="a GPU draws what it can",
            above=0,
            aka=("power_limit_w", "power_cap", "power_limit"),
        ),
    )

    @property
    def at_start(self) -> int:
        """Instances at the start."""
        return self.min if self.start is None else self.start

    @property
    def at_most(self) -> int:
        """Most instances."""
        return max(self.min, self.at_start) if self.max is None else self.max


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraPool(Pool):
    """One more pool of a role, of another GPU type or shape."""

    role: Role = field(
        metadata=about(text="Which role its instances have.", why="an extra pool adds instances to a role"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The pools of a model, one for each role. A role that is not named has no pool."""

    prefill: Pool | None = field(
        default=None,
        metadata=about(text="Computes prompts and hands their KV cache over.", why="no pool unless named"),
    )
    decode: Pool | None = field(
        default=None,
        metadata=about(text="Takes the KV cache and generates.", why="no pool unless named"),
    )
    both: Pool | None = field(
        default=None,
        metadata=about(
            text="Runs either leg, and whole requests; can take over for both.",
            why="no pool unless named",
            aka=("mixed", "aggregated"),
        ),
    )

    extra: Mapping[str, ExtraPool] = field(
        default_factory=dict,
        metadata=about(
            text="More pools beside those, by a name of yours that says which it is (`decode-l40s`): a role whose "
            "instances are of several GPU types or shapes.",
            why="one pool a role",
            keys=NAME,
        ),
    )

    def every(self) -> Mapping[str, tuple[Role, Pool]]:
        """All pools by name, with the role of each. A role's own pool has the role's name, an extra pool has its
        own.
        """
        main = {role.value: (role, pool) for role, pool in self.named().items()}
        return {**main, **{name: (pool.role, pool) for name, pool in self.extra.items()}}

    def named(self) -> Mapping[Role, Pool]:
        """The pools by role, without the extra ones."""
        pools = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.BOTH: self.both}
        return {role: pool for role, pool in pools.items() if pool is not None}

    def can_hand_over(self) -> bool:
        """Whether the pools may have one instance to compute a prompt and another one to generate."""
        prefill, decode, both = (
            sum(pool.at_most for role, pool in self.every().values() if role is wanted)
            for wanted in (Role.PREFILL, Role.DECODE, Role.BOTH)
        )
        return bool(both >= 2 or (prefill and (decode or both)) or (decode and both))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model and the pools that serve it."""

    name: str = field(
        metadata=about(
            text="Hugging Face name, or a folder.",
            why="required: nothing else says what to serve",
            aka=("model", "id", "path", "model_name", "model_id"),
        ),
    )
    served_name: str | None = field(
        default=None,
        metadata=about(
            text="Name in the API, what clients send as `model`. Left out: `name`.",
            why="clients know the model by its own name",
            aka=("served_model_name",),
        ),
    )
    aliases: tuple[str, ...] = field(
        default=(),
        metadata=about(
            text="Other names that clients may send as `model`. Engines and answers know its own name only.",
            why="one name is enough until clients ask for another",
            aka=("alias", "other_names", "also_known_as", "names"),
        ),
    )
    tenants: tuple[str, ...] = field(
        default=(),
        metadata=about(
            text="Names under `tenants` whose requests alone its instances serve, under this name and those of its "
            "adapters; to others there is no such model. Left out: all tenants.",
            why="GPUs that several tenants share are idle less",
            not_empty="leave it out to serve every tenant, or name one",
            aka=("only_for", "reserved_for", "allowed_tenants", "tenant"),
        ),
    )
    pools: Pools = field(
        default=Pools(prefill=Pool(), decode=Pool()),
        metadata=about(
            text="Which instances compute prompts, and which generate.",
            why="one prefill and one decode instance: the smallest fleet that hands over",
            aka=("roles",),
        ),
    )

    @property
    def api_name(self) -> str:
        """The name that clients send as `model`."""
        return self.served_name or self.name


def _target(text: str, *aka: str) -> dict[str, Any]:
    return about(text=text, why="no promise unless named", above=0, aka=aka)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """The targets of one class of requests. At least one target is needed."""

    ttft_ms: float | None = field(
        default=None,
        metadata=_target("Time to the first token, from the arrival.", "first_token_ms", "time_to_first_token_ms"),
    )
    tt2t_ms: float | None = field(
        default=None,
        metadata=_target("From the first token to the second: the handoff lies in between.", "second_token_ms"),
    )
    tpot_ms: float | None = field(
        default=None,
        metadata=_target(
            "Mean time per output token after the first.", "itl_ms", "tbt_ms", "time_per_output_token_ms", "token_ms"
        ),
    )
    e2e_ms: float | None = field(
        default=None,
        metadata=_target(
            "From the arrival to the last token, whatever the length of the answer.", "latency_ms", "total_ms"
        ),
    )
    attainment: float = field(
        default=0.95,
        metadata=about(
            text="Share of all arrivals that must meet every target, 0 to 1. Refused ones count as missed.",
            why="one request in twenty may be late: a stricter promise is kept with GPUs that idle most of the time",
            above=0,
            at_most=1,
            aka=("percentile", "target", "goal", "p", "quantile"),
        ),
    )
    lengths_within: float = field(
        default=1.0,
        metadata=about(
            text="How much more often prompts of one length may be given up than all together, 0 to 1; 1: no bound.",
            why="fewest requests are late if the longest prompts are given up first; a bound makes more of them late",
            above=0,
            at_most=1,
            aka=("fairness", "length_fairness", "lengths_apart"),
        ),
    )
    when_missed: WhenMissed = field(
        default=WhenMissed.QUEUE,
        metadata=about(
            text="What happens to a request whose targets cannot be met.",
            why="late is better than refused unless you say otherwise",
            aka=("on_miss", "if_missed", "when_late", "policy", "action"),
        ),
    )
    degrade_to: str | None = field(
        default=None,
        metadata=about(
            text="The class whose targets apply instead; needed with `when_missed: degrade`, and only there.",
            why="only you know which looser promise is still worth keeping",
            aka=("fallback", "degraded"),
        ),
    )

    def targets(self) -> Mapping[str, float]:
        """The targets that are set, in milliseconds."""
        named = {name: getattr(self, name) for name in ("ttft_ms", "tt2t_ms", "tpot_ms", "e2e_ms")}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One client organisation: its keys, its share and what it may ask for."""

    key_file: str | None = field(
        default=None,
        metadata=about(
            text="File of SHA-256 lines of this tenant's keys, relative to the cluster file. Left out: `keys/NAME`.",
            why="where `baton key new NAME` writes it",
            aka=("key", "keys", "api_key", "api_keys", "keyfile", "api_key_file", "token"),
        ),
    )
    share: float = field(
        default=1.0,
        metadata=about(
            text="Weight of this tenant beside the others while requests queue.",
            why="equal shares",
            above=0,
            at_most=1e6,
            aka=("weight", "priority", "shares"),
        ),
    )
    classes: tuple[str, ...] = field(
        default=(),
        metadata=about(
            text="Classes under `slo` that its requests may name, the usual one first. Left out: all of them.",
            why="a class is a promise, not a privilege, unless you make it one",
            aka=("slo", "slos", "slo_classes", "class"),
        ),
    )
    default_class: str | None = field(
        default=None,
        metadata=about(
            text="Class of a request that names none. Left out: the first of `classes`; without those, best effort.",
            why="the list has the usual one first",
            aka=("default", "default_slo"),
        ),
    )
    open_max: int | None = field(
        default=None,
        metadata=about(
            text="Most requests it may have open at once; one more is answered 429. Of several routers each has its "
            "part. Left out: no bound.",
            why="requests without targets wait in a queue: a bound is for clients that send without waiting",
            at_least=1,
            at_most=1_000_000,
            aka=("max_open", "concurrency", "max_concurrency", "max_requests", "max_parallel", "open_requests_max"),
        ),
    )
    cache_scope: CacheScope = field(
        default=CacheScope.TENANT,
        metadata=about(
            text="Whose requests may reuse the KV cache of its prompts.",
            why="a prefix hit is fast, so a shared cache tells others what was asked",
            aka=("cache", "prefix_cache", "cache_sharing"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """How the KV cache gets from prefill to decode."""

    connector: Connector = field(
        default=Connector.AUTO,
        metadata=about(
            text="What moves it.",
            why="ours: as fast in most places, and nothing stays held when clients leave",
            aka=("kv_connector", "backend", "type"),
        ),
    )
    lease_s: int | None = field(
        default=None,
        metadata=about(
            text="How long a prefill engine keeps blocks that are not pulled. Left out: 30 on GPUs, 120 on CPU.",
            why="vLLM's own 30 s; a busy engine on CPU may take longer to get to a pull",
            at_least=1,
            at_most=86400,
            aka=("kv_lease_duration", "timeout_s", "hold_s", "ttl_s"),
        ),
    )
    digests: bool = field(
        default=False,
        metadata=about(
            text="Compare every pulled block with what prefill held; if one is wrong, decode computes the prompt. "
            "For `connector: baton`, and KV caches in host memory.",
            why="it reads every byte once more on both sides, to find what only a fault of memory or network does",
            aka=("checksum", "checksums", "verify", "crc"),
        ),
    )
    peers: bool = field(
        default=True,
        metadata=about(
            text="Pull a prompt's beginning from any instance that has it in its KV cache, where that costs less than "
            "to compute it. With Baton's connector.",
            why="it is used only where it is clearly the cheaper way, and a source that fails costs its wait",
            aka=("p2p", "peer_cache", "remote_prefix", "share_prefixes"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTiers:
    """Tiers below each instance's KV cache, by vLLM's own offloading. They end with the engine."""

    host_gib: float | None = field(
        default=None,
        metadata=about(
            text="Host memory of each instance, all its ranks together, in shared memory. Left out: none.",
            why="memory that you have not given is not taken",
            above=0,
            at_most=TIER_GIB_MAX,
            aka=("cpu_gib", "host", "cpu", "ram_gib", "host_memory_gib", "kv_offloading_size"),
        ),
    )
    disk_gib: float | None = field(
        default=None,
        metadata=about(
            text="Files of each instance. vLLM moves blocks through host memory: it needs `host_gib`. Left out: none.",
            why="a disk is slower than computing a prompt again unless the model is large",
            above=0,
            at_most=TIER_GIB_MAX,
            aka=("disk", "nvme_gib", "ssd_gib", "file_gib", "storage_gib"),
        ),
    )
    disk_folder: str | None = field(
        default=None,
        metadata=about(
            text="Folder, absolute, below which each instance has one of its own. Left out: that of Baton's state.",
            why="the state is on a disk that the user may fill",
            aka=("disk_path", "path", "root_dir", "folder", "directory"),
        ),
    )


NO_TIERS = KvTiers()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    """The registry: a Redis that agents and routers share."""

    url: str | None = field(
        default=None,
        metadata=about(
            text="`redis://HOST:PORT`, or `rediss://` for TLS. Left out: one is started with the cluster.",
            why="one machine needs no service of its own for this",
            aka=("redis", "redis_url", "address", "host", "endpoint"),
        ),
    )
    password_file: str | None = field(
        default=None,
        metadata=about(
            text="File with its password, relative to the cluster file. Left out: no password.",
            why="a Redis that listens on one machine alone has none",
            aka=("password", "auth", "passwd"),
        ),
    )
    ca_file: str | None = field(
        default=None,
        metadata=about(
            text="Certificates that `rediss://` is checked against, relative to the cluster file. Left out: the "
            "system's.",
            why="a public certificate needs none",
            aka=("ca", "ca_cert", "tls_ca", "ca_certs"),
        ),
    )
    cluster: str = field(
        default="default",
        metadata=about(
            text="Name of this cluster in it.",
            why="a Redis of its own needs no other; several clusters in one are apart by it",
            form=NAME,
            aka=("namespace", "prefix", "cluster_name", "name"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits at which the router cuts something off."""

    body_bytes_max: int = field(
        default=32 << 20,
        metadata=about(
            text="Largest request body.",
            why="holds a two-million-token prompt with room to spare",
            at_least=1024,
            aka=("max_body", "body_size_max", "max_body_size", "body_max"),
        ),
    )
    answer_bytes_max: int = field(
        default=64 << 20,
        metadata=about(
            text="Most of one engine's answer that is kept to be read: answers in one piece, a prefill engine's, one "
            "event of a stream. A longer one is that engine's failure.",
            why="holds 100,000 tokens with the log probabilities of six others each; a stream has no limit",
            at_least=65536,
            aka=("max_answer", "answer_size_max", "response_bytes_max", "max_response"),
        ),
    )
    uploads_bytes_max: int = field(
        default=0,
        metadata=about(
            text="Bytes of request bodies that a router reads or parses at once; beyond it uploads wait. One client "
            "has at most three quarters of it. 0: eight of the largest bodies, 64 MiB at least.",
            why="eight of the largest bodies hold a usual burst",
            at_least=0,
            aka=("uploads_max", "upload_bytes_max"),
        ),
    )
    open_bytes_max: int = field(
        default=0,
        metadata=about(
            text="Bytes of the bodies of all open requests; beyond it new ones get a 503. One client has at most three "
            "quarters of it. 0: 32 of the largest bodies, four times what uploads may have at least.",
            why="a parsed body takes up to ten times its bytes: with 32 MiB for a body, some 10 GiB at most",
            at_least=0,
            aka=("open_max_bytes", "bodies_bytes_max"),
        ),
    )
    connections_max: int = field(
        default=0,
        metadata=about(
            text="Connections that clients may have open at a router; at the bound the one that is idle for longest is "
            "closed. 0: as many as descriptors allow, 16384 at most.",
            why="engines, the registry and logs need descriptors, too",
            at_least=0,
            aka=("max_connections", "max_clients", "clients_max"),
        ),
    )
    body_timeout_s: float = field(
        default=30.0,
        metadata=about(
            text="Time for a body that was announced to arrive.",
            why="a client that does not send holds a place until then",
            above=0,
        ),
    )
    head_timeout_s: float = field(
        default=15.0,
        metadata=about(
            text="Time for a request's head to arrive.",
            why="an open connection that says nothing holds a place until then",
            above=0,
        ),
    )
    first_token_s: float = field(
        default=300.0,
        metadata=about(
            text="Deadline of the first token, for every request.",
            why="generous: without targets nothing better is known",
            above=0,
            aka=("timeout_s", "deadline_s", "request_timeout_s"),
        ),
    )
    stall_s: float = field(
        default=120.0,
        metadata=about(
            text="Longest silence between two pieces of a stream.",
            why="a decode engine may recompute a long prompt in between",
            above=0,
            aka=("idle_timeout_s", "stream_timeout_s", "stall_timeout_s"),
        ),
    )
    client_stall_s: float = field(
        default=60.0,
        metadata=about(
            text="Longest time a client may take nothing of what was sent to it.",
            why="an answer that its client does not read holds an engine's place until then",
            above=0,
            at_most=86400,
            aka=("write_timeout_s", "send_timeout_s"),
        ),
    )
    whole_s: float = field(
        default=1800.0,
        metadata=about(
            text="Longest time to an answer that is not streamed.",
            why="a long answer looks like an engine that hangs; vllm-router gives half an hour to any request",
            above=0,
            aka=("answer_timeout_s", "response_timeout_s"),
        ),
    )
    drain_s: float = field(
        default=30.0,
        metadata=about(
            text="Time open requests have to end once a stop was asked for.",
            why="as long as Kubernetes waits before it kills",
            at_least=0,
            aka=("grace_s", "shutdown_timeout_s", "grace_period_s"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One type of GPU that the fleet may use."""

    count: int | None = field(
        default=None,
        metadata=about(
            text="GPUs of this type there are. Left out: no bound.",
            why="pools have a `max` of their own",
            at_least=1,
            aka=("gpus", "number", "available", "quantity", "max"),
        ),
    )
    price_per_hour: float | None = field(
        default=None,
        metadata=about(
            text="Price of one GPU for an hour, in one currency of yours for all types.",
            why="`baton plan` takes a market price of its own (costs/hardware.py)",
            at_least=0,
            aka=("price", "cost", "cost_per_hour", "price_hour", "hourly_price", "usd_per_hour"),
        ),
    )
    power_w: float | None = field(
        default=None,
        metadata=about(
            text="Power of one GPU under load.",
            why="`baton plan` takes the data sheet's (costs/hardware.py)",
            above=0,
            aka=("tdp_w", "tdp", "watt"),
        ),
    )
    memory_gib: float | None = field(
        default=None,
        metadata=about(
            text="Memory of one GPU. Left out: what the GPU says.",
            why="a machine that has the GPU knows; a plan for one that is not there needs the number",
            above=0,
            aka=("vram_gib", "vram", "mem_gib", "hbm_gib"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """The router: what clients and operators connect to."""

    host: str = field(
        default="127.0.0.1",
        metadata=about(
            text="Address it listens on.",
            why="no other machine gets in before you say so",
            aka=("address", "bind", "listen"),
        ),
    )
    port: int = field(
        default=8000,
        metadata=about(
            text="Port for clients, 0 for a free one.",
            why="where vLLM's own server listens, so clients need no change",
            at_least=0,
            at_most=65535,
        ),
    )
    admin_host: str = field(
        default="127.0.0.1",
        metadata=about(text="Address of the admin side: metrics, readiness.", why="metrics are for operators only"),
    )
    admin_port: int = field(
        default=8001,
        metadata=about(
            text="Port of the admin side, 0 for a free one.",
            why="the next one",
            at_least=0,
            at_most=65535,
            aka=("metrics_port",),
        ),
    )
    admin_key_file: str | None = field(
        default=None,
        metadata=about(
            text="File of SHA-256 lines of operators' keys (`baton key new`), for the admin side from other machines. "
            "Left out: other machines get no answer there.",
            why="this machine needs no key for it, and others mostly have no business there",
            aka=("admin_key", "admin_keys", "operator_key_file"),
        ),
    )
    tls_cert_file: str | None = field(
        default=None,
        metadata=about(
            text="Certificate chain (PEM) for the clients' port. Left out: plain HTTP.",
            why="on this machine the network cannot be tapped; elsewhere a gateway often ends TLS",
            aka=("tls_cert", "ssl_certfile", "ssl_cert", "cert_file", "certificate", "tls"),
        ),
    )
    tls_key_file: str | None = field(
        default=None,
        metadata=about(
            text="Private key (PEM) of the certificate. Left out: it is in the certificate's file.",
            why="tools write either one file or two",
            aka=("tls_key", "ssl_keyfile", "ssl_key", "private_key_file"),
        ),
    )
    policy: str = field(
        default=POLICY,
        metadata=about(
            text="How instances are chosen: `workload` or `least_load` (docs/policy.md).",
            why="it knows prefixes and what is under way where, and learns what it is not told",
            aka=("routing", "strategy", "routing_policy", "load_balancing"),
        ),
    )
    explain_last: int = field(
        default=1000,
        metadata=about(
            text="Finished requests that `/explain` of the admin side remembers.",
            why="about 3 KB each, 16 MiB in all at most",
            at_least=0,
            aka=("explain_max", "remembers"),
        ),
    )
    processes: int = field(
        default=1,
        metadata=about(
            text="Router processes that share the port, as replicas of one registry; their admin sides have "
            "`admin_port` and the ports after it.",
            why="one is enough until you measure that it is not",
            at_least=1,
            at_most=256,
            aka=("replicas", "count", "threads", "procs"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The whole cluster file."""

    models: tuple[Model, ...] = field(
        metadata=about(
            text="What is served, and by which pools.",
            why="required: nothing else says what to serve",
            aka=("model",),
        ),
    )
    slo: Mapping[str, SloClass] = field(
        default_factory=dict,
        metadata=about(
            text="Classes of requests, by name, and what each is promised.",
            why="best effort: nothing is promised and nothing is ever refused",
            keys=NAME,
            aka=("slos", "sla", "slas", "classes", "slo_classes", "targets", "objectives"),
        ),
    )
    tenants: Mapping[str, Tenant] = field(
        default_factory=dict,
        metadata=about(
            text="Clients that may use the cluster, by name.",
            why="no keys: every client that reaches the router may use it, and all are one tenant",
            keys=NAME,
            aka=("tenant", "users", "clients", "customers", "keys"),
        ),
    )
    transfer: Transfer = field(
        default=Transfer(),
        metadata=about(
            text="How the KV cache gets from prefill to decode.",
            why="Baton's connector where it can serve, else vLLM's",
            aka=("kv_transfer", "handoff"),
        ),
    )
    kv: KvTiers = field(
        default=NO_TIERS,
        metadata=about(
            text="Where an instance's prompts are kept when its KV cache is full.",
            why="no tier: prompts that the KV cache drops are computed again",
            aka=("kv_cache", "kv_offload", "offload", "offloading", "tiers", "kv_tiers"),
        ),
    )
    registry: RegistrySettings = field(
        default=RegistrySettings(),
        metadata=about(
            text="The Redis of agents and routers.",
            why="one is started with the cluster",
            aka=("redis", "discovery", "store"),
        ),
    )
    limits: Limits = field(
        default=Limits(),
        metadata=about(
            text="What the router allows before it cuts something off.",
            why="each bound is far from what a healthy request needs",
            aka=("timeouts", "limit", "bounds"),
        ),
    )
    hardware: Mapping[str, Hardware] = field(
        default_factory=dict,
        metadata=about(
            text="Types of GPU the fleet may use, by name.",
            why="whatever is found, without prices",
            keys=NAME,
            aka=("gpus", "gpu_types", "gpu", "nodes", "machines"),
        ),
    )
    router: RouterSettings = field(
        default=RouterSettings(),
        metadata=about(
            text="What clients connect to.", why="this machine alone, port 8000", aka=("frontend", "gateway", "server")
        ),
    )

    def key_file(self, tenant: str) -> str:
        """The file of a tenant's keys, with the path that the cluster file gives or implies."""
        return self.tenants[tenant].key_file or f"keys/{tenant}"

    def default_class(self, tenant: str) -> str | None:
        """The class of a tenant's request that names no class; None: best effort."""
        said = self.tenants[tenant]
        return said.default_class or (said.classes[0] if said.classes else None)
