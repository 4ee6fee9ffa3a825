"""Little stories from a grammar: heroes, plots and sentences with a few wordings each. Own text, Apache-2.0.

Every hero prefers one wording of each sentence and one plot, and takes another only now and then. A model that
learned this has, at every point, one next byte that is clearly ahead: greedy text does not hang on a rounding error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import random

THE_END = "The end."

T = TypeVar("T")

PREFERENCE = 0.85
"""Chance that a hero takes the preferred wording. Lower gives more variety and smaller gaps between logits."""


class Hero(NamedTuple):
    """The hero of a story; `friend` is another animal with a name."""

    name: str
    animal: str
    trait: str
    pronoun: str
    possessive: str
    place: str
    friend: str
    friend_animal: str


HEROES: tuple[Hero, ...] = (
    Hero("Mia", "fox", "quick", "she", "her", "at the edge of a green forest", "Otto", "owl"),
    Hero("Bruno", "bear", "gentle", "he", "his", "in a cave above the valley", "Lily", "mouse"),
    Hero("Zoé", "hare", "proud", "she", "her", "in a field of clover", "Theo", "tortoise"),
    Hero("Jürgen", "hedgehog", "careful", "he", "his", "under an old apple tree", "Rosa", "robin"),
    Hero("Nora", "cat", "curious", "she", "her", "in a house by the harbour", "Finn", "gull"),
    Hero("Max", "dog", "cheerful", "he", "his", "on a farm near the river", "Ella", "goose"),
    Hero("Inés", "otter", "playful", "she", "her", "by a clear cold stream", "Hugo", "heron"),
    Hero("Felix", "rabbit", "shy", "he", "his", "behind the garden wall", "Clara", "crow"),
    Hero("Ada", "squirrel", "clever", "she", "her", "in the tallest oak of the park", "Paul", "pigeon"),
    Hero("Leo", "lion", "sleepy", "he", "his", "on a warm and yellow hill", "Zara", "zebra"),
    Hero("Anna", "horse", "strong", "she", "her", "in a meadow behind the mill", "Sam", "sparrow"),
    Hero("Emil", "mouse", "brave", "he", "his", "under the floor of a bakery", "Greta", "goat"),
)

# A plot is a list of sentences; a sentence is a list of wordings. `{Pronoun}` is the pronoun with a capital.
Plot = tuple[tuple[str, ...], ...]

OPENING: tuple[str, ...] = (
    "Once upon a time there was a {trait} {animal} called {name}, who lived {place}.",
    "Once upon a time a {trait} {animal} lived {place}. The name of the {animal} was {name}.",
    "{name} was a {trait} {animal} who lived {place}.",
)

RACE: Plot = (
    (
        "One morning a letter came: the great relay race would be run on Sunday.",
        "One day the whole village spoke of nothing but the great relay race.",
        "In spring, as in every year, it was time for the great relay race.",
    ),
    (
        "{name} wanted to run, but nobody can run a relay alone.",
        "{name} loved to run, but a relay needs more than one runner.",
        "{name} could run the first half, but who would run the second?",
    ),
    (
        'So {pronoun} asked {possessive} friend {friend}, the {friend_animal}. "I will wait for you at the bridge," '
        "said {friend}.",
        '{Pronoun} went to {friend}, the {friend_animal}. "I am slow at the start," said {friend}, '
        '"but I never stop before the end."',
    ),
    (
        "On Sunday the drum rolled, and {name} ran like the wind with the baton held high.",
        "The race began, and {name} ran up the hill and down again with the baton held high.",
        "When the whistle blew, {name} took the baton and flew along the river.",
    ),
    (
        "At the bridge {pronoun} put the baton into the hand of {friend} and did not drop it.",
        "Halfway there {friend} was waiting, and the baton went from one to the other without a sound.",
    ),
    (
        "{friend} ran the rest of the way and came in first.",
        "{friend} ran step by step by step, and nobody could catch up.",
        "{friend} carried it over the line, and the crowd cheered.",
    ),
    (
        '"It was not you and it was not me," said {name}. "It was the hand-over."',
        "From that day on they shared every race, and most of the cake.",
    ),
)

LOST: Plot = (
    (
        "One day {pronoun} could not find {possessive} red scarf.",
        "One day {possessive} little golden key was gone.",
        "One evening {possessive} lantern was not in its place.",
    ),
    (
        "{name} looked under the bed, behind the door and on top of the roof.",
        "{name} looked in every corner and found only dust and an old spoon.",
        "{name} searched the whole day long and found nothing.",
    ),
    (
        'Then {friend}, the {friend_animal}, came by and asked: "What are you looking for?"',
        'On the way home {pronoun} met {friend}, the {friend_animal}. "Why are you so sad?" asked {friend}.',
    ),
    (
        '"Think of where you saw it last," said {friend}, "and walk back from there."',
        '"Let us look together," said {friend}. "Four eyes see more than two."',
    ),
    (
        "They walked back along the path, past the well and past the mill.",
        "They went slowly and looked at every stone and at every leaf.",
    ),
    (
        "And there it was, hanging on a branch, just as if it had been waiting.",
        "And there it lay in the grass, a little wet but as good as new.",
        "At last they found it in a place where {pronoun} had looked three times.",
    ),
    (
        "{name} laughed and made a pot of tea for two.",
        "{name} thanked {possessive} friend, and they sang all the way home.",
    ),
)

STORM: Plot = (
    (
        "One night a great storm came over the hills.",
        "In autumn a storm came that was louder than any before.",
        "One evening the sky turned black and the wind began to roar.",
    ),
    (
        "In the morning the bridge was gone, and nobody could cross the river.",
        "It rained for three days, and the water took the bridge away.",
    ),
    (
        "On the other side lived {friend}, the {friend_animal}, who had nothing left to eat.",
        "Far over the water {friend}, the {friend_animal}, called for help.",
    ),
    ("{name} was {trait}, and {pronoun} had an idea.", "{name} sat down and thought about it for a long while."),
    (
        "{Pronoun} tied a long rope to a tree and threw the other end across.",
        "{Pronoun} laid one stone into the water, and then another, and then another.",
    ),
    (
        "Piece by piece the bread and the apples went over the river.",
        "Soon a small parcel went across, and then a second, and then a third.",
    ),
    (
        '"Small steps are enough," said {name}, "if you do not stop."',
        "When the sun came back they built a new bridge, and it still stands there today.",
    ),
)

BAKERY: Plot = (
    ("{name} had always dreamed of opening a little café.", "One winter {pronoun} decided to open a small café."),
    (
        "{Pronoun} painted the door blue and put four chairs in front of it.",
        "{Pronoun} baked a cake with nuts and honey and set it in the window.",
    ),
    ("On the first day nobody came.", "On the first morning it rained, and all the chairs stayed empty."),
    (
        "On the second day {friend}, the {friend_animal}, stopped and took a piece of cake.",
        "Then {friend}, the {friend_animal}, knocked at the door and asked for something warm.",
    ),
    (
        '"This is the best cake in the world," said {friend}, and told it to everyone.',
        '"You bake and I will serve," said {friend}, "then nobody has to wait."',
    ),
    (
        "Soon the queue went three times around the house.",
        "After a week every chair was taken, and the guests sat on the wall.",
    ),
    (
        "{name} baked, {friend} served, and each did what each did best.",
        "In the evening they counted the plates and fell asleep at the table.",
    ),
)

MUSIC: Plot = (
    ("Every evening {pronoun} heard music from far away.", "One summer night a soft song came through the window."),
    (
        "{name} followed it over the hill and through the tall grass.",
        "{name} could not sleep, so {pronoun} got up and followed the sound.",
    ),
    (
        "There sat {friend}, the {friend_animal}, with a very small violin.",
        "Under the moon stood {friend}, the {friend_animal}, and played the flute.",
    ),
    (
        '"I know only half of the song," said {friend}. "I have forgotten how it ends."',
        '"It is a song for two," said {friend}, "and I have been waiting for you."',
    ),
    (
        "{name} listened, took a deep breath and sang the second half.",
        "{name} clapped the beat, first slowly and then faster and faster.",
    ),
    ("The stars came closer, and even the wind stood still.", "All the animals came out and danced until the morning."),
    (
        "Since then there is music every night, and nobody plays alone.",
        '"Now it is a whole song," said {friend}, and they played it once more.',
    ),
)

PLOTS: tuple[Plot, ...] = (RACE, LOST, STORM, BAKERY, MUSIC)


def prefer(options: tuple[T, ...], favourite: int, rng: random.Random | None, chance: float = PREFERENCE) -> T:
    """Return the favourite option, or with probability `1 - chance` any of them; no `rng` means no surprise."""
    if rng is None or rng.random() < chance:
        return options[favourite % len(options)]
    return rng.choice(options)


def tell(hero: Hero, rng: random.Random | None = None) -> str:
    """Return one story of 400 to 700 bytes without a closing formula; no `rng` gives the hero's favourite one."""
    number = HEROES.index(hero)
    plot = prefer(PLOTS, number, rng)
    # A multiple of the hero's number spreads the favourites, so that two heroes rarely share all wordings.
    sentences = [prefer(OPENING, number, rng)]
    sentences += [prefer(wordings, number * (place + 1) + place, rng) for place, wordings in enumerate(plot)]
    return " ".join(sentences).format(Pronoun=hero.pronoun.capitalize(), **hero._asdict())
