"""vLLM's flags in a cluster file: turns `engine_args` into words, and lists the flags that other settings give. Pure.

The lists below repeat what `engine/vllm` knows, which this layer may not import; tests/unit/test_spec_flags.py compares
the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from cluster.spec.settings import KvTiers, Shape

FLAG_NAME = re.compile(r"[a-z][A-Za-z0-9_.+-]{0,127}")

BY_SHAPE = {
    "tensor-parallel-size": "tp",
    "data-parallel-size": "dp",
    "pipeline-parallel-size": "pp",
    "enable-expert-parallel": "ep",
}
"""Flags that Baton derives from a pool's `shape`, and the setting of each."""

SHORT = {"tp": "tensor-parallel-size", "dp": "data-parallel-size", "pp": "pipeline-parallel-size"}
"""vLLM's short flags (``-tp``), which look like settings of Baton."""

REFUSED = {
    "host": "remove it: Baton chooses each instance's address",
    "port": "remove it: Baton gives each instance a port of its own",
    "model": "remove it: the model's `name` says it",
    "uds": "remove it: instances are reached by address and port",
    "ssl-keyfile": "remove it: instances speak plain HTTP inside the cluster; put TLS in front of them",
    "ssl-certfile": "remove it: instances speak plain HTTP inside the cluster; put TLS in front of them",
    "headless": "remove it: each instance has its own API server",
}
"""Flags that would move an engine away from where the router looks for it."""

SET_BY_BATON = {
    "kv-transfer-config": "remove it, or make sure that it still hands over: see `transfer`",
    "served-model-name": "write the model's `served_name` instead",
    "shutdown-timeout": "remove it, or keep it above 0: at 0 a stop aborts every request",
    "enable-scale-out": "remove it: the router ends a leg through it",
    "enable-prompt-tokens-details": "remove it: usage reports cached tokens through it",
    "enable-per-request-metrics": "remove it: the parts of a latency come from it",
    "logits-processors": "add `engine.vllm.pin:PinFirstToken` to it: without, clients get no token before the handoff",
    "disable-uvicorn-access-log": "remove it, unless you want a line for each probe",
    "config": "write its flags here: what it says cannot be checked",
}
"""Flags that Baton sets itself. The user's values win, so a cluster file that sets them gets a warning only."""

DEFAULTED = frozenset({"allowed-media-domains"})
"""Flags with a default of Baton's own that users may well replace: a file that sets them gets no warning."""

SECRET = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN", "watermark-config": ""}
"""Flags whose value is a secret, and the environment variable that keeps it out of the process list; empty: vLLM reads
none."""

ENV_SET_BY_BATON = {
    "CUDA_VISIBLE_DEVICES": "remove it: each instance is given GPUs of its own",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "remove it: each instance is given an address of its own",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "remove it: each instance is given a port of its own",
}
"""Variables that differ between the instances of a pool; one value for all of them breaks all but the first."""

SAME_ON_BOTH_SIDES = ("attention-backend", "disable-hybrid-kv-cache-manager", "dtype", "kv-cache-dtype")
"""Flags that must be equal on prefill and decode: they decide the bytes of a KV block. vLLM's NixlConnector refuses a
peer whose digest of them differs (`compute_nixl_compatibility_hash`)."""

SAME_ANSWERS = (
    "chat-template", "chat-template-content-format", "default-chat-template-kwargs", "generation-config",
    "hf-config-path", "hf-overrides", "override-generation-config", "quantization", "revision", "tokenizer",
    "tokenizer-mode", "tokenizer-revision",
)  # fmt: skip
"""Flags that turn the same files into another model. Agents put them into the digest of the weights
(`baton/commands/engine.py`; tests/unit/test_spec_flags.py compares)."""

SAME_WORDS = ("enable-auto-tool-choice", "reasoning-parser", "tool-call-parser")
"""Flags that change how a request is read and how its answer is written. No pair proof compares them."""

BUDGET, KV_DTYPE = "max-num-batched-tokens", "kv-cache-dtype"
PRICED = (BUDGET, KV_DTYPE)
"""Flags from which routers derive what an engine's steps and transfers cost (`baton/makes.py`). A router's cluster file
on Kubernetes has these flags and no others."""

LEFT_OUT = {"kv-cache-dtype": "auto", "dtype": "auto", "generation-config": "auto", "tokenizer-mode": "auto"}
"""vLLM's default values of flags: a flag with its default is the same as no flag."""

MEMORY: Final = "gpu-memory-utilization"
LENGTH: Final = "max-model-len"
_SUFFIXED: Final = frozenset({LENGTH, BUDGET})
NUMBERS: Final = frozenset({*_SUFFIXED, "max-num-seqs", "block-size", "num-gpu-blocks-override", MEMORY})
"""Flags whose value is a number that costs and simulations read: whole numbers, but for `MEMORY`. Of those in
`_SUFFIXED`, vLLM takes `32k` (thousands) and `32K` (1,024s), too."""

WHOLE_MAX: Final = 10**12
_WITH_SUFFIX: Final = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)([kmgt])|(\d{1,12})([KMGT])")

_SECRET_WORDS = frozenset("auth credential credentials key keys passwd password secret token".split())


def normal(flag: str) -> str:
    """``--max_model_len`` -> ``max-model-len``, as vLLM's parser reads it."""
    return flag.lstrip("-").replace("_", "-")


def is_secret_flag(flag: str) -> bool:
    """Whether the flag's value is a secret, or the flag is for a field of one (`watermark-config.key`)."""
    return normal(flag).partition(".")[0] in SECRET


def given(engine_args: Mapping[str, Any], flag: str) -> tuple[str, Any]:
    """A flag as `engine_args` spell it, and its value; ("", None) where they do not give it."""
    return next(((name, value) for name, value in engine_args.items() if normal(name) == flag), ("", None))


def number_of(flag: str, text: str) -> float | None:
    """The number that vLLM reads of one of the `NUMBERS`; None: vLLM chooses it (`max-model-len: auto`).

    Raises:
        ValueError: vLLM refuses the text; says what the number must be.
    """
    text = text.strip()
    if flag == MEMORY:
        return _share(text)
    if flag == LENGTH and text.lower() in {"-1", "auto"}:
        return None
    suffixed = _WITH_SUFFIX.fullmatch(text) if flag in _SUFFIXED else None
    if suffixed is not None:
        thousands, small, plain, large = suffixed.groups()
        found = int(float(thousands) * 1000 ** ("kmgt".index(small) + 1)) if small else 0
        found = int(plain) * 1024 ** ("KMGT".index(large) + 1) if large else found
    else:
        found = int(text) if len(text) < 20 and re.fullmatch(r"\+?\d+(?:_\d+)*", text) else 0
    if not 0 < found <= WHOLE_MAX:
        more = ", or one such as 32k or 32K" if flag in _SUFFIXED else ""
        raise ValueError(f"must be a whole number from 1 to {WHOLE_MAX:,}{more}")
    return found


def _share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise ValueError("must be a number above 0 and up to 1")
    return found


def wrong_number(flag: str, value: Any) -> str:
    """What the value of one of the `NUMBERS` in `engine_args` must be; empty if vLLM takes it."""
    try:
        number_of(flag, _text_alone(value))
    except ValueError as error:
        return str(error)
    return ""


def number_in(engine_args: Mapping[str, Any], flag: str) -> float | None:
    """One of the `NUMBERS` in `engine_args`; None: it is not there or wrong, or vLLM chooses it."""
    name, value = given(engine_args, flag)
    return number_of(flag, _text_alone(value)) if name and not wrong_number(flag, value) else None


def _text_alone(value: Any) -> str:
    return _text(value[0] if isinstance(value, list) and len(value) == 1 else value)


def shared(pools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The flags in these pools' `engine_args` that must have one value in all pools of a model. The first pool's value
    counts.
    """
    found: dict[str, Any] = {}
    for engine_args in pools:
        for name, value in engine_args.items():
            if normal(name) in {*SAME_ON_BOTH_SIDES, *SAME_ANSWERS, *SAME_WORDS}:
                found.setdefault(normal(name), value)
    return found


def is_secret_name(name: str) -> bool:
    """Whether a variable, flag or key has the name of a secret (and not of a file that holds one)."""
    words = name.lower().replace("-", "_").split("_")
    return bool(_SECRET_WORDS & set(words)) and words[-1] not in {"file", "path"}


def shape_flags(shape: Shape) -> tuple[str, ...]:
    """The words that give an engine its shape; sizes of 1 are vLLM's default and need none."""
    words: list[str] = []
    for flag, size in (
        ("--tensor-parallel-size", shape.tp),
        ("--pipeline-parallel-size", shape.pp),
        ("--data-parallel-size", shape.dp),
    ):
        words += [flag, str(size)] if size > 1 else []
    return (*words, "--enable-expert-parallel") if shape.ep > 1 else tuple(words)


def words(engine_args: Mapping[str, Any]) -> tuple[str, ...]:
    """`engine_args` as the words of a command line, in their order, without those that the shape gives."""
    return tuple(
        word for flag, value in engine_args.items() if normal(flag) not in BY_SHAPE for word in _words(flag, value)
    )


def _words(flag: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool) and "." not in flag:
        yield f"--{flag}" if value else f"--no-{flag}"
        return
    texts = [_text(each) for each in value] if isinstance(value, list) else [_text(value)]
    if len(texts) == 1 and texts[0].startswith("-"):  # a parser would take such a value for the next flag
        yield f"--{flag}={texts[0]}"
        return
    yield f"--{flag}"
    yield from texts


def _text(value: Any) -> str:
    """One value as vLLM's parser reads it: a text unchanged, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def tier_words(kv: KvTiers) -> list[str]:
    """The words of `baton engine` that give an instance its tiers."""
    words = ["--kv-host-gib", f"{kv.host_gib:g}"] if kv.host_gib else []
    words += ["--kv-disk-gib", f"{kv.disk_gib:g}"] if kv.disk_gib else []
    return [*words, *(["--kv-disk-folder", kv.disk_folder] if kv.disk_folder else [])]
