"""Whether, and when, the decode leg is sent before P has answered (an *early leg*). Pure.

An early leg is read, tokenized and queued at D while P computes, and D begins to read P's blocks as soon as P's engine
says that they are there: P's HTTP answer, this router and D's HTTP server are out of the way. It has no blocks at D.
Its price: while the leg waits, a lookup in D's prefix cache at each of D's steps; and if P fails, D's work was for
nothing. So it is sent when P's answer is expected within `LEAD_S`, and not while P has a queue of unknown length. Nor
where it was seen to cost more than a pull (`router.predict.early_cost`).

A leg that comes late, after P has computed, costs no more than one that was sent after P's answer.
"""

from __future__ import annotations

from typing import Final

LEAD_S: Final = 2.0
"""The leg is sent so many seconds before P's expected answer. That is much longer than any tokenizer takes (some 10 ms
for 10,000 tokens), as predictions err: if P answers before the leg is sent, the early leg gains nothing. And it is
short enough: a leg that waits through 100 steps of 20 ms costs D 100 lookups of a prompt's blocks, some 4 ms for 10,000
tokens."""


def early_in_s(*, able: bool, expected_s: float | None, queued: bool) -> float | None:
    """In how many seconds to send the early leg; 0: with the prefill leg; None: not before P has answered.

    Args:
        able: whether the engines of both instances take early legs.
        expected_s: seconds until P's answer, as predicted; None: no prediction is made.
        queued: whether P has other requests to compute first, as far as is known.
    """
    if not able or (expected_s is None and queued):
        return None
    return 0.0 if expected_s is None else max(0.0, expected_s - LEAD_S)
