"""Puts together what sizes a fleet: each model's controller, its pools' costs, the shell, the HTTP side."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from baton.changing import Changing
from baton.gpus import as_told, said_of
from baton.scaling_admin import Wishes, admin_app
from baton.scaling_check import Checker
from baton.state import state_folder
from cluster.background import keep_running
from cluster.errors import UsageError
from cluster.instance import Role
from cluster.registry.registry import Registry
from cluster.spec import Model, Pool, SloClass, Spec, flags
from cluster.spec.plan import stems
from costs.hardware import Gpu, find_gpu
from costs.power import cap_of
from costs.shipped import find_model, profiles
from engine.agent.http import listen
from goodput.actuate.journal import Journal
from goodput.actuate.lease import LeaderClaim
from goodput.actuate.protocol import Actuator
from goodput.actuate.scaler import ScaledFleet, Scaler
from goodput.bounds import EngineBounds
from goodput.budget import Budget, Footprint
from goodput.control_rules import START_MAX_S, ControlRules
from goodput.controller import Controller
from goodput.demand import ClassPromise
from goodput.fixed import FixedPools
from goodput.pools import ScalingPool
from sim.engine_args import engine_of, read_words
from sim.fleet import SimulatedMember, member

logger = logging.getLogger("baton.controller")

MOCK_GPU: Final = "H100-SXM"
"""The GPU that a mock imitates, unless its flags name another one."""

STARTS_S: Final = {"mock": 5.0, "vllm": 90.0}
"""Assumed seconds of a start until one was measured. A mock's Python takes a few; vLLM loads weights, compiles and
captures graphs: a minute and a half for an 8B model on one H100."""

RENEW_EVERY_S: Final = 2.0
"""Seconds between two looks whether the cluster file was edited."""

AGAIN_S: Final = 5.0
"""Seconds between an exception in the controller and its new start; the fleet keeps its size meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePools:
    """What pools were made of besides the cluster file: enough to make the same controllers again."""

    engine: str
    gpu: str | None
    """The machine's GPU; None: it has none, or it does not matter."""
    vllm_args: tuple[str, ...] = ()
    dry: bool = False
    resizes: bool = True
    """False: every pool is kept at the file's size."""
    by_hand: bool = True
    """Whether a role keeps for a while a size that a person has changed without an order (`goodput.manual`)."""
    start_max_s: float = START_MAX_S
    """Seconds after which an engine's agent gives its start up."""
    promises: Mapping[str, ClassPromise] | None = None
    """By class, the targets at the beginning; None: not noted (logs of earlier versions)."""

    @staticmethod
    def read(said: Mapping[str, Any]) -> MadePools:
        """From a line of a log.

        Raises:
            msgspec.ValidationError: the line is of another version.
        """
        found: MadePools = msgspec.convert(said, MadePools)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPlan:
    """The pools to size, and the rules for it."""

    made: MadePools

    pools: Mapping[str, tuple[ScalingPool, ...]]
    """By the model's name in the API."""
    promises: dict[str, ClassPromise]
    """Targets by class; the shell replaces them in place when the file is edited. Controllers have copies, and are
    told (`Renewed`), so that their logs say when."""
    rules: ControlRules
    members: Mapping[str, Mapping[str, SimulatedMember]] = field(default_factory=dict)
    """By model and pool: the simulation's settings of one instance."""
    off: Mapping[str, str] = field(default_factory=dict)
    """By model: why it is not sized."""
    kept: Mapping[str, Mapping[str, tuple[Role, int]]] = field(default_factory=dict)
    """By model of `off`: the role of each pool, and the instances that it begins with and keeps."""

    @property
    def as_made(self) -> MadePools:
        """`made`, with the present targets: the settings of controllers that begin now."""
        return replace(self.made, promises=dict(self.promises))


def wants_scaling(spec: Spec) -> bool:
    """Whether some pool may have more or fewer instances than at the start, or an instance may take another role."""
    return any(pool.min < pool.at_most or pool.flips for _, _, pool in stems(spec).values())


def plan_of(
    spec: Spec,
    engine: str,
    gpu_found: str | None,
    vllm_args: list[str],
    *,
    dry: bool = False,
    resizes: bool = True,
    by_hand: bool = True,
    start_max_s: float = START_MAX_S,
) -> ScalingPlan:
    """Which pools of a cluster file to size, and by which rules; `off` names models that cannot be sized.

    Args:
        spec: the file.
        engine: ``vllm`` or ``mock``.
        gpu_found: the machine's GPU; None: it has none, or it does not matter.
        vllm_args: words after ``--`` on the command line.
        dry: decide only, and do nothing.
        resizes: False keeps every pool at the file's size.
        by_hand: whether a size that a person has changed without an order is kept for a while.
        start_max_s: seconds after which an engine's agent gives its start up.
    """
    pools: dict[str, tuple[ScalingPool, ...]] = {}
    members: dict[str, dict[str, SimulatedMember]] = {}
    off: dict[str, str] = {}
    for model in spec.models:
        if not resizes:
            off[model.api_name] = "--no-scale was given"
            continue
        try:
            made_of = _pools(spec, model, engine, gpu_found, vllm_args)
            pools[model.api_name] = tuple(pool for pool, _ in made_of)
            members[model.api_name] = {pool.name: one for pool, one in made_of}
        except UsageError as error:
            off[model.api_name] = str(error)
        except (ArithmeticError, ValueError) as error:  # `memory_gib: 1e308`: the other models are sized all the same
            off[model.api_name] = f"nothing can be computed from its settings ({type(error).__name__}: {error})"
    kept = {
        model.api_name: {stem: (role, pool.at_start) for stem, (its, role, pool) in stems(spec).items() if its is model}
        for model in spec.models
        if model.api_name in off
    }
    counts = {name: each.count for name, each in spec.hardware.items() if each.count is not None}
    rules = ControlRules(budget=Budget(gpus=counts), dry=dry, checks=True, start_max_s=start_max_s)
    rules = rules if by_hand else replace(rules, manual_s=0.0)
    made = MadePools(
        engine=engine,
        gpu=gpu_found,
        vllm_args=tuple(vllm_args),
        dry=dry,
        resizes=resizes,
        by_hand=by_hand,
        start_max_s=start_max_s,
    )
    promises = {name: _promise(slo) for name, slo in spec.slo.items()}
    return ScalingPlan(made=made, pools=pools, promises=promises, rules=rules, members=members, off=off, kept=kept)


def _promise(slo: SloClass) -> ClassPromise:
    return ClassPromise(
        ttft_ms=slo.ttft_ms,
        tt2t_ms=slo.tt2t_ms,
        tpot_ms=slo.tpot_ms,
        e2e_ms=slo.e2e_ms,
        attainment=slo.attainment,
    )


def _pools(
    spec: Spec, model: Model, engine: str, gpu_found: str | None, vllm_args: list[str]
) -> list[tuple[ScalingPool, SimulatedMember]]:
    named = {stem: pool for stem, (its, _, pool) in stems(spec).items() if its is model}
    roles = {stem: role for stem, (its, role, _) in stems(spec).items() if its is model}
    return [_pool(spec, model, stem, roles[stem], pool, engine, gpu_found, vllm_args) for stem, pool in named.items()]


def _pool(
    spec: Spec,
    model: Model,
    stem: str,
    role: Role,
    pool: Pool,
    engine: str,
    gpu_found: str | None,
    vllm_args: list[str],
) -> tuple[ScalingPool, SimulatedMember]:
    words = [*flags.words(pool.engine_args), *vllm_args]
    gpu = _gpu(spec, pool, engine, gpu_found, words)
    sizes = find_model(model.name)
    if sizes is None:
        raise UsageError(f"no sizes of {model.name} ship, so nothing tells what an instance of it can do")
    words = _vllm_words(words) if engine == "mock" else words
    costs, config = engine_of(role, sizes, gpu, pool.shape, read_words(words), profiles=profiles())
    if pool.power_cap_w is not None:
        costs = costs.capped(cap_of(pool.power_cap_w, gpu.tdp_w))
    said = said_of(gpu, spec.hardware)
    price = None if said is None else said.price_per_hour
    made = ScalingPool(
        name=stem,
        role=role,
        engine=EngineBounds(
            costs=costs,
            batched_tokens=config.max_num_batched_tokens,
            seqs_max=config.max_num_seqs,
            kv_tokens=config.num_blocks * config.block_size,
        ),
        footprint=Footprint(
            gpu=_type(spec, pool),
            gpus=pool.shape.gpus,
            price_per_hour=(price or 0.0) * pool.shape.gpus,
            power_w=gpu.tdp_w * pool.shape.gpus,
        ),
        ranks=pool.shape.dp,
        first_token_ms=costs.first_token_ms,
        min=pool.min,
        max=pool.at_most,
        flips=pool.flips,
        startup_s=STARTS_S[engine],
    )
    return made, member(stem, role, model.api_name, costs, config)


_BOTH_KNOW: Final = frozenset({"--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "--block-size"})
"""Flags that mean the same to vLLM and to a mock."""


def _vllm_words(words: list[str]) -> list[str]:
    """Those flags of a mock that vLLM has, too, each as one word with its value."""
    joined = [f"{word}={after}" for word, after in pairwise([*words, ""]) if word in _BOTH_KNOW]
    return joined + [word for word in words if word.partition("=")[0] in _BOTH_KNOW and "=" in word]


def _type(spec: Spec, pool: Pool) -> str:
    """The pool's type of GPU as the file spells it: its own, or the only one of `hardware`; empty: neither."""
    only = next(iter(spec.hardware)) if len(spec.hardware) == 1 else ""
    return pool.gpu or only


def _gpu(spec: Spec, pool: Pool, engine: str, found: str | None, words: list[str]) -> Gpu:
    """The GPU type of a pool.

    Raises:
        UsageError: no setting names it, or the type is unknown.
    """
    mocked = _value(words, "--gpu", MOCK_GPU) if engine == "mock" else None
    name = _type(spec, pool) or mocked or found
    if name is None:
        raise UsageError("no type of GPU is named (`gpu:` of the pool), so nothing tells what an instance can do")
    gpu = find_gpu(name)
    if gpu is None:
        raise UsageError(f"`gpu: {name}` is no type whose speed is known (`baton plan --help`)")
    return as_told(gpu, spec.hardware)


def _value(words: list[str], flag: str, otherwise: str) -> str:
    """The value of a flag on a command line; `otherwise` if it is not given."""
    for at, word in enumerate(words):
        if word == flag and at + 1 < len(words):
            return words[at + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return otherwise


def machine_of(plan: ScalingPlan, model: str) -> Controller | FixedPools:
    """A new controller of one model of the plan; for a model in `kept` one that keeps the file's sizes."""
    if model in plan.kept:
        return FixedPools({name: count for name, (_, count) in plan.kept[model].items()})
    return Controller(plan.pools[model], dict(plan.promises), plan.rules)


def fleets_of(plan: ScalingPlan) -> tuple[ScaledFleet, ...]:
    """A controller for each model that can be sized, and one that keeps the file's sizes for each model in `kept`."""
    fixed = tuple(
        ScaledFleet(
            model=model if len(plan.pools) + len(plan.off) > 1 else "",
            pools={name: (role, False) for name, (role, _) in sizes.items()},
            machine=machine_of(plan, model),
        )
        for model, sizes in plan.kept.items()
    )
    return fixed + tuple(
        ScaledFleet(
            model=model if len(plan.pools) + len(plan.off) > 1 else "",
            pools={pool.name: (pool.role, pool.flips) for pool in pools},
            machine=machine_of(plan, model),
            footprints={pool.name: pool.footprint for pool in pools},
            check=Checker(plan.members[model], plan.promises),
        )
        for model, pools in plan.pools.items()
    )


def scaling_folder() -> Path:
    """The folder of the controllers' logs and of operators' orders."""
    return state_folder() / "scaling"


class ScalingShell:
    """The controllers of one cluster, with their lease, log and HTTP side: `run` until cancelled."""

    def __init__(
        self,
        cluster: str,
        plan: ScalingPlan,
        registry: Callable[[], Registry],
        *,
        say: Callable[[str], None],
        host: str = "127.0.0.1",
        port: int = 0,
        at_start: Mapping[str, int] | None = None,
        changing: Changing | None = None,
    ) -> None:
        """`registry` opens a registry; `at_start` is as in `Scaler`; `host` and `port` are those of the HTTP side;
        `changing` is the cluster file, whose classes may be edited.
        """
        self._changing: Final = changing
        self._at_start: Final = at_start
        self._cluster: Final = cluster
        self.plan = plan
        self._registry: Final = registry
        self._say: Final = say
        self._host: Final = host
        self._port: Final = port
        self.scaler: Scaler | None = None
        self.running = False
        self.ran = False
        """Whether its HTTP side was ever up."""

    async def run(self, actuator: Actuator, on_url: Callable[[str], None] = lambda _: None) -> None:
        """Size the fleet until cancelled. After an exception the controller starts anew; nothing else ends.

        `on_url` gets the URL of the HTTP side at each start.

        Raises:
            UsageError: the first start failed for a wrong flag: its port is taken, the registry's password is missing.
        """
        for model, because in self.plan.off.items():
            self._say(f"scaling: {model} keeps its size: {because}")
        self.running = True
        try:
            await keep_running(
                partial(self._once, actuator, on_url),
                "the controller",
                logger,
                pauses_s=(AGAIN_S, AGAIN_S),
                gives_up=lambda error: isinstance(error, UsageError) and not self.ran,
            )
        except UsageError:
            self.running = False
            raise

    async def _once(self, actuator: Actuator, on_url: Callable[[str], None]) -> None:
        registry = self._registry()
        try:
            await self._size(registry, actuator, on_url)
        finally:
            await registry.close()

    async def _size(self, registry: Registry, actuator: Actuator, on_url: Callable[[str], None]) -> None:
        folder = scaling_folder()
        lease = LeaderClaim(registry, "http://127.0.0.1:1", said=self._line)
        began = self.plan.as_made
        journal = Journal(folder / f"{self._cluster}.jsonl", msgspec.to_builtins(began))
        scaler = Scaler(
            registry, lease, actuator, fleets_of(self.plan), journal, say=self._say, at_start=self._at_start
        )
        wishes = Wishes(folder / f"{self._cluster}.json", scaler)
        runner, url = await listen(admin_app(scaler, wishes), self._host, self._port, "--port")
        self.ran = True
        lease.url = url
        try:
            await wishes.take_up()
            on_url(url)
            self.scaler = scaler
            if self.plan.promises != began.promises:  # they were edited since
                await scaler.renew(self.plan.promises)
            async with asyncio.TaskGroup() as group:
                group.create_task(scaler.run(), name="scaler")
                if self._changing is not None:
                    group.create_task(self._renew_forever(self._changing), name="file")
        finally:
            self.scaler = None
            with contextlib.suppress(Exception):
                await runner.cleanup()

    async def renew(self, promises: Mapping[str, ClassPromise]) -> None:
        """Go by other targets from now on, without a restart; nothing happens if they are the same."""
        if promises == self.plan.promises:
            return
        self.plan.promises.clear()  # checks hold this very dictionary
        self.plan.promises.update(promises)
        if self.scaler is not None:
            await self.scaler.renew(promises)

    async def _renew_forever(self, changing: Changing) -> None:
        """Take over edited targets without a restart. A bad file changes nothing; edited pools need a restart."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            found = await asyncio.to_thread(changing.look)
            if found is None:
                continue
            if isinstance(found, str):
                self._say(found)
                continue
            await self.renew({name: _promise(slo) for name, slo in found.slo.items()})
            self._say("scaling: goes by the targets of the edited cluster file; its pools take a restart")

    def _line(self) -> str:
        """The line about the controller in the registry, which pages and tables show."""
        scaler = self.scaler
        if scaler is None:
            return ""
        if scaler.paused:
            return "paused"
        told = [f"{model}: {each.because}" if model else each.because for model, each in scaler.last.items()]
        return "; ".join(told)
