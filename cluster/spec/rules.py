"""Rules between the settings of a file: contradictions, promises that cannot be kept, secrets. Pure.

Each rule is a function from the whole file to findings. A finding that depends on a value that could not be read is
dropped (`uses`): that mistake is already reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any
from urllib.parse import SplitResult, urlsplit

from cluster.instance import TENANTS_MAX, Role
from cluster.spec import flags, sides
from cluster.spec.pairing import refused_pair
from cluster.spec.plan import every_stem
from cluster.spec.problems import FieldPath, Finding, Severity, nearest, quoted, shown_path
from cluster.spec.settings import Connector, Model, Pool, SloClass, Spec, WhenMissed
from cluster.spec.units import shown
from cluster.urls import PORT_MAX

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The lowest latencies that a model can reach on the hardware of its pools, without other requests."""

    because: str
    targets: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds by name of the target, such as ``ttft_ms``."""
    kv_heads: int | None = None
    """KV heads of the model; None: they do not matter to a hand-over (latent attention), or are not known."""


FloorOf = Callable[[Spec, Model], Floor | None]
"""Gives a cost model's floor for one model of the file; None: it does not know the model or its hardware."""

LIMIT_MAX_S = 86_400
"""Longest limit that a fix proposes, in seconds: a target beyond a day is a slip, and no reason to wait so long."""

ALIAS_CHARS_MAX = 200
"""Longest alias of a model: every request's model is compared with it, and lists show it."""


def check(spec: Spec, floor_of: FloorOf | None = None) -> Iterator[Finding]:
    """All findings. Without `floor_of`, targets are not compared with what the hardware can reach."""
    for rule in RULES:
        yield from rule(spec)
    if floor_of is not None:
        yield from _below_the_floor(spec, floor_of)
        yield from _copied_heads(spec, floor_of)


# -- models and pools --


def _models(spec: Spec) -> Iterator[Finding]:
    seen: dict[str, int] = {}
    for at, model in enumerate(spec.models):
        name = "served_name" if model.served_name else "name"
        path = ("models", at, name)
        if model.api_name in seen:
            first = seen[model.api_name]
            fix = "give one of them another `served_name`, or put their pools together"
            other = ("models", first)
            yield Finding(path=path, message=f"models {first} and {at} have one name", fix=fix, uses=(other,))
        seen.setdefault(model.api_name, at)
        if not model.pools.every():
            fix = "name `prefill` and `decode`, or `both`; or leave `pools` out"
            yield Finding(path=("models", at, "pools"), message="no pool: nothing would serve the model", fix=fix)
    yield from _aliases(spec, seen)


def _aliases(spec: Spec, names: dict[str, int]) -> Iterator[Finding]:
    """`names`: the models' own names, with the index of each model."""
    seen = dict(names)
    for at, model in enumerate(spec.models):
        for number, alias in enumerate(model.aliases):
            path = ("models", at, "aliases", number)
            if not alias.strip() or len(alias) > ALIAS_CHARS_MAX:
                fix = f"write 1 to {ALIAS_CHARS_MAX} characters"
                yield Finding(path=path, message="cannot be a model's name", fix=fix)
            elif alias in seen:
                uses = (("models", seen[alias]),)
                message = f"`{alias}` is a name of model {seen[alias]} already"
                yield Finding(path=path, message=message, fix="take it out", uses=uses)
            seen.setdefault(alias, at)


def all_pools(spec: Spec) -> Iterator[tuple[FieldPath, Role, Pool]]:
    """Each pool of each model, with its path in the file and its role."""
    for at, model in enumerate(spec.models):
        yield from _pools_of(model, ("models", at, "pools"))


def _pools_of(model: Model, path: FieldPath) -> Iterator[tuple[FieldPath, Role, Pool]]:
    for name, (role, pool) in model.pools.every().items():
        where = (name,) if name == role.value else ("extra", name)
        yield (*path, *where), role, pool


def _stems(spec: Spec) -> Iterator[Finding]:
    """Two models' pools must not name their instances alike: a model's short name and an extra pool's name together may
    be another model's short name and role.
    """
    seen: dict[str, FieldPath] = {}
    for (path, _, _), (stem, *_) in zip(all_pools(spec), every_stem(spec), strict=True):
        if stem in seen:
            message = f"its instances would be called `{stem}-0` and so on, as those of {shown_path(seen[stem])}"
            fix = "give the extra pool another name, or one of the models another `served_name`"
            yield Finding(path=path, message=message, fix=fix, uses=(seen[stem],))
        seen.setdefault(stem, path)


def _counts(spec: Spec) -> Iterator[Finding]:
    for path, _, pool in all_pools(spec):
        low, high, start = (*path, "min"), (*path, "max"), (*path, "start")
        if pool.max is not None and pool.max < pool.min:
            fix = f"write `max: {pool.min}` or more, or a `min` of {pool.max} or less"
            yield Finding(path=high, message=f"`max` is below `min`, which is {pool.min}", fix=fix, uses=(low,))
        elif pool.max is not None and pool.at_start > pool.max:
            fix = f"write a `start` of {pool.max} or less, or `max: {pool.at_start}`"
            yield Finding(path=start, message=f"`start` is above `max`, which is {pool.max}", fix=fix, uses=(high,))
        elif pool.start is not None and pool.start < pool.min:
            fix = f"write `start: {pool.min}` or more, or `min: {pool.start}`"
            yield Finding(path=start, message=f"`start` is below `min`, which is {pool.min}", fix=fix, uses=(low,))
        elif pool.at_most == 0:
            fix = "write a `max` of 1 or more, or remove the pool"
            yield Finding(path=path, message="can never have an instance", fix=fix)


def _legs(spec: Spec) -> Iterator[Finding]:
    """A model that nothing serves at the start, or whose requests can never be handed over."""
    for at, model in enumerate(spec.models):
        path: FieldPath = ("models", at, "pools")
        pools = list(_pools_of(model, path))
        warning = Severity.WARNING
        if pools and not any(pool.at_start for _, _, pool in pools):
            message = "no pool has an instance at the start: the first request finds no instance"
            yield Finding(path=path, message=message, fix="write `start: 1`", severity=warning)
        if {role for _, role, _ in pools} in ({Role.PREFILL}, {Role.DECODE}):
            where, role, _ = pools[0]
            other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
            message = f"without a {other} pool nothing is handed over: requests run whole on {role}"
            instead = "give it the role `both`" if "extra" in where else "call the pool `both`"
            yield Finding(path=where, message=message, fix=f"add `{other}: {{}}`, or {instead}", severity=warning)


def _shapes(spec: Spec) -> Iterator[Finding]:
    for path, _, pool in all_pools(spec):
        shape = pool.shape
        ranks = shape.tp * shape.dp
        if shape.ep not in {1, ranks}:
            message = f"vLLM spreads experts over all `tp` × `dp` = {ranks} ranks or over none"
            fix = f"write `ep: {ranks}` or leave it out" if ranks > 1 else "leave it out, or raise `tp` or `dp` to it"
            at = (*path, "shape")
            yield Finding(path=(*at, "ep"), message=message, fix=fix, uses=((*at, "tp"), (*at, "dp")))


# -- what goes to vLLM --


def _engine_args(spec: Spec) -> Iterator[Finding]:
    for pool_path, _, pool in all_pools(spec):
        seen: dict[str, str] = {}
        for name, value in pool.engine_args.items():
            path = (*pool_path, "engine_args", name)
            flag = flags.normal(name)
            if flag in seen and seen[flag] != name:
                message = f"the same flag as `{seen[flag]}`"
                yield Finding(path=path, message=message, fix="remove one of the two")
            seen.setdefault(flag, name)
            yield from _flag(pool, path, name, value)


def _flag(pool: Pool, path: FieldPath, name: str, value: Any) -> Iterator[Finding]:
    """What is wrong with one flag."""
    flag = flags.normal(name)
    bare = name.lstrip("-")
    if flag in flags.BY_SHAPE or bare in flags.SHORT:
        yield _said_by_shape(pool, path, flags.SHORT.get(bare, flag), value)
    elif flag in flags.REFUSED:
        yield Finding(path=path, message="Baton sets this flag itself", fix=flags.REFUSED[flag])
    elif not flags.FLAG_NAME.fullmatch(name):
        clean = bare if flags.FLAG_NAME.fullmatch(bare) else "max-model-len"
        yield Finding(path=path, message="is not how a flag is named here", fix=f"write it as in `{clean}: …`")
    elif value is None or value == []:
        fix = f"write `{name}: true` for a flag without a value, or remove it"
        yield Finding(path=path, message="has no value", fix=fix)
    elif flag in flags.NUMBERS:
        message = flags.wrong_number(flag, value)
        if message:
            percent = flag == flags.MEMORY and type(value) in {int, float} and 1 < value <= 100
            fix = f"write `{name}: {value / 100:g}`" if percent else "write such a number, or leave it out"
            yield Finding(path=path, message=message, fix=fix)
    elif flags.is_secret_flag(name):
        variable = flags.SECRET[flag.partition(".")[0]]
        fix = f"remove it; keep the secret in a file of its own, and set {variable} from it where `baton up` runs"
        if not variable:
            fix = "remove it, or keep this file and the process list from other users"
        message = "a secret: every reader of this file or of the process list has it"
        yield Finding(path=path, message=message, fix=fix, severity=Severity.WARNING, value="***")
    elif flag in flags.SET_BY_BATON:
        message = "replaces what Baton sets"
        yield Finding(path=path, message=message, fix=flags.SET_BY_BATON[flag], severity=Severity.WARNING)
    elif isinstance(value, str) and value.lower() in {"yes", "no", "on", "off"}:
        fix = f"write `{'true' if value.lower() in {'yes', 'on'} else 'false'}` if you mean a switch"
        yield Finding(path=path, message="is passed on as a text", fix=fix, severity=Severity.WARNING)


def _said_by_shape(pool: Pool, path: FieldPath, flag: str, value: Any) -> Finding:
    """A flag that the shape says, too: an error where the two differ."""
    name = flags.BY_SHAPE[flag]
    said = getattr(pool.shape, name)
    shape_path = (*path[:-2], "shape")
    if flag == "enable-expert-parallel":
        said, right = said > 1, pool.shape.tp * pool.shape.dp
    else:
        right = value
    if value == said:
        message, fix = f"says again what `shape.{name}` says", "remove it"
        return Finding(path=path, message=message, fix=fix, uses=(shape_path,), severity=Severity.WARNING)
    message = f"contradicts `shape`, which has {name} {getattr(pool.shape, name)}"
    fix = f"remove it and write `shape: {{{name}: {right}}}`" if value and right != 1 else "remove it"
    return Finding(path=path, message=message, fix=fix, uses=(shape_path,))


def _environment(spec: Spec) -> Iterator[Finding]:
    for pool_path, _, pool in all_pools(spec):
        for name, value in pool.env.items():
            path = (*pool_path, "env", name)
            if name in flags.ENV_SET_BY_BATON:
                yield Finding(path=path, message="Baton sets this variable itself", fix=flags.ENV_SET_BY_BATON[name])
            elif value and flags.is_secret_name(name):
                fix = f"remove it; keep the secret in a file of its own, and set {name} from it where `baton up` runs"
                message = "a secret: every reader of this file has it"
                yield Finding(path=path, message=message, fix=fix, severity=Severity.WARNING, value="***")


# -- hardware --


def _gpus(spec: Spec) -> Iterator[Finding]:
    """GPU types that are not under `hardware`, and pools that need more GPUs than it has."""
    used: dict[str, int] = {}
    for path, _, pool in all_pools(spec):
        if pool.gpu is None or not spec.hardware:
            continue
        if pool.gpu not in spec.hardware:
            near = nearest(pool.gpu, spec.hardware)
            fix = f"did you mean `{near}`?" if near else f"add it there, or use one of {quoted(spec.hardware)}"
            yield Finding(
                path=(*path, "gpu"), message="is not under `hardware`", fix=fix, uses=(("hardware", pool.gpu),)
            )
            continue
        used[pool.gpu] = used.get(pool.gpu, 0) + pool.at_start * pool.shape.gpus
        count = spec.hardware[pool.gpu].count
        if count is not None and pool.shape.gpus > count:
            message = f"one instance needs {pool.shape.gpus} GPUs, and there are {count}"
            fix = f"write a smaller shape, or raise `hardware.{pool.gpu}.count`"
            yield Finding(path=(*path, "shape"), message=message, fix=fix, uses=(path, ("hardware", pool.gpu)))
    for gpu, need in used.items():
        count = spec.hardware[gpu].count
        if count is not None and need > count:
            message = f"the pools start with {need} of these GPUs"
            fix = f"write `count: {need}`, or start fewer instances"
            yield Finding(path=("hardware", gpu, "count"), message=message, fix=fix, uses=(("models",),))


def _digests(spec: Spec) -> Iterator[Finding]:
    """Digests need Baton's connector, and KV caches in host memory."""
    if not spec.transfer.digests:
        return
    path = ("transfer", "digests")
    if spec.transfer.connector is not Connector.BATON:
        fix = "write `connector: baton` beside it, or leave it out"
        message = "vLLM's connector compares nothing"
        yield Finding(path=path, message=message, fix=fix, uses=(("transfer", "connector"),))
    elif on_gpus := [pool_path for pool_path, _, pool in all_pools(spec) if pool.gpu is not None]:
        message = "the KV cache is in a GPU's memory, and would have to be copied out for every comparison"
        yield Finding(path=path, message=message, fix="leave it out", uses=(on_gpus[0],))


def _peers(spec: Spec) -> Iterator[Finding]:
    """`peers: true` in a file that chooses vLLM's connector, which does not do it. As a default it is no problem."""
    if spec.transfer.peers and spec.transfer.connector is Connector.NIXL:
        yield Finding(
            path=("transfer", "peers"),
            message="vLLM's connector reads from prefill alone",
            fix="write `connector: baton` beside it, or leave it out",
            uses=(("transfer", "connector"),),
            severity=Severity.WARNING,
            if_written=True,
        )


def _tiers(spec: Spec) -> Iterator[Finding]:
    """Files need host memory, through which vLLM moves their blocks; a folder needs files, and an absolute path."""
    if spec.kv.disk_gib and not spec.kv.host_gib:
        message = "vLLM moves blocks to and from files through host memory, and has none for that"
        yield Finding(path=("kv", "disk_gib"), message=message, fix="write `host_gib` beside it, or leave it out")
    folder = spec.kv.disk_folder
    if folder is not None and not spec.kv.disk_gib:
        yield Finding(path=("kv", "disk_folder"), message="has no effect without `disk_gib`", fix="leave it out")
    elif folder is not None and not folder.startswith("/"):
        message = "each instance runs in a folder of its own"
        yield Finding(path=("kv", "disk_folder"), message=message, fix="write an absolute path")


# -- promises --


def _targets(spec: Spec) -> Iterator[Finding]:
    """Targets that contradict each other, or that no engine can meet."""
    for name, each in spec.slo.items():
        path: FieldPath = ("slo", name)
        targets = each.targets()
        if not targets:
            fix = "write at least one of `ttft_ms`, `tt2t_ms`, `tpot_ms`, `e2e_ms`"
            yield Finding(path=path, message="promises nothing", fix=fix)
        for target, value in targets.items():
            if value < 1:
                fix = f"write `{target}: {shown(value * 1000)}` if you mean {shown(value)} seconds"
                yield Finding(path=(*path, target), message="no engine answers within a millisecond", fix=fix)
        if _less(each.tt2t_ms, each.tpot_ms):
            message = f"below `tpot_ms`, {shown(each.tpot_ms or 0)}: the second token waits for a handoff and a step"
            fix = f"write `tt2t_ms: {shown(each.tpot_ms or 0)}` or more"
            yield Finding(path=(*path, "tt2t_ms"), message=message, fix=fix, uses=((*path, "tpot_ms"),))
        if _less(each.e2e_ms, each.ttft_ms):
            message = f"below `ttft_ms`, {shown(each.ttft_ms or 0)}: the last token cannot come before the first"
            fix = f"write `e2e_ms: {shown(each.ttft_ms or 0)}` or more"
            yield Finding(path=(*path, "e2e_ms"), message=message, fix=fix, uses=((*path, "ttft_ms"),))
        if each.attainment == 1:
            message = "one late request in a year breaks this promise"
            fix = "write a share below 1, such as 0.999"
            yield Finding(path=(*path, "attainment"), message=message, fix=fix, severity=Severity.WARNING)


def _less(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and one < other


def _cut_off(spec: Spec) -> Iterator[Finding]:
    """Targets beyond what the router waits for."""
    bounds = {"ttft_ms": "first_token_s", "tt2t_ms": "stall_s", "tpot_ms": "stall_s"}
    for name, each in spec.slo.items():
        for target, value in each.targets().items():
            limit = bounds.get(target)
            if limit is None or value <= getattr(spec.limits, limit) * 1000:
                continue
            said = getattr(spec.limits, limit)
            message = f"the router gives up after `limits.{limit}`, {shown(said)} s"
            fix = f"write `{target}: {shown(said * 1000)}` or less"
            if value <= LIMIT_MAX_S * 1000:
                fix += f", or `limits: {{{limit}: {shown(value / 1000)}}}`"
            yield Finding(path=("slo", name, target), message=message, fix=fix, uses=(("limits", limit),))


def _degrading(spec: Spec) -> Iterator[Finding]:
    for name, each in spec.slo.items():
        path: FieldPath = ("slo", name, "degrade_to")
        if each.when_missed is not WhenMissed.DEGRADE:
            if each.degrade_to is not None:
                fix = "write `when_missed: degrade`, or remove it"
                message = f"has no effect with `when_missed: {each.when_missed}`"
                yield Finding(path=path, message=message, fix=fix, uses=(("slo", name, "when_missed"),))
        elif each.degrade_to is None:
            fix = "write `degrade_to: CLASS`, a class with looser targets"
            yield Finding(
                path=("slo", name, "when_missed"), message="says not what to degrade to", fix=fix, uses=(path,)
            )
        elif each.degrade_to not in spec.slo:
            yield _no_such_class(path, each.degrade_to, spec)
        elif each.degrade_to == name or _stricter(spec.slo[each.degrade_to], each):
            message = "no looser promise than the class itself"
            fix = "name a class whose every target is looser"
            yield Finding(path=path, message=message, fix=fix, uses=(("slo", name), ("slo", each.degrade_to)))


def _stricter(other: SloClass, one: SloClass) -> bool:
    """Whether `other` is no looser than `one`: its targets are the same, or one of them is below `one`'s."""
    ours, theirs = one.targets(), other.targets()
    return ours == theirs or any(value < ours.get(target, 0.0) for target, value in theirs.items())


def _no_such_class(path: FieldPath, name: str, spec: Spec) -> Finding:
    near = nearest(name, spec.slo)
    known = f"use one of {quoted(spec.slo)}" if spec.slo else "add it under `slo`"
    fix = f"did you mean `{near}`?" if near else known
    return Finding(path=path, message="is no class under `slo`", fix=fix, uses=(("slo", name),))


def _below_the_floor(spec: Spec, floor_of: FloorOf) -> Iterator[Finding]:
    for at, model in enumerate(spec.models):
        floor = floor_of(spec, model)
        for name, each in spec.slo.items() if floor else ():
            for target, value in each.targets().items():
                least = floor.targets.get(target, 0.0) if floor else 0.0
                if floor and value < least:
                    message = f"{model.api_name} cannot reach it: at best {shown(least)} ms ({floor.because})"
                    path = ("slo", name, target)
                    fix = f"write `{target}: {shown(least)}` or more, or use faster hardware"
                    yield Finding(path=path, message=message, fix=fix, uses=(("models", at), ("hardware",)))


def _copied_heads(spec: Spec, floor_of: FloorOf) -> Iterator[Finding]:
    """Pairs of pools that vLLM refuses because of the model's number of KV heads."""
    for at, model in enumerate(spec.models):
        floor, pools = floor_of(spec, model), model.pools.every()
        for (producer, (gives, our_pool)), (consumer, (takes, their_pool)) in permutations(pools.items(), 2):
            if floor is None or floor.kv_heads is None or (gives, takes) not in sides.ROLE_PAIRS:
                continue
            ours, theirs = our_pool.shape.tp, their_pool.shape.tp
            because = refused_pair(ours, theirs, floor.kv_heads)
            if because and not refused_pair(ours, theirs):
                where = (producer,) if producer == gives.value else ("extra", producer)
                path = ("models", at, "pools", *where, "shape", "tp")
                most = max(theirs, floor.kv_heads)
                message = f"vLLM hands nothing over from {producer} to {consumer}: {because}"
                yield Finding(path=path, message=message, fix=f"write `tp: {most}` or less", uses=(path[:2],))


# -- tenants --


def _tenants(spec: Spec) -> Iterator[Finding]:
    files: dict[str, str] = {}
    for name, tenant in spec.tenants.items():
        path: FieldPath = ("tenants", name)
        for at, wanted in enumerate(tenant.classes):
            if wanted not in spec.slo:
                yield _no_such_class((*path, "classes", at), wanted, spec)
        chosen = tenant.default_class
        if chosen is not None and chosen not in spec.slo:
            yield _no_such_class((*path, "default_class"), chosen, spec)
        elif chosen is not None and tenant.classes and chosen not in tenant.classes:
            fix = f"add it to `classes`, or use one of {quoted(tenant.classes)}"
            uses = ((*path, "classes"),)
            yield Finding(path=(*path, "default_class"), message="is not among `classes`", fix=fix, uses=uses)
        file = spec.key_file(name)
        if file.startswith("sk-"):
            fix = "write the file it is kept in; this one is known now: replace it with `baton key new`"
            yield Finding(path=(*path, "key_file"), message="a key itself, not a file of keys", fix=fix, value="***")
        elif _plain_path(file) in files:
            message = f"the file of tenant `{files[_plain_path(file)]}`: one key would be two tenants"
            yield Finding(path=(*path, "key_file"), message=message, fix="give each tenant a file of its own")
        files.setdefault(_plain_path(file), name)


def _plain_path(path: str) -> str:
    """A path without the parts that lead nowhere: `./keys//acme` is `keys/acme`."""
    parts = [part for part in path.split("/") if part not in {"", "."}]
    return f"{'/' if path.startswith('/') else ''}{'/'.join(parts)}"


def _models_of_tenants(spec: Spec) -> Iterator[Finding]:
    for at, model in enumerate(spec.models):
        for number, name in enumerate(model.tenants):
            if name not in spec.tenants:
                near = nearest(name, spec.tenants)
                known = f"use one of {quoted(spec.tenants)}" if spec.tenants else "add it under `tenants`"
                fix = f"did you mean `{near}`?" if near else known
                path: FieldPath = ("models", at, "tenants", number)
                yield Finding(path=path, message="is not under `tenants`", fix=fix, uses=(("tenants", name),))
        if len(model.tenants) > TENANTS_MAX:
            message = f"{len(model.tenants)} tenants: an instance is kept for at most {TENANTS_MAX}"
            yield Finding(path=("models", at, "tenants"), message=message, fix="leave it out: then all are served")
    for name in spec.tenants:
        if spec.models and all(model.tenants and name not in model.tenants for model in spec.models):
            message = "no model serves it: every one is kept for others"
            fix = "name it under a model's `tenants`, or take it out here"
            uses = tuple(("models", at, "tenants") for at in range(len(spec.models)))
            yield Finding(path=("tenants", name), message=message, fix=fix, severity=Severity.WARNING, uses=uses)


# -- registry and router --


def _registry(spec: Spec) -> Iterator[Finding]:
    registry = spec.registry
    if registry.url is None:
        for name in ("password_file", "ca_file"):
            if getattr(registry, name) is not None:
                message = "has no effect without `url`: the registry that Baton starts needs none"
                url = ("registry", "url")
                yield Finding(path=("registry", name), message=message, fix="add `url`, or remove it", uses=(url,))
        return
    path: FieldPath = ("registry", "url")
    hidden = "***" if "@" in registry.url else None
    parts = _redis_address(registry.url)
    if parts is None:
        fix = "write `redis://HOST:PORT`, or `rediss://HOST:PORT` for TLS"
        yield Finding(path=path, message="is no address of a Redis", fix=fix, value=hidden)
        return
    plain = parts.scheme == "redis"
    if parts.password:
        twice = registry.password_file is not None
        message = (
            "a second password beside `password_file`" if twice else "a password: every reader of this file has it"
        )
        fix = "take it out of the address" if twice else "take it out of the address and write `password_file: FILE`"
        severity = Severity.ERROR if twice else Severity.WARNING
        yield Finding(path=path, message=message, fix=fix, severity=severity, value=hidden)
    if registry.ca_file is not None and plain:
        message, fix = "has no effect: the address says no TLS", "write `rediss://` in `url`"
        yield Finding(path=("registry", "ca_file"), message=message, fix=fix)
    if plain and registry.password_file and parts.hostname not in LOOPBACK:
        message, fix = "the password would cross the network in the clear", "write `rediss://` for TLS"
        yield Finding(path=path, message=message, fix=fix, severity=Severity.WARNING, value=hidden)


def _redis_address(url: str) -> SplitResult | None:
    """The parts of an address that the registry can use, else None."""
    try:
        parts = urlsplit(url)
        database = parts.path.strip("/")
        usable = parts.port != 0 and not parts.query and not parts.fragment
    except ValueError:  # a port that is no number, half a bracket
        return None
    usable &= parts.scheme in {"redis", "rediss"} and bool(parts.hostname) and (not database or database.isdecimal())
    return parts if usable else None


def _router(spec: Spec) -> Iterator[Finding]:
    router = spec.router
    if router.port == router.admin_port != 0:
        fix = f"write another port, such as {router.port % PORT_MAX + 1}"
        message = "the same as `port`"
        yield Finding(path=("router", "admin_port"), message=message, fix=fix, uses=(("router", "port"),))
    elif 0 < router.admin_port < router.port < router.admin_port + router.processes:
        last = router.admin_port + router.processes - 1
        message = f"`processes: {router.processes}` take admin ports up to {last}, and `port` is {router.port}"
        fix = f"write another port, such as {router.port % PORT_MAX + 1}"
        uses: tuple[FieldPath, ...] = (("router", "port"), ("router", "processes"))
        yield Finding(path=("router", "admin_port"), message=message, fix=fix, uses=uses)
    if router.processes > 1 and router.admin_port + router.processes - 1 > PORT_MAX:
        message = f"`processes: {router.processes}` take as many admin ports from here on, and {PORT_MAX} is the last"
        fix = f"write {PORT_MAX - router.processes + 1} or less"
        yield Finding(path=("router", "admin_port"), message=message, fix=fix, uses=(("router", "processes"),))
    for name in ("host", "admin_host"):
        host: str = getattr(router, name)
        if "/" in host or "[" in host:
            message = "an address or a host's name alone is wanted, without brackets, scheme and path"
            yield Finding(path=("router", name), message=message, fix=f"write `{_host_in(host)}`")
    if router.tls_key_file is not None and router.tls_cert_file is None:
        fix = "add `tls_cert_file`, or remove it"
        message = "a key without a certificate: TLS stays off"
        yield Finding(path=("router", "tls_key_file"), message=message, fix=fix, uses=(("router", "tls_cert_file"),))
    if router.admin_host not in LOOPBACK and router.admin_key_file is None:
        message = (
            "asked from other machines, the admin side refuses all callers but tenants: it asks for an operator's key"
        )
        fix = "name an `admin_key_file`, or keep 127.0.0.1"
        yield Finding(path=("router", "admin_host"), message=message, fix=fix, severity=Severity.WARNING)
    if router.host not in LOOPBACK and not spec.tenants:
        message = "every client that reaches this address may use it"
        fix = "name `tenants`, or keep 127.0.0.1 and put a gateway in front"
        yield Finding(path=("router", "host"), message=message, fix=fix, severity=Severity.WARNING)


def _host_in(url: str) -> str:
    """The host that was meant by something like a URL."""
    try:
        return urlsplit(url if "//" in url else f"//{url}").hostname or "127.0.0.1"
    except ValueError:
        return "127.0.0.1"


RULES: tuple[Callable[[Spec], Iterator[Finding]], ...] = (
    _models,
    _stems,
    _counts,
    _legs,
    _shapes,
    sides.check,
    _engine_args,
    _environment,
    _gpus,
    _digests,
    _peers,
    _tiers,
    _targets,
    _cut_off,
    _degrading,
    _tenants,
    _models_of_tenants,
    _registry,
    _router,
)
