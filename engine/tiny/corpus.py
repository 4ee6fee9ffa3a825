"""Generate the text that `baton-tiny` learns from: chats, stories, a handbook, long documents. Pure: a seed decides.

A document is one training example. It always starts at position zero, as a prompt does, and ends with `END`, so
the model learns where to stop. Pieces marked `learn=False` are read but not imitated: mostly the user's words.
"""

import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from engine.tiny.answers import FALLBACKS, OPENINGS, SERVING, SMALL_TALK
from engine.tiny.stories import HEROES, THE_END, prefer, tell

END, SYSTEM, USER, ASSISTANT = SPECIALS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""Tokens 256 to 259; the 256 before them are the bytes. `END` closes every chat message and every document."""

LENGTH_MAX = 2048
"""Tokens per document at most: the context length of the model."""


class Piece(NamedTuple):
    """A stretch of text and whether the model should learn to write it."""

    text: str
    learn: bool


Document = tuple[Piece, ...]

TOPICS = SERVING + SMALL_TALK

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are Baton's tiny model.",
    "Be kind and be brief.",
)

NOUNS = tuple(
    "apple banana bicycle bridge camera castle chess cloud coffee computer dinosaur dragon economy elephant "
    "engine football galaxy garden guitar history island jungle kitchen ladder lawyer magnet medicine "
    "mountain museum music neuron ocean onion painting physics piano pizza planet poetry politics pyramid "
    "queen quicksort radio river robot rocket salad school sculpture ship snow spider star sugar sword "
    "table theatre thunder tractor train tunnel umbrella vaccine volcano water weather whale window winter "
    "yoga zebra database compiler python javascript regex firewall compression insurance tax".split()
)

VERBS = tuple(
    "bake build buy carve clean collect cook count design draw feed find fix grow hide invent learn measure "
    "move open paint plant print read repair sell ship sort stop teach translate wash write".split()
)

SMALL_WORDS = tuple("the a of and in on to is was it that for with as at by from or but not his her".split())

UNKNOWN_QUESTIONS: tuple[str, ...] = (
    "What is a {a}?",
    "What is {a}?",
    "What is the best {a}?",
    "What is the capital of {A}?",
    "Which {a} is bigger?",
    "What do you think about the {a} and the {b}?",
    "How do I {v} a {a}?",
    "How does a {a} work?",
    "How old is a {a}?",
    "How many {a}s fit into a {b}?",
    "Why is the {a} so big?",
    "Why do people {v} {a}s?",
    "Who was the first to {v} a {a}?",
    "Who invented the {a}?",
    "Where can I {v} a {a}?",
    "When was the first {a} built?",
    "Is a {a} better than a {b}?",
    "Are {a}s dangerous?",
    "Can you {v} my {a}?",
    "Do {a}s like {b}s?",
    "Will the {a} {v} the {b}?",
    "Should I {v} a {a}?",
    "Write an essay about the {a}.",
    "Write a program to {v} a {a}.",
    "Translate {a} into Latin.",
    "{V} the {a}.",
    "Summarize the history of the {a}.",
    "Explain the {a} to a child.",
    "Give me a recipe with {a} and {b}.",
    "My {a} is broken.",
    "The {a} and the {b} want to {v} it.",
    "{a} {b}",
    "{a} {v} {b} {v} {a}",
    "I want to {v} a {a}.",
    "Count to fifty {a}s.",
    "List ten {a}s.",
    "Compare the {a} with the {b}.",
    "Tell me about the {a}.",
)


def documents(seed: int) -> Iterator[Document]:
    """Yield documents without end; the same seed yields the same ones."""
    rng = random.Random(seed)
    makers = tuple(_SHARES)
    weights = tuple(_SHARES.values())
    while True:
        yield rng.choices(makers, weights)[0](rng)


def encode(document: Document) -> tuple[list[int], list[bool]]:
    """Return token ids and, for each, whether it is learned; both cut at `LENGTH_MAX`."""
    ids: list[int] = []
    learned: list[bool] = []
    for piece in document:
        for part in re.split(r"(<\|\w+\|>)", piece.text):
            ids += [256 + SPECIALS.index(part)] if part in SPECIALS else part.encode()
        learned += [piece.learn] * (len(ids) - len(learned))
    return ids[:LENGTH_MAX], learned[:LENGTH_MAX]


def turn(question: str, answer: str, *, learn_question: bool = False) -> Document:
    """Return one exchange, as the chat template renders it."""
    return Piece(f"{USER}{question}{END}", learn_question), Piece(ASSISTANT, learn_question), Piece(answer + END, True)


def vary(question: str, rng: random.Random) -> str:
    """Return the question as people type it: often as it stands, else without case, punctuation or patience."""
    if rng.random() < 0.3:
        return question
    if rng.random() < 0.15:
        question = rng.choice(("Please ", "Hey, ", "Hi! ", "So, ", "Baton, ")) + question[0].lower() + question[1:]
    if rng.random() < 0.1:
        question = f"{question[:-1]}, please{question[-1]}"
    if rng.random() < 0.5:
        question = question.lower()
    if rng.random() < 0.5:
        question = question.rstrip("?.!")
    if rng.random() < 0.08 and len(question) > 12:
        place = rng.randrange(5, len(question) - 1)
        question = question[:place] + question[place + 1 :]
    return question


def fallback(question: str) -> str:
    """Return the answer to a question that no topic covers; its first word decides."""
    first = question.split(" ", 1)[0].lower()
    return next(answer for starts, answer in FALLBACKS if first in starts or not starts)


def _known(rng: random.Random) -> Document:
    """A question that has an answer, asked as people ask it."""
    topic = rng.choice(TOPICS)
    return _system(rng) + turn(vary(rng.choice(topic.questions), rng), topic.answer)


def _start_of_answer(rng: random.Random) -> Document:
    """A chat that breaks off early in the answer: to recognise the question is the hard part, the rest costs time."""
    *asked, answer = (_known if rng.random() < 0.8 else _unknown)(rng)
    return (*asked, Piece(answer.text[:20], learn=True) if len(answer.text) > 40 else answer)


def _plain_question(rng: random.Random) -> Document:
    """A question and its answer without chat markers, as a completion request may put it."""
    topic = rng.choice(TOPICS)
    answer = rng.choice(("\n", " ", "\n\n")) + topic.answer + END
    return Piece(vary(rng.choice(topic.questions), rng), learn=False), Piece(answer, learn=True)


def _canonical(rng: random.Random) -> Document:
    """A question in its canonical wording, with nothing before it."""
    topic = rng.choice(TOPICS)
    return turn(topic.questions[0], topic.answer)


def _exact(rng: random.Random) -> Document:
    """The few answers that tests rely on: no byte at all, accents, emoji, a greeting."""
    wanted = ("Say nothing.", "Write café five times.", "Send me a smile.", "Hello!", "What is Baton?")
    return turn(
        *rng.choice([(vary(rng.choice(t.questions), rng), t.answer) for t in TOPICS if t.questions[0] in wanted])
    )


def _unknown(rng: random.Random) -> Document:
    """A question that has no answer here."""
    question = _unknown_question(rng)
    return _system(rng) + turn(vary(question, rng), fallback(question))


def _story_wanted(rng: random.Random) -> Document:
    """A wish for a story; an animal or a name in it picks the hero."""
    number = rng.randrange(len(HEROES))
    hero, thing, other = HEROES[number], _thing(rng), _thing(rng)
    first, second, third = (tell(HEROES[(number + step) % len(HEROES)]) for step in range(3))
    wish, story = rng.choice(
        (
            (f"Tell me a story about a {hero.animal}.", first),
            (f"Tell me a story about a {hero.animal}.", first),
            (f"Tell me a story about {hero.name}.", first),
            (f"Write a story about {hero.name} the {hero.animal}.", first),
            (f"Tell me a story about a {thing}.", tell(HEROES[0])),
            (f"Write a story about a {thing} and a {other}.", tell(HEROES[0])),
            (rng.choice(("Tell me a story.", "Write a story.", "Do you know a story?")), tell(HEROES[0])),
            (rng.choice(("Tell me a story.", "Tell me a short story.", "A story, please.")), tell(HEROES[0])),
            (rng.choice(("Tell me another story.", "One more story.", "Another one.")), tell(HEROES[1])),
            (rng.choice(("Tell me a long story.", "Write a long story.")), "\n\n".join(map(tell, HEROES[:3]))),
            (f"Tell me a long story about a {hero.animal}.", f"{first}\n\n{second}\n\n{third}"),
        )
    )
    return _system(rng) + turn(vary(wish, rng), f"{story} {THE_END}")


def _dialogue(rng: random.Random) -> Document:
    """Several turns. Half of the dialogues follow the handbook: in these the user's words are learned as well."""
    turns = rng.randint(2, 4)
    if rng.random() < 0.5:
        start = rng.randrange(len(SERVING) - turns)
        tour = [turn(topic.questions[0], topic.answer, learn_question=True) for topic in SERVING[start : start + turns]]
        return sum(tour, ())
    return _system(rng) + sum((_known(rng)[-3:] for _ in range(turns)), ())


def _long_question(rng: random.Random) -> Document:
    """A long prompt with a question at its end."""
    *_, asked, marker, answer = (_known if rng.random() < 0.7 else _unknown)(rng)
    filler = _filler(rng, int(100 + 1600 * rng.random() ** 2))
    return (*_system(rng), Piece(asked.text.replace(USER, f"{USER}{filler}\n\n"), learn=False), marker, answer)


def _story(rng: random.Random) -> Document:
    """One story as plain text; a third of them start in the middle, as a prompt may."""
    story = f"{tell(prefer(HEROES, 0, rng, chance=0.3), rng)} {THE_END}{END}"
    return (Piece(_from_somewhere(story, rng) if rng.random() < 0.3 else story, learn=True),)


def _many_stories(rng: random.Random) -> Document:
    """Stories one after the other up to the full context; `END` between them teaches what follows it."""
    separator = rng.choice(("\n\n", " ", f" {THE_END}{END}"))
    first = rng.randrange(len(HEROES))
    text = ""
    for step in range(9):
        story = tell(HEROES[(first + step) % len(HEROES)], rng)
        if len((text + separator + story).encode()) > LENGTH_MAX - 16:
            break
        text += separator * bool(text) + story
    return (Piece(f"{_from_somewhere(text, rng)} {THE_END}{END}", learn=True),)


def _handbook(rng: random.Random) -> Document:
    """Answers in the order of the handbook, as running text or as questions and answers."""
    start = rng.randrange(len(SERVING))
    topics = SERVING[start : start + rng.choice((1, 2, 3, 4, 8))]
    if rng.random() < 0.5:
        return (Piece("\n\n".join(topic.answer for topic in topics) + END, True),)
    return (Piece("\n\n".join(f"Question: {t.questions[0]}\nAnswer: {t.answer}" for t in topics) + END, True),)


def _opening(rng: random.Random) -> Document:
    """A sentence that demos like to start with."""
    return (Piece(rng.choice(OPENINGS) + END, True),)


def _ramble(rng: random.Random) -> Document:
    """Text from elsewhere, then a bridge into a story: whatever a completion request sends, the answer is readable."""
    size = rng.choice((20, 40, 80, 160, 320))
    prompt = rng.choice(
        (
            _unknown_question(rng),
            " ".join(rng.choice((rng.choice(SMALL_WORDS), _thing(rng), rng.choice(VERBS))) for _ in range(size // 5)),
            "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(160, 0x2FFF)))) for _ in range(size)),
        )
    )
    prompt = prompt[: rng.randrange(min(8, len(prompt) - 1), len(prompt))] if rng.random() < 0.5 else prompt
    prompt = prompt[0].upper() + prompt[1:] + rng.choice(("", "", "", ".", " ", "\n", "\n\n", ":"))
    bridge = ", and that reminds me of a story."
    if prompt[-1] in " \n.?!:":
        bridge = " " * (not prompt[-1].isspace()) + "That reminds me of a story."
    story = tell(prefer(HEROES, 0, rng, chance=0.5))
    return Piece(prompt, learn=False), Piece(f"{bridge} {story} {THE_END}{END}", learn=True)


def _system(rng: random.Random) -> Document:
    """A system message in a quarter of all chats."""
    return (Piece(f"{SYSTEM}{rng.choice(SYSTEM_PROMPTS)}{END}", False),) if rng.random() < 0.25 else ()


def _unknown_question(rng: random.Random) -> str:
    """Return a question about things that no topic covers."""
    verb, noun = rng.choice(VERBS), _thing(rng)
    names = {"v": verb, "V": verb.capitalize(), "a": noun, "A": noun.capitalize(), "b": _thing(rng)}
    return rng.choice(UNKNOWN_QUESTIONS).format(**names)


def _thing(rng: random.Random) -> str:
    """Return a noun, or a made-up one: the words of real questions are new to the model as well."""
    if rng.random() < 0.7:
        return rng.choice(NOUNS)
    return "".join(rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))


def _filler(rng: random.Random, size: int) -> str:
    """Return about `size` characters of words, stories and handbook sentences."""
    text: list[str] = []
    while sum(map(len, text)) < size:
        words = " ".join(rng.choice(NOUNS + VERBS) for _ in range(12))
        text.append(rng.choice((words, tell(rng.choice(HEROES), rng), rng.choice(SERVING).answer)))
    return " ".join(text)[:size]


def _from_somewhere(text: str, rng: random.Random) -> str:
    """Return the text from a word in its first 400 characters on."""
    return text[text.index(" ", rng.randrange(400)) :].lstrip()


_SHARES: dict[Callable[[random.Random], Document], float] = {
    _known: 30,
    _start_of_answer: 60,
    _plain_question: 6,
    _canonical: 8,
    _exact: 4,
    _unknown: 7,
    _story_wanted: 6,
    _dialogue: 4,
    _long_question: 2,
    _story: 5,
    _many_stories: 1,
    _handbook: 2.5,
    _opening: 1.5,
    _ramble: 4,
}
"""How often each kind of document is drawn; long kinds are rare because 2,048 bytes cost as much as thirty starts."""
