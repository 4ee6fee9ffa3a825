"""A fitted profile: coefficients of `step` for one model on one GPU type and shape, with their origin.

Profiles ship in ``costs/profiles/*.json``, one file for each origin, made by ``tools/fit_profiles.py``. Raw tables do
not ship. Times of *kernels* (computed from operator databases) lack the CPU's part; their origin says how much that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from costs.fit import DecodeRow, FitError, MixedRow, PrefillRow, fit_decode, fit_mixed, fit_prefill
from costs.hardware import Gpu
from costs.model import ModelShape
from costs.shape import CostShape
from costs.step import ByKind, StepCost

FIRST_TOKEN_MS = 7.8
"""Time of a request's first token besides its steps: HTTP, tokenising, the way to the scheduler and back.

Source: requests with short prompts, one at a time, on H100s (github.com/yobitelcomm/bench): median time to the first
token less the median step was 13.98 - 6.48 = 7.5 ms for Llama-3.1-8B (32 layers, vLLM 0.21.0;
docs/recipes/concurrency-sweep.md at 1a865f6) and 24.21 - 16.05 = 8.2 ms for Qwen2.5-72B (80 layers, vLLM 0.22.1;
validation-runs/2026-06-13-llm-h100/c1-79d354b13545.json at 363c146); this is their mean. It does not grow with layers.
No request waits for another one there: that part belongs to a scheduler, and so to the twin. For origins of kernel
times only."""

KERNEL_STEP_FACTOR = 1.075
"""Steps with decode take this many times longer than their kernels: the middle of the 5 to 10 % measured on vLLM's
inter-token latency (same source)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A source of measurements: its authors, its licence, and how its times become those of an engine."""

    name: str
    source: str
    licence: str
    today: bool = True
    """Whether the kernels are those of present engines. Kernels of 2023 are 2 to 4 times slower in decode: profiles of
    them are used only by name."""
    first_token_ms: float = 0.0
    step_factor: float = 1.0


UNMEASURED = FitError(rows=0, mean=0.0, max=0.0)
"""The error of a kind of step without measured rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One fitted profile."""

    origin: Origin
    model: str
    """The model measured, by its name on Hugging Face."""
    fingerprint: str
    """`ModelShape.fingerprint` of the model: the key of a match."""
    gpu: str
    """A name of `hardware.GPUS`."""
    tp: int
    variant: str = ""
    """Another condition, such as a power cap; a profile with one is used only by name."""
    cost: StepCost
    prefill_error: FitError
    small_error: FitError
    """Error of prefills below the knee."""
    decode_error: FitError
    mixed_context: float = 1.0
    """Beside prompts, reading the context of decoding requests takes this many times longer (`by_kind`)."""
    mixed_error: FitError = UNMEASURED

    @property
    def name(self) -> str:
        """The profile's name, unique among those shipped: ``aiconfigurator/Qwen/Qwen3-32B/H200/tp2``."""
        variant = f"/{self.variant}" if self.variant else ""
        return f"{self.origin.name}/{self.model}/{self.gpu}/tp{self.tp}{variant}"

    def __str__(self) -> str:
        prefill, decode = self.prefill_error, self.decode_error
        worst = max(prefill.max, decode.max)
        return f"profile {self.name} (fit error {max(prefill.mean, decode.mean):.1%} mean, {worst:.1%} max)"


def by_kind(cost: StepCost, *, step_factor: float = 1.0, mixed_context: float = 1.0) -> ByKind:
    """The coefficients for each kind of step.

    Args:
        cost: as fitted to steps of one kind, or to kernels.
        step_factor: steps with decode take this many times longer than their kernels; a prefill's overhead belongs to
            its first token.
        mixed_context: attention kernels read decoding requests' KV this many times slower beside prompts. They then
            give up their optimisations for single queries: splitting long contexts, packing heads that share K and V.
    """
    slower = cost.scaled(step_factor, step_factor)
    return ByKind(prefill=cost, decode=slower, mixed=replace(slower, context_ms=slower.context_ms * mixed_context))


def fit_profile(
    origin: Origin,
    model: ModelShape,
    gpu: Gpu,
    tp: int,
    prefills: Sequence[PrefillRow],
    decodes: Sequence[DecodeRow],
    *,
    mixed: Sequence[MixedRow] = (),
    variant: str = "",
) -> Profile:
    """The profile of measured steps of one model on `tp` GPUs. Without `mixed` rows `mixed_context` is 1: reading
    contexts takes as long beside prompts as in a decode step.
    """
    miss = model.experts.miss if model.experts else 1.0
    decode = fit_decode(decodes, miss=miss)
    prefill = fit_prefill(prefills, floor_ms=decode.decode_ms, experts_ms=decode.experts_ms, miss=miss)
    cost = StepCost(
        floor_ms=_rounded(prefill.floor_ms),
        start_ms=_rounded(prefill.start_ms),
        token_ms=_rounded(prefill.token_ms),
        area_ms=_rounded(prefill.area_ms),
        decode_ms=_rounded(decode.decode_ms),
        context_ms=_rounded(decode.context_ms),
        request_ms=_rounded(decode.request_ms),
        cached_ms=_rounded(prefill.cached_ms),
        crowd_ms=_rounded(decode.crowd_ms),
        crowd_from=_rounded(decode.crowd_from),
        experts_ms=_rounded(decode.experts_ms),
        expert_miss=miss if decode.experts_ms else 1.0,
    )
    mixed_context, mixed_error = fit_mixed(mixed, cost)
    return Profile(
        origin=origin,
        model=model.name,
        fingerprint=model.fingerprint,
        gpu=gpu.name,
        tp=tp,
        variant=variant,
        cost=cost,
        prefill_error=prefill.error,
        small_error=prefill.small_error,
        decode_error=decode.error,
        mixed_context=_rounded(mixed_context),
        mixed_error=mixed_error,
    )


DIGITS = 6
"""Significant digits of a coefficient: far beyond the fits' errors, and the same on every machine."""


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


ERRORS = {
    "prefill": "prefill_error",
    "small_prefill": "small_error",
    "decode": "decode_error",
    "mixed": "mixed_error",
}
"""Names of the errors, in a file and in this module."""


def write_profiles(origin: Origin, profiles: Iterable[Profile]) -> dict[str, Any]:
    """A file's content, as `read_profiles` reads it; values at their default are left out."""
    return {"origin": _said(asdict(origin), Origin), "fits": [_written(profile) for profile in profiles]}


def _written(profile: Profile) -> dict[str, Any]:
    errors = {name: error for name, field in ERRORS.items() if (error := getattr(profile, field)).rows}
    return {
        "model": profile.model,
        "fingerprint": profile.fingerprint,
        "gpu": profile.gpu,
        "tp": profile.tp,
        **({"variant": profile.variant} if profile.variant else {}),
        "cost": _said(asdict(profile.cost), StepCost),
        **({"mixed_context": profile.mixed_context} if profile.mixed_context != 1 else {}),
        "error": {
            name: {"rows": each.rows, "mean": round(each.mean, 4), "max": round(each.max, 4)}
            for name, each in errors.items()
        },
    }


def _said(values: dict[str, Any], kind: type[Origin | StepCost]) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(kind)}
    return {name: value for name, value in values.items() if value != defaults[name]}


def read_profiles(document: Mapping[str, Any]) -> tuple[Profile, ...]:
    """The profiles of one file.

    Raises:
        KeyError, TypeError: a field is missing or unknown. Only the package's own files are read, so this is a bug.
    """
    origin = Origin(**document["origin"])
    return tuple(_read(origin, fit) for fit in document["fits"])


def _read(origin: Origin, fit: Mapping[str, Any]) -> Profile:
    errors = {
        field: FitError(**fit["error"][name]) if name in fit["error"] else UNMEASURED for name, field in ERRORS.items()
    }
    return Profile(
        origin=origin,
        model=fit["model"],
        fingerprint=fit["fingerprint"],
        gpu=fit["gpu"],
        tp=fit["tp"],
        variant=fit.get("variant", ""),
        cost=StepCost(**fit["cost"]),
        mixed_context=fit.get("mixed_context", 1.0),
        **errors,
    )


def matching(profiles: Iterable[Profile], model: ModelShape, gpu: Gpu) -> list[Profile]:
    """Profiles of present kernels for this model on this GPU, whatever their shape."""
    return [
        profile
        for profile in profiles
        if profile.origin.today
        and not profile.variant
        and profile.gpu == gpu.name
        and profile.fingerprint == model.fingerprint
    ]


def exact(candidates: Iterable[Profile], model: ModelShape, shape: CostShape) -> Profile | None:
    """The profile of exactly this shape. A data-parallel rank of a dense model steps like an instance of its own."""
    if shape.pp > 1 or (model.experts and shape.dp > 1):
        return None
    return next((each for each in candidates if each.tp == shape.tp), None)


def nearest(candidates: Iterable[Profile], shape: CostShape) -> Profile | None:
    """The profile with the nearest tensor parallelism, by factor; the smaller one of two equally near."""
    ranked = {(max(each.tp, shape.tp) / min(each.tp, shape.tp), each.tp, each.name): each for each in candidates}
    return ranked[min(ranked)] if ranked else None


def carried_over(known: StepCost, there: StepCost, here: StepCost) -> StepCost:
    """A fit for one shape, carried over to another by how the roofline differs between `there` and `here`.

    Coefficient by coefficient: a coefficient that the roofline lacks (0) is taken as fitted.
    """

    def by(fitted: float, from_: float, to: float) -> float:
        return fitted * to / from_ if from_ > 0 else fitted

    token = by(1.0, there.token_ms, here.token_ms)
    return StepCost(
        floor_ms=by(known.floor_ms, there.floor_ms, here.floor_ms),
        start_ms=known.start_ms * token,
        token_ms=known.token_ms * token,
        area_ms=by(known.area_ms, there.area_ms, here.area_ms),
        decode_ms=by(known.decode_ms, there.decode_ms, here.decode_ms),
        context_ms=by(known.context_ms, there.context_ms, here.context_ms),
        request_ms=known.request_ms * token,
        cached_ms=by(known.cached_ms, there.cached_ms, here.cached_ms),
        crowd_ms=known.crowd_ms * token,
        crowd_from=known.crowd_from,
        experts_ms=by(known.experts_ms, there.experts_ms, here.experts_ms),
        expert_miss=known.expert_miss if known.experts_ms else here.expert_miss,
    )
