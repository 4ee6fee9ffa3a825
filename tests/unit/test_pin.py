"""The logits processor that gives D its first token, under both of vLLM's model runners."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch", reason="make setup installs torch")
pytest.importorskip("vllm", reason="make setup installs vLLM")

from vllm import SamplingParams  # noqa: E402
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality  # noqa: E402

from cluster.wire import FIRST_TOKEN  # noqa: E402
from engine.vllm.pin import PinFirstToken, pinned  # noqa: E402


def params(token: Any) -> SamplingParams:
    return SamplingParams(extra_args={"kv_transfer_params": {FIRST_TOKEN: token}})


def logits(rows: int = 3, vocabulary: int = 5) -> Any:
    return torch.arange(rows * vocabulary, dtype=torch.float32).reshape(rows, vocabulary)


def update(size: int, *, added: Any = (), removed: Any = (), moved: Any = ()) -> BatchUpdate:
    return BatchUpdate(batch_size=size, removed=removed, added=added, moved=moved)


@pytest.mark.parametrize("token", [None, "3", True, -1, 2.0])
def test_what_is_no_token_pins_nothing(token: Any) -> None:
    assert pinned(params(token)) is None
    assert pinned(SamplingParams()) is None
    assert pinned(SamplingParams(extra_args={"kv_transfer_params": "x"})) is None


def test_first_runner_pins_the_first_token_only() -> None:
    processor = PinFirstToken(None, None, False)
    output: list[int] = []
    processor.update_state(update(2, added=[(1, params(3), None, output), (0, SamplingParams(), None, [])]))
    made = processor.apply(logits())
    assert made.argmax(dim=1).tolist() == [4, 3, 4]
    assert torch.isinf(made[1]).sum() == 4
    output.append(3)
    processor.update_state(None)
    assert torch.equal(processor.apply(logits()), logits())


def test_first_runner_follows_rows_that_move() -> None:
    processor = PinFirstToken(None, None, False)
    processor.update_state(update(3, added=[(0, params(1), None, []), (2, params(2), None, [])]))
    processor.update_state(update(3, moved=[(0, 2, MoveDirectionality.SWAP)]))
    assert processor.apply(logits()).argmax(dim=1).tolist() == [2, 4, 1]
    processor.update_state(update(1, removed=[2]))
    assert processor.apply(logits()).argmax(dim=1).tolist() == [2, 4, 4]


def test_first_runner_after_a_preemption_pins_nothing() -> None:
    processor = PinFirstToken(None, None, False)
    processor.update_state(update(1, added=[(0, params(1), None, [1, 4])]))
    assert torch.equal(processor.apply(logits()), logits())


def test_a_token_outside_the_vocabulary_pins_nothing() -> None:
    processor = PinFirstToken(None, None, False)
    processor.update_state(update(1, added=[(0, params(5), None, [])]))
    assert torch.equal(processor.apply(logits()), logits())


def second_runner(*prompts: int) -> tuple[PinFirstToken, Any]:
    states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array(prompts)))
    return PinFirstToken(None, states), states


def context(slots: list[int], lengths: list[int]) -> Any:
    return SimpleNamespace(idx_mapping_np=np.array(slots), seq_lens_upper_bound_np=np.array(lengths))


def test_second_runner_pins_where_only_the_prompt_is_there() -> None:
    processor, _ = second_runner(10, 20, 30)
    assert processor.add_request(2, params(1))
    assert not processor.add_request(0, SamplingParams())
    # Slot 2 stands in row 0 of this step, slot 0 in row 1.
    assert processor.apply(logits(2), context([2, 0], [30, 10])).argmax(dim=1).tolist() == [1, 4]
    assert torch.equal(processor.apply(logits(2), context([2, 0], [31, 11])), logits(2)), "the second token is free"
    assert torch.equal(processor.apply(logits(2), context([2, 0], [16, 11])), logits(2)), "a chunk of the prompt"


def test_second_runner_forgets_the_slots_former_request() -> None:
    processor, _ = second_runner(10)
    processor.add_request(0, params(1))
    processor.add_request(0, SamplingParams())
    assert torch.equal(processor.apply(logits(1), context([0], [10])), logits(1))


def test_second_runner_finds_the_row_of_a_slot_behind_one_with_drafts() -> None:
    """An engine that speculates has a row for each draft: vLLM finds such a model by itself, and loads the class."""
    processor, _ = second_runner(10, 20)
    processor.add_request(0, SamplingParams())
    processor.add_request(1, params(2))
    # Slot 0 has a token and two drafts in rows 0 to 2, slot 1 its first token in row 3.
    step = context([0, 1], [15, 20])
    step.expanded_idx_mapping = torch.tensor([0, 0, 0, 1])
    made = processor.apply(logits(4), step)
    assert made.argmax(dim=1).tolist() == [4, 4, 4, 2]
    assert torch.equal(made[:3], logits(4)[:3]), "the other request's rows are its own"
    processor.add_request(1, params(5))
    assert torch.equal(processor.apply(logits(4), step), logits(4)), "a token outside the vocabulary"
