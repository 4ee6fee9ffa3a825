"""Vidur's inputs, made from Baton's cost model: its tables of operator times, and a trace. Pure.

Vidur (0.0.26) adds up a step's operators and multiplies by the layers, in milliseconds:

    layers x [ rest(t) + attn_decode(b, c) + sum over prompts of attn_prefill(k, n) ]

`rest` are ten operators that depend only on t, the step's tokens rounded up to 8; b requests decode with a mean context
c; a prompt's chunk of n tokens (up to a multiple of 32) ends at k tokens. c and k are rounded up to GRANULARITY. Ours
(costs/step.py) has the same terms under other names, so that one operator takes each and the others are zero:

    rest = G(t), all of it as `mlp_up_proj`
    attn_prefill(k, n) = area (k² - (k - n)²)
    attn_decode(b, c) = context b c + D(b) - G(b): a step that only decodes costs D, not G

Steps that only decode come out as ours but for the rounding. A mixed step lacks G(b) + request b - D(b): 3 % of a step
with a prompt of 1,000 tokens and 32 requests (Llama-3.1-8B on H100). A step that decodes nothing costs as much as one
that does: 7 % too much.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from costs.cost import Costs
from loadgen.arrival import Arrival

GRANULARITY = 64
"""Tokens of context between two rows. Vidur's default is 256, whose rounding alone would be 10 % of a context here."""
CHUNK_STEP = 32
TOKEN_STEP = 8
"""Vidur's own roundings (`sklearn_execution_time_predictor.py`, `entities/batch.py`)."""

BY_TOKENS = (
    "attn_pre_proj", "attn_post_proj", "attn_rope", "attn_kv_cache_save", "mlp_up_proj", "mlp_down_proj", "mlp_act",
    "input_layernorm", "post_attention_layernorm", "add",
)  # fmt: skip
"""Operators whose time depends on the step's tokens alone."""
CARRIES = "mlp_up_proj"
"""The one operator that has all the time. It is counted once a layer, as `add` is; `attn_kv_cache_save` is not
counted."""

DATE = "2023-11-16"
"""The day of Azure's trace: Vidur replays one day of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How far the tables go."""

    batch: int
    """Requests in a step."""
    chunk: int
    """Tokens of a step (`chunk_size` of its Sarathi scheduler, vLLM's `max_num_batched_tokens`)."""
    tokens: int
    """Prompt and answer of one request."""


Row = tuple[int, float] | tuple[int, int, float]


def tables(costs: Costs, bounds: Bounds) -> Iterator[tuple[str, Iterator[Row]]]:
    """Every operator's name and its rows: one or two numbers to look up by, and milliseconds of one layer."""
    for name in BY_TOKENS:
        yield name, _by_tokens(costs if name == CARRIES else None, bounds)
    yield "attn_prefill", _prefill(costs, bounds)
    yield "attn_decode", _decode(costs, bounds)


def _by_tokens(costs: Costs | None, bounds: Bounds) -> Iterator[Row]:
    for tokens in range(1, up(bounds.chunk + bounds.batch, TOKEN_STEP) + 1):
        yield tokens, 0.0 if costs is None else costs.by_kind.mixed.matrices_ms(tokens) / costs.model.layers


def _prefill(costs: Costs, bounds: Bounds) -> Iterator[Row]:
    area_ms = costs.by_kind.mixed.area_ms / costs.model.layers
    for end in range(0, up(bounds.tokens, GRANULARITY) + 1, GRANULARITY):
        for chunk in range(CHUNK_STEP, up(bounds.chunk, CHUNK_STEP) + 1, CHUNK_STEP):
            yield end, chunk, area_ms * (end**2 - max(0, end - chunk) ** 2)


def _decode(costs: Costs, bounds: Bounds) -> Iterator[Row]:
    cost, mixed, layers = costs.by_kind.decode, costs.by_kind.mixed, costs.model.layers
    for batch in range(1, bounds.batch + 1):
        beside_ms = cost.requests_ms(batch) - mixed.matrices_ms(up(batch, TOKEN_STEP))
        for context in range(0, up(bounds.tokens, GRANULARITY) + 1, GRANULARITY):
            yield batch, context, (beside_ms + cost.context_ms * batch * context) / layers


def up(number: int, step: int) -> int:
    """`number` rounded up to a multiple of `step`."""
    return -(-number // step) * step


def table_csv(rows: Iterable[Row]) -> str:
    """A table as Vidur keeps its predictions: `X_0,prediction` or `X_0,X_1,prediction`."""
    listed = list(rows)
    return _csv([*(f"X_{at}" for at in range(len(listed[0]) - 1)), "prediction"], listed)


def trace_csv(arrivals: Iterable[Arrival]) -> str:
    """A trace in the form that Vidur replays; both simulators read this."""
    rows = ((DATE, repr(each.at_s), each.input_tokens, each.output_tokens) for each in arrivals)
    return _csv(("Date", "Time", "PromptTokenCount", "CompletionTokenCount"), rows)


def _csv(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def arrivals_of(text: str) -> Iterator[Arrival]:
    """The arrivals that `trace_csv` wrote."""
    for row in csv.DictReader(io.StringIO(text)):
        counts = int(row["PromptTokenCount"]), int(row["CompletionTokenCount"])
        yield Arrival(at_s=float(row["Time"]), input_tokens=counts[0], output_tokens=counts[1])


def within(arrivals: Iterable[Arrival], tokens: int) -> Iterator[Arrival]:
    """Arrivals of at most this length, with at least a token of prompt and of answer: prompts are cut, as Vidur
    would.
    """
    for each in arrivals:
        output = min(max(1, each.output_tokens), tokens - 1)
        yield Arrival(
            at_s=each.at_s, input_tokens=min(max(1, each.input_tokens), tokens - output), output_tokens=output
        )
