"""Fit what a step costs on a running engine, and write it to a file.

Sends prompts of several lengths, one at a time, and streams at several batch sizes and contexts, for at most
--budget-s seconds; no other client should use the engine meanwhile. The file holds coefficients, their error and their
origin; docs/costs.md explains them. Ask an engine itself, not a router. Ends with exit code 1 where too few points
could be measured for a fit.

examples:
  baton profile http://127.0.0.1:8100 --gpu H100-SXM
  baton profile http://10.0.0.7:8100 --gpu H200 --tp 4 --prompt-tokens 8192 --batch 256 --budget-s 300
  baton profile http://127.0.0.1:8100 --gpu CPU-core --config my-model/config.json --out mine.json --json
"""

from __future__ import annotations

import argparse
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from baton.api_key_file import api_key_in
from baton.file_kinds import exists, is_file
from baton.number_flags import above_zero
from baton.output import say
from baton.profile_view import ProfileProgress, misfits, notes_of, say_notes, show_profile
from baton.profiling import Measuring, ProfileResults, text_of
from baton.written import check_folders
from cluster.errors import UsageError
from cluster.text_file import unreadable
from costs import shipped
from costs.hardware import GPUS, Gpu, find_gpu
from costs.model import ModelShape
from costs.profile import Origin, Profile, fit_profile, write_profiles
from costs.step import KNEE_TOKENS
from engine.vllm.metrics import parse_load
from engine.vllm.probe import Probe, Unwell
from loadgen.ask import fit_of
from loadgen.body import Asking
from loadgen.http import LoadConnections
from loadgen.measure import EngineLimits, Point, too_short

PROMPT_TOKENS = 2048
"""Longest prompt by default: vLLM's smallest usual token budget of a step. A longer prompt may take several steps."""

ROWS_LEAST = 3
"""Fewest large prompts, and fewest batches, for a fit: each kind has so many coefficients."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton profile`."""
    parser.add_argument("url", metavar="URL", help="one engine, like http://127.0.0.1:8100")
    parser.add_argument("--gpu", required=True, metavar="NAME", help=f"what it runs on: {', '.join(GPUS)}")
    parser.add_argument("--tp", type=_whole, default=1, metavar="N", help="GPUs it spans (default %(default)s)")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the model's config.json (default: where the engine has it, or ours)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=_whole,
        default=PROMPT_TOKENS,
        metavar="N",
        help="longest prompt; at most the engine's max_num_batched_tokens (default %(default)s)",
    )
    parser.add_argument("--batch", type=_whole, default=64, metavar="N", help="most streams at once (default 64)")
    parser.add_argument(
        "--budget-s", type=above_zero, default=120.0, metavar="S", help="time it may take (default 120)"
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="sent as a bearer token")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: MODEL-GPU-tpN.json in this folder, if new")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What the engine says of itself."""

    url: str
    model: str
    root: str
    """Folder or name that it loaded the model from; empty: unknown."""
    context_tokens: int
    """`max_model_len`: longest prompt and answer together."""
    kv_tokens: int | None
    """Tokens that its KV cache holds; None: unknown."""
    version: str
    says_load: bool
    """Whether its metrics tell how many requests run."""


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write; 0 if there is a profile."""
    if args.vllm_args:
        raise UsageError("`baton profile` takes no vLLM flags")
    gpu = find_gpu(args.gpu)
    if gpu is None:
        raise UsageError(f"--gpu {args.gpu} is not known; one of {', '.join(GPUS)}")
    import uvloop

    check_folders({"--out": args.out})
    engine, found, fit = uvloop.run(_measured(args, gpu, api_key_in(args.api_key_file)))
    notes = notes_of(found, args.budget_s, says_load=engine.says_load)
    missing = _missing(found)
    if missing:
        say_notes(notes)
        say(f"no profile: {missing}; more time (--budget-s) may do")
        return 1
    profile = fit(found)
    path, text = _path(args, engine, gpu), json.dumps(write_profiles(profile.origin, [profile]), indent=1) + "\n"
    try:
        path.write_text(text)
    except OSError as error:
        print(text, end="")  # what took minutes to measure is not lost
        raise UsageError(f"--out {path}: {error.strerror}; the profile is on stdout instead") from None
    show_profile(profile, found, notes, path, as_json=args.json)
    return 0


def _path(args: argparse.Namespace, engine: EngineDescription, gpu: Gpu) -> Path:
    """Where the profile is written."""
    return args.out or Path(f"{engine.model.rpartition('/')[2]}-{gpu.name}-tp{args.tp}.json")


def _missing(found: ProfileResults) -> str | None:
    """What was measured too little for a fit, in words; None: nothing."""
    large = sum(row.new_tokens >= KNEE_TOKENS for row in found.prefills.values())
    if large >= ROWS_LEAST and len(found.decodes) >= ROWS_LEAST:
        return None
    return (
        f"{large} prompts of {KNEE_TOKENS:,} tokens and more and {len(found.decodes)} batches were measured, "
        f"{ROWS_LEAST} of each are needed"
    )


async def _measured(
    args: argparse.Namespace, gpu: Gpu, key: str | None
) -> tuple[EngineDescription, ProfileResults, Callable[[ProfileResults], Profile]]:
    """Ask the engine, send the points; return its description, the results, and the function that fits them."""
    url = LoadConnections(args.url).url
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    engine = await _engine(url, key, headers)
    path = _path(args, engine, gpu)
    if args.out is None and exists(path):
        raise UsageError(f"{path} is here already: give --out {path} to replace it, or another name")
    model = _shape(args.config, engine)
    limits = EngineLimits(
        prompt_tokens=min(args.prompt_tokens, engine.context_tokens - 2),
        context_tokens=engine.context_tokens,
        batch=args.batch,
        kv_tokens=engine.kv_tokens,
    )
    short = too_short(limits)
    if short:
        raise UsageError(
            f"{url}: {short}; the model's context is {engine.context_tokens:,} tokens, --prompt-tokens "
            f"{args.prompt_tokens:,}"
        )
    asking = Asking(model=engine.model, salt=f"profile {secrets.token_hex(8)}")
    text = await fit_of(url, headers, asking)
    if text is None:
        raise UsageError(f"{url} does not say in `usage` how many tokens a prompt has: no engine to profile")
    source = f"baton profile on {time.strftime('%Y-%m-%d', time.gmtime())}, vLLM {engine.version}"

    def fit(found: ProfileResults) -> Profile:
        origin = Origin(
            name="measured",
            source=source,
            licence="its owner's",
            first_token_ms=round(found.server_ms or 0.0, 4),
        )
        return fit_profile(origin, model, gpu, args.tp, list(found.prefills.values()), list(found.decodes.values()))

    def doubtful(found: ProfileResults) -> list[Point]:
        return [] if _missing(found) else misfits(fit(found), found)

    with ProfileProgress() as progress:
        measuring = Measuring(url, headers, replace(asking, fit=text), progress.told)
        return engine, await measuring.run(limits, args.budget_s, doubtful), fit


async def _engine(url: str, key: str | None, headers: dict[str, str]) -> EngineDescription:
    """Ask the engine for its model and limits, before any load is sent.

    Raises:
        UsageError: it does not answer, or is no vLLM engine.
    """
    try:
        async with Probe(url, key) as probe:
            entries = await probe.models()
    except Unwell as error:
        raise UsageError(f"{url}: {error}; give the URL of a running engine") from None
    if not entries or "id" not in entries[0]:
        raise UsageError(f"{url}/v1/models lists no model")
    first = entries[0]
    length = first.get("max_model_len")
    if not isinstance(length, int):
        raise UsageError(f"{url}/v1/models does not say max_model_len: not vLLM, or a router; ask the engine itself")
    metrics, version = [await text_of(f"{url}/{path}", headers) for path in ("metrics", "version")]
    try:
        version = str(json.loads(version)["version"])
    except (ValueError, LookupError, TypeError):
        version = "(unknown version)"
    return EngineDescription(
        url=url,
        model=str(first["id"]),
        root=str(first.get("root") or ""),
        context_tokens=length,
        kv_tokens=parse_load(metrics).kv_tokens or None,
        version=version,
        says_load="vllm:num_requests_running" in metrics,
    )


def _shape(config: Path | None, engine: EngineDescription) -> ModelShape:
    """The model's sizes: by --config, by the folder the engine loaded it from, or by name."""
    beside = Path(engine.root) / "config.json"
    path = config or (beside if engine.root and is_file(beside) else None)
    if path is None:
        found = shipped.find_model(engine.root) or shipped.find_model(engine.model)
        if found is None:
            raise UsageError(f"the sizes of {engine.model} do not ship: give its config.json with --config FILE")
        return found
    try:
        return shipped.model_in(path, engine.model)
    except OSError as error:
        raise unreadable(path, "--config", error, "give the model's config.json") from None
    except ValueError as error:
        raise UsageError(f"--config {path}: no JSON ({error}); give the model's config.json") from None


def _whole(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, 1 or more")
    return int(text)
