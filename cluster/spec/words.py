"""Says in words what a cluster file promises to its operator and to its clients. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.spec import flags
from cluster.spec.about import Setting, is_section, settings_of, shown_default
from cluster.spec.parse import Parsed
from cluster.spec.problems import FieldPath
from cluster.spec.settings import CacheScope, Connector, Model, Pool, SloClass, Spec, WhenMissed
from cluster.spec.units import shown, unit_of

WIDTH = 100

_MISSED = {
    WhenMissed.QUEUE: "A request that cannot make it any more waits its turn and is served late.",
    WhenMissed.SHED: "A request that cannot make it is refused at once, with 429 and Retry-After.",
}


@dataclass(frozen=True, slots=True)
class ExplainedPart:
    """One subject: a title and its sentences."""

    title: str
    lines: tuple[str, ...]
    coming: str = ""
    """The part of Baton that will act on this, if no part does yet."""


def explain(parsed: Parsed) -> tuple[ExplainedPart, ...]:
    """Everything that a file promises, subject by subject.

    Raises:
        UsageError: the file has errors.
    """
    spec = parsed.usable()
    parts = [ExplainedPart(f"model {model.api_name}", tuple(_model(model))) for model in spec.models]
    parts += [
        _classes(spec),
        _tenants(spec),
        _transfer(spec),
        *_kv(spec),
        _registry(spec),
        _hardware(spec),
        _router(spec),
    ]
    parts.append(ExplainedPart("left at defaults", tuple(_defaults(spec, parsed))))
    return tuple(part for part in parts if part.lines)


def as_text(parts: tuple[ExplainedPart, ...]) -> str:
    """The parts, one below the other."""
    blocks = []
    for part in parts:
        coming = f"  (not yet in effect: comes with {part.coming})" if part.coming else ""
        blocks.append("\n".join([f"{part.title}{coming}", *(_wrapped(line) for line in part.lines)]))
    return "\n\n".join(blocks) + "\n"


def _wrapped(line: str) -> str:
    """A line below a title, broken where it is long, with its own indent kept."""
    indent = " " * (2 + len(line) - len(line.lstrip()))
    more = f"{indent}  "
    return textwrap.fill(
        line.strip(),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=more,
        break_long_words=False,
        break_on_hyphens=False,
    )


# -- models --


def _model(model: Model) -> Iterator[str]:
    if model.served_name:
        yield f"is {model.name}; clients call it {model.served_name}"
    if model.aliases:
        yield f"answers to {', '.join(model.aliases)}, too"
    if model.tenants:
        yield f"serves {' and '.join(model.tenants)} only; to others there is no such model"
    for name, (role, pool) in model.pools.every().items():
        yield f"{name}{'' if name == role.value else f' ({role})'}: {_size(pool)}"
        yield from (f"  {line}" for line in _details(pool))
    if model.pools.can_hand_over():
        yield "One instance computes the prompt; where the answer stays exact, it hands over to another that generates."
    else:
        yield "Every request runs whole on one instance: nothing is handed over."


def _size(pool: Pool) -> str:
    each = f"{_count(pool.shape.gpus, 'GPU')} each" if pool.shape.gpus > 1 else "one GPU (or part of the CPU) each"
    kind = f" of type {pool.gpu}" if pool.gpu else ""
    size = f"starts with {_count(pool.at_start, 'instance')}, {each}{kind}"
    if pool.min == pool.at_most:
        return f"{size}; never more or fewer"
    return f"{size}; may become {pool.min} to {pool.at_most}"


_WHOLE_CACHES = ("auto", "bfloat16", "float16")
"""Formats of a KV cache that answers do not suffer from: they are not mentioned."""


def _details(pool: Pool) -> Iterator[str]:
    shape = pool.shape
    parallel = (("tensor", shape.tp), ("pipeline", shape.pp), ("data", shape.dp), ("expert", shape.ep))
    if said := ", ".join(f"{kind} parallel {size}" for kind, size in parallel if size > 1):
        yield said
    if pool.engine_args:
        shown_args = {name: "***" if flags.is_secret_flag(name) else value for name, value in pool.engine_args.items()}
        yield f"vLLM flags: {' '.join(flags.words(shown_args))}"
    kept = flags.given(pool.engine_args, "kv-cache-dtype")[1]
    if isinstance(kept, str) and kept not in _WHOLE_CACHES:
        yield f"KV cache kept and handed over as {kept}: answers differ from those without it"
    if pool.env:
        pairs = ("***" if flags.is_secret_name(name) else value for name, value in pool.env.items())
        yield f"environment: {' '.join(f'{name}={value}' for name, value in zip(pool.env, pairs, strict=True))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# -- promises --


def _classes(spec: Spec) -> ExplainedPart:
    coming = settings_of(Spec)["slo"].about.coming
    if not spec.slo:
        line = "None: best effort. Nothing is promised, and nothing is ever refused for being late."
        return ExplainedPart("classes of requests", (line,))
    lines: list[str] = []
    for name, each in spec.slo.items():
        lines.append(f"{name}: {_share(each.attainment)} of all requests get {_promise(each)}.")
        lines.append(f"  {_MISSED.get(each.when_missed) or _degraded(each)} Refused and late ones count as missed.")
    lines.append("A request names its class in the header x-slo-class.")
    return ExplainedPart("classes of requests", tuple(lines), coming)


def _share(attainment: float) -> str:
    return f"{shown(attainment * 100)} %"


def _promise(each: SloClass) -> str:
    said = {
        "ttft_ms": "the first token within {}",
        "tt2t_ms": "the second at most {} after it",
        "tpot_ms": "the others at {} each or faster on average",
        "e2e_ms": "the whole answer within {}",
    }
    parts = [said[target].format(_time(value)) for target, value in each.targets().items()]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _time(value_ms: float) -> str:
    """A time in milliseconds, or in seconds from ten seconds on."""
    return f"{shown(value_ms / 1000)} s" if value_ms >= 10_000 else f"{shown(value_ms)} ms"


def _degraded(each: SloClass) -> str:
    return f"A request that cannot make it is served by the targets of {each.degrade_to}."


def _tenants(spec: Spec) -> ExplainedPart:
    if not spec.tenants:
        return ExplainedPart("tenants", ("None named: no keys. Every client that reaches the router may use it.",))
    total = sum(tenant.share for tenant in spec.tenants.values())
    lines = []
    for name, tenant in spec.tenants.items():
        part = f"{shown(round(100 * tenant.share / total, 1))} % of the capacity while requests queue"
        lines.append(f"{name}: {part}; keys in {spec.key_file(name)}")
        served = [model.api_name for model in spec.models if not model.tenants or name in model.tenants]
        if len(served) < len(spec.models):
            lines.append(f"  is served {' and '.join(served)} only" if served else "  is served by no model")
        if tenant.open_max is not None:
            lines.append(f"  may have {_count(tenant.open_max, 'request')} open at once; one more is refused with 429")
        allowed = ", ".join(tenant.classes or tuple(spec.slo))
        usual = spec.default_class(name)
        if spec.slo:
            lines.append(f"  may ask for {allowed}; without a class it gets {usual or 'what is left (best effort)'}")
        if tenant.cache_scope is CacheScope.SHARED:
            lines.append("  shares its cached prompts with the others: what it asked can be told from their latency")
        else:
            lines.append("  reuses cached prompts of its own requests only")
    return ExplainedPart("tenants", tuple(lines), settings_of(Spec)["tenants"].about.coming)


# -- the rest --


_MOVERS = {
    Connector.AUTO: "Baton's connector moves the KV cache, or vLLM's where Baton's cannot.",
    Connector.NIXL: "vLLM's NixlConnector moves the KV cache.",
    Connector.BATON: "Baton's connector moves the KV cache.",
}


def _transfer(spec: Spec) -> ExplainedPart:
    mover = _MOVERS[spec.transfer.connector]
    lease = spec.transfer.lease_s
    kept = f"for {lease} s" if lease else "for 30 s (120 s on CPU)"
    lines = (
        f"{mover} Blocks that are not pulled are kept {kept}, then freed.",
        *(("Every block that was pulled is compared with what was held.",) if spec.transfer.digests else ()),
        *(() if spec.transfer.peers else ("No instance takes a prompt's beginning from another's KV cache.",)),
        "A handoff that fails costs time, never the answer: decode computes the prompt again.",
    )
    return ExplainedPart("handoff", lines)


def _kv(spec: Spec) -> tuple[ExplainedPart, ...]:
    if not spec.kv.host_gib:
        return ()
    files = f" and {shown(spec.kv.disk_gib)} GiB of files" if spec.kv.disk_gib else ""
    kept = f"Each instance keeps prompts in {shown(spec.kv.host_gib)} GiB of host memory{files}"
    return (ExplainedPart("tiers", (f"{kept}, beside its KV cache, until its engine ends.",)),)


def _registry(spec: Spec) -> ExplainedPart:
    if spec.registry.url is None:
        return ExplainedPart("registry", ("A Redis is started with the cluster.",))
    address = spec.registry.url.rpartition("@")[2]
    address = address if "://" in address else f"{spec.registry.url.partition('://')[0]}://{address}"
    lines = [f"The fleet meets at {address}."]
    if spec.registry.password_file:
        lines.append(f"Its password is read from {spec.registry.password_file}.")
    if spec.registry.ca_file:
        lines.append(f"Its certificate is checked against {spec.registry.ca_file}.")
    return ExplainedPart("registry", tuple(lines))


def _hardware(spec: Spec) -> ExplainedPart:
    lines = []
    for name, each in spec.hardware.items():
        said = [f"{each.count} of them" if each.count else "as many as the pools want"]
        said += [f"{shown(each.memory_gib)} GiB"] if each.memory_gib else []
        said += [f"{shown(each.price_per_hour)} per hour"] if each.price_per_hour is not None else []
        said += [f"{shown(each.power_w)} W"] if each.power_w else []
        lines.append(f"{name}: {', '.join(said)}")
    return ExplainedPart("hardware", tuple(lines), settings_of(Spec)["hardware"].about.coming)


def _router(spec: Spec) -> ExplainedPart:
    router, limits = spec.router, spec.limits
    lines = [
        f"listens on {_address(router.host, router.port)}, its admin side on "
        f"{_address(router.admin_host, router.admin_port)}; chooses by {router.policy}",
        f"A request without a first token after {shown(limits.first_token_s)} s is given up; so is a stream that is "
        f"silent for {shown(limits.stall_s)} s.",
        f"A body may have {_bytes(limits.body_bytes_max)}. After a stop, open requests have "
        f"{shown(limits.drain_s)} s to end.",
    ]
    if router.tls_cert_file:
        lines.append(f"Clients speak TLS with it; its certificate is in {router.tls_cert_file}.")
    if router.admin_key_file:
        lines.append(f"From other machines the admin side asks for a key of {router.admin_key_file}.")
    if router.processes > 1:
        lines.append(f"{router.processes} processes share the port.")
    return ExplainedPart("router", tuple(lines))


def _address(host: str, port: int) -> str:
    where = f"[{host}]" if ":" in host else host
    return f"{where}:{port}" if port else f"a free port of {where}"


def _bytes(count: int) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size and count % size == 0:
            return f"{count // size} {unit}"
    return f"{count} bytes"


# -- what was left out --


def _defaults(spec: Spec, parsed: Parsed) -> Iterator[str]:
    """Every setting that the file does not name and whose default matters, with the reason for the default."""
    for at, model in enumerate(spec.models):
        prefix = f"{model.api_name}: " if len(spec.models) > 1 else ""
        path: FieldPath = ("models", at, "pools")
        if path not in parsed.places:
            yield f"{prefix}pools: {settings_of(Model)['pools'].about.why}"
    for name, setting in settings_of(Spec).items():
        if (name,) in parsed.places and is_section(setting.kind):
            yield from _unset(settings_of(setting.kind), (name,), parsed)
        elif (name,) not in parsed.places and not setting.required:
            yield f"{name}: {setting.about.why}"


def _unset(settings: Mapping[str, Setting], path: FieldPath, parsed: Parsed) -> Iterator[str]:
    for name, setting in settings.items():
        if (*path, name) not in parsed.places:
            default = f" {shown_default(setting)}" if shown_default(setting) else ""
            unit = f" {unit_of(name)}" if default and setting.default and unit_of(name) else ""
            yield f"{'.'.join(map(str, path))}.{name}{default}{unit}: {setting.about.why}"


def as_json(parts: tuple[ExplainedPart, ...]) -> list[dict[str, Any]]:
    """The parts for programs."""
    return [{"title": part.title, "lines": list(part.lines), "coming": part.coming} for part in parts]
