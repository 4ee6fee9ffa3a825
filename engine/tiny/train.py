"""Train `baton-tiny` on its own corpus and save it as vLLM and transformers load it: `python -m engine.tiny.train`.

The schedule follows the processor's clock, not a step count: a slower machine trains less and still ends with a
cooled-down model, a busy one only takes longer. For the same reason two runs do not give the same weights; the corpus
and the tokenizer are the same each time.
"""

import argparse
import contextlib
import math
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.tiny import tokenizer
from engine.tiny.corpus import ASSISTANT, END, LENGTH_MAX, SPECIALS, TOPICS, USER, Piece, documents, encode

END_ID = 256 + SPECIALS.index(END)
BATCH_TOKENS = 2048
MUON_RATE = 0.02
ADAM_RATE = 3e-3
"""The highest learning rates of the two optimizers."""
WARMUP = 0.02
"""Share of the time in which the learning rate rises from zero."""

SAMPLE_PROMPTS = (
    f"{USER}Hello!{END}{ASSISTANT}",
    f"{USER}what is disaggregated serving{END}{ASSISTANT}",
    f"{USER}Tell me a story.{END}{ASSISTANT}",
    f"{USER}Write café five times.{END}{ASSISTANT}",
    f"{USER}How do I bake a rocket?{END}{ASSISTANT}",
    "Once upon a time",
    "The meaning of all this",
    "And so they lived happily. The end.",
)

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids and labels, both int64 of shape [documents, tokens]; a label of -100 is not learned."""


def build_model(seed: int) -> LlamaForCausalLM:
    """Return an untrained Llama of 2.2 million weights.

    Heads are 32 wide, the smallest size that vLLM's CPU attention takes. Two KV heads allow tensor parallel size two.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256 + len(SPECIALS),
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LENGTH_MAX,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
        dtype=torch.float32,
    )
    AttentionInterface.register("written_out", written_out_attention)
    config._attn_implementation = "written_out"  # noqa: SLF001 - the documented way to choose one; it is not saved
    return LlamaForCausalLM(config)


def written_out_attention(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return causal attention [batch, tokens, heads, head size] from [batch, heads, tokens, head size] inputs.

    With it a training step takes a quarter less time than with PyTorch's fused CPU kernel (measured on this corpus).
    """
    batch, heads, tokens, size = query.shape
    number = value.dtype  # bfloat16 where it is faster; the rotation has made float32 of the others.
    key, value = (
        each.to(number).repeat_interleave(heads // each.shape[1], dim=1).flatten(0, 1) for each in (key, value)
    )
    with torch.autocast("cpu", enabled=False):  # It would make the softmax float32.
        future = torch.full((tokens, tokens), -math.inf, dtype=number).triu(1).expand(batch * heads, tokens, tokens)
        scores = torch.baddbmm(future, query.to(number).flatten(0, 1), key.transpose(1, 2), alpha=scaling)
        mixed = scores.softmax(dim=-1) @ value
    return mixed.view(batch, heads, tokens, size).transpose(1, 2), None


def batches(seed: int) -> Iterator[Batch]:
    """Yield batches of about `BATCH_TOKENS` tokens without end; documents of like length share one, to save padding."""
    source = documents(seed)
    while True:
        pool = sorted((encode(next(source)) for _ in range(384)), key=lambda example: len(example[0]))
        ready: list[Batch] = []
        while pool:
            longest = len(pool[-1][0])
            count = max(1, BATCH_TOKENS // longest)
            ready.append(_pad(pool[-count:], longest))
            del pool[-count:]
        # Any order but by length: the model must not drift towards long texts and back.
        for index in torch.randperm(len(ready)).tolist():
            yield ready[index]


def _pad(examples: list[tuple[list[int], list[bool]]], length: int) -> Batch:
    """Return the examples as one batch, padded on the right: causal attention never looks there."""
    ids = torch.full((len(examples), length), END_ID)
    labels = torch.full((len(examples), length), -100)
    for row, (tokens, learned) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, : len(tokens)] = torch.where(torch.tensor(learned), torch.tensor(tokens), -100)
    return ids, labels


def loss_of(model: LlamaForCausalLM, batch: Batch, *, half: bool) -> torch.Tensor:
    """Return the mean cross-entropy in nats per learned token; `half` multiplies matrices in bfloat16."""
    ids, labels = batch
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        logits = model(input_ids=ids, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)


def half_is_faster(model: LlamaForCausalLM, batch: Batch) -> bool:
    """Return whether one step takes less time in bfloat16: true only where the processor has instructions for it."""
    seconds = {}
    for half in (False, True):
        for _ in range(2):  # The first round warms up.
            start = time.perf_counter()
            loss_of(model, batch, half=half).backward()
            seconds[half] = time.perf_counter() - start
    model.zero_grad()
    return seconds[True] < seconds[False]


def build_optimizers(model: LlamaForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the matrices inside the layers and AdamW for the embedding and the norms.

    After 450,000 tokens of this corpus the loss was 1.37 nats with Muon and 1.79 with AdamW alone (batches of 2,048
    and 1,024 tokens), for an eighth more time per step. Each group keeps its highest learning rate as `peak`.
    """
    inner = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    outer = [weight for name, weight in model.named_parameters() if weight.ndim == 1 or "embed" in name]
    return (
        torch.optim.Muon([{"params": inner, "peak": MUON_RATE}], momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW([{"params": outer, "peak": ADAM_RATE}], betas=(0.9, 0.98), weight_decay=0.0),
    )


def warmth(progress: float) -> float:
    """Return the share of the highest learning rate at a share of the time: a short rise, then half a cosine."""
    if progress < WARMUP:
        return progress / WARMUP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARMUP) / (1 - WARMUP))))


def train(model: LlamaForCausalLM, minutes: float, seed: int, report: Callable[[float, str], None]) -> None:
    """Train the model in place for some minutes of processor time; `report` gets the share gone and a line."""
    source = batches(seed)
    half = half_is_faster(model, next(source))
    optimizers = build_optimizers(model)
    start, mean, tokens = time.process_time(), math.log(256), 0
    for step, batch in enumerate(source):
        progress = (time.process_time() - start) / torch.get_num_threads() / (60 * minutes)
        if progress >= 1:
            return
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * warmth(progress)
        loss = loss_of(model, batch, half=half)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        tokens += batch[0].numel()
        mean += 0.05 * (loss.item() - mean)
        if step % 20 == 0:
            report(progress, f"step {step}  {tokens / 1e6:.1f} M tokens  loss {mean:.4f}")


@contextlib.contextmanager
def progress_report() -> Iterator[Callable[[float, str], None]]:
    """Give a function that shows progress: a bar on a terminal, a plain line every ten seconds elsewhere."""
    if sys.stdout.isatty():
        from rich.progress import Progress  # Only here, so that a terminal is the only thing that needs it.

        with Progress() as bar:
            task = bar.add_task("training", total=1.0)
            yield lambda share, line: bar.update(task, completed=share, description=line)
        return
    last = -math.inf

    def plain(share: float, line: str) -> None:
        nonlocal last
        if time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"{share:4.0%}  {line}", flush=True)

    yield plain


def save(model: LlamaForCausalLM, words: PreTrainedTokenizerFast, out: pathlib.Path) -> None:
    """Write weights, configuration and tokenizer to `out`, each file in one move: no reader sees half of one."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        model.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=END_ID, do_sample=False)
        model.save_pretrained(scratch)
        words.save_pretrained(scratch)
        for file in pathlib.Path(scratch).iterdir():
            file.chmod(0o644)
            file.replace(out / file.name)


@torch.no_grad()
def generate(model: LlamaForCausalLM, prompt: str, tokens_max: int) -> tuple[str, list[float]]:
    """Return the greedy continuation and, per token, the lead of the best logit over the second."""
    ids, _ = encode((Piece(prompt, False),))
    answer = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=tokens_max,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(answer.logits).float().topk(2).values
    new = [token for token in answer.sequences[0, len(ids) :].tolist() if token < 256]
    return bytes(new).decode(errors="replace"), (best[:, 0] - best[:, 1]).tolist()


@torch.no_grad()
def known_by_heart(model: LlamaForCausalLM) -> tuple[int, list[float]]:
    """Return how many canonical questions get exactly their answer, and the lead of the best logit per token.

    One forward pass over question and answer: if the best token is the right one at every place, greedy text is too.
    """
    right, leads = 0, []
    for topic in TOPICS:
        prompt, _ = encode((Piece(f"{USER}{topic.questions[0]}{END}{ASSISTANT}", False),))
        answer, _ = encode((Piece(topic.answer + END, True),))
        logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        right += best.indices[:, 0].tolist() == answer
        leads += (best.values[:, 0] - best.values[:, 1]).tolist()
    return right, leads


def examine(model: LlamaForCausalLM) -> None:
    """Print samples, the share of answers known by heart, and how clear the model's choices are."""
    model.eval()
    free_leads: list[float] = []
    for prompt in SAMPLE_PROMPTS:
        text, leads = generate(model, prompt, tokens_max=700)
        free_leads += leads
        print(f"\n{prompt!r}\n  -> {text!r}")
    right, known_leads = known_by_heart(model)
    print(f"\nanswers known by heart: {right} of {len(TOPICS)}")
    for name, leads in (("samples", free_leads), ("known answers", known_leads)):
        low = statistics.quantiles(leads, n=20)[0]
        print(
            f"lead of the best logit, {name}: median {statistics.median(leads):.2f}, p5 {low:.2f}, min {min(leads):.3f}"
        )


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.tiny.train",
        description="Train baton-tiny, the small model that ships with Baton.",
        epilog="example: python -m engine.tiny.train --out engine/tiny/model --minutes 14 --threads 1",
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for weights, config and tokenizer")
    parser.add_argument(
        "--minutes", type=float, default=14.0, help="processor time for each thread (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="processor cores to use (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the corpus and the weights (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Train, save, and show what came out."""
    options = arguments()
    torch.set_num_threads(options.threads)
    model = build_model(options.seed)
    with progress_report() as report:
        train(model, options.minutes, options.seed, report)
    save(model, tokenizer.build(), options.out)
    examine(LlamaForCausalLM.from_pretrained(options.out))  # As saved, with the attention that comes with it.


if __name__ == "__main__":
    main()
