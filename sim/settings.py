"""The delays and limits around engines and router in a simulated cluster, each with the source of its default."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.registry.membership import BEAT_EVERY_S, TTL_S
from router.core.load_notes import TELL_S
from sim.roughness import SMOOTH, Roughness


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """All parameters of a run that are not the fleet's or the load's: many attributes, each with its own source."""

    seed: int = 0
    """The seed of everything random in the world: starts, faults and roughness. Arrivals have their own."""
    rough: Roughness = SMOOTH
    """How far engines, network and the router's estimates are from what predictions say."""
    client_us: float = 0.0
    """Client to router, one way. 0: latencies are measured at the router, as a user's network is unknown."""
    router_us: float = 300.0
    """A request in the router before its first leg leaves. Order of the CPU time of routers per request: 207 to 325 us
    for vllm-router and sglang-router (measured with 2 KB prompts); ours has the same order as a target."""
    hop_us: float = 100.0
    """Router to engine or engine to engine, one way, HTTP of a whole message included: half of the 0.1 to 0.5 ms round
    trip that clouds state within a zone. A parameter."""
    pull_front_ms: float = 2.0
    """A decode leg in its engine before its pull is ordered: HTTP, tokeniser, hand-over to the scheduler. Estimated
    (vLLM's own front end takes low single milliseconds); a prompt leg's is the cost model's `first_token_ms`."""
    handshake_ms: float = 0.0
    """The wait of a pair's first pull. 0: pairs are taken as warmed. Unwarmed pairs pay it once: 100 to 300 ms were
    measured on loopback (`router.scheduler.scheduler.HANDSHAKE_S`)."""
    first_token_s: float = 300.0
    """`router.api.config.RouterConfig.first_token_s`: the deadline where no class promises anything."""
    seeding: bool = True
    """`router.api.config.RouterConfig.seeding`: P's first token goes out before the handoff. Every engine can be
    told.
    """
    early: bool = False
    """Whether engines take early legs, and routers send them (`router.core.early_leg`). Then P's notice takes
    to D as long as its answer takes to the router, and D's server has read the leg by then (`pull_front_ms`). What a
    leg costs D while it waits is not simulated. Off, as in results published before early legs existed."""
    early_slows_ms: float = 0.0
    """The time by which each early leg that waits for a prompt of P delays each of P's answers. 0: engines have cores
    of their own. On shared cores a delay was seen (docs/decisions/0015-early-leg.md), and not taken apart: a
    parameter."""
    greedy: bool = False
    """Whether requests are repeatable (temperature 0 or a seed), so that `router.core.eligibility` lets a dead stream
    be resumed. Clients' default is not."""
    stall_s: float = 120.0
    """`router.api.config.RouterConfig.stall_s`."""
    connect_s: float = 5.0
    """`router.http.upstream.CONNECT_S`: the time after which a leg to a host that does not answer is given up."""
    digests: bool = False
    """Whether D compares what it has pulled with what P held, and computes the prompt where it differs, as Baton's
    connector with ``transfer.digests``. The time it takes is not simulated."""
    peers: bool = False
    """Whether instances share prompts' beginnings (``transfer.peers``). Off, as in the published comparisons with
    rivals, whose policies know no sharing."""
    pull_timeout_s: float = 10.0
    """The time after which a pull from a host that does not answer fails. UCX' own order; a parameter."""
    exit_s: float = 1.0
    """From a stop until the process has ended and its GPUs are free: vLLM's own order, once it is drained. A process
    that a fault kills is gone at once."""
    beat_every_s: float = BEAT_EVERY_S
    read_every_s: float = 0.5
    """`router.fleet.discovery.READ_EVERY_S`."""
    registry_ms: float = 2.0
    """From an agent's report to the router's reading, where the registry wakes the router: two hops and Redis."""
    ttl_s: float = TTL_S
    notes_ms: float = 1000.0 * TELL_S
    """Time between two notes of one of several routers to its peers about its load in flight
    (`router.core.load_notes`). 0: they tell each other nothing."""
    note_ms: float = 1.0
    """From a note's sending until its peers know it: two hops and Redis, and a turn of their loops. Estimated."""
    routers: int = 1
    """Routers that share the fleet's credits. One of them is simulated, with its share of the load, unless
    `World(others=…)` brings more."""
    cold_start: bool = False
    """Whether engines start with the run instead of being ready before it."""
    checks: bool = True
    """Whether `sim.checks` run after every event."""

    @property
    def hop_ns(self) -> int:
        """`hop_us` in the kernel's unit."""
        return round(self.hop_us * 1000)
