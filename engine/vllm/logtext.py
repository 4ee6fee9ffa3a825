"""Reads vLLM's log for people: how far a start is, and why it failed. Pure and total: any text is read.

The phrases are those of vLLM 0.32. If a later version words a line differently, a start shows an older stage a little
longer; nothing else depends on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

FIRST_STAGE = "importing vLLM"

_STAGES = (
    ("reading the model's configuration", ("non-default args",)),
    ("starting the engine core", ("Initializing a V1 LLM engine",)),
    ("loading weights", ("Starting to load model", "Loading model from scratch")),
    ("preparing the model", ("Loading weights took",)),
    ("loading the draft model", ("Loading drafter model",)),
    ("compiling", ("Starting torch.compile", "Compiling a graph")),
    ("measuring memory", ("torch.compile took",)),
    ("allocating the KV cache", ("GiB for KV cache", "Available KV cache memory", "KV cache size")),
    ("opening NIXL", ("Initializing NIXL worker",)),
    ("warming up", ("Detected kv cache layout",)),
    ("capturing CUDA graphs", ("Capturing CUDA graph",)),
    ("starting the HTTP server", ("init engine (profile",)),
    ("first token", ("Application startup complete",)),
)
"""The stages of a start in their order, and the phrases that begin each."""

_ORDER = {words: at for at, words in enumerate((FIRST_STAGE, *(words for words, _ in _STAGES)))}
_WEIGHTS, _PREPARING, _DRAFT, _MEASURING, _CACHE, _GRAPHS = (
    "loading weights",
    "preparing the model",
    "loading the draft model",
    "measuring memory",
    "allocating the KV cache",
    "capturing CUDA graphs",
)

_SHARDS = re.compile(r"Loading .*checkpoint shards?: +(\d+)%")
_WITH_DRAFT = re.compile(r"\bspeculative_config=SpeculativeConfig\(")
_PREFIX = re.compile(
    r"""^(?:\([^()]*pid=\d+\)\s?)?                        # (EngineCore pid=12)
        (?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s[\d-]+\s[\d:]+\s\[[^]]*\]\s?)?   # ERROR 11-20 16:16:58 [core.py:1512]
    """,
    re.VERBOSE,
)
_NO_ERROR = re.compile(r"^(?:\([^()]*pid=\d+\)\s?)?(?:DEBUG|INFO|WARNING)\s[\d-]+\s[\d:]+\s\[")
"""The beginning of a line with which vLLM goes on: a package that is optional and could not be imported, say."""
_ERROR = re.compile(r"^(?:[A-Za-z_.][\w.]*)?(?:(?:Error|Exception|Interrupt|Exit|Failure)\b|\.[A-Z]\w*)(?::.*)?$")
"""An error by its usual names; with its module (``triton.runtime.errors.OutOfResources``) also by another one."""
_CAUSE = "The above exception was the direct cause of the following exception:"
_PROCESS = re.compile(r"^\([^()]*pid=\d+\)")
_USAGE = re.compile(r"^[\w.-]+: error: (?P<text>.+)$")
_MODULES = re.compile(r"^(?:\w+\.)+(?=\w+\b)")
_PYDANTIC = re.compile(r" \[type=\w+, input_value=.*$")
_NOISE = re.compile(r"^(?:usage: .*|\s+\[(?:-|[a-z_]+\]).*|[ ^~]+)$")
_POINTERS = ("See root cause above", "See stack trace", "Engine core initialization failed")
"""Errors that only point to an earlier one."""

_LISTENER = "Exception in thread nixl_handshake_listener"
"""The thread in which vLLM's connector answers handshakes: the engine core waits until the thread listens, for ever."""

SILENT_DEATH = "the engine core ended without a word (killed, or out of memory?)"
"""The reason if the log holds only such pointers."""

_MORE_LINES_MAX = 3
"""Lines of an error's text that are kept after its first one."""


def has_draft(line: str) -> bool:
    """Whether this is vLLM's line with its configuration, and the engine speculates with a draft model or a head."""
    return _WITH_DRAFT.search(line) is not None


def stage(line: str, reached: str = FIRST_STAGE, *, drafts: bool = False) -> str:
    """How far the start is after this line, if it had `reached` this stage before. No line leads back: neither to an
    earlier stage, nor to a smaller percentage.

    On a GPU vLLM captures CUDA graphs twice: a few before it has a KV cache, to measure their memory, and all of them
    at the end. Workers may write lines of a stage that is over. Other ranks and a model's second set of weights count
    from 0 % again; the highest percentage stays. If the engine `drafts` (`has_draft`), its draft model's weights come
    after "Loading weights took", and begin with 0 %: one of vLLM's two model runners does not name them.
    """
    shards = _SHARDS.search(line)
    if shards:
        return _loading(int(shards[1]), reached, drafts=drafts)
    found = next((words for words, phrases in _STAGES if any(phrase in line for phrase in phrases)), None)
    if found == _GRAPHS and _at(reached) < _ORDER[_CACHE]:
        found = _MEASURING
    return reached if found is None or _ORDER[found] <= _at(reached) else found


def stage_after(lines: Iterable[str], reached: str, *, drafts: bool) -> tuple[str, bool]:
    """`stage` after all of these lines, and whether they or the ones before say that the engine `drafts`."""
    for line in lines:
        drafts = drafts or has_draft(line)
        reached = stage(line, reached, drafts=drafts)
    return reached, drafts


def hangs(lines: Iterable[str]) -> str | None:
    """Why the start will never end, if one of these lines says so; else None."""
    lost = any(_LISTENER in line for line in lines)
    return "the side channel of vLLM's connector does not listen (--side-channel-port)" if lost else None


def _loading(percent: int, reached: str, *, drafts: bool) -> str:
    """The stage after a line that says how much of a model's weights is loaded."""
    of, _, before = reached.partition(", ")
    if _ORDER[of] < _ORDER[_WEIGHTS]:
        of = _WEIGHTS
    elif of == _PREPARING and drafts and not percent:
        of = _DRAFT
    elif of not in {_WEIGHTS, _DRAFT}:
        return reached
    return f"{of}, {max(percent, int(before.removesuffix(' %') or 0))} %"


def _at(reached: str) -> int:
    """The place of a stage in the order, with or without its percentage."""
    return _ORDER[reached.partition(", ")[0]]


def reason(lines: Sequence[str]) -> str | None:
    """The line that says why vLLM ended: a wrong flag, or the error that its first traceback ends with; else None.

    The first error counts, not the last: later ones come from processes that notice the first one's end. If it is the
    direct cause of another one, that one counts. An error that only points to another is skipped if there is another.
    Tracebacks in warnings end nothing.
    """
    kept = [line for line in lines if not _NO_ERROR.match(line)]
    bare = [_bare(line) for line in kept]
    pointer = None
    for at, line in enumerate(bare):
        usage = _USAGE.match(line)
        if usage:
            return _whole(usage["text"], bare[at + 1 :])
        if not _is_error(bare, at):
            continue
        error = _whole(line, bare[at + 1 :])
        if not _points(error):
            return _outcome(kept[at:], error)
        pointer = pointer or error
    return _cannot_start(bare) or (pointer and SILENT_DEATH)


def _outcome(lines: Sequence[str], error: str) -> str:
    """The last error of the chain that begins with this `error`, in the first line: its author raised that one to say
    what the first one means. It is of the same process, and not one that only points to another.
    """
    own = [_bare(line) for line in lines if _process(line) == _process(lines[0])]
    follows = False
    for at, line in enumerate(own[1:], 1):
        if line == _CAUSE:
            follows = True
        elif follows and _is_error(own, at):
            follows, meant = False, _whole(line, own[at + 1 :])
            error = error if _points(meant) else meant
        elif not follows and line.startswith("Traceback "):
            break
    return error


def _bare(line: str) -> str:
    """The line without its process and the head of a log line."""
    return _PREFIX.sub("", line).rstrip()


def _process(line: str) -> str:
    found = _PROCESS.match(line)
    return found[0] if found else ""


def _is_error(lines: Sequence[str], at: int) -> bool:
    """Whether this line has the error of a traceback."""
    return _ERROR.match(lines[at]) is not None and _ends_traceback(lines, at)


def _points(error: str) -> bool:
    return any(phrase in error for phrase in _POINTERS)


def _ends_traceback(lines: Sequence[str], at: int) -> bool:
    """Whether an error line closes a traceback: the line before it is indented code, or names a file."""
    before = next((line for line in reversed(lines[:at]) if line.strip()), "")
    return before.startswith("  ")


def _whole(first: str, rest: Sequence[str]) -> str:
    """The error and the indented lines that belong to it (pydantic says what is wrong only there), on one line."""
    words = [_MODULES.sub("", first.strip())]
    for line in rest[:_MORE_LINES_MAX]:
        if not line.startswith("  ") or line.lstrip().startswith("For further information"):
            break
        words.append(line.strip())
    return _PYDANTIC.sub("", " ".join(words))


def worth_showing(lines: Sequence[str], count: int) -> list[str]:
    """The last `count` lines, without lines that do not help: empty ones, carets, and argparse's list of all flags."""
    return [line for line in lines if line.strip() and not _NOISE.match(line)][-count:]


def _cannot_start(lines: Sequence[str]) -> str | None:
    """The message of the keeper or the interpreter, if not even Python's module was found."""
    starts = ("cannot start ", "Error while finding module")
    return next((line for line in lines if line.startswith(starts) or "No module named" in line), None)
