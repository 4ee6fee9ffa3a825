"""Surveys a JSON text without building it: how deep it nests, how many values it has, which keys it names.

A parser makes objects of a text, and a small text can make many: one megabyte of `[{"a":[]},…]` takes 300 ms and 30 MB.
This module reads a text of any size slice by slice with the interpreter's own byte searches, and keeps nothing of it.
It stops at the first limit that the text breaks. Callers let other tasks run between two slices.

The text is taken to be JSON. For a text that is not, the results hold up to its first mistake, which the caller's
parser finds. Standard library only: the guard runs this module inside vLLM's own process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Generic, NamedTuple, TypeVar

SLICE_BYTES: Final = 1 << 16
"""Bytes of one step. The densest slices take 5 ms, prose and images 0.03 ms (an EPYC core)."""

VALUES_MAX: Final = 1 << 20
"""Objects, arrays and texts (keys too) that one body may hold."""

NUMBERS_MAX: Final = 1 << 23
"""Commas outside of texts. Eight million token ids pass, and a parser takes 30 ms to skip them."""

_BACKSLASH: Final = b"\\"
_CONTROLS: Final = bytes(range(32))
_WRONG_ESCAPE: Final = re.compile(rb"\\(?![/bfnrt]|u[0-9a-fA-F]{4})")
"""Searched after `\\\\` and `\\"` are removed."""
_LONGEST_ESCAPE: Final = 6
"""Length in bytes of `\\u0041`, the longest escape."""
_WHITE: Final = b" \t\r\n"
_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEPS: Final = tuple((byte == ord("[")) - (byte == ord("]")) for byte in range(256))
_SPACES: Final = re.compile(rb"[ \t\r\n]+")
_RUN_BYTES: Final = 64
"""Bytes that are searched first for a run of backslashes: real runs are short."""
_QUOTES_FEW: Final = 256
"""With fewer quotes than this in a slice, the search for keys tries each quote."""

Found = TypeVar("Found")
Steps = Generator[None, None, Found]
"""Work in steps of some milliseconds: other tasks may run at each `yield`."""


class ScanWork(Generic[Found]):
    """Steps to run one by one; `found` is set after the last."""

    __slots__ = ("_steps", "found")
    found: Found

    def __init__(self, steps: Steps[Found]) -> None:
        self._steps: Final = steps

    def __iter__(self) -> Iterator[None]:
        self.found = yield from self._steps


class TooDeep(ValueError):
    """The text nests deeper than allowed."""


class TooMany(ValueError):
    """The text holds more values than allowed, or more keys with one name (`key`; empty: values)."""

    def __init__(self, said: str, key: str = "") -> None:
        super().__init__(said)
        self.key: Final = key


class Names:
    """Keys to look for, in every spelling that JSON has for them."""

    __slots__ = ("common", "longest", "needles", "pattern", "shared")

    def __init__(self, names: Iterable[str], common: Iterable[str] = ()) -> None:
        """All names are of ASCII letters and underscores. `common`: names that ordinary bodies have many times."""
        self.common: Final = frozenset(common)
        wanted = sorted({*names, *self.common})
        assert all(name.replace("_", "").isascii() and name.replace("_", "").isalpha() for name in wanted)
        self.needles: Final = (*(name.encode() for name in wanted), b"\\u00")
        """A slice without any of these bytes has no such key."""
        self.pattern: Final = re.compile(b'"(?:' + b"|".join(map(spelled, wanted)) + b')"')
        self.shared: Final = {name: name for name in wanted}
        """One object for each name: many keys may have it."""
        self.longest: Final = 6 * max(map(len, wanted)) + 2


def spelled(name: str) -> bytes:
    """A pattern that matches a name of ASCII letters and underscores with any of its letters escaped."""
    return b"".join(b"(?:%c|\\\\u00%s)" % (ord(letter), _either_case(b"%02x" % ord(letter))) for letter in name)


def _either_case(digits: bytes) -> bytes:
    lower, upper = digits.lower(), digits.upper()
    return b"".join(b"[%c%c]" % pair for pair in zip(lower, upper, strict=True))


KEYS_MAX: Final = 256

COMMON_MAX: Final = 10_000
"""The most keys with one of `Names.common`. Each takes 4 µs and 130 bytes."""

_KEYS_A_STEP: Final = 1024
"""Names that are looked at in one step: keys, and texts with the same content."""


class FoundKey(NamedTuple):
    """A key that was looked for and found."""

    name: str
    at: int
    """Where its value begins, or the space before the value."""
    depth: int
    """The number of objects and arrays around it: 1 at the top level."""


class Plain(NamedTuple):
    """A range that holds only the inside of one text, or only spaces that follow a space."""

    start: int
    end: int
    is_text: bool
    """Whether the range is inside a text: its escapes are right, and it has no control characters."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a text holds."""

    values: int
    """Objects, arrays and texts, counted together."""
    commas: int
    """Commas outside of texts. The text holds at most as many numbers as it has commas, objects and arrays together."""
    keys: tuple[FoundKey, ...]
    """The first `KEYS_MAX` of the keys that were looked for, without those of `Names.common`."""
    common: tuple[FoundKey, ...]
    """The keys with one of `Names.common`, in their order: all of them if there are fewer than `KEYS_MAX` of `keys`."""
    plain: tuple[Plain, ...]
    """Whole slices only: a short text has none. A parser finds the same values in a body without these ranges."""


def survey(raw: bytes, names: Names, *, depth_max: int, values_max: int = VALUES_MAX) -> Steps[Survey]:
    """Survey a text.

    Args:
        raw: JSON, UTF-8.
        names: the keys to look for.
        depth_max: deepest nesting of objects and arrays, the outermost one counted.
        values_max: most objects, arrays and texts.

    Raises:
        TooDeep, TooMany: at the first slice that breaks a limit.
    """
    inside = depth = quotes = brackets = commas = 0
    keys = _Keys(raw, names)
    plain: list[Plain] = []
    start, size = 0, len(raw)
    while start < size and depth >= 0:
        end = end_of_slice(raw, start)
        piece = _without_escapes(raw[start:end])
        texts = piece.split(b'"')
        outside = b"".join(texts[inside::2])
        found = len(texts) - 1
        quotes += found
        commas += outside.count(b",")
        steps = outside.translate(_BRACKETS, _NO_BRACKETS)
        brackets += steps.count(b"[")
        before, depth = depth, _deeper(depth, steps, depth_max)
        _check(brackets + quotes // 2, commas, values_max)
        if found and len(keys.found) < KEYS_MAX:
            yield from keys.search(start, end, before, inside, few=found < _QUOTES_FEW)
        inside = (inside + found) % 2
        if not found and (_is_text(piece) if inside else not piece.strip(_WHITE)):
            _add(plain, Plain(start, end, bool(inside)))
        start = end
        yield
    return Survey(brackets + quotes // 2, commas, tuple(keys.found), tuple(keys.common), tuple(plain))


class _Keys:
    """The keys of a text that are looked for, found slice by slice."""

    __slots__ = ("_names", "_raw", "common", "found")

    def __init__(self, raw: bytes, names: Names) -> None:
        self._raw: Final = raw
        self._names: Final = names
        self.found: Final[list[FoundKey]] = []
        """`Survey.keys`"""
        self.common: Final[list[FoundKey]] = []
        """`Survey.common`"""

    def search(self, start: int, end: int, depth: int, inside: int, *, few: bool) -> Steps[None]:
        """Add the keys that begin in a slice, until `found` is full. `depth` is that of its `start`, where `inside` is
        1 within a text. `few`: the slice has so few quotes that trying each one is quick.
        """
        raw = self._raw
        for number, match in enumerate(self._matches(start, end, few=few)):
            if number % _KEYS_A_STEP == _KEYS_A_STEP - 1:
                yield
            if len(self.found) == KEYS_MAX:
                return
            begin = match.start()
            if backslashes_before(raw, begin, start) % 2:
                continue  # an escaped quote begins no text
            value = yield from _value_after(raw, match.end())
            if not value:
                continue
            outside = b"".join(_without_escapes(raw[start:begin]).split(b'"')[inside::2])
            brackets = outside.translate(_BRACKETS, _NO_BRACKETS)
            depth += 2 * brackets.count(b"[") - len(brackets)
            self._add(FoundKey(self._names.shared[json.loads(match.group())], value, depth))
            start, inside = begin, 0

    def _matches(self, start: int, end: int, *, few: bool) -> Iterator[re.Match[bytes]]:
        """The wanted names in quotes that begin in this slice."""
        stop = min(len(self._raw), end + self._names.longest)
        if not few and all(self._raw.find(needle, start, stop) < 0 for needle in self._names.needles):
            return
        for match in self._names.pattern.finditer(self._raw, start, stop):
            if match.start() >= end:
                return
            yield match

    def _add(self, key: FoundKey) -> None:
        if key.name not in self._names.common:
            self.found.append(key)
            return
        if len(self.common) == COMMON_MAX:
            raise TooMany(f"The body holds more than {COMMON_MAX:,} keys `{key.name}`.", key.name)
        self.common.append(key)


def _value_after(raw: bytes, at: int) -> Steps[int]:
    """Where the value of the key begins that ends at `at`: after its colon; 0 if no colon follows. Spaces before the
    colon may be most of a body.
    """
    while raw[at : at + 1] != b":":
        spaces = _SPACES.match(raw, at, at + SLICE_BYTES)
        if spaces is None:
            return 0
        at = spaces.end()
        if len(spaces[0]) == SLICE_BYTES:
            yield
    return at + 1


def _without_escapes(piece: bytes) -> bytes:
    """The piece without its escaped backslashes and quotes: each quote that is left begins or ends a text."""
    return piece.replace(b"\\\\", b"").replace(b'\\"', b"") if _BACKSLASH in piece else piece


def _is_text(piece: bytes) -> bool:
    """Whether `piece` may stand inside a text. Escaped backslashes and quotes are removed already."""
    return len(piece.translate(None, _CONTROLS)) == len(piece) and not (
        _BACKSLASH in piece and _WRONG_ESCAPE.search(piece)
    )


def _add(plain: list[Plain], slice_: Plain) -> None:
    """Add a slice to the ranges before it: join it to its neighbour, or append it. Of spaces, the first one stays
    out.
    """
    if plain and plain[-1].end == slice_.start:
        plain[-1] = plain[-1]._replace(end=slice_.end)
    else:
        plain.append(slice_ if slice_.is_text else slice_._replace(start=slice_.start + 1))


def _check(values: int, commas: int, values_max: int) -> None:
    if values > values_max:
        raise TooMany(f"The body holds more than {values_max:,} objects, arrays and texts.")
    if commas > NUMBERS_MAX:
        raise TooMany(f"The body holds more than {NUMBERS_MAX:,} numbers.")


def run(steps: Steps[Found]) -> Found:
    """Run all steps at once."""
    work = ScanWork(steps)
    for _ in work:
        pass
    return work.found


def end_of_slice(raw: bytes, start: int) -> int:
    """Where a slice ends, never inside an escape. `start` is never inside one either."""
    end = min(start + SLICE_BYTES, len(raw))
    end = min(end + backslashes_before(raw, end, start) % 2, len(raw))
    at = raw.rfind(b"\\u", max(start, end - _LONGEST_ESCAPE + 1), end)
    if at < 0 or backslashes_before(raw, at, start) % 2:
        return end
    whole = at + _LONGEST_ESCAPE
    return whole if _BACKSLASH not in raw[at + 2 : whole] and whole <= len(raw) else end


def backslashes_before(raw: bytes, at: int, since: int) -> int:
    """How many backslashes stand directly before `at`, at or after `since`."""
    near = raw[max(since, at - _RUN_BYTES) : at]
    run_bytes = len(near) - len(near.rstrip(_BACKSLASH))
    if run_bytes < _RUN_BYTES:
        return run_bytes
    far = raw[since:at]
    return len(far) - len(far.rstrip(_BACKSLASH))


def _deeper(depth: int, brackets: bytes, depth_max: int) -> int:
    """The depth after these brackets, all written as square ones; below 0 if they do not match.

    Raises:
        TooDeep: the brackets nest deeper than `depth_max`.
    """
    opening = brackets.count(b"[")
    if depth + opening > depth_max and max(accumulate(map(_STEPS.__getitem__, brackets), initial=depth)) > depth_max:
        raise TooDeep(f"The body is nested more than {depth_max} levels deep.")
    return depth + 2 * opening - len(brackets)
