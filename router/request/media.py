"""Finds the names of media in a large body, among its keys `wire.MEDIA_NAME`. Pure.

`wire.strip` renames the media of a small body; this module finds the same names without building the body. Both follow
one rule: the key stands in a part of the `content` of a message or document, and around this message or document stand
only arrays, `wire.MEDIA_ARRAYS_MAX` at most.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from cluster import scan, wire

_Positions = np.ndarray[Any, np.dtype[np.int64]]

_AROUND: Final = re.compile(rb"\[{0,%d}\{\[\{" % wire.MEDIA_ARRAYS_MAX)
"""The brackets around a name, inside its field: arrays, a message, its content, a part."""
_FEWEST: Final = 3
_MOST: Final = _FEWEST + wire.MEDIA_ARRAYS_MAX
"""How many brackets these are."""
_CONTENT: Final = re.compile(b'"' + scan.spelled(wire.MEDIA_CONTENT) + b'"$')
_LONGEST: Final = 6 * len(wire.MEDIA_CONTENT) + 2
_WHITE: Final = b" \t\r\n"
_NEAR: Final = 128
"""The bytes before a list that are first searched for its key: few bodies have spaces there."""
_STEPS: Final = np.array([(chr(byte) in "[{") - (chr(byte) in "]}") for byte in range(256)], dtype=np.int8)
_PARTS_A_STEP: Final = 256


def named(text: bytes, begin: int, keys: Sequence[scan.FoundKey], places: Sequence[int]) -> scan.Steps[list[bool]]:
    """Which of these keys name media.

    Args:
        text: the body, without the insides of long texts and without long spaces.
        begin: where the keys' field has its value.
        keys: keys `wire.MEDIA_NAME` inside this value.
        places: where their values begin in `text`, ascending.
    """
    may = [_FEWEST < key.depth <= _MOST + 1 for key in keys]
    rows = yield from _brackets_around(text, begin, np.array([at for at, is_ in zip(places, may, strict=True) if is_]))
    is_content: dict[int, bool] = {}
    found = []
    row = 0
    for key, is_ in zip(keys, may, strict=True):
        if not is_:
            found.append(False)
            continue
        around = rows[row, : key.depth - 1].tolist()
        row += 1
        parts = around[-2]
        if parts not in is_content:
            is_content[parts] = _AROUND.fullmatch(bytes(text[at] for at in around)) is not None and (
                yield from _has_content_key(text, parts)
            )
        found.append(is_content[parts])
        if not row % _PARTS_A_STEP:
            yield
    return found


def _brackets_around(text: bytes, begin: int, places: _Positions) -> scan.Steps[_Positions]:
    """A row for each place: the positions of the brackets that are open there, from the outermost one in. A row goes on
    with brackets that are closed.
    """
    rows = np.zeros((len(places), _MOST), dtype=np.int64)
    last = np.zeros(_MOST, dtype=np.int64)
    start, depth, inside, done = begin, 0, 0, 0
    while done < len(places):
        end = scan.end_of_slice(text, start)
        piece = text[start:end].replace(b"\\\\", b"__").replace(b'\\"', b"__")  # as long as before: positions count
        codes = np.frombuffer(piece, dtype=np.uint8)
        quotes = np.flatnonzero(codes == ord('"'))
        brackets = np.flatnonzero(_STEPS[codes])
        brackets = brackets[(np.searchsorted(quotes, brackets) + inside) % 2 == 0]
        steps = _STEPS[codes[brackets]]
        depths = depth + np.cumsum(steps)
        here = slice(done, int(np.searchsorted(places, end)))
        for level in range(_MOST):
            opened = start + brackets[(steps > 0) & (depths == level + 1)]
            known = np.concatenate((last[level : level + 1], opened))
            rows[here, level] = known[np.searchsorted(opened, places[here])]
            last[level] = known[-1]
        depth = int(depths[-1]) if len(depths) else depth
        inside = (inside + len(quotes)) % 2
        start, done = end, here.stop
        yield
    return rows


def _has_content_key(text: bytes, at: int) -> scan.Steps[bool]:
    """Whether the list at `at`, which stands in an object, is the value of a key `wire.MEDIA_CONTENT`."""
    size = _NEAR
    while True:
        start = max(0, at - size)
        tail = text[start:at].rstrip(_WHITE).removesuffix(b":").rstrip(_WHITE)
        if len(tail) > _LONGEST or not start:
            break
        size *= 8
        yield
    found = _CONTENT.search(tail)
    return found is not None and not scan.backslashes_before(text, start + found.start(), 0) % 2
