"""vLLM's flags for a simulated instance: from the words that a pool gives its engines to the twin's settings. Pure.

Flags that change what is simulated are read. `unread` names all others, so that no user believes they had an effect.
Defaults are vLLM 0.32's for its server on that GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cluster.errors import UsageError
from cluster.instance import Role
from cluster.spec import flags
from costs.cost import Costs, costs_of
from costs.hardware import Gpu, is_kv_dtype_priced, kv_dtype_named
from costs.memory import MEMORY_SHARE, batched_tokens_default, seqs_default
from costs.model import ModelShape
from costs.profile import Profile
from costs.shape import CostShape
from engine.twin.config import Policy, TwinConfig, Version

LENGTH_MAX: Final = 131_072
"""Tokens of prompt and answer where no flag says: today's models' own limit, unless fewer fit into the memory."""

_SWITCHES: Final = {"enable-prefix-caching": True, "enable-chunked-prefill": True, "async-scheduling": True}
_WORDS: Final = {flags.KV_DTYPE, "scheduling-policy"}
_HARMLESS: Final = {"tensor-parallel-size", "data-parallel-size", "pipeline-parallel-size", "enable-expert-parallel"}
"""Flags that are not read: the instance's shape says the same."""
_SHORT: Final = {"-tp": "tensor-parallel-size", "-dp": "data-parallel-size", "-pp": "pipeline-parallel-size"}
"""vLLM's short names of them."""


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """The flags that are read, and the names of the others."""

    numbers: dict[str, float]
    switches: dict[str, bool]
    words: dict[str, str]
    unread: tuple[str, ...]

    def whole(self, flag: str, default: int) -> int:
        """The flag's value as a whole number, or the default."""
        return int(self.numbers.get(flag, default))


def unread_line(names: Sequence[str]) -> str:
    """A line for people on flags that are not read."""
    return f"not simulated, so no figure has what they change: {', '.join(names)}"


def read_words(words: Sequence[str]) -> EngineArgs:
    """Sort ``--flag value``, ``--flag=value``, ``--flag`` and ``--no-flag``.

    Raises:
        UsageError: vLLM does not take the value of a flag that is read, or a word belongs to no flag.
    """
    numbers: dict[str, float] = {}
    switches, chosen, unread = dict(_SWITCHES), dict[str, str](), list[str]()
    for name, value in _pairs(words):
        plain = name.removeprefix("no-")
        if plain in _SWITCHES:
            switches[plain] = plain == name
        elif name in flags.NUMBERS:
            numbers.pop(name, None)
            number = _number(name, value)
            numbers |= {} if number is None else {name: number}
        elif name in _WORDS:
            chosen[name] = value or ""
            if name == flags.KV_DTYPE and not is_kv_dtype_priced(chosen[name]):
                unread.append(f"--{name} {value}")
        elif name not in _HARMLESS:
            unread.append(f"--{name}")
    return EngineArgs(numbers, switches, chosen, tuple(dict.fromkeys(unread)))


def _pairs(words: Sequence[str]) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            found.append((name.replace("_", "-"), value or None))
        elif re.match("-[a-z]", word):
            found.append((_SHORT.get(word, word[1:]), None))
        elif found and found[-1][1] is None:
            found[-1] = (found[-1][0], word)
        elif not found:
            raise UsageError(f"`{word}` belongs to no flag of vLLM: write `--{word}`")
    return found


def _number(flag: str, value: str | None) -> float | None:
    """The flag's number; None: vLLM chooses it."""
    try:
        return flags.number_of(flag, value or "")
    except ValueError as error:
        raise UsageError(f"--{flag} {value or ''}: {error}") from None


def engine_of(
    role: Role,
    model: ModelShape,
    gpu: Gpu,
    shape: CostShape,
    args: EngineArgs,
    *,
    profiles: Sequence[Profile],
    lease_s: float = 30.0,
    contents: bool = False,
) -> tuple[Costs, TwinConfig]:
    """The costs of an instance's steps, and its settings.

    Raises:
        UsageError: the model does not fit or cannot be split, or the flags contradict each other.
    """
    if (why := model.undivided_heads(shape.tp)) is not None:
        raise UsageError(why)
    batched = args.whole("max-num-batched-tokens", batched_tokens_default(gpu))
    costs = costs_of(
        model,
        gpu,
        shape,
        profiles=profiles,
        kv_dtype=kv_dtype_named(args.words.get(flags.KV_DTYPE)),
        memory_share=args.numbers.get(flags.MEMORY, MEMORY_SHARE),
        batched_tokens=batched,
    )
    size = args.whole("block-size", 16)
    blocks = args.whole("num-gpu-blocks-override", costs.kv_capacity_tokens // size)
    if blocks < 2:
        raise UsageError(
            f"{model.name} does not fit on {gpu.name} with this shape: give more GPUs (tp), or larger ones"
        )
    length = args.whole("max-model-len", min(LENGTH_MAX, blocks * size))
    try:
        config = TwinConfig(
            role=role,
            block_size=size,
            num_blocks=blocks,
            max_num_batched_tokens=batched,
            max_num_seqs=args.whole("max-num-seqs", seqs_default(gpu.name, gpu.memory_gib)),
            max_model_len=length,
            chunked_prefill=args.switches["enable-chunked-prefill"],
            prefix_caching=args.switches["enable-prefix-caching"],
            policy=Policy(args.words.get("scheduling-policy", "fcfs")),
            lease_s=lease_s,
            version=Version(async_scheduling=args.switches["async-scheduling"], pull_after_forward=False),
            contents=contents,
            every_share=contents,
        )
    except ValueError as error:
        raise UsageError(f"{role.value} instances of {model.name} on {gpu.name}: {error}") from None
    return costs, config
