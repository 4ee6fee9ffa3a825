"""Laws of the prefix-cache index under any history, and of chunk names under any text."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core.values import Sent
from router.predict.chunks import CHUNK_BYTES, Hasher, prompt_text
from router.predict.prefix_cache import PrefixCacheIndex

HASHER = Hasher(b"0123456789abcdef")
TOKENS = CHUNK_BYTES // 4
ENTRIES_MAX = 60

rows = st.integers(0, 3)
prompts = st.tuples(st.integers(0, 3), st.integers(0, 12)).map(
    lambda each: [each[0] * 1000 + at for at in range(each[1])]
)


class Index(RuleBasedStateMachine):
    """All events of a prefix-cache index, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixCacheIndex(ENTRIES_MAX)
        self.now = 0.0
        self.told: dict[int, set[int]] = {}
        self.open: list[Sent] = []

    @rule(row=rows, chunks=st.integers(0, 40), epoch=st.integers(0, 2))
    def join(self, row: int, chunks: int, epoch: int) -> None:
        self.index.join(row, chunks * TOKENS, epoch)
        self.told.setdefault(row, set())

    @rule(row=rows)
    def leave(self, row: int) -> None:
        self.index.leave(row)
        self.told.pop(row, None)

    @rule(row=rows, prompt=prompts)
    def send(self, row: int, prompt: list[int]) -> None:
        self.now += 1
        sent = self.index.sent(row, prompt, self.now)
        assert (sent is None) == (row not in self.told)
        if sent:
            self.told[row].update(prompt)
            self.open.append(sent)

    @rule(
        cached=st.none() | st.integers(0, 20 * TOKENS), tokens=st.integers(0, 20 * TOKENS), size=st.integers(0, 1 << 15)
    )
    def answer(self, cached: int | None, tokens: int, size: int) -> None:
        self.now += 1
        if self.open:
            self.index.answered(self.open.pop(0), self.now, prompt_tokens=tokens, text_bytes=size, cached_tokens=cached)

    @rule(row=rows, prompt=prompts, tokens=st.integers(0, 10 * TOKENS), which=st.sampled_from("wroteused"))
    def end(self, row: int, prompt: list[int], tokens: int, which: str) -> None:
        self.now += 1
        if which in "wrote":
            self.index.wrote(row, tokens, self.now)
        else:
            self.index.used(row, prompt, self.now)

    def held(self, row: int) -> set[int]:
        """Chunks that the instance is assumed to hold."""
        known = self.index._held.get(row)
        return set() if known is None else {name for name in known.entries if name >= 0}

    @rule(row=rows, tokens=st.integers(0, 10 * TOKENS))
    def removed(self, row: int, tokens: int) -> None:
        before = self.held(row)
        self.index.removed(row, tokens)
        assert self.held(row) <= before, "this event removes chunks, and never adds any"

    @rule(row=rows)
    def cleared(self, row: int) -> None:
        self.index.cleared(row)
        self.told.get(row, set()).clear()
        assert not self.held(row)

    @invariant()
    def bounded(self) -> None:
        assert len(self.index) <= ENTRIES_MAX

    @invariant()
    def matches_are_what_each_instance_holds(self) -> None:
        for first in range(4):
            prompt = [first * 1000 + at for at in range(14)]
            match = self.index.match(prompt)
            for row in range(4):
                held = self.held(row)
                assert held <= self.told.get(row, set()), (
                    "an instance is expected to hold only chunks that were sent to it"
                )
                whole = next((at for at, name in enumerate(prompt) if name not in held), len(prompt))
                assert match.chunks_of(row) == whole


Index.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndex = Index.TestCase

text = st.binary(min_size=1, max_size=40).flatmap(lambda seed: st.integers(0, 6000).map(lambda n: (seed * n)[:6000]))


@given(text, text)
@settings(deadline=None)
def test_appended_text_changes_no_name(before: bytes, more: bytes) -> None:
    scope = HASHER.scope("m", "t")
    names = HASHER.names(scope, before)
    assert HASHER.names(scope, before + more)[: len(names)] == names


@given(text, text)
@settings(deadline=None)
def test_names_of_chunks_are_equal_exactly_as_far_as_the_texts_are(one: bytes, other: bytes) -> None:
    scope = HASHER.scope("m", "t")
    both = zip(HASHER.names(scope, one), HASHER.names(scope, other), strict=False)
    for at, (name, named) in enumerate(both, start=1):
        assert (name == named) == (one[: at * CHUNK_BYTES] == other[: at * CHUNK_BYTES])


@given(
    text, st.lists(st.tuples(st.text(max_size=3), st.none() | st.text(max_size=3), st.text(max_size=3)), unique=True)
)
@settings(deadline=None)
def test_no_two_scopes_share_a_name(content: bytes, scopes: list[tuple[str, str | None, str]]) -> None:
    named = [HASHER.names(HASHER.scope(*each), content) for each in scopes]
    assert len({name for names in named for name in names}) == sum(map(len, named))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": values}), max_size=4
)


@given(messages, st.text(), messages, values)
def test_a_conversation_grows_at_its_end(first: list[object], answer: str, more: list[object], tools: object) -> None:
    answered = [*first, {"role": "assistant", "content": answer}]
    text = prompt_text({"messages": first, "tools": tools})
    following = prompt_text({"messages": [*answered, *more], "tools": tools})
    assert prompt_text({"messages": answered, "tools": tools}).startswith(text)
    assert following.startswith(prompt_text({"messages": answered, "tools": tools}))


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "tools"]), values))
def test_any_json_object_has_a_text(body: dict[str, object]) -> None:
    parsed = msgspec.json.decode(msgspec.json.encode(body))
    assert isinstance(prompt_text(parsed), bytes)
