"""What one engine is: everything that decides its command line and environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cluster.errors import UsageError
from cluster.ids import RANK_MARK, RANKS_MAX, InstanceId, ranks_of
from cluster.instance import Role
from cluster.urls import netloc
from engine.vllm.tiers import Tiers

Device = Literal["cpu", "gpu"]
Connector = Literal["nixl", "baton"]
"""What moves KV cache: vLLM's own NixlConnector, or Baton's (`engine.vllm.connector`)."""

OURS = {
    "--host": "--host before `--`",
    "--port": "--port before `--`",
    "--model": "the MODEL argument",
    "--uds": "--host and --port",
    "--ssl-keyfile": "plain HTTP inside the cluster, or a proxy with TLS in front of the engine",
    "--ssl-certfile": "plain HTTP inside the cluster, or a proxy with TLS in front of the engine",
    "--headless": "one `baton engine` per API server",
}
"""vLLM flags that would move the engine away from where Baton and the router look for it, and what to use instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One stock vLLM server. A value of None or empty leaves the choice to vLLM.

    It has many attributes: one for each thing that an engine's flags or environment can say. `UsageError`: a name, a
    number of ranks, a memory share or a user's flag that cannot be.
    """

    instance: InstanceId
    role: Role
    model: str
    """Hugging Face name or folder."""
    served_name: str | None = None
    python: str
    """The interpreter that has vLLM."""
    device: Device
    host: str = "127.0.0.1"
    port: int
    side_channel_host: str = "127.0.0.1"
    """Address at which other engines reach this engine's NIXL handshake."""
    side_channel_port: int
    cores: tuple[int, ...] = ()
    """CPU engines: the cores of its threads. Without them vLLM chooses, and two engines choose the same ones."""
    unbound_threads: int = 0
    """OpenMP threads, bound to no core, of a CPU engine that shares its cores with others. 0: see `cores`."""
    gpus: tuple[str, ...] = ()
    """GPU engines: the value of CUDA_VISIBLE_DEVICES."""
    gpu_memory_share: float | None = None
    """Part of each GPU's memory, 0 to 1."""
    dtype: str | None = None
    max_model_len: int | None = None
    """Tokens."""
    kv_lease_s: int | None = None
    """How long a prefill engine keeps blocks that no engine pulls, in whole seconds; None: vLLM's 30, on CPU 120."""
    shutdown_timeout_s: int = 30
    """For how many seconds a stopping engine may finish its requests; vLLM's default of 0 aborts every request."""
    seqs_max: int = 256
    """Requests that the engine, or each of its `ranks`, runs at once (``max_num_seqs``). Its agent gives credits for
    them."""
    ranks: int = 1
    """Data parallel ranks behind its port. Each is an instance of its own (docs/ranks.md)."""
    flips: bool = False
    """Whether it is started for both kinds of leg whatever its role, so that its agent may take another role."""
    peers: bool = True
    """Whether it may pull prompts' beginnings from instances of any role, and hold them for such, with Baton's
    connector."""
    pinning: bool = True
    """Whether to load `engine.vllm.pin`, so that a client can have the first token before the hand-over."""
    ticket_keys_file: str | None = None
    """Key file of the guard in its API server, absolute; None: no guard, and any client that reaches the engine may
    start transfers."""
    connector: Connector = "nixl"
    door: str = ""
    """Path of the socket between its agent and Baton's connector, with `kvtransfer.asks.RANK` in it where each rank has
    one; empty: none, and the engine is introduced to no peer."""
    kv_events: str = ""
    """Path of the socket on which vLLM reports evictions from its KV cache; empty: they are not read."""
    tiers: Tiers | None = None
    """Tiers that keep its prompts' KV below its KV cache; None: it has none."""
    digests: bool = False
    """Whether Baton's connector vouches for blocks, and compares pulled ones (`kvtransfer.block_digests`)."""
    extra_args: tuple[str, ...] = ()
    """The user's vLLM flags, verbatim and last."""
    extra_env: Mapping[str, str] = field(default_factory=dict)
    """The user's environment for this engine, verbatim; wins over Baton's."""

    def __post_init__(self) -> None:
        if RANK_MARK in self.instance:
            raise UsageError(f"{self.instance}: `{RANK_MARK}` stands before the number of a rank, and in no name")
        if not 1 <= self.ranks <= RANKS_MAX:
            raise UsageError(f"an engine of {self.ranks} data parallel ranks: 1 to {RANKS_MAX}")
        for flag, instead in OURS.items():
            if given(self.extra_args, flag):
                raise UsageError(f"{flag} after `--` would move the engine away from Baton: use {instead}")
        if self.gpu_memory_share is not None and not 0 < self.gpu_memory_share <= 1:
            raise UsageError(f"--gpu-memory-share is {self.gpu_memory_share}: it must be above 0 and at most 1")

    @property
    def url(self) -> str:
        """Base URL of the engine from this machine. An engine that listens everywhere is reached on loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)  # noqa: S104
        return f"http://{netloc(host, self.port)}"

    @property
    def pins(self) -> bool:
        """Whether the engine loads Baton's logits processor. vLLM allows none beside speculative decoding, nor beside
        sampling masks. An engine that counts tokens in every chunk needs none: a first token from the router would lack
        the count.
        """
        ruled_out = any(given(self.extra_args, flag, *short) for flag, short in _NO_PINNING)
        return self.pinning and not ruled_out and not any(switched_on(self.extra_args, flag) for flag in _NONE_WHILE_ON)

    @property
    def instances(self) -> tuple[InstanceId, ...]:
        """The fleet's ids for it: its own, or one for each of its ranks."""
        return ranks_of(self.instance, self.ranks)

    @property
    def has_peers(self) -> bool:
        """Whether its connector pulls from instances of any role, as `peers` allows: Baton's can, vLLM's cannot."""
        return self.peers and self.connector == "baton"

    @property
    def evictions(self) -> str:
        """Path of rank 0's socket for reported evictions. Empty if the user's own flags configure KV events, or if the
        server has only some of a deployment's ranks: vLLM numbers their sockets itself.
        """
        mine = given(self.extra_args, "--kv-events-config") or any(given(self.extra_args, *flag) for flag in SOME_RANKS)
        return "" if mine else self.kv_events

    @property
    def first_rank(self) -> int:
        """vLLM's number of the first rank behind this port: the user's ``--data-parallel-rank``, else 0."""
        said = value_of(self.extra_args, "--data-parallel-rank", "-dpn")
        return int(said) if said is not None and said.isdecimal() else 0

    @property
    def stop_s(self) -> int:
        """Longest time for the engine's last requests at a stop: the user's `--shutdown-timeout`, or Baton's."""
        said = value_of(self.extra_args, "--shutdown-timeout")
        return int(said) if said is not None and said.isdecimal() else self.shutdown_timeout_s

    def api_key(self, base_env: Mapping[str, str]) -> str | None:
        """The key that the engine asks of its clients; None: it asks for none. `base_env`: Baton's environment."""
        return value_of(self.extra_args, "--api-key") or self.extra_env.get(
            "VLLM_API_KEY", base_env.get("VLLM_API_KEY")
        )


_NO_PINNING = (("--speculative-config", ("-sc",)), ("--spec-method", ()), ("--spec-model", ()), ("--spec-tokens", ()),
               ("--logits-processors", ()), ("--runner", ()), ("--convert", ()))  # fmt: skip
"""User flags that rule pinning out: speculative decoding, own logits processors, models that only embed."""
_NONE_WHILE_ON = ("--enable-force-include-usage", "--return-sampling-mask")
"""Flags that rule it out while they are on."""


SOME_RANKS = (("--data-parallel-start-rank", "-dpr"), ("--data-parallel-hybrid-lb", "-dph"))
"""vLLM flags of a server with some of a deployment's data parallel ranks, neither all nor one."""

_BALANCED_OUTSIDE = (*SOME_RANKS, ("--data-parallel-rank", "-dpn"), ("--data-parallel-external-lb", "-dpe"),
                     ("--data-parallel-multi-port-external-lb", "-dpm"))  # fmt: skip
"""vLLM flags of a server that has one or some of a deployment's ranks, but not all."""


def ranks_in(args: tuple[str, ...]) -> int:
    """The number of data parallel ranks that vLLM, by its flags, starts behind one port and balances itself. A
    request's ``X-data-parallel-rank`` may name one of them. 1: the port has one engine, perhaps one rank of many.
    """
    size = value_of(args, "--data-parallel-size", "-dp")
    if size is None or not size.isdecimal() or any(given(args, *flag) for flag in _BALANCED_OUTSIDE):
        return 1
    return max(1, int(size))


def given(args: tuple[str, ...], flag: str, *short: str) -> bool:
    """Whether a command line already sets `flag`, in any way vLLM's parser takes it.

    That is ``--flag value``, ``--flag=value``, ``--no-flag``, ``--flag.key value``, underscores for dashes, and the
    short forms with the value apart or attached (``-tp 2``, ``-tp=2``, ``-tp2``).
    """
    negated = "--no-" + flag.removeprefix("--")
    for arg in args:
        name = _name(arg)
        if name in {flag, negated} or name.startswith(f"{flag}."):
            return True
        if any(arg == one or (arg.startswith(one) and arg[len(one) :].lstrip("=").isdecimal()) for one in short):
            return True
    return False


def switched_on(args: tuple[str, ...], flag: str) -> bool:
    """Whether a command line switches `flag` on. The last of ``--flag`` and ``--no-flag`` counts, as in argparse."""
    last = [name for name in map(_name, args) if name in {flag, "--no-" + flag.removeprefix("--")}][-1:]
    return last == [flag]


def value_of(args: tuple[str, ...], flag: str, *short: str) -> str | None:
    """The value a command line gives `flag`, or None. The last one counts, as in argparse."""
    found = None
    for at, arg in enumerate(args):
        if _name(arg) == flag or arg.partition("=")[0] in short:
            if "=" in arg:
                found = arg.partition("=")[2]
            elif at + 1 < len(args):
                found = args[at + 1]
        else:
            found = next(
                (arg[len(one) :] for one in short if arg.startswith(one) and arg[len(one) :].isdecimal()), found
            )
    return found


def _name(arg: str) -> str:
    """``--Flag_name=value`` -> ``--Flag-name``; other words come back unchanged."""
    return arg.partition("=")[0].replace("_", "-") if arg.startswith("--") else arg
