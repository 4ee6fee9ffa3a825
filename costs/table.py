"""The costs of many instances at once: columns, one row per instance, updated in place, computed in one expression.

It gives the same numbers as `Costs` (a property test compares). The caller assigns rows to instances. The router does
not use it: its policies price rows by what it has learned (`router.scheduler.scoring.row_prices`).
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import numpy.typing as npt

from costs.cost import Costs
from costs.step import KNEE_TOKENS, StepCost
from costs.transfer import BLOCK_TOKENS, copies, nic, paths

Array = npt.NDArray[np.float64]
Counts = npt.ArrayLike
"""A number for all rows, or one for each."""
Rows = slice | npt.NDArray[np.intp]

ALL = slice(None)
_NAMES = tuple(each.name for each in fields(StepCost))


class _StepColumns:
    """The coefficients of one kind of step."""

    def __init__(self, rows: int) -> None:
        self.cost = {name: np.zeros(rows) for name in _NAMES}
        self.cost["expert_miss"] = np.ones(rows)
        self.knee = np.zeros(rows)
        self.rise_square = np.zeros(rows)
        self.mixtures = 0

    def put(self, row: int, cost: StepCost) -> None:
        self.mixtures += bool(cost.experts_ms) - bool(self.cost["experts_ms"][row])
        for name in _NAMES:
            self.cost[name][row] = getattr(cost, name)
        self.knee[row] = cost.knee_ms
        self.rise_square[row] = (cost.knee_ms**2 - (cost.floor_ms + cost.experts_ms) ** 2) / KNEE_TOKENS**2

    def matrices(self, tokens: Array, rows: Rows) -> Array:
        """G of `costs.step` for every row, in ms."""
        line = np.maximum(self.knee[rows], self.cost["start_ms"][rows] + self.cost["token_ms"][rows] * tokens)
        read = self.cost["floor_ms"][rows]
        if self.mixtures:
            read = read + self.experts(tokens, rows)
        below = np.sqrt(read * read + self.rise_square[rows] * (tokens * tokens))
        return np.asarray(np.where(tokens >= KNEE_TOKENS, line, below))

    def requests(self, batch: Array, rows: Rows) -> Array:
        """D of `costs.step` for every row, in ms."""
        crowd = self.cost["crowd_ms"][rows] * np.maximum(0.0, batch - self.cost["crowd_from"][rows])
        time = self.cost["decode_ms"][rows] + self.cost["request_ms"][rows] * batch + crowd
        return np.asarray(time + self.experts(batch, rows) if self.mixtures else time)

    def experts(self, tokens: Array, rows: Rows) -> Array:
        read: Array = self.cost["experts_ms"][rows] * (1 - self.cost["expert_miss"][rows] ** tokens)
        return read


class CostTable:
    """`rows` instances. A row never written costs nothing."""

    def __init__(self, rows: int) -> None:
        self._prefill = _StepColumns(rows)
        self._decode = _StepColumns(rows)
        self._mixed = _StepColumns(rows)
        self.first_token_ms = np.zeros(rows)
        self.kv_capacity_tokens = np.zeros(rows)
        self._kv_bytes_per_token = np.zeros(rows)
        self._latency_ms = np.zeros(rows)
        self._bytes_per_ms = np.ones(rows)

    def put(self, row: int, costs: Costs) -> None:
        """Write an instance's costs into its row: when it joins, and when its correction changed."""
        self._prefill.put(row, costs.now.prefill)
        self._decode.put(row, costs.now.decode)
        self._mixed.put(row, costs.now.mixed)
        link = nic(costs.gpu, costs.gpu)
        self.first_token_ms[row] = costs.first_token_ms
        self.kv_capacity_tokens[row] = costs.kv_capacity_tokens
        self._kv_bytes_per_token[row] = costs.kv_bytes_per_token * copies(costs.model, costs.shape)
        self._latency_ms[row] = link.latency_ms
        self._bytes_per_ms[row] = link.gb_s * 1e6 * paths(costs.model, costs.shape, costs.shape)

    def prefill_ms(self, new_tokens: Counts, cached_tokens: Counts = 0, rows: Rows = ALL) -> Array:
        """`Costs.prefill_ms` for every row; `cached_tokens` may differ between rows."""
        new, cached = _floats(new_tokens), _floats(cached_tokens)
        attention = self._prefill.cost["area_ms"][rows] * (new * (new + 2 * cached))
        time: Array = np.where(new > 0, self._prefill.matrices(new, rows), 0.0) + attention
        return time

    def decode_step_ms(self, batch: Counts, sum_context: Counts, rows: Rows = ALL) -> Array:
        """`Costs.decode_step_ms` for every row."""
        requests, context = _floats(batch), _floats(sum_context)
        attention = self._decode.cost["context_ms"][rows] * context
        time: Array = np.where(requests > 0, self._decode.requests(requests, rows), 0.0) + attention
        return time

    def mixed_step_ms(
        self, new_tokens: Counts, cached_tokens: Counts, batch: Counts, sum_context: Counts, rows: Rows = ALL
    ) -> Array:
        """`Costs.mixed_step_ms` for every row; a row without a batch, or without new tokens, is a step of one kind."""
        new, cached = _floats(new_tokens), _floats(cached_tokens)
        requests, context = _floats(batch), _floats(sum_context)
        cost = self._mixed.cost
        shared = self._mixed.matrices(new + requests, rows) + cost["request_ms"][rows] * requests
        attention = cost["area_ms"][rows] * (new * (new + 2 * cached)) + cost["context_ms"][rows] * context
        mixed = np.maximum(self._mixed.requests(requests, rows), shared) + attention
        if (requests > 0).all() and (new > 0).all():
            return np.asarray(mixed)
        alone = np.where(new > 0, self.prefill_ms(new, cached, rows), self.decode_step_ms(requests, context, rows))
        return np.where((requests > 0) & (new > 0), mixed, alone)

    def transfer_ms(self, tokens: Counts, sharers: Counts = 1, rows: Rows = ALL) -> Array:
        """Time of a prompt's KV through each row's own NICs, shared by `sharers`; a pair takes the longer of its two
        times.
        """
        held = np.ceil(_floats(tokens) / BLOCK_TOKENS) * BLOCK_TOKENS
        moving = self._kv_bytes_per_token[rows] * held * _floats(sharers) / self._bytes_per_ms[rows]
        time: Array = np.where(held > 0, self._latency_ms[rows] + moving, 0.0)
        return time


def _floats(values: Counts) -> Array:
    return np.asarray(values, dtype=np.float64)
