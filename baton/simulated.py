"""`baton simulate`: turns the cluster file or flags into the members of a simulated fleet and its targets."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton import clusterfile
from baton.gpus import as_told
from baton.model_sizes import sizes_of
from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.spec import POLICY, Hardware, PlannedInstance, SloClass, Spec, instances
from costs import shipped
from costs.hardware import gpu_named
from costs.power import cap_of
from costs.shape import Spans
from loadgen.report import Targets
from router.core.slo import promises_of
from router.core.values import Promise
from sim.engine_args import engine_of, read_words, unread_line
from sim.fleet import SimulatedMember, as_ranks, member
from sim.startup import StartUp

MODEL, GPU = "meta-llama/Llama-3.1-8B", "H100-SXM"
"""Model and GPU that are simulated by default: the pair with the most measurements to compare with."""

LEASE_S = 30
"""Seconds of a lease by default: vLLM's default on GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSimulation:
    """The simulation that was asked for."""

    members: tuple[SimulatedMember, ...]
    model: str
    """Name in the API that requests ask for."""
    targets: Targets
    """Targets of requests that name no class."""
    by_class: Mapping[str, Targets] = field(default_factory=dict)
    policy: str = POLICY
    promises: Mapping[str, Promise] = field(default_factory=dict)
    """The router's targets by class, if the file has classes."""
    first_token_s: float | None = None
    stall_s: float | None = None
    notes: tuple[str, ...] = ()


def planned_fleet(args: argparse.Namespace, *, contents: bool) -> PlannedSimulation:
    """The fleet that the flags describe. `contents`: instances simulate what their blocks hold, for faults.

    Raises:
        UsageError: the flags contradict each other, or name something unknown.
    """
    return _from_file(args, contents=contents) if args.cluster else _from_flags(args, contents=contents)


def _from_flags(args: argparse.Namespace, *, contents: bool) -> PlannedSimulation:
    counts = {role: getattr(args, role.value) for role in Role}
    if all(count is None for count in counts.values()):
        counts = {Role.PREFILL: 1, Role.DECODE: 1, Role.BOTH: 0}
    model = args.model or MODEL
    listed = [
        PlannedInstance(
            name=InstanceId(f"{role.value}-{number}"),
            role=role,
            model=model,
            served_name=None,
            shape=Spans(tp=getattr(args, f"tp_{role.value}") or 1),  # type: ignore[arg-type]
            gpu=args.gpu,
            vllm_args=tuple(args.vllm_args),
            env={},
            kv_lease_s=None,
            flips=args.flips,
        )
        for role, count in counts.items()
        for number in range(count or 0)
    ]
    if not listed:
        raise UsageError("no instance: give at least one with --prefill, --decode or --both")
    for role, count in counts.items():
        if count and getattr(args, f"tp_{role.value}") == 0:
            raise UsageError(f"--tp-{role.value} 0: write a whole number of GPUs, 1 or more")
        if not count and getattr(args, f"tp_{role.value}") is not None:
            raise UsageError(
                f"--tp-{role.value} is of instances that the fleet has none of: give --{role.value} N, too"
            )
    members, notes = _members(listed, {}, args, contents=contents)
    targets = Targets(args.ttft_ms, args.tt2t_ms, args.tpot_ms, args.e2e_ms)
    return PlannedSimulation(members=members, model=model, targets=targets, notes=notes)


def _from_file(args: argparse.Namespace, *, contents: bool) -> PlannedSimulation:
    for name in ("prefill", "decode", "both", "tp_prefill", "tp_decode", "tp_both"):
        if getattr(args, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} describes a fleet, and --cluster names a file that does: one of them"
            )
    parsed = clusterfile.read(args.cluster)
    if parsed.spec is None or parsed.errors:
        told = "; ".join(str(each) for each in parsed.errors[:3])
        raise UsageError(f"{args.cluster} has errors (`baton lint {args.cluster}` lists them): {told}")
    spec = parsed.spec
    chosen = clusterfile.named_model(spec, args.model, args.cluster)
    listed = [each for each in instances(spec) if each.api_name == chosen.api_name]
    if not listed:
        raise UsageError(f"{args.cluster}: {chosen.api_name} starts with no instance; give its pools `start`")
    members, notes = _members(listed, spec.hardware, args, contents=contents)
    if spec.slo and not Targets(args.ttft_ms, args.tt2t_ms, args.tpot_ms, args.e2e_ms).any:
        notes = (
            *notes,
            f"requests without a class are judged as `{next(iter(spec.slo))}`; a router serves them best effort: send "
            "`x-slo-class`, or give tenants a default_class",
        )
    if len(spec.models) > 1:
        notes = (*notes, f"one model at a time: {chosen.api_name}; --model names another")
    return PlannedSimulation(
        members=members,
        model=chosen.api_name,
        targets=_targets(args, spec),
        by_class={name: targets_of(each) for name, each in spec.slo.items()},
        policy=spec.router.policy,
        promises=promises_of(spec.slo),
        first_token_s=spec.limits.first_token_s,
        stall_s=spec.limits.stall_s,
        notes=notes,
    )


def targets_of(promised: SloClass) -> Targets:
    """A class's targets as the load generator has them."""
    return Targets(promised.ttft_ms, promised.tt2t_ms, promised.tpot_ms, promised.e2e_ms)


def _targets(args: argparse.Namespace, spec: Spec) -> Targets:
    """Targets of requests without a class: those of the flags, else of the file's first class."""
    asked = Targets(args.ttft_ms, args.tt2t_ms, args.tpot_ms, args.e2e_ms)
    if asked.any or not spec.slo:
        return asked
    return targets_of(next(iter(spec.slo.values())))


def _members(
    listed: list[PlannedInstance], hardware: Mapping[str, Hardware], args: argparse.Namespace, *, contents: bool
) -> tuple[tuple[SimulatedMember, ...], tuple[str, ...]]:
    """The simulated instances, and notes for people. Instances of one kind share their costs."""
    made: dict[tuple[object, ...], SimulatedMember] = {}
    unread: dict[str, None] = {}
    found = []
    for each in listed:
        shape = each.shape
        key = (
            *(each.role, each.gpu, shape.tp, shape.pp, shape.dp, shape.ep),
            *(each.vllm_args, each.kv_lease_s, each.flips, each.power_cap_w),
        )
        if key not in made:
            words = read_words(each.vllm_args)
            unread.update(dict.fromkeys(words.unread))
            name = each.gpu or args.gpu or GPU
            costs, config = engine_of(
                each.role,
                sizes_of(each.model),
                as_told(gpu_named(name), hardware),
                shape,
                words,
                profiles=shipped.profiles(),
                lease_s=each.kv_lease_s or LEASE_S,
                contents=contents,
            )
            if each.power_cap_w is not None:
                costs = costs.capped(cap_of(each.power_cap_w, costs.gpu.tdp_w))
            made[key] = replace(
                member(each.name, each.role, each.api_name, costs, config, start_up_s=args.start_up_s),
                flips=each.flips,
                startup=_startup(args),
            )
        found += as_ranks(replace(made[key], name=each.name))
    notes = [f"{made_.name}: {made_.costs.because}" for made_ in made.values()]  # type: ignore[attr-defined]
    if unread:
        notes.append(unread_line(list(unread)))
    return tuple(found), tuple(notes)


def _startup(args: argparse.Namespace) -> StartUp | None:
    """The distribution of start times; None if all starts take the same time."""
    if args.start_up_p95_s is None and not args.start_fails:
        return None
    try:
        return StartUp(median_s=args.start_up_s, p95_s=args.start_up_p95_s, fails=args.start_fails)
    except ValueError as error:
        raise UsageError(f"--start-up-s, --start-up-p95-s, --start-fails: {error}") from None


def read_gpus(text: str, flag: str) -> dict[str, int]:
    """`H100-SXM=8,L40S=4`: how many GPUs of each type; types in any of their spellings.

    Raises:
        UsageError: an unknown type, one type twice, or no whole number; the message says which.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.strip().partition("=")
        if not count.isascii() or not count.isdigit() or not int(count):
            raise UsageError(f"{flag} {part.strip()}: write TYPE=N, like H100-SXM=8")
        gpu = gpu_named(name).name
        if gpu in found:
            raise UsageError(f"{flag} names {gpu} twice")
        found[gpu] = int(count)
    return found
