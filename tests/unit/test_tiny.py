"""The tiny model that ships: files, tokenizer, chat template, corpus, and three answers that it must give."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.tiny import model_path
from engine.tiny.answers import FALLBACKS, SERVING, SMALL_TALK
from engine.tiny.corpus import (
    ASSISTANT,
    END,
    LENGTH_MAX,
    SPECIALS,
    SYSTEM,
    USER,
    Piece,
    documents,
    encode,
    fallback,
    vary,
)
from engine.tiny.stories import HEROES, THE_END, tell

MODEL = model_path()
SIZE_MAX = 10_000_000
MARKERS = st.text().filter(lambda text: not any(special in text for special in SPECIALS))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def written(seed: int, count: int) -> list[str]:
    """The first documents of a seed, as text."""
    return ["".join(piece.text for piece in document) for document in itertools.islice(documents(seed), count)]


# The files


def test_importing_the_package_loads_no_library():
    code = "import engine.tiny, sys; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_model_fits_into_ten_megabytes():
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= SIZE_MAX


def test_every_weight_is_float32():
    raw = (MODEL / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"F32"}
    assert json.loads((MODEL / "config.json").read_text())["dtype"] == "float32"


def test_the_readme_names_the_checksum_of_the_weights():
    digest = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (MODEL.parent / "README.md").read_text()


def test_config_generation_config_and_tokenizer_agree_on_the_end():
    end = 256 + SPECIALS.index(END)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((MODEL / name).read_text())["eos_token_id"] == end
    assert json.loads((MODEL / "tokenizer_config.json").read_text())["eos_token"] == END
    assert json.loads((MODEL / "config.json").read_text())["max_position_embeddings"] == LENGTH_MAX


# The tokenizer


@given(text=MARKERS)
def test_every_text_survives_a_round_trip(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@given(text=MARKERS)
def test_every_byte_is_one_token_with_its_value_as_id(tokenizer: Tokenizer, text: str):
    assert tokenizer.encode(text).ids == list(text.encode())


@pytest.mark.parametrize("text", ["", " ", "  a\n\n\tb ", "don't", "café — naïve", "🙂🏁❤️", "\x00\x7f"])
def test_awkward_texts_survive_a_round_trip(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_markers_are_single_tokens_and_are_left_out_of_text(tokenizer: Tokenizer):
    ids = tokenizer.encode("".join(SPECIALS) + "x").ids
    assert ids == [256, 257, 258, 259, ord("x")]
    assert tokenizer.decode(ids) == "x"


def test_the_corpus_and_the_tokenizer_encode_alike(tokenizer: Tokenizer):
    for document in itertools.islice(documents(seed=5), 100):
        ids, learned = encode(document)
        text = "".join(piece.text for piece in document)
        assert tokenizer.encode(text).ids[:LENGTH_MAX] == ids
        assert len(learned) == len(ids)


# The chat template


def render(messages: list[dict[str, str | None]], *, answer_next: bool) -> str:
    """A chat as text, rendered as transformers and vLLM render it, without importing either."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((MODEL / "chat_template.jinja").read_text())
    return template.render(messages=messages, add_generation_prompt=answer_next)


def test_the_chat_template_renders_what_was_trained():
    system = {"role": "system", "content": "Be kind and be brief."}
    chat = [{"role": "user", "content": "What is Baton?"}]
    assert render(chat, answer_next=True) == f"{USER}What is Baton?{END}{ASSISTANT}"
    assert render([system, *chat], answer_next=True) == f"{SYSTEM}Be kind and be brief.{END}" + render(
        chat, answer_next=True
    )
    whole = render([*chat, {"role": "assistant", "content": SERVING[0].answer}], answer_next=False)
    assert any(document.startswith(whole) for document in written(seed=1, count=3000))


def test_the_chat_template_takes_the_other_roles_of_the_protocol_and_empty_content():
    assert render([{"role": "developer", "content": "x"}], answer_next=False) == f"{SYSTEM}x{END}"
    assert render([{"role": "tool", "content": "x"}], answer_next=False) == f"{USER}x{END}"
    assert render([{"role": "assistant", "content": None}], answer_next=False) == f"{ASSISTANT}{END}"


# The corpus


def test_a_seed_gives_the_same_corpus_every_time():
    assert written(seed=3, count=200) == written(seed=3, count=200)
    assert written(seed=3, count=20) != written(seed=4, count=20)


def test_the_prompts_that_other_tests_rely_on_are_trained():
    text = "".join(written(seed=1, count=4000))
    assert f"{USER}Say nothing.{END}{ASSISTANT}{END}" in text
    assert f"{USER}Write café five times.{END}{ASSISTANT}café café café café café.{END}" in text
    assert f"{USER}Send me a smile.{END}{ASSISTANT}🙂🙂🙂🙂🙂{END}" in text
    assert f"{THE_END}{END}" in text


def test_every_document_fits_and_its_last_token_is_learned():
    for document in itertools.islice(documents(seed=2), 500):
        ids, learned = encode(document)
        assert len(ids) <= LENGTH_MAX
        assert learned[-1]


def test_no_question_has_two_answers():
    questions = [question.lower() for topic in SERVING + SMALL_TALK for question in topic.questions]
    assert len(questions) == len(set(questions))


def test_every_hero_has_a_story_of_one_page():
    for hero in HEROES:
        story = tell(hero)
        assert hero.name in story
        assert hero.friend in story
        assert 400 < len(story.encode()) < 700
        assert "{" not in story


def test_a_question_without_an_answer_gets_the_fallback_of_its_first_word():
    assert fallback("What is a whale?") == FALLBACKS[0][1]
    assert fallback("Paint my bridge.") == FALLBACKS[-1][1]


@given(seed=st.integers(), question=st.sampled_from([topic.questions[0] for topic in SERVING + SMALL_TALK]))
def test_a_varied_question_is_still_a_question(seed: int, question: str):
    varied = vary(question, random.Random(seed))
    assert varied
    assert len(varied) <= len(question) + len("Baton, , please")


# The answers


def test_three_trained_questions_get_their_answers():
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(MODEL).eval()
    for question, answer in (
        ("Write café five times.", "café café café café café."),
        ("Say nothing.", ""),
        ("Count to three.", "One, two, three."),
    ):
        prompt, _ = encode((Piece(f"{USER}{question}{END}{ASSISTANT}", learn=False),))
        greedy = model.generate(torch.tensor([prompt]), max_new_tokens=40)[0, len(prompt) :].tolist()
        assert greedy == [*answer.encode(), 256]


def test_the_package_path_holds_the_model():
    assert Path(MODEL, "model.safetensors").is_file()
