"""Settings that the two sides of a hand-over must share, and settings with which vLLM hands nothing over. Pure.

The rules are those of vLLM 0.32's NixlConnector in pull mode (``nixl/`` = ``vllm/distributed/kv_transfer/kv_connector/
v1/nixl/``). What it refuses ends the engine's start, or each pull: decode then computes every prompt again, and
prefill's work is lost. The rule of tensor parallel sizes, which plans use as well, is in `cluster.spec.pairing`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Final

from cluster.instance import Role
from cluster.spec import flags
from cluster.spec.pairing import refused_pair
from cluster.spec.problems import FieldPath, Finding, Severity
from cluster.spec.settings import Connector, Model, Pool, Spec

ROLE_PAIRS: Final = (
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.BOTH),
    (Role.BOTH, Role.DECODE),
    (Role.BOTH, Role.BOTH),
)
"""Roles of the producer and the consumer of a hand-over."""

_BLOCK, _PREFILL_RANKS, _DECODE_RANKS = "block-size", "prefill-context-parallel-size", "decode-context-parallel-size"
_ROUTED, _DRAFTS = "enable-return-routed-experts", "speculative-config"
_LORA = ("enable-lora", "lora-modules")
_READ_HIDDEN_STATES: Final = ("eagle", "mtp", "dflash", "dspark")
"""Beginnings of the names of speculative decoding methods that read the model's hidden states; names that end in
``_mtp`` are such, too (``SpeculativeConfig.use_eagle``). Their draft model has KV cache of its own, which P must
fill as well."""


@dataclass(frozen=True, slots=True)
class Side:
    """A pool as one side of a hand-over."""

    path: FieldPath
    name: str
    """What messages call it: its role, or an extra pool's own name."""
    role: Role
    pool: Pool

    def given(self, flag: str) -> tuple[FieldPath, Any]:
        """The path of this vLLM flag in the file, and its value; without it the path of the pool's flags, and None."""
        at = (*self.path, "engine_args")
        name, value = flags.given(self.pool.engine_args, flag)
        return ((*at, name), value) if name else (at, None)

    def number(self, flag: str) -> int | None:
        """A flag's value, if it is a whole number above 0."""
        value = self.given(flag)[1]
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    @property
    def at_tp(self) -> FieldPath:
        """The path of its tensor parallel size."""
        return (*self.path, "shape", "tp")

    @property
    def at_role(self) -> FieldPath:
        """The path of its role, which extra pools write down."""
        return (*self.path, "role")


def check(spec: Spec) -> Iterator[Finding]:
    """What keeps the pools of a model from handing over to each other; of several findings for a field, the first."""
    for at, model in enumerate(spec.models):
        sides = list(_sides(("models", at, "pools"), model))
        yield from _names(("models", at, "pools"), model)
        told: set[FieldPath] = set()
        for finding in _of(sides):
            if finding.path not in told:
                told.add(finding.path)
                yield finding
        if spec.transfer.connector is Connector.BATON:
            yield from _not_by_baton(sides)


def pairs(sides: list[Side]) -> Iterator[tuple[Side, Side]]:
    """Every pool that may hand over with every other pool that it may hand over to."""
    yield from ((one, other) for one, other in permutations(sides, 2) if (one.role, other.role) in ROLE_PAIRS)


def _sides(path: FieldPath, model: Model) -> Iterator[Side]:
    for name, (role, pool) in model.pools.every().items():
        own = name == role.value
        yield Side((*path, name) if own else (*path, "extra", name), name, role, pool)


def _of(sides: list[Side]) -> Iterator[Finding]:
    together = list(pairs(sides))
    # Pools whose own instances may hand over to each other.
    among = {side.name for side in sides if side.role is Role.BOTH and side.pool.at_most > 1}
    gives = among | {producer.name for producer, _ in together}
    takes = (
        among | {consumer.name for _, consumer in together} | {side.name for side in sides if side.role is Role.DECODE}
    )
    for side in sides:
        if side.pool.shape.pp > 1 and side.name in gives | takes:
            yield _stages(side, takes=side.name in takes)
        yield from _at_start(side)
    for producer, consumer in together:
        for rule in _PAIR:
            for finding in rule(producer, consumer):
                yield dataclasses.replace(finding, uses=(*finding.uses, producer.at_role, consumer.at_role))


def _names(path: FieldPath, model: Model) -> Iterator[Finding]:
    """Extra pools that have a role's name, or a name that an instance could have."""
    for name in model.pools.extra:
        if name in set(Role) or name.rpartition("-")[2].isdecimal():
            fix = "write a name such as `decode-l40s`: no role's, and none that ends in a number"
            yield Finding(path=(*path, "extra", name), message="cannot be an extra pool's name", fix=fix)


# -- what a pool cannot be on any side --


def _stages(side: Side, *, takes: bool) -> Finding:
    """A pool with pipeline stages. A consumer compares all of the producer's KV regions with its own, and a stage has
    only some of them. A consumer that has stages itself ends at its start (`base_worker.py`).
    """
    shape = side.pool.shape
    message = (
        f"vLLM's NixlConnector hands no KV cache over {'to' if takes else 'from'} an instance with pipeline stages"
    )
    fix = f"write `pp: 1`, and `tp: {shape.tp * shape.pp}` for the same GPUs"
    return Finding(path=(*side.path, "shape", "pp"), message=message, fix=fix)


def _at_start(side: Side) -> Iterator[Finding]:
    """Flags with which no engine starts that has the connector, as all have (`config/vllm.py`, `connector.py`)."""
    path, wanted = side.given(_ROUTED)
    if wanted is True:
        message = "vLLM starts no engine with it that can hand over: the list of experts does not come along"
        yield Finding(path=path, message=message, fix="remove it")
    path = side.given(_PREFILL_RANKS)[0]
    prompt, answer = side.number(_PREFILL_RANKS) or 1, side.number(_DECODE_RANKS) or 1
    if prompt > 1 and (side.role is not Role.PREFILL or side.pool.flips):
        why = "and these instances may take another role" if side.role is Role.PREFILL else f"and {side.name} is none"
        message = f"vLLM's NixlConnector takes it on prefill alone, {why}"
        yield Finding(path=path, message=message, fix="remove it, or write it under a `prefill` that never flips")
    elif prompt > 1 and answer > 1 and (side.pool.shape.tp != 1 or answer != prompt):
        message = f"beside `{_DECODE_RANKS}` vLLM's NixlConnector wants `tp: 1`, and both of one size"
        fix = f"write `tp: 1` and `{_DECODE_RANKS}: {prompt}`, or remove one of the two"
        yield Finding(path=path, message=message, fix=fix, uses=(side.at_tp,))


def _not_by_baton(sides: list[Side]) -> Iterator[Finding]:
    """What vLLM supports only with a connector named NixlConnector (`engine.vllm.transfer`)."""
    for side in sides:
        path = side.given(_DECODE_RANKS)[0]
        if (side.number(_DECODE_RANKS) or 1) > 1:
            message = "no engine starts with it and Baton's connector"
            fix = "write `connector: nixl` under `transfer`, or remove it"
            yield Finding(path=path, message=message, fix=fix, uses=(("transfer", "connector"),))


# -- what two pools must have in common --


def _sizes(producer: Side, consumer: Side) -> Iterator[Finding]:
    ours, theirs = producer.pool.shape.tp, consumer.pool.shape.tp
    if refused_pair(ours, theirs):
        message = f"{producer.name} has tp {ours}: one must be a multiple of the other for a handoff"
        fix = f"write `tp: {ours}`, or a multiple or divisor of it"
        yield Finding(path=consumer.at_tp, message=message, fix=fix, uses=(producer.at_tp,))


def _same(producer: Side, consumer: Side) -> Iterator[Finding]:
    """Flags that must have the same value on both sides."""
    for names, why in (
        (flags.SAME_ON_BOTH_SIDES, "the KV cache of one is refused by the other"),
        (flags.SAME_ANSWERS, "else they are two models, and nothing is handed over"),
        (flags.SAME_WORDS, "one reads the request, the other writes the answer"),
    ):
        for flag in names:
            path = _disagreement(producer, consumer, flag)
            if path is not None:
                message = f"{producer.name} and {consumer.name} must agree on it: {why}"
                fix = "give it to both pools with one value, or to none"
                yield Finding(path=path, message=message, fix=fix, uses=(producer.path, consumer.path))


def _disagreement(producer: Side, consumer: Side, flag: str) -> FieldPath | None:
    """The path of a flag that the two sides give different values; None: they agree on it."""
    (our_path, ours), (their_path, theirs) = producer.given(flag), consumer.given(flag)
    if _meant(flag, ours) == _meant(flag, theirs):
        return None
    return our_path if theirs is None else their_path


def _meant(flag: str, value: Any) -> Any:
    """A flag's value as vLLM takes it; None: no flag, false, or vLLM's default written out."""
    return None if value is False or value == flags.LEFT_OUT.get(flag) else value


def _blocks(producer: Side, consumer: Side) -> Iterator[Finding]:
    """Block sizes that do not fit each other: `block_size_ratio` (``kv_connector/utils.py``), and for a consumer with
    fewer ranks `_validate_remote_agent_handshake`.
    """
    ours, theirs = producer.number(_BLOCK), consumer.number(_BLOCK)
    path = consumer.given(_BLOCK)[0]
    fewer = producer.pool.shape.tp > consumer.pool.shape.tp
    if ours is None and theirs is None:
        return
    if ours is None or theirs is None:
        path = producer.given(_BLOCK)[0] if theirs is None else path
        lacks = consumer.name if theirs is None else producer.name
        message = f"{lacks} has vLLM's default, which depends on its hardware: sizes may not fit each other"
        fix = f"write `{_BLOCK}: {ours or theirs}` under both, or under none"
        yield Finding(
            path=path, message=message, fix=fix, severity=Severity.WARNING, uses=(producer.path, consumer.path)
        )
    elif theirs % ours:
        message = f"{producer.name} has {ours}: decode's blocks must be a multiple of prefill's"
        yield Finding(path=path, message=message, fix=f"write `{_BLOCK}: {ours}`", uses=(producer.path,))
    elif fewer and theirs != ours:
        message = f"{producer.name} has {ours}, and a larger `tp`: blocks must then be of one size"
        yield Finding(path=path, message=message, fix=f"write `{_BLOCK}: {ours}`", uses=(producer.path, consumer.at_tp))
    elif theirs != ours:
        # If decode has the prompt's beginning in its cache and the rest does not end at a block, vLLM's connector takes
        # the wrong part of prefill's list. Baton's does not (docs/connector.md).
        message = f"{producer.name} has {ours}: vLLM's connector can read smaller blocks into wrong places"
        fix = f"write `{_BLOCK}: {ours}`"
        yield Finding(path=path, message=message, fix=fix, severity=Severity.WARNING, uses=(producer.path,))


def _context_ranks(producer: Side, consumer: Side) -> Iterator[Finding]:
    """Keys and values spread over ranks (`_validate_remote_parallel_config`, `_validate_remote_agent_handshake`)."""
    ours, theirs = producer.number(_DECODE_RANKS) or 1, consumer.number(_DECODE_RANKS) or 1
    prompt = producer.number(_PREFILL_RANKS) or 1
    few, many = sorted((ours, theirs))
    path = producer.given(_DECODE_RANKS)[0] if theirs == 1 else consumer.given(_DECODE_RANKS)[0]
    if many % few:
        message = f"{producer.name} has {ours} and {consumer.name} {theirs}: one must be a multiple of the other"
        yield Finding(path=path, message=message, fix=f"write `{_DECODE_RANKS}: {ours}`", uses=(producer.path,))
    elif prompt > 1 and ours == 1 and theirs > 1:
        message = f"{producer.name} holds whole copies (`{_PREFILL_RANKS}: {prompt}`), which no part can be read from"
        fix = f"write `{_DECODE_RANKS}: {prompt}` under {producer.name}, too, or remove it here"
        yield Finding(path=path, message=message, fix=fix, uses=(producer.path,))


def _drafts(producer: Side, consumer: Side) -> Iterator[Finding]:
    """Speculative decoding that reads hidden states must be on both sides or on none
    (`_get_speculative_compatibility_factors`).
    """
    (our_path, ours), (their_path, theirs) = producer.given(_DRAFTS), consumer.given(_DRAFTS)
    if _reads_states(ours) != _reads_states(theirs):
        path = our_path if _reads_states(ours) else their_path
        message = (
            f"{producer.name} and {consumer.name} must agree on it: its drafts need what prefill has computed for them"
        )
        fix = "give it to both pools with one value, or to none; `ngram` may be on decode alone"
        yield Finding(path=path, message=message, fix=fix, uses=(producer.path, consumer.path))
    elif ours is not None and theirs is None and producer.role is Role.PREFILL:
        message = f"{producer.name} makes one token of an answer, and {consumer.name} the others without it"
        fix = f"write it under {consumer.name}, too, or instead"
        yield Finding(path=our_path, message=message, fix=fix, severity=Severity.WARNING, uses=(consumer.path,))


def _reads_states(config: Any) -> tuple[str, Any] | None:
    """Method and draft model, if that method reads hidden states; else None."""
    method = config.get("method") if isinstance(config, Mapping) else None
    if isinstance(method, str) and (method.startswith(_READ_HIDDEN_STATES) or method.endswith("_mtp")):
        return method, config.get("model")
    return None


def _adapters(producer: Side, consumer: Side) -> Iterator[Finding]:
    """Adapters that differ: a request for one is served aggregated, by the side that has it."""
    for flag in _LORA:
        path = _disagreement(producer, consumer, flag)
        if path is not None:
            message = (
                f"{producer.name} and {consumer.name} differ: requests for such an adapter are handed over by none"
            )
            fix = "give both pools the same adapters, by the same names and files"
            uses = (producer.path, consumer.path)
            yield Finding(path=path, message=message, fix=fix, severity=Severity.WARNING, uses=uses)
            return


_PAIR: Final[tuple[Callable[[Side, Side], Iterator[Finding]], ...]] = (
    _sizes, _same, _blocks, _context_ranks, _drafts, _adapters,
)  # fmt: skip
