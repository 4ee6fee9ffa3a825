"""Runs inside vLLM: fixes a request's first token in advance. Loaded by ``--logits-processors``.

A decode leg may carry, in its ``kv_transfer_params``, the token that the prefill instance has already chosen
(`FIRST_TOKEN`). This processor leaves the decode instance no other choice for its first token; every later token is the
engine's own choice. So the client can have P's token while the blocks are still on their way, and D still makes one
whole answer: usage, seeds, penalties, grammar and stop strings count that token like any other.

vLLM has two model runners with an interface each (CPUs run the first, GPUs the second since 0.32). The runner of an
engine is not known when the engine is launched, so this class has both interfaces. It imports nothing of Baton but
`decode.pins`. A client's own value of that field never reaches it (`cluster.wire.strip`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as RunnerOne
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as RunnerTwo

from decode import pins

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams


def pinned(params: SamplingParams) -> int | None:
    """The token with which a request's answer must begin; None: any."""
    return pins.pinned((params.extra_args or {}).get("kv_transfer_params"))


def pin(row: torch.Tensor, token: int) -> None:
    """Leave one token possible in a row of logits. A token the model does not have pins nothing."""
    if token < row.shape[-1]:
        row.fill_(float("-inf"))
        row[token] = 0.0


def pin_where(logits: torch.Tensor, rows: torch.Tensor, token: int) -> None:
    """`pin` for the rows of a mask on the logits' own device. The rows' numbers are not fetched from there: that would
    wait for all of the device's work.
    """
    if token < logits.shape[-1]:
        logits.masked_fill_(rows.unsqueeze(1), float("-inf"))
        logits[:, token].masked_fill_(rows, 0.0)


class PinFirstToken(RunnerOne, RunnerTwo):  # type: ignore[misc]
    """Both interfaces of vLLM 0.32; see the module."""

    def __init__(self, vllm_config: Any, device_or_states: Any, *_: Any) -> None:
        self._states = device_or_states
        """Second runner: its request slots."""
        self._rows: dict[int, tuple[int, list[int]]] = {}
        """First runner: row -> token, and the request's output so far (the runner's own list, which grows)."""
        self._slots: dict[int, int] = {}
        """Second runner: slot -> token."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Nothing to refuse: what is not a token pins nothing."""

    def is_argmax_invariant(self) -> bool:
        """False: it decides which token is the greatest."""
        return False

    # --- first runner: rows move, outputs are lists ---

    def update_state(self, batch_update: Any) -> None:
        """Follow the batch, and forget requests that have their first token."""
        process_dict_updates(self._rows, batch_update, self._wanted)
        for row in [row for row, (_, output) in self._rows.items() if output]:
            del self._rows[row]

    @staticmethod
    def _wanted(params: SamplingParams, _prompt: list[int] | None, output: list[int]) -> tuple[int, list[int]] | None:
        token = pinned(params)
        return None if token is None or output else (token, output)

    # --- second runner: slots stay, lengths are arrays ---

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """A request enters a slot, perhaps again after a preemption."""
        token = pinned(sampling_params)
        if token is None:
            self._slots.pop(req_idx, None)
            return False
        self._slots[req_idx] = token
        return True

    # --- both ---

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Pin the rows whose first token is being chosen."""
        if ctx is None:
            for row, (token, output) in self._rows.items():
                if not output:
                    pin(logits[row], token)
        elif self._slots:
            self._pin_slots(logits, ctx)
        return logits

    def _pin_slots(self, logits: torch.Tensor, ctx: Any) -> None:
        """Pin by slots. A slot has one row each, and one more for each draft where the engine speculates: vLLM's first
        runner refuses this class there, its second takes it. A first token has no drafts, so its slot has one row.
        """
        one_each = logits.shape[0] == len(ctx.idx_mapping_np)
        for row, slot in enumerate(ctx.idx_mapping_np):
            token = self._slots.get(int(slot))
            if token is None:
                continue
            if int(ctx.seq_lens_upper_bound_np[row]) == int(self._states.prompt_len.np[slot]):
                if one_each:
                    pin(logits[row], token)
                else:
                    pin_where(logits, ctx.expanded_idx_mapping == int(slot), token)
