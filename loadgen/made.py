"""Made-up load: times from one process, lengths from two distributions, prefixes shared by groups. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from loadgen.arrival import Arrival
from loadgen.lengths import Lengths


def made(
    times: Iterable[float],
    inputs: Lengths,
    outputs: Lengths,
    rng: np.random.Generator,
    *,
    prefix_tokens: int = 0,
    prefix_groups: int = 1,
    slo_class: str | None = None,
) -> Iterator[Arrival]:
    """One arrival for each of the `times` (seconds, ascending). Lengths are independent of each other and of time.

    With `prefix_tokens`, each prompt begins with the text of one of `prefix_groups` groups, picked evenly. `inputs`
    includes that prefix, and a prompt is always at least one token longer than it.
    """
    for at_s in times:
        tokens = inputs.draw(rng)
        answer = outputs.draw(rng)
        if not prefix_tokens:
            yield Arrival(at_s=at_s, input_tokens=tokens, output_tokens=answer, slo_class=slo_class)
            continue
        yield Arrival(
            at_s=at_s,
            input_tokens=max(tokens, prefix_tokens + 1),
            output_tokens=answer,
            prefix=(int(rng.integers(prefix_groups)),),
            block_tokens=prefix_tokens,
            slo_class=slo_class,
        )
