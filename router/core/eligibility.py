"""Law 8, exact or not at all: the parameters of a request decide which ways of serving it are exact.

There are three ways to serve a request: *seeded* (the client gets P's first token before the hand-over), *plain*
(handed over, and D generates every token the client gets) and *aggregated* (served wholly by one engine, with that
engine's own validation and semantics). A second result says whether a broken stream may be *resumed*: generated again
on another instance, while the router drops the tokens that the client already has.

`RULES` is the table; the strictest matching rule decides. Neutral values (None, False, 0, empty, ``n=1``) count as
absent, except where vLLM reads 0 or empty as a value (`_Given`). docs/exactness.md is generated from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from cluster.readable import lax_flag
from router.core.unread import Sort, Unread

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATING_PATHS = frozenset({COMPLETIONS, CHAT})

Body = Mapping[str, Any]


class Way(StrEnum):
    """How a request is served: the fastest way that is exact for it."""

    SEEDED = "seeded"
    PLAIN = "plain"
    AGGREGATED = "aggregated"


class Verdict:
    """The result for one request."""

    __slots__ = ("because", "resumable", "way")

    def __init__(self, way: Way, because: str, resumable: bool) -> None:  # noqa: FBT001
        """`because`: the rule that decided; empty for *seeded*."""
        self.way: Final = way
        self.because: Final = because
        self.resumable: Final = resumable

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Verdict):
            return False
        return (self.way, self.because, self.resumable) == (other.way, other.because, other.resumable)

    def __hash__(self) -> int:
        return hash((self.way, self.because, self.resumable))


_STRICTNESS = (Way.SEEDED, Way.PLAIN, Way.AGGREGATED)


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    parameter: str
    form: str
    """When the rule applies, in words."""
    way: Way
    resumable: bool
    why: str
    applies: Callable[[str, Body], bool]
    """Whether the rule applies to a path and a body. Rules that depend on P's answer or on the stream are never true
    here."""


def verdict(path: str, body: Body) -> Verdict:
    """The strictest of all matching rules."""
    way, because, resumable, strictness = Way.SEEDED, "", True, 0
    for rule, its in _asked_of(_NAMES.intersection(body)):
        if rule.applies(path, body):
            resumable = resumable and rule.resumable
            if its > strictness:
                way, because, strictness = rule.way, f"{rule.parameter}: {rule.why}", its
            if way is Way.AGGREGATED:
                break
    return Verdict(way, because, resumable and way is not Way.AGGREGATED)


@lru_cache(maxsize=1024)
def _asked_of(names: frozenset[str]) -> tuple[tuple[Rule, int], ...]:
    """The rules that a body with these of `_NAMES` can match, in order, with their strictness."""
    return tuple(
        (rule, _STRICTNESS.index(rule.way))
        for rule in RULES
        if rule.applies is not _never and not _needs(rule.applies).isdisjoint({*names, _NOTHING})
    )


def single_token(path: str, body: Body) -> bool:
    """Whether the client asked for one token: then P's own answer is the whole answer."""
    limit = _token_limit(path, body)
    return isinstance(limit, int) and not isinstance(limit, bool) and limit == 1


def drawn_by_lot(body: Body) -> bool:
    """Whether the answer is sampled without a seed. vLLM's default temperature is the model's, mostly above 0; its seed
    -1 is none.
    """
    seed = body.get("seed")
    return body.get("temperature") != 0 and (not isinstance(seed, int) or seed == -1)


def is_on(fields: Mapping[str, Any], name: str) -> bool:
    """Whether vLLM takes this flag for true: it reads `1` and `"yes"` so, too."""
    given = fields.get(name)
    return given is True or (given is not None and given is not False and lax_flag(given) is True)


def has_room(body: Body, prompt_tokens: int | None, context: int | None) -> bool:
    """Whether D will accept the lengths that leg 1 does not carry. If not, D must refuse with its own status, so no
    seed may be sent.

    vLLM 0.32 refuses a limit above `context` (its ``max_model_len``, tokens); it lowers one that does not fit beside
    the prompt (`get_max_tokens`). It refuses a ``min_tokens`` above the limit that counts in the end, which the model's
    ``generation_config.json`` or the engine's flags may lower further: only D knows it.
    """
    if (body.get("min_tokens") or 0) > 1:
        return False
    limit = max(body.get(name) or 0 for name in _MOST)
    return not limit or (prompt_tokens is not None and context is not None and max(limit, prompt_tokens + 1) <= context)


# --- conditions -------------------------------------------------------------------------------------------------------


_DEFAULT_LIMIT = 16
"""vLLM's ``max_tokens`` of completions that name none."""


def _token_limit(path: str, body: Body) -> Any:
    """The output limit as vLLM reads it; None: no limit. In chats ``max_completion_tokens`` wins over ``max_tokens``;
    completions do not have it.
    """
    limit = body.get("max_completion_tokens") if path == CHAT else None
    limit = body.get("max_tokens") if limit is None else limit
    return _DEFAULT_LIMIT if limit is None and path == COMPLETIONS else limit


_MOST = ("max_tokens", "max_completion_tokens")
_COUNTS = (*_MOST, "min_tokens")


def _not_a_count(_: str, body: Body) -> bool:
    for name in _COUNTS:
        value = body.get(name)
        if value is not None and (type(value) is not int or value < 0):  # JSON has no other kinds of ints than bools
            return True
    return False


def _one_token_at_most(path: str, body: Body) -> bool:
    limit = _token_limit(path, body)
    return isinstance(limit, int) and limit < 2


def _impossible_minimum(path: str, body: Body) -> bool:
    minimum, limit = body.get("min_tokens"), _token_limit(path, body)
    return not _not_a_count(path, body) and minimum is not None and limit is not None and minimum > limit


def _several_answers(_: str, body: Body) -> bool:
    count = body.get("n", 1)
    return count not in (None, 1) or isinstance(count, bool)


def _several_candidates(_: str, body: Body) -> bool:
    count = body.get("best_of")
    return bool(count) and (count != 1 or isinstance(count, bool))


_PROMPTS = frozenset({Sort.TEXT, Sort.IDS})


def _odd_prompt(path: str, body: Body) -> bool:
    if path != COMPLETIONS:
        return False
    prompt = body.get("prompt")
    if isinstance(prompt, Unread):
        return prompt.sort not in _PROMPTS
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return not prompt
    return not (isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt))


STOPS_MAX = 64
"""With more stop strings, no first token is sent early: each would have to be looked for in it."""
STOP_CHARS_MAX = 4096
"""The same for a longer stop string."""


def _many_stops(_: str, body: Body) -> bool:
    stop = body.get("stop")
    if isinstance(stop, str):
        return len(stop) > STOP_CHARS_MAX
    if isinstance(stop, list):
        return len(stop) > STOPS_MAX or any(isinstance(each, str) and len(each) > STOP_CHARS_MAX for each in stop)
    return isinstance(stop, Unread)


def _odd_messages(path: str, body: Body) -> bool:
    messages = body.get("messages")
    if isinstance(messages, Unread):
        return path == CHAT and messages.sort is not Sort.LIST
    return path == CHAT and (not isinstance(messages, list) or not messages)


def _forced_call(path: str, body: Body) -> bool:
    choice = body.get("tool_choice")
    return path == CHAT and (choice == "required" or isinstance(choice, Mapping))


def _tools(path: str, body: Body) -> bool:
    choice = body.get("tool_choice", "")  # null is not absent: without tools, vLLM's tool parser reads the text then
    return (bool(body.get("tools")) and choice != "none") or (choice is None and path == CHAT)


def _logprobs(path: str, body: Body) -> bool:
    wanted = body.get("logprobs")  # completions: a count, where 0 (also false) asks for the chosen token's own
    return wanted is not None and (wanted is not False or path == COMPLETIONS)


def _usage_in_every_chunk(_: str, body: Body) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("continuous_usage_stats"))


_OPTIONS = frozenset({"include_usage", "continuous_usage_stats"})
_SWITCHES = frozenset({bool, type(None)})


def _odd_options(_: str, body: Body) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        return True
    return not options.keys() <= _OPTIONS or any(type(value) not in _SWITCHES for value in options.values())


def _drawn_by_lot(_: str, body: Body) -> bool:
    return drawn_by_lot(body)


class _Set:
    """Applies if a parameter is given and not neutral."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, _: str, body: Body) -> bool:
        return bool(body.get(self.name))


class _Given:
    """Applies if a parameter is given and not null: 0, false and an empty text are values, too."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, _: str, body: Body) -> bool:
        return body.get(self.name) is not None


def _never(_: str, __: Body) -> bool:
    return False


_NOTHING = ""

_LIMITS = frozenset(_COUNTS)

_GIVEN_BY: dict[Callable[[str, Body], bool], frozenset[str]] = {
    _several_candidates: frozenset({"best_of"}),
    _several_answers: frozenset({"n"}),
    _not_a_count: _LIMITS,
    _one_token_at_most: _LIMITS,
    _impossible_minimum: frozenset({"min_tokens"}),
    _forced_call: frozenset({"tool_choice"}),
    _logprobs: frozenset({"logprobs"}),
    _tools: frozenset({"tools", "tool_choice"}),
    _usage_in_every_chunk: frozenset({"stream_options"}),
    _odd_options: frozenset({"stream_options"}),
    _many_stops: frozenset({"stop"}),
}
"""For each of these conditions, the parameters of which one must be given."""


def _needs(applies: Callable[[str, Body], bool]) -> frozenset[str]:
    """The parameters of which one must be given; `_NOTHING`: the rule may apply to any body."""
    if isinstance(applies, (_Set, _Given)):
        return frozenset({applies.name})
    return _GIVEN_BY.get(applies, frozenset({_NOTHING}))


# --- the table --------------------------------------------------------------------------------------------------------

_S, _P, _W = Way.SEEDED, Way.PLAIN, Way.AGGREGATED

RULES: tuple[Rule, ...] = (
    # whole on one engine
    Rule("endpoint", "any other than completions and chat", _W, False, "not a text generation endpoint",
         lambda path, _: path not in GENERATING_PATHS),
    Rule("best_of", "above 1", _W, False, "several candidates per prompt", _several_candidates),
    Rule("echo", "true", _W, False, "the prompt is part of the answer", _Set("echo")),
    Rule("prompt_embeds", "given", _W, False, "the prompt is not text", _Given("prompt_embeds")),
    Rule("prompt_logprobs", "given", _W, False, "prompt logprobs need the whole prefill on one engine",
         _Given("prompt_logprobs")),
    Rule("suffix", "given", _W, False, "infilling", _Given("suffix")),
    Rule("truncate_prompt_tokens", "given", _W, False,
         "the truncation depends on max_tokens, which differs between legs", _Given("truncate_prompt_tokens")),
    Rule("use_beam_search", "true", _W, False, "beam search", _Set("use_beam_search")),
    Rule("n", "above 1", _W, False, "several answers to one prompt", _several_answers),
    Rule("max_tokens, max_completion_tokens, min_tokens", "not a count", _W, False,
         "not a count, the engine shall say so", _not_a_count),
    Rule("max_tokens", "0 or 1", _W, False, "at most one token: nothing left to decode elsewhere", _one_token_at_most),
    Rule("min_tokens", "above max_tokens (completions without: above 16)", _W, False,
         "above max_tokens: the engine shall say so", _impossible_minimum),
    Rule("prompt", "several, or none", _W, False, "not one text or one list of token ids", _odd_prompt),
    Rule("messages", "none", _W, False, "not a list of messages, the engine shall say so", _odd_messages),
    Rule("tool_choice", "required or a function", _W, False,
         "a forced call cannot be parsed from the prefill leg's single token", _forced_call),
    # seen only where it is chosen
    Rule("instances", "not proven to hand over to each other", _W, False,
         "what has not been seen to be one engine's answer may be another", _never),
    Rule("model", "a LoRA adapter, unless P and D tell one digest of it", _W, False,
         "one name may mean other weights on P, on D, or tomorrow", _never),
    # handed over, but D speaks first
    Rule("stream", "false", _P, False, "the answer comes in one piece: there is nothing to say early, and until it is "
         "there any instance may start anew", lambda _, body: not is_on(body, "stream")),
    Rule("logprobs, top_logprobs", "given", _P, False, "the first chunk carries numbers that D has not computed",
         _logprobs),
    Rule("return_token_ids", "true", _P, False, "vLLM adds the prompt's ids to the first chunk",
         _Set("return_token_ids")),
    Rule("return_tokens_as_token_ids", "true", _P, False, "texts are replaced by ids",
         _Set("return_tokens_as_token_ids")),
    Rule("stream_options.continuous_usage_stats", "true", _P, False, "every chunk counts tokens",
         _usage_in_every_chunk),
    Rule("stream_options", "of another form than vLLM's", _P, False, "only D sees them: the engine shall say so",
         _odd_options),
    Rule("stop", "more than 64 texts, or one over 4,096 characters", _P, True,
         "to look for each in the first token would hold up all other requests", _many_stops),
    Rule("tools", "given, tool_choice not none; or tool_choice null", _P, False,
         "a parser stands between tokens and text", _tools),
    # seen only in P's answer
    Rule("first token", "ends inside a character, or has no text", _P, True,
         "its text is not known before the next token", _never),
    Rule("first token", "not known to be the answer's: P left some of the prompt to D, or the proof found another one, "
         "or could not tell", _P, True, "P answers with the token after what it has computed", _never),
    Rule("first token", "of a chat, if P's engine has a reasoning parser", _P, True,
         "alone the parser may read the token otherwise than in a stream", _never),
    Rule("first token", "reasoning, or a tool call", _P, False, "a parser stands between tokens and text", _never),
    Rule("max_tokens", "beyond the model's context, or that is not known", _P, True,
         "only D sees it: it may refuse, with a true status", _never),
    Rule("min_tokens", "above 1", _P, True, "D refuses it above the limit that counts in the end, which only D knows",
         _never),
    Rule("stop", "the first token's text holds or may begin a stop string", _P, True,
         "D may have to take that text back", _never),
    Rule("finish_reason", "stop at the first token", _W, False, "EOS or a stop string first: P's answer is the whole "
         "answer, or P makes the stream; where P's token is drawn by lot, or not known to be the first, D answers",
         _never),
    # seeded, but never resumed
    Rule("temperature, seed", "temperature not 0 and no seed (or -1)", _S, False,
         "drawn by lot: a second answer would be another one", _drawn_by_lot),
    # seeded and resumable: nothing to forbid, listed because a live test stands behind each
    Rule("stop", "given", _S, True, "P and D look for the same strings", _never),
    Rule("chat_template, add_generation_prompt, continue_final_message", "given", _S, True,
         "both legs carry them, and P and D are proven to read a chat as the same tokens", _never),
    Rule("temperature, penalties", "left out", _S, True,
         "P and D are proven to draw the same by default, and agents tell other defaults apart", _never),
    Rule("seed", "given", _S, True, "D's generator draws for the pinned token too, so the next draw is the same",
         _never),
    Rule("presence, frequency, repetition penalty", "given", _S, True, "the pinned token counts as generated", _never),
    Rule("logit_bias, bad_words, allowed_token_ids", "given", _S, True, "P obeyed them", _never),
    Rule("min_tokens", "up to max_tokens", _S, True, "P forbids EOS as D does", _never),
    Rule("response_format, structured_outputs", "given", _S, True,
         "P's token is the grammar's, and D's grammar takes it", _never),
    Rule("stream_options.include_usage", "true", _S, True, "the usage is D's own", _never),
    Rule("prompt length", "at a block's edge", _S, True, "D's prompt stays the client's: no block more than P holds",
         _never),
)  # fmt: skip

_NAMES = frozenset().union(*(_needs(rule.applies) for rule in RULES if rule.applies is not _never))
"""Parameters that decide which rules may apply: most bodies have none of them."""
