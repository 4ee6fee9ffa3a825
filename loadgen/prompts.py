"""Prompts of a wanted length that share the wanted prefixes. Pure: the same id gives the same text, everywhere.

Texts are common English words, about one token each for a trained tokenizer and one token per byte for a byte-level
one. The caller measures the characters per token once, from `usage`, and then keeps the number. If it changed during a
load, equal ids would no longer give equal texts. For exact token counts, token ids are sent instead.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from loadgen.arrival import Arrival

CHARS_PER_TOKEN = 5.0
"""Characters per token, assumed before a measurement. The words below have 5.6 on average, each with its space."""

WORDS = (
    "able about above across after again against ago air all almost alone along also always among and animal another "
    "answer any appear area arm ask away back bad ball bank base be bear beat because bed been before began behind "
    "being believe below best better between big bird black blue board boat body book both bottom box boy bread break "
    "bring brother brought build built business but buy call came can car care carry case catch cause center certain "
    "chance change chart check child choose church circle city class clean clear close cold color come common company "
    "complete condition cook cool copy corn corner cost cotton could count country course cover cross crowd cry cut "
    "dance dark day dead deal dear decide deep did differ direct do doctor does dog done door double down draw dream "
    "dress drink drive drop dry during each early earth ease east eat edge effect egg eight either else end energy "
    "engine enough enter equal even evening event ever every exact example eye face fact fair fall family famous far "
    "farm fast father favor fear feed feel feet fell few field fight figure fill final find fine finger finish fire "
    "first fish fit five flat floor flow flower fly follow food foot for force forest form forward found four free "
    "fresh friend from front fruit full fun game garden gas gave general get girl give glad glass go gold gone "
    "good grand grass gray great green ground group grow guess guide had hair half hall hand happen happy hard has hat"
).split()
"""256 words, so that one byte of a hash picks one."""


def text_of(seed: bytes, chars: int) -> str:
    """`chars` characters of words that `seed` decides, beginning with a space.

    A shorter text of a seed is the beginning of its longer ones.
    """
    text = _words(seed, chars // 5 + 8)  # a word and its space are 5.6 characters on average
    if len(text) < chars:
        text = _words(seed, chars // 3 + 1)  # each is at least three characters
    return text[:chars]


def _words(seed: bytes, count: int) -> str:
    return " " + " ".join(map(WORDS.__getitem__, hashlib.shake_128(seed).digest(count)))


@lru_cache(maxsize=4096)
def _block(seed: bytes, chars: int) -> str:
    """One block's text, cached because blocks repeat by design. 4,096 of them are about 10 MB."""
    return text_of(seed, chars)


@dataclass(frozen=True, slots=True)
class Fit:
    """How characters become prompt tokens: tokens = overhead + characters / chars_per_token."""

    chars_per_token: float = CHARS_PER_TOKEN
    overhead_tokens: float = 0.0
    """Tokens that the chat template and special tokens add."""

    def chars(self, tokens: int) -> int:
        """Characters for a prompt of this many tokens in all, 1 or more."""
        return max(1, round((tokens - self.overhead_tokens) * self.chars_per_token))


def fit(small: tuple[int, int], large: tuple[int, int]) -> Fit:
    """The line through two probes, each (characters, prompt tokens as the server counted them).

    Two probes that give no rising line give the default `Fit`.
    """
    (chars_a, tokens_a), (chars_b, tokens_b) = small, large
    if tokens_b <= tokens_a or chars_b <= chars_a:
        return Fit()
    ratio = (chars_b - chars_a) / (tokens_b - tokens_a)
    return Fit(ratio, max(0.0, tokens_a - chars_a / ratio))


def prompt_text(arrival: Arrival, fitted: Fit, salt: str) -> str:
    """The prompt of one arrival: a text for each shared block, then one that no other prompt has.

    `salt` makes the text behind the blocks unique: give another one for each request and each run.
    """
    total = fitted.chars(arrival.input_tokens)
    if not arrival.prefix:
        return text_of(b"own " + salt.encode(), total)
    width = max(1, round(arrival.block_tokens * fitted.chars_per_token))
    own = arrival.input_tokens > len(arrival.prefix) * arrival.block_tokens
    # A chat template's tokens must not leave a prompt without a text of its own: it would be all cached.
    covered = max(0, min(len(arrival.prefix) * width, total - (max(1, round(fitted.chars_per_token)) if own else 0)))
    parts = [_block(b"block %d" % each, width) for each in arrival.prefix]
    return "".join(parts)[:covered] + text_of(b"own " + salt.encode(), total - covered)


@lru_cache(maxsize=4096)
def _id_block(seed: bytes, tokens: int, low: int, high: int) -> tuple[int, ...]:
    """One block's ids, cached because blocks repeat by design."""
    return _ids(seed, tokens, low, high)


def _ids(seed: bytes, tokens: int, low: int, high: int) -> tuple[int, ...]:
    raw = hashlib.shake_128(seed).digest(tokens * 4)
    span = high - low
    return tuple(low + int.from_bytes(raw[at : at + 4], "little") % span for at in range(0, tokens * 4, 4))


def prompt_ids(arrival: Arrival, vocabulary: tuple[int, int], salt: str) -> list[int]:
    """The prompt of one arrival as `input_tokens` token ids, at least one.

    Ids are from `vocabulary[0]` up to, not including, `vocabulary[1]`; `salt` is as in `prompt_text`.
    """
    low, high = vocabulary
    total = max(1, arrival.input_tokens)
    found: list[int] = []
    for each in arrival.prefix:
        found += _id_block(b"block %d" % each, arrival.block_tokens, low, high)
    del found[total:]
    if len(found) < total:
        found += _ids(b"own " + salt.encode(), total - len(found), low, high)
    return found
