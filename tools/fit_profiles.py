"""Fit the profiles that ship in costs/profiles/: BATON_DATA=/path/to/data python tools/fit_profiles.py [GRID]

GRID is a folder that tools/kernel_grid.py has written; without it, costs/profiles/kernels.json stays as it is.

Reads the folder ``profiles/`` of the data and nothing else, above all not ``measured/``, which is there to check
against. docs/costs.md says where the tables come from. Fits the same rows to the same digits on every machine.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from costs import shipped
from costs.bounds import least_step_ms
from costs.fit import (
    Array,
    DecodeRow,
    FitError,
    MixedRow,
    PrefillRow,
    error_of,
    fit_columns,
    fit_link,
)
from costs.hardware import GPUS, Gpu, gpu_named
from costs.memory import kv_capacity_tokens
from costs.model import ModelShape
from costs.profile import (
    FIRST_TOKEN_MS,
    KERNEL_STEP_FACTOR,
    Origin,
    Profile,
    fit_profile,
    write_profiles,
)
from costs.roofline import PCIE_GB_S, TYPICAL, Efficiency, peaks
from costs.shape import Spans
from costs.step import StepWork, decoding, prompt

Row = dict[str, str]

OUT = Path(__file__).resolve().parent.parent / "costs" / "profiles"


def table(path: Path) -> list[Row]:
    """The rows of a CSV file with a header."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def error_entry(error: FitError) -> dict[str, Any]:
    """An error as it stands in a file."""
    return {"rows": error.rows, "mean": round(error.mean, 4), "max": round(error.max, 4)}


# -- aiconfigurator: a grid of kernel times --


def aiconfigurator(data: Path) -> dict[str, Any]:
    """Three dense models on five GPUs, from NVIDIA's operator database."""
    return kernels(data / "grid")


def kernels(folder: Path) -> dict[str, Any]:
    """Every model, GPU and number of GPUs of a folder of kernel times."""
    groups: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for path in sorted(folder.glob("*_vllm*.csv")):
        for row in table(path):
            groups[row["model"], row["system"], int(row["tp"])].append(row)
    origin = Origin(
        name="aiconfigurator",
        source="kernel times computed with NVIDIA aiconfigurator 0.12 (github.com/ai-dynamo/aiconfigurator), vllm",
        licence="Apache-2.0",
        first_token_ms=FIRST_TOKEN_MS,
        step_factor=KERNEL_STEP_FACTOR,
    )
    fits = []
    for (name, system, tp), rows in sorted(groups.items()):
        model, gpu = shipped.model_named(name), gpu_named(system)
        fitting = list(fit_in_memory(rows, model, gpu, tp))
        prefills = [prefill_row(row) for row in fitting if row["kind"] == "prefill"]
        decodes = [decode_row(row) for row in fitting if row["kind"] == "decode"]
        fits.append(fit_profile(origin, model, gpu, tp, prefills, decodes))
    return write_profiles(origin, fits)


def fit_in_memory(rows: Sequence[Row], model: ModelShape, gpu: Gpu, tp: int) -> Iterator[Row]:
    """Rows that the GPU has room for: by the table's own column, or by our account of memory where it has none."""
    room = kv_capacity_tokens(model, gpu, Spans(tp=tp))
    for row in rows:
        needed = int(row["batch"]) * int(row["ctx"])
        if float(row["mem"]) <= gpu.memory_gib if "mem" in row else needed <= room:
            yield row


def prefill_row(row: Row) -> PrefillRow:
    """`ctx` is a prompt's whole length, `prefix` what of it was cached."""
    batch, length, cached = int(row["batch"]), int(row["ctx"]), int(row["prefix"])
    return PrefillRow(batch * (length - cached), batch * (length**2 - cached**2), float(row["ms"]), cached)


def decode_row(row: Row) -> DecodeRow:
    """`ctx` is each request's context."""
    batch = int(row["batch"])
    return DecodeRow(batch, batch * int(row["ctx"]), float(row["ms"]))


# -- Splitwise: whole requests on 2023's kernels --

SPLITWISE_GPUS = {
    "a100-80gb": ("A100-80G-SXM", ""),
    "h100-80gb": ("H100-SXM", ""),
    "h100-80gb-pcap": ("H100-SXM", "capped"),
}


Setting = tuple[int, int, int]
"""Batch, tokens of each prompt, tokens of each answer."""


def splitwise_groups(data: Path) -> dict[tuple[str, str, int], dict[Setting, list[Row]]]:
    """The repetitions of each setting, by model, hardware and tensor parallelism."""
    groups: dict[tuple[str, str, int], dict[Setting, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in table(data / "splitwise" / "perf_model.csv"):
        setting = int(row["batch_size"]), int(row["prompt_size"]), int(row["token_size"])
        groups[row["model"], row["hardware"], int(row["tensor_parallel"])][setting].append(row)
    return groups


def middle(rows: Sequence[Row], column: str) -> float:
    """The median of the repetitions."""
    return statistics.median(float(row[column]) for row in rows)


def prompts(batch: int, size: int) -> StepWork:
    """One step that prefills `batch` prompts of `size` tokens."""
    return StepWork(new_tokens=batch * size, area=batch * size**2)


def splitwise(data: Path) -> dict[str, Any]:
    """Prompt and token times of two models. Settings faster than the hardware's peaks were not one batch: dropped."""
    origin = Origin(
        name="splitwise",
        source="data/perf_model.csv of github.com/Mutinifni/splitwise-sim, measured on vLLM of 2023",
        licence="MIT, Copyright (c) 2024 Pratyush Patel",
        today=False,
    )
    fits, dropped = [], 0
    for (name, hardware, tp), settings in sorted(splitwise_groups(data).items()):
        model, (gpu_name, variant) = shipped.model_named(name), SPLITWISE_GPUS[hardware]
        gpu = gpu_named(gpu_name)
        prefills, decodes = [], []
        for (batch, size, tokens), rows in settings.items():
            prompt_ms, work = middle(rows, "prompt_time"), prompts(batch, size)
            if prompt_ms < least_step_ms(model, gpu, Spans(tp=tp), work):
                dropped += 1
                continue
            if tokens == 128:  # the others repeat the same prompt
                prefills.append(PrefillRow(work.new_tokens, work.area, prompt_ms))
            decodes.append(DecodeRow(batch, batch * (size + tokens / 2), middle(rows, "token_time")))
        fits.append(fit_profile(origin, model, gpu, tp, prefills, decodes, variant=variant))
    return {**write_profiles(origin, fits), "dropped_settings": dropped}


def power_terms(data: Path) -> tuple[Array, FitError]:
    """costs.power's three shares: peak power of prompts below the cap, average power of generation."""
    columns, shares = [], []
    for (name, hardware, tp), settings in sorted(splitwise_groups(data).items()):
        model, gpu = shipped.model_named(name), gpu_named(SPLITWISE_GPUS[hardware][0])
        peak = peaks(model, gpu, Spans(tp=tp))
        for (batch, size, tokens), rows in settings.items():
            if not middle(rows, "peak_power"):
                continue  # not measured
            took, work = middle(rows, "prompt_time"), prompts(batch, size)
            if middle(rows, "peak_power") < 0.97:  # beyond, the TDP caps it
                arithmetic = peak.token_ms * work.new_tokens + peak.area_ms * work.area
                columns.append((1.0, arithmetic / took, peak.weights_ms / took))
                shares.append(middle(rows, "peak_power"))
            if size <= 1024:  # beyond, the prompt is much of the average
                took, step = middle(rows, "token_time"), decoding(batch, batch * (size + tokens // 2))
                reading = peak.weights_ms + peak.context_ms * step.sum_context
                columns.append((1.0, peak.token_ms * batch / took, reading / took))
                shares.append(middle(rows, "average_power"))
    table_, measured = np.array(columns), np.array(shares)
    terms = fit_columns(table_, measured)
    return terms, error_of(table_ @ terms, measured)


# -- DistServe: coefficients that its authors fitted --

OPT_BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 192, 256)
OPT_CONTEXTS = (64, 128, 256, 512, 1024, 2048)


def distserve(data: Path) -> dict[str, Any]:
    """OPT on A100: their prefill form is ours, their two decode regimes become one bent line."""
    fitted = json.loads((data / "distserve" / "profiler-a100-80g.distserve.json").read_text())
    capacity = {
        (row["model"], int(row["tp"])): int(row["max_num_tokens"])
        for row in table(data / "distserve" / "max_num_tokens.csv")
        if row["pp"] == "1"
    }
    origin = Origin(
        name="distserve",
        source="simdistserve/estimators/profile_data of github.com/LLMServe/DistServe; errors are of the conversion",
        licence="Apache-2.0",
        today=False,
    )
    fits, gpu = [], gpu_named("A100-80G-SXM")
    for name, by_tp in fitted.items():
        for tp, terms in by_tp.items():
            room = capacity.get((name, int(tp)))
            if room and (model := shipped.find_model(name)):
                decodes = list(distserve_decode_rows(terms, room))
                fits.append(fit_profile(origin, model, gpu, int(tp), list(distserve_prefill_rows(terms)), decodes))
    return write_profiles(origin, fits)


def distserve_prefill_rows(terms: dict[str, Any]) -> Iterator[PrefillRow]:
    """Their formula for one stage: a + b·ΣL + c·ΣL², and 1 ms."""
    start, per_token, per_area = terms["prefill"]
    for batch in (1, 2, 4):
        for length in (128, 256, 512, 1024, 1536, 2048):
            tokens, area = batch * length, batch * length**2
            yield PrefillRow(tokens, area, start + per_token * tokens + per_area * area + 1)


def distserve_decode_rows(terms: dict[str, Any], capacity_tokens: int) -> Iterator[DecodeRow]:
    """Their formula for one stage, in its regime for small or for large batches, where the KV cache fits."""
    for batch in OPT_BATCHES:
        large = batch >= terms["decoding_large_small_bs_threshold"]
        start, per_context, per_request = terms["decoding_largebs" if large else "decoding_smallbs"]
        for context in (batch * each for each in OPT_CONTEXTS if batch * each <= capacity_tokens):
            yield DecodeRow(batch, context, start + per_context * context + per_request * batch)


# -- LLMServingSim: times of single layers on vLLM 0.19 --

LAYER_TWICE = ("layernorm",)
LAYER_ONCE = ("qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
STEP_ONCE = ("embedding", "final_layernorm")
REQUEST_ONCE = ("lm_head", "sampler")


class Layers:
    """Steps put together from the measured times of their layers.

    `attention` is keyed as in the table: (tokens of the chunk, tokens cached before it, decoding requests, context of
    each).
    """

    def __init__(self, folder: Path, layers: int) -> None:
        self.layers = layers
        self.by_tokens = columns(table(folder / "dense.csv"), "tokens")
        self.by_requests = columns(table(folder / "per_sequence.csv"), "sequences")
        self.attention = {
            (int(row["prefill_chunk"]), int(row["kv_prefill"]), int(row["n_decode"]), int(row["kv_decode"])): float(
                row["time_us"]
            )
            for row in table(folder / "attention.csv")
        }

    def step_ms(self, key: tuple[int, int, int, int]) -> float:
        """The whole model's step for a row of the attention table."""
        chunk, _, batch, _ = key
        tokens, answers = chunk + batch, batch + (chunk > 0)
        once = sum(between(self.by_tokens[name], tokens) for name in STEP_ONCE)
        once += sum(between(self.by_requests[name], answers) for name in REQUEST_ONCE)
        layer = sum(between(self.by_tokens[name], tokens) for name in LAYER_ONCE) + self.attention[key]
        layer += 2 * sum(between(self.by_tokens[name], tokens) for name in LAYER_TWICE)
        return (once + self.layers * layer) / 1000


def is_mixed(key: tuple[int, int, int, int]) -> bool:
    """Whether the mixed form is fitted to a row of the attention table."""
    chunk, cached, batch, _ = key
    return chunk > 0 and batch > 0 and cached <= CACHED_MAX and chunk + batch <= STEP_TOKENS_MAX


def mixed_work(key: tuple[int, int, int, int]) -> StepWork:
    """What that step does."""
    chunk, cached, batch, context = key
    return prompt(chunk, cached) + decoding(batch, batch * context)


def columns(rows: Sequence[Row], by: str) -> dict[str, tuple[list[int], list[float]]]:
    """Each layer's sizes and times, in order of size."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        found[row["layer"]][int(row[by])] = float(row["time_us"])
    return {layer: (sorted(times), [times[size] for size in sorted(times)]) for layer, times in found.items()}


def between(column: tuple[list[int], list[float]], size: int) -> float:
    """The time at `size`, interpolated."""
    return float(np.interp(size, *column))


CACHED_MAX = 1024
"""Mixed steps with a longer prefix before the chunk are not fitted: they show how well the form meets other steps
(docs/costs.md)."""

STEP_TOKENS_MAX = 2048
"""``max_num_batched_tokens`` of the engine that was measured: larger steps it never made."""

LAYER_TABLES = (
    ("llmservingsim-rtx4090-llama-3.1-8b", "RTX-4090"),
    ("llmservingsim-rtxpro6000-llama-3.1-8b", "RTX-PRO-6000"),
)


def llmservingsim(data: Path) -> dict[str, Any]:
    """Llama-3.1-8B on two workstation GPUs."""
    origin = Origin(
        name="llmservingsim",
        source="profiler/perf of github.com/casys-kaist/LLMServingSim: layers measured inside vLLM 0.19.0",
        licence="MIT, Copyright (c) 2024 CASYS Lab at KAIST",
    )
    model, fits = shipped.model_named("meta-llama/Llama-3.1-8B"), []
    for folder, name in LAYER_TABLES:
        gpu = gpu_named(name)
        layers = Layers(data / folder, model.layers)
        room = kv_capacity_tokens(model, gpu, Spans())
        keys = [key for key in sorted(layers.attention) if key[1] + key[2] * key[3] <= room]
        decodes = [DecodeRow(key[2], key[2] * key[3], layers.step_ms(key)) for key in keys if key[2] and not key[0]]
        prefills = [
            PrefillRow(chunk, prompt(chunk, cached).area, layers.step_ms((chunk, cached, batch, context)), cached)
            for chunk, cached, batch, context in keys
            if chunk and not batch
        ]
        mixed = [MixedRow(mixed_work(key), layers.step_ms(key)) for key in keys if is_mixed(key)]
        fits.append(fit_profile(origin, model, gpu, 1, prefills, decodes, mixed=mixed))
    return write_profiles(origin, fits)


# -- vidur: messages between two GPUs --

LINK_NAMES = {
    ("a100", 1): "A100 between nodes",
    ("a100", 2): "A100 NVLink",
    ("h100", 1): "H100 between nodes",
    ("h100", 2): "H100 NVLink",
}


def links(data: Path) -> dict[str, Any]:
    """Latency and bandwidth of four links."""
    found = []
    for (gpu, per_node), name in LINK_NAMES.items():
        rows = [
            row
            for row in table(data / "vidur" / "network" / f"{gpu}_dgx.send_recv.csv")
            if int(row["devices_per_node"]) == per_node
        ]
        sizes = [float(row["size"]) for row in rows]
        times = [float(row["time_stats.send_recv.median"]) for row in rows]
        latency, gb_s, error = fit_link(sizes, times)
        link = {"latency_ms": round(latency, 5), "gb_s": round(gb_s, 2)}
        found.append({"name": name, "link": link, "error": error_entry(error)})
    origin = {
        "name": "vidur",
        "source": "data/profiling/network of github.com/microsoft/vidur (send_recv, medians)",
        "licence": "MIT, Copyright (c) Microsoft Corporation",
    }
    return {"origin": origin, "links": found}


# -- the roofline's efficiencies, from the profiles above --


def efficiencies(profiles: Sequence[Profile]) -> dict[str, Efficiency]:
    """What each GPU reaches of its peaks: costs.roofline's table. With one profile, layer and hop are `TYPICAL`'s."""
    by_gpu: dict[str, list[Profile]] = defaultdict(list)
    for profile in profiles:
        if profile.origin.today:
            by_gpu[profile.gpu].append(profile)
    return {gpu: efficiency(GPUS[gpu], group) for gpu, group in by_gpu.items()}


def efficiency(gpu: Gpu, profiles: Sequence[Profile]) -> Efficiency:
    """Efficiencies of one GPU over its profiles of dense models; the terms that only mixtures have, over theirs."""
    mixtures = [each for each in profiles if shipped.model_named(each.model).experts is not None]
    wide = [each for each in profiles if gpu.link_gb_s <= PCIE_GB_S and each.tp > 2]
    dense = dense_efficiency(gpu, [each for each in profiles if each not in mixtures and each not in wide])
    return replace(dense, **mixture_efficiency(gpu, [each for each in mixtures if each not in wide], dense.link))


def mixture_efficiency(gpu: Gpu, group: Sequence[Profile], link: float) -> dict[str, float]:
    """Medians over the mixtures' profiles; nothing without any."""
    computes, layers = [], []
    for profile in group:
        model = shipped.model_named(profile.model)
        peak = peaks(model, gpu, Spans(tp=profile.tp))
        assert model.experts is not None
        computes.append(peak.token_ms / (profile.cost.token_ms - peak.collective_ms / link))
        layers.append(profile.cost.start_ms / model.experts.layers)
    if not group:
        return {}
    return {"mixture_compute": statistics.median(computes), "mixture_layer_ms": statistics.median(layers)}


def dense_efficiency(gpu: Gpu, group: Sequence[Profile]) -> Efficiency:
    """Of one GPU, over its profiles of dense models."""
    shapes = [shipped.model_named(profile.model) for profile in group]
    found = [peaks(model, gpu, Spans(tp=profile.tp)) for model, profile in zip(shapes, group, strict=True)]
    costs = [profile.cost for profile in group]
    layers, hops = [model.layers for model in shapes], [peak.hops for peak in found]
    decodes = np.array([cost.decode_ms for cost in costs])
    weights = np.array([peak.weights_ms for peak in found])
    layer_ms, hop_ms = TYPICAL.layer_ms, TYPICAL.hop_ms
    if len(group) > 1:
        slower, layer_ms, hop_ms = fit_columns(np.stack([weights, layers, hops], axis=1), decodes)
    else:
        slower = float((decodes - np.array(layers) * layer_ms)[0] / weights[0])
    arithmetic, moved = [peak.token_ms for peak in found], [peak.collective_ms for peak in found]
    tokens = np.array([cost.token_ms for cost in costs])
    if any(moved):
        compute, link = fit_columns(np.stack([arithmetic, moved], axis=1), tokens)
    else:
        compute, link = float(tokens[0] / arithmetic[0]), 1 / TYPICAL.link
    return Efficiency(
        compute=float(1 / compute),
        attention=statistics.median(peak.area_ms / cost.area_ms for peak, cost in zip(found, costs, strict=True)),
        weights=float(1 / slower),
        kv=statistics.median(peak.context_ms / cost.context_ms for peak, cost in zip(found, costs, strict=True)),
        link=float(1 / link),
        layer_ms=float(layer_ms),
        hop_ms=float(hop_ms),
        mixed_context=statistics.median(profile.mixed_context for profile in group),
    )


# -- the table in docs/costs.md --

DOCS = OUT.parent.parent / "docs" / "costs.md"
TABLE_START, TABLE_END = "<!-- fits: made by tools/fit_profiles.py -->", "<!-- end of fits -->"


def fits_table(profiles: Sequence[Profile]) -> str:
    """Every shipped fit, its coefficients and errors, as Markdown."""
    lines = [
        "| profile | floor, start ms | µs/token | ns/token² | decode ms | ns/context | µs/request "
        "| prefill | < 1k | decode | mixed |",
        "| --- " * 11 + "|",
    ]
    for profile in profiles:
        cost = profile.cost
        per_request = f"{cost.request_ms * 1e3:.1f}"
        if cost.crowd_ms:
            per_request += f" (+{cost.crowd_ms * 1e3:.1f} > {cost.crowd_from:g})"
        per_context = f"{cost.context_ms * 1e6:.1f}"
        if profile.mixed_context > 1:
            per_context += f" (×{profile.mixed_context:.2f} mixed)"
        numbers = (
            f"{cost.floor_ms:.1f}, {cost.start_ms:.1f}",
            f"{cost.token_ms * 1e3:.2f}",
            f"{cost.area_ms * 1e6:.3f}" + (f" (≥ {cost.cached_ms * 1e6:.0f} ns/cached)" if cost.cached_ms else ""),
            f"{cost.decode_ms:.2f}",
            per_context,
            per_request,
        )
        errors = (profile.prefill_error, profile.small_error, profile.decode_error, profile.mixed_error)
        told = [f"{each.mean:.1%} / {each.max:.1%}" if each.rows else "–" for each in errors]
        lines.append(f"| {' | '.join((profile.name, *numbers, *told))} |")
    return "\n".join(lines)


def write_docs() -> None:
    """Put the table where it stands in docs/costs.md."""
    before, _, rest = DOCS.read_text().partition(TABLE_START)
    _, _, after = rest.partition(TABLE_END)
    table_ = fits_table(shipped.profiles())
    DOCS.write_text(f"{before}{TABLE_START}\n\n{table_}\n\n{TABLE_END}{after}")


FILES = {
    "aiconfigurator.json": aiconfigurator,
    "distserve.json": distserve,
    "links.json": links,
    "llmservingsim.json": llmservingsim,
    "splitwise.json": splitwise,
}


KERNELS = "kernels.json"
"""Made from the folder that tools/kernel_grid.py writes, if that is named."""


def main() -> int:
    """Write every file of costs/profiles/ and say how well each fit holds."""
    root = os.environ.get("BATON_DATA")
    if not root or not (data := Path(root) / "profiles").is_dir():
        print("fit_profiles: set BATON_DATA to the folder that holds profiles/ (docs/costs.md)", file=sys.stderr)
        return 2
    documents = {name: make(data) for name, make in FILES.items()}
    if len(sys.argv) > 1:
        documents[KERNELS] = kernels(Path(sys.argv[1]))
    for name, document in documents.items():
        (OUT / name).write_text(json.dumps(document, indent=1) + "\n")
        for fit in document.get("fits", ()):
            told = "  ".join(f"{kind} {each['mean']:.1%}/{each['max']:.1%}" for kind, each in fit["error"].items())
            print(f"{name:22} {fit['model']:28} {fit['gpu']:13} tp{fit['tp']} {fit.get('variant', ''):7} {told}")
        for link in document.get("links", ()):
            print(f"{name:22} {link['name']:28} {link['link']} {link['error']}")
    terms, error = power_terms(data)
    print(f"costs.power: {np.round(terms, 3)} ({error})")
    shipped.profiles.cache_clear()
    write_docs()
    for gpu, reached in efficiencies(shipped.profiles()).items():
        print(f"costs.roofline: {gpu} {reached}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
