"""vLLM's HTTP hand-over protocol: the one place that builds and reads ``kv_transfer_params``.

A hand-over is two requests to two engines (vLLM 0.32, NixlConnector, pull mode). P is the prefill engine, D the decode
engine:

1. *prefill leg*: the client's body with ``max_tokens=1``, not streamed, which asks P to keep the prompt's blocks;
2. *decode leg*: the client's body unchanged, plus the fields that P answered with, so that D pulls the blocks.

These fields in a client's own body never reach an engine. With a ``remote_host`` a client could make the engine connect
to any machine (vLLM issue 47843); a stale block id reads another prompt's answer (vLLM issue 52234).

This module runs inside the router and, with the guard, inside vLLM's own process: standard library only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from cluster.ids import InstanceId, TransferId
from cluster.scan import Steps

TRANSFER_KEYS: frozenset[str] = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""Removed at every depth: vLLM reads them at the top level, in ``sampling_params.extra_args`` and ``vllm_xargs``."""

TOP_LEVEL_KEYS: frozenset[str] = frozenset({"priority", "request_id"})
"""Removed at the top level only, where vLLM reads them; deeper they are the client's own words (a tool's field).

The router names the request at an engine. What an engine aborts, holds and keeps under a name then belongs to that
request alone."""

FREE_FORM_KEYS: frozenset[str] = frozenset({"vllm_xargs", "extra_args"})
"""Objects that vLLM also accepts as JSON text in a form; a text in these fields is searched, too."""

MEDIA_NAME = "uuid"
"""Key of a part of a message's content. Its value is a name that the client chooses. vLLM keeps the processed image,
sound or film under this name, and gives it to any request with the name alone. So names of two tenants must differ."""

MEDIA_CONTENT = "content"
"""Key of the parts of a message or document. vLLM reads the `MEDIA_NAME` of these parts; any other key of that name is
the client's own word (a tool's input)."""

MEDIA_ARRAYS_MAX = 2
"""The most arrays around messages or documents in their field: two in a batch of chats."""

FREE_TEXT_BYTES_MAX = 1 << 16
"""Characters of JSON as text in free-form fields that are searched; a body with more is refused."""

_SPACES_MAX = 1 << 10
"""Spaces that a free-form text may begin with and still be told from JSON by its first character."""

DEPTH_MAX = 64
"""Deepest nesting of a body that is searched. Real bodies stay under 20; deeper ones are refused, not passed unread."""

FIRST_TOKEN = "baton_first_token"  # noqa: S105 - a field's name
"""Baton's own key among the transfer fields: the token that D's answer must begin with. `engine.vllm.pin` reads it in
D."""

TICKET = "baton_ticket"
"""Baton's own key among the transfer fields: the router's signature under all the others (`kvtransfer.ticket`)."""

TRANSFER = "baton_transfer"
"""Baton's own key among the transfer fields: the `TransferId` that a router gives the hold before P has answered. An
engine with Baton's connector gives the hold up by that name (`RELEASE_PATH`); other engines ignore it."""

ADAPTER = "baton_adapter"
"""Baton's own key among the transfer fields: the digest of the LoRA adapter with which P has computed the blocks
(empty: unknown). Baton's connector writes it in P and compares it in D. No key: the model itself, or another connector
in P."""

EARLY = "baton_early"
"""Baton's own key among the transfer fields of a decode leg that is sent before P has answered: the instance that
computes the prompt. The leg names the hold-to-be (`TRANSFER`). P's connector tells D's connector when that hold is
there, and which token P has chosen; until then the leg has no blocks."""

PINS = "baton_pins"
"""Beside `EARLY`, true: D's answer begins with P's token, if that is the answer's first (as with `FIRST_TOKEN`)."""

TOLD_EARLY = "baton_told_early"
"""Baton's own key among the transfer fields of P's answer. True: an engine has asked for this hold, as it has an early
leg, and was told of it and of P's token. False: none was. An engine that was not told may compute the prompt itself,
and draw a token of its own. Engines of earlier versions tell, and do not say so."""

CACHED_ONLY = "baton_cached_only"
"""Baton's own key among the transfer fields, true on a *source leg*. The engine then holds as much of the prompt as its
KV cache and the tiers below it have, and computes none of the rest."""

FROM_CACHE = "baton_from_cache"
"""Baton's own key among the transfer fields, true in a source leg's hold. Such a hold is a prompt's beginning that was
cached, not computed for the request that pulls it."""

REASON_CHARS_MAX = 40
"""Longest ``finish_reason``: logs and errors repeat it."""

COUNT_MAX = 1 << 31
"""A count of tokens from this value on is not believed."""

ENGINE_ID_CHARS_MAX = 256
"""Longest engine id, by which the router remembers an engine: vLLM's ids have 36 characters and some more."""

_OBJECT = (dict, Mapping)
"""A dict first: to find out that something is a Mapping takes a microsecond."""

_NO_LIST = (str, int, float, dict)
"""What JSON has beside lists. A list that is only passed on is none of Python's: `msgspec.Raw`
(`router.core.engine_answers.prefilled_in`), which engines' own Python need not have."""

RANK_HEADER = "x-data-parallel-rank"
"""Chooses the data parallel rank of an engine that computes a request (vLLM). Set by routers, never by clients."""

RELEASE_PATH = "/baton/release"
"""Where an engine's guard takes a `release_by_name`."""

TICKET_REFUSED = "TicketRefused"
"""``error.type`` of a guard's refusal (`kvtransfer.guard`). A client cannot cause it."""

_CACHED = "remote_prefill_cached_tokens"

RELEASE_MODEL = "baton-release"
"""A model name that no engine serves: D rejects a decode leg for it, and then tells P to free the blocks."""

_FORWARDED_HEADERS = frozenset(
    {
        "accept",
        "anthropic-beta",
        "anthropic-version",
        "authorization",
        "baggage",
        "content-type",
        "openai-organization",
        "openai-project",
        "traceparent",
        "tracestate",
        "user-agent",
        "x-api-key",
    }
)


PARTS_MAX = 1000
"""Parts of one form: audio endpoints take about twenty."""

PART_HEAD_BYTES_MAX = 8192
_FORM_STEP = 1 << 20

_BOUNDARY = re.compile(r""";\s*boundary="?([A-Za-z0-9'()+_,./:=? -]{1,70})"?\s*(?:;|$)""", re.IGNORECASE)
_CHARSET = re.compile(r"""charset\s*=\s*(?!"?utf-8"?\s*(?:;|$))|charset\*""", re.IGNORECASE)
_PART_NAME = re.compile(
    rb'(?i)content-disposition:[ \t]*form-data;[ \t]*name="([A-Za-z0-9_.\[\]-]{1,128})"'
    rb'(;[ \t]*filename="[^"\r\n]*")?[ \t]*'
)


class NestedTooDeep(ValueError):
    """A body nests deeper than `DEPTH_MAX`."""


class TextTooLong(ValueError):
    """Free-form fields hold more JSON as text than `FREE_TEXT_BYTES_MAX`."""


class FormUnreadable(ValueError):
    """A multipart form that two readers might read differently."""


@dataclass(frozen=True, slots=True)
class TransferFields:
    """P's answer: where the prompt's blocks are held and how D reaches them. Only D reads its content."""

    fields: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """Prompt tokens whose KV is held; 0: P does not say."""
        count = self.fields.get("remote_num_tokens")
        return count if type(count) is int and 0 <= count < COUNT_MAX else 0

    def stops_short_of(self, answer: Mapping[str, Any]) -> str:
        """Why the token in P's answer may not be the first of the client's answer; empty: it is that token.

        P's token is the first one only if P has computed the whole prompt. On some models P leaves the prompt's last
        tokens to D (Mamba and its hybrids, MTP of several modules: vLLM 0.32, ``nixl/base_scheduler.py``,
        ``_prefill_backoff``). P's token is then what P would say *before* these tokens. P's answer does not say so, but
        P then holds fewer tokens than the prompt has (`usage`). If either number is missing, the question stays open.
        """
        usage = answer.get("usage")
        prompt = usage.get("prompt_tokens") if isinstance(usage, _OBJECT) else None
        held = self.fields.get("remote_num_tokens")
        if type(prompt) is not int or type(held) is not int or prompt < 1:
            return "P does not say how much of the prompt it has computed"
        return "" if held == prompt else f"P holds {held} of the prompt's {prompt} tokens: its token is not the first"

    def of_another_adapter(self, announced: str | None) -> str:
        """Why the blocks, and P's token, may be of another adapter than D's agent has announced; empty: they are not,
        as far as P tells.

        Agents notice within a second that an adapter was loaded anew, and P tells what it computed with at that moment.

        Args:
            announced: the adapter's digest on D; empty: unknown; None: the name is no adapter there.
        """
        told = self.fields.get(ADAPTER)
        if told is None or (told and told == announced):
            return ""
        return "P has computed with another adapter than D's agent announces, or cannot tell which"

    @property
    def told_early(self) -> bool:
        """Whether the engine of an early leg was told of this hold (`TOLD_EARLY`), as far as P says."""
        return self.fields.get(TOLD_EARLY) is not False

    @property
    def is_from_cache(self) -> bool:
        """Whether this is a source leg's hold (`FROM_CACHE`)."""
        return self.fields.get(FROM_CACHE) is True

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that P had in its prefix cache, as D will tell the client (vLLM 0.32); None: P does not say."""
        count = self.fields.get(_CACHED)
        return count if type(count) is int and 0 <= count < COUNT_MAX else None

    def at_most_cached(self, tokens: int | None) -> TransferFields:
        """The same transfer, with at most this many tokens reported as cached. The count of a prompt's first run holds:
        a second run finds what the first has left in the cache. None: unchanged.
        """
        told = self.cached_tokens
        return (
            self
            if tokens is None or told is None or told <= tokens
            else TransferFields({**self.fields, _CACHED: tokens})
        )

    def untold(self) -> TransferFields:
        """The same transfer without P's cached tokens: D then reports how many tokens it had itself, pulled ones
        included.
        """
        return TransferFields({name: value for name, value in self.fields.items() if name != _CACHED})

    @property
    def producer(self) -> str:
        """The engine that holds the blocks, by vLLM's id, which is new at every start of an engine."""
        return str(self.fields.get("remote_engine_id"))[:ENGINE_ID_CHARS_MAX]


def prefill_body(
    body: Mapping[str, Any],
    *,
    token_ids: bool = False,
    transfer: TransferId | None = None,
    source: TransferFields | None = None,
) -> dict[str, Any]:
    """The prefill leg for a client's (already stripped) body.

    Args:
        body: the client's body.
        token_ids: whether P's answer is to say which token it chose.
        transfer: the name of the hold that P will make (`TRANSFER`).
        source: a hold of the prompt's beginning, which P pulls first.
    """
    fields = prefill_fields(body, token_ids=token_ids, transfer=transfer, source=source)
    return {key: value for key, value in {**body, **fields}.items() if value is not None or key not in fields}


def source_fields(body: Mapping[str, Any], *, transfer: TransferId) -> dict[str, Any]:
    """The fields of a source leg (`CACHED_ONLY`): as `prefill_fields`, and nothing is computed but the last token."""
    leg = prefill_fields(body, transfer=transfer)
    leg["kv_transfer_params"][CACHED_ONLY] = True
    return leg


def prefill_fields(
    body: Mapping[str, Any],
    *,
    token_ids: bool = False,
    transfer: TransferId | None = None,
    source: TransferFields | None = None,
) -> dict[str, Any]:
    """The fields of a prefill leg that differ from the client's body. A value None: left out, or sent as null.

    The leg asks for one token, not streamed. ``min_tokens`` above 1 would be a 400 there. A request with ``min_tokens``
    may not end at its first token, so 1 is kept to make P forbid EOS just as D will.
    """
    leg: dict[str, Any] = {"max_tokens": 1, "stream": False}
    for name in ("stream_options", "max_completion_tokens"):
        if name in body:
            leg[name] = None
    if token_ids:
        leg["return_token_ids"] = True
    if body.get("min_tokens"):
        leg["min_tokens"] = 1
    leg["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    if source is not None:  # P is told both: to pull the beginning, and to hold the whole
        leg["kv_transfer_params"] = {**source.untold().fields, "do_remote_decode": True, TRANSFER: None}
    if transfer is not None:
        leg["kv_transfer_params"][TRANSFER] = str(transfer)
    return leg


def decode_body(
    body: Mapping[str, Any],
    transfer: TransferFields | None,
    first_token: int | None = None,
    adapter: str | None = None,
) -> Mapping[str, Any]:
    """The decode leg's fields: `body`, the place of its blocks, and its first token, if one is pinned.

    Args:
        body: the other fields.
        transfer: the hold that is pulled; None: the engine computes the prompt itself.
        first_token: the token that the answer is to begin with.
        adapter: used without a hold only: the digest of the adapter that chose the token, as P told it; None: the model
            itself chose it. If an engine's adapter has other weights, it begins with a token of its own.
    """
    fields = {} if transfer is None else dict(transfer.fields)
    if first_token is not None:
        fields[FIRST_TOKEN] = first_token
        if transfer is None and adapter is not None:
            fields[ADAPTER] = adapter
    return {**body, "kv_transfer_params": fields} if fields else body


def early_fields(name: TransferId, producer: InstanceId, *, pins: bool) -> dict[str, Any]:
    """The fields of a decode leg that is sent while `producer` computes the prompt, under the name of its hold-to-be.

    Nothing of vLLM's own stands in them: its connector would take them for a hold.
    """
    return {"kv_transfer_params": {TRANSFER: str(name), EARLY: producer, PINS: pins}}


def release_body(transfer: TransferFields) -> dict[str, Any]:
    """A decode leg that D rejects before it schedules anything; D then tells P to free the hold.

    vLLM 0.32 (``entrypoints/generate/base/serving.py``): a request with ``do_remote_prefill`` that ends in an error
    answer makes the connector notify the producer. It costs D no step and needs no prompt.
    """
    return {"model": RELEASE_MODEL, "prompt": "x", "max_tokens": 1, "kv_transfer_params": dict(transfer.fields)}


def release_by_name(transfer: TransferId | str) -> dict[str, Any]:
    """The body for `RELEASE_PATH`, before its ticket: it needs nothing from P's answer."""
    return {"kv_transfer_params": {TRANSFER: str(transfer)}}


def ticketed(body: Mapping[str, Any], sign: Callable[[str], str]) -> Mapping[str, Any]:
    """A leg with a ticket beside its transfer fields. `sign` signs their digest; a leg without such fields needs no
    ticket.
    """
    fields = body.get("kv_transfer_params")
    if not fields:
        return body
    return {**body, "kv_transfer_params": {**fields, TICKET: sign(fields_digest(fields))}}


def fields_digest(fields: Mapping[str, Any]) -> str:
    """The digest that a ticket signs: SHA-256 of all transfer fields but the ticket, in base64url.

    The fields are written in one spelling first (sorted keys, no spaces, ASCII), since programs parse and rewrite them
    between the two ends.
    """
    others = {name: value for name, value in fields.items() if name != TICKET}
    spelled = json.dumps(others, sort_keys=True, separators=(",", ":"))
    return base64.urlsafe_b64encode(hashlib.sha256(spelled.encode()).digest()).rstrip(b"=").decode()


def is_ticket_refused(status: int, body: bytes) -> bool:
    """Whether an engine's answer is its guard's refusal of a ticket."""
    return status == 403 and TICKET_REFUSED.encode() in body


def read_transfer(answer: Mapping[str, Any]) -> TransferFields | None:
    """The hold that P's answer describes; None if P kept nothing (no connector, or nothing to hand over)."""
    fields = answer.get("kv_transfer_params")
    if not isinstance(fields, _OBJECT) or not fields.get("do_remote_prefill"):
        return None
    blocks = fields.get("remote_block_ids")
    return TransferFields(dict(fields)) if blocks and not isinstance(blocks, _NO_LIST) else None


def first_finish_reason(answer: Mapping[str, Any]) -> str | None:
    """``finish_reason`` of the first choice of a completion or chat answer."""
    choices = answer.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], _OBJECT):
        reason = choices[0].get("finish_reason")
        return reason[:REASON_CHARS_MAX] if isinstance(reason, str) else None
    return None


def without_transfer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """P's answer as a client may see it: without the hold's address, as vLLM answers when there is no hold."""
    return {**answer, "kv_transfer_params": None}


def strip(body: dict[str, Any], *, namespace: str = "") -> dict[str, Any]:
    """A copy of a client's body without any field that could steer a transfer or jump a queue.

    `namespace` separates tenants that use ``cache_salt``, or that name media (`MEDIA_NAME`): engines never share
    anything between equal salts or names of two namespaces.

    Raises:
        NestedTooDeep: the body nests deeper than `DEPTH_MAX`.
        TextTooLong: the body holds too much JSON as text.
    """
    left = [FREE_TEXT_BYTES_MAX]
    clean = {
        key: _strip_value(key, value, 1, left)
        for key, value in body.items()
        if key not in TRANSFER_KEYS | TOP_LEVEL_KEYS
    }
    for value in clean.values():
        _rename_media(value, namespace, MEDIA_ARRAYS_MAX)
    salt = clean.get("cache_salt")
    if salt is None:
        clean.pop("cache_salt", None)  # null: for vLLM, too, the client has none
    elif isinstance(salt, str) and 1 <= len(salt) <= 1024:  # vLLM's own bounds: vLLM answers for anything else
        clean["cache_salt"] = apart(namespace, salt)
    return clean


def apart(namespace: str, name: str) -> str:
    """A name that no other namespace can make."""
    return hashlib.sha256(f"{namespace}\0{name}".encode("utf-8", "surrogatepass")).hexdigest()


def _rename_media(value: Any, namespace: str, arrays: int) -> None:
    """Rename the media of a field's value in place; up to `arrays` arrays may stand around its messages or documents.
    The router finds the same names in a large body (`router.request.media`).
    """
    if isinstance(value, list):
        for inner in value if arrays else ():
            if isinstance(inner, dict | list):
                _rename_media(inner, namespace, arrays - 1)
        return
    parts = value.get(MEDIA_CONTENT) if isinstance(value, dict) else None
    for part in parts if isinstance(parts, list) else ():
        named = part.get(MEDIA_NAME) if isinstance(part, dict) else None
        if named is not None:  # vLLM takes any value as a text
            part[MEDIA_NAME] = apart(namespace, named if isinstance(named, str) else json.dumps(named))


def _strip_value(key: str, value: Any, depth: int, left: list[int]) -> Any:
    if depth > DEPTH_MAX:
        raise NestedTooDeep(f"The body is nested more than {DEPTH_MAX} levels deep.")
    if isinstance(value, dict):
        return {
            name: _strip_value(name, inner, depth + 1, left)
            for name, inner in value.items()
            if name not in TRANSFER_KEYS
        }
    if isinstance(value, list):
        return [_strip_value(key, inner, depth + 1, left) for inner in value]
    if isinstance(value, str) and key in FREE_FORM_KEYS:
        return _strip_text(key, value, depth, left)
    return value


def _strip_text(key: str, text: str, depth: int, left: list[int]) -> Any:
    """Strip JSON inside a text of a free-form field if it is an object or a list; leave any other text alone.

    `left`: one number, how many characters of the body may still be searched. To build a text's values takes 500 times
    as long as to read its bytes.
    """
    start = text[:_SPACES_MAX].lstrip()
    if not start.startswith(("{", "[")) and (start or len(text) <= _SPACES_MAX):
        return text
    left[0] -= len(text)
    if left[0] < 0:
        raise TextTooLong(
            f"`{key}` holds JSON as text: {FREE_TEXT_BYTES_MAX:,} characters of that are looked into. Send objects."
        )
    try:
        inner = json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        raise NestedTooDeep(f"The text in `{key}` is nested more than {DEPTH_MAX} levels deep.") from None
    return json.dumps(_strip_value("", inner, depth + 1, left)) if isinstance(inner, dict | list) else text


def forwarded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The client's headers that an engine may see.

    An allow-list: `RANK_HEADER` and ``X-Vllm-Priority`` steer the engine, cookies are not for engines, and
    hop-by-hop headers belong to this hop. ``Authorization`` passes, for engines with an ``--api-key`` of their own.
    """
    return {name: value for name, value in headers.items() if name.lower() in _FORWARDED_HEADERS}


class FormField(NamedTuple):
    """One field of a form."""

    field: str
    """Name of the field; of ``a[b]`` it is ``a``."""
    begin: int
    """Where its content begins in the form's bytes."""
    end: int


def form_parts(raw: bytes, content_type: str) -> Steps[list[FormField]]:
    """The fields of a multipart form, in steps; nothing is copied.

    Takes only forms that every reader reads alike: any other form could hide a field from Baton that an engine then
    finds.

    Raises:
        FormUnreadable: the form is not such a form, or has more than `PARTS_MAX` parts.
    """
    match = _BOUNDARY.search(content_type)
    if match is None or content_type.lower().count("boundary") > 1:
        raise FormUnreadable("The multipart body has no readable boundary in its Content-Type.")
    if _CHARSET.search(content_type):
        raise FormUnreadable("The multipart body must be UTF-8.")
    edge = b"\r\n--" + match.group(1).rstrip().encode()
    ends = yield from _edges(raw, edge)
    if not ends or not _only(b"", raw, 0, ends[0]) or not _only(b"--", raw, ends[-1] + len(edge), len(raw)):
        raise FormUnreadable("The multipart body must begin with its boundary, and end with it and `--`.")
    parts: list[FormField] = []
    for begin, end in pairwise(ends):
        parts.append(_form_part(raw, begin + len(edge), end))
    return parts


def _only(said: bytes, raw: bytes, begin: int, end: int) -> bool:
    """Whether `said` stands alone in this range, with at most some spaces around it."""
    return end - begin <= PART_HEAD_BYTES_MAX and raw[begin : max(begin, end)].strip() == said


def _edges(raw: bytes, edge: bytes) -> Steps[list[int]]:
    """The positions of a form's boundaries, each from the line end before it. A first boundary without one is at -2."""
    found = [-2] if raw.startswith(edge[2:]) else []
    at = len(edge) - 2 if found else 0
    since = at
    while at < len(raw):
        step = min(len(raw), at + _FORM_STEP)
        next_at = raw.find(edge, at, step + len(edge) - 1)
        if next_at < 0:
            at = step
        else:
            found.append(next_at)
            at = next_at + len(edge)
            if len(found) > PARTS_MAX + 1:
                raise FormUnreadable(f"The multipart body has more than {PARTS_MAX:,} parts; send fewer.")
        if at - since >= _FORM_STEP:
            since = at
            yield
    return found


def form_with(raw: bytes, part: FormField, content: bytes) -> bytes:
    """A form with new content for one of its fields."""
    return b"".join((memoryview(raw)[: part.begin], content, memoryview(raw)[part.end :]))


def _form_part(raw: bytes, begin: int, end: int) -> FormField:
    """The part between two boundaries."""
    head_end = raw.find(b"\r\n\r\n", begin, min(end, begin + PART_HEAD_BYTES_MAX))
    lines = raw[begin : max(begin, head_end)].split(b"\r\n")
    names = [_PART_NAME.fullmatch(line) for line in lines if b"content-disposition" in line.lower()]
    if lines[0] or head_end < 0 or len(names) != 1 or names[0] is None:
        raise FormUnreadable('A part of the multipart body has no plain `name`; send `form-data; name="field"`.')
    return FormField(names[0].group(1).decode().split("[", 1)[0], head_end + 4, end)
