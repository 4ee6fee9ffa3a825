"""Tickets: `check` returns a signed ticket unchanged, and refuses every other text."""

import base64
import contextlib
import hashlib
import hmac
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ids import InstanceId, RequestId, TransferId
from kvtransfer import ticket as t
from kvtransfer.packing import NUMBER_MAX, MalformedBytes, Packed, Packer

NOW = 1_800_000_000.0
KEY = t.SigningKey("k1", b"\x11" * 32)
OLD = t.SigningKey("k0", b"\x22" * 32)
OTHERS = t.SigningKey("k1", b"\x33" * 32)
"""Another producer's key, under the same name."""
TICKET = t.Ticket(
    id=TransferId(RequestId("req-1"), 2, 7),
    tenant="acme",
    producer=InstanceId("prefill-0"),
    host="10.0.0.5",
    port=5600,
    consumer=InstanceId("decode-1"),
    groups=((4, 5, 6, 9), (100,)),
    tokens=70,
    expires_ms=int(NOW * 1000) + 60_000,
)
HERE = t.ExpectedTicket(
    producer=t.TicketPeer(InstanceId("prefill-0"), 7), consumer=InstanceId("decode-1"), id=TICKET.id
)


def verdict(
    text: object, now: float = NOW, expected: t.ExpectedTicket = HERE, keys: tuple[t.SigningKey, ...] = (KEY, OLD)
) -> Any:
    """`Accepted`, or the reason for the refusal."""
    answer = t.check(text, keys, now, expected)
    return answer.reason if isinstance(answer, t.TicketRefused) else answer


def signed(**changes: Any) -> str:
    return t.sign(replace(TICKET, **changes), KEY)


def raw(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def spelled(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


# --- genuine tickets -------------------------------------------------------------------------------------------------


def test_a_ticket_comes_back_as_it_was_signed() -> None:
    accepted = verdict(signed())
    assert accepted.ticket == TICKET
    assert accepted.left_s == pytest.approx(60.0 + t.SKEW_S)
    assert accepted.ticket.tenant == "acme"
    assert accepted.ticket.blocks == {4, 5, 6, 9, 100}


def test_a_ticket_is_short() -> None:
    """Every decode leg carries a ticket. The block numbers of an empty engine are consecutive; those of a busy engine
    are not.
    """
    assert len(signed()) < 160
    row = signed(groups=(tuple(range(1000, 7250)),))
    dice = random.Random(1)
    scattered = signed(groups=(tuple(dice.sample(range(100_000), 6250)),))
    assert (len(row), len(scattered)) < (170, 40_000), "100,000 tokens"


NAMES = st.text(max_size=60).filter(lambda text: len(text.encode("utf-8", "surrogatepass")) <= 255)
PLAIN = NAMES.filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text))
NUMBERS = st.integers(0, NUMBER_MAX)
BLOCKS = st.lists(st.integers(0, (1 << 32) - 1), max_size=20).map(tuple) | st.builds(
    lambda start, length, more: (*range(start, start + length), *more),
    st.integers(0, 999),
    st.integers(0, 99),
    st.lists(st.integers(0, 999), max_size=3),
)


@given(
    st.builds(
        t.Ticket,
        id=st.builds(TransferId, PLAIN, NUMBERS, NUMBERS),
        tenant=PLAIN,
        producer=PLAIN,
        host=PLAIN,
        port=NUMBERS,
        consumer=PLAIN,
        groups=st.lists(BLOCKS, max_size=4).map(tuple),
        tokens=NUMBERS,
        expires_ms=st.just(TICKET.expires_ms),
    )
)
def test_every_ticket_comes_back_as_it_was_signed(ticket: t.Ticket) -> None:
    answer = t.check(t.sign(ticket, KEY), [KEY], NOW, t.ExpectedTicket(producer=None, consumer=None))
    assert isinstance(answer, t.Accepted)
    assert answer.ticket == ticket


def test_two_keys_are_valid_while_one_is_replaced() -> None:
    old = t.sign(TICKET, OLD)
    assert verdict(old).ticket == TICKET
    assert verdict(old, keys=(KEY,)) is t.Reason.UNKNOWN_KEY
    assert verdict(old, keys=()) is t.Reason.UNKNOWN_KEY


def test_clocks_may_be_apart_by_a_stated_allowance() -> None:
    end = TICKET.expires_ms / 1000
    assert verdict(signed(), end + t.SKEW_S - 0.01).left_s == pytest.approx(0.01, abs=1e-3)
    assert verdict(signed(), end + t.SKEW_S) is t.Reason.EXPIRED
    longest = int((NOW + t.LIFE_S_MAX) * 1000)
    assert verdict(signed(expires_ms=longest), NOW - t.SKEW_S).ticket.expires_ms == longest
    assert verdict(signed(expires_ms=longest), NOW - t.SKEW_S - 1) is t.Reason.LIVES_TOO_LONG


def test_fewer_blocks_may_be_claimed_than_permitted() -> None:
    assert verdict(signed(), expected=replace(HERE, blocks=(5, 100))).ticket == TICKET
    assert verdict(signed(), expected=replace(HERE, blocks=())).ticket == TICKET


def test_a_key_does_not_show_its_secret() -> None:
    assert "\\x11" not in repr(KEY)
    for wrong in (
        {"id": "", "secret": b"x" * 32},
        {"id": "a b", "secret": b"x" * 32},
        {"id": "k", "secret": b"x" * 31},
    ):
        with pytest.raises(ValueError, match="key"):
            t.SigningKey(**wrong)  # type: ignore[arg-type]


# --- attacks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        (replace(HERE, producer=t.TicketPeer(InstanceId("prefill-1"), 7)), t.Reason.OTHER_PRODUCER),
        (replace(HERE, producer=t.TicketPeer(InstanceId("prefill-0"), 8)), t.Reason.OTHER_EPOCH),
        (replace(HERE, producer=t.TicketPeer(InstanceId("prefill-0"), 6)), t.Reason.OTHER_EPOCH),
        (replace(HERE, consumer=InstanceId("decode-2")), t.Reason.OTHER_CONSUMER),
        (replace(HERE, id=TICKET.id._replace(attempt=3)), t.Reason.OTHER_TRANSFER),
        (replace(HERE, id=TICKET.id._replace(request=RequestId("req-2"))), t.Reason.OTHER_TRANSFER),
        (replace(HERE, tenant="evil"), t.Reason.OTHER_TENANT),
        (replace(HERE, blocks=(4, 5, 6, 7)), t.Reason.OTHER_BLOCKS),
        (replace(HERE, fields="AAAA"), t.Reason.OTHER_FIELDS),
    ],
)
def test_a_genuine_ticket_for_something_else_is_refused(expected: t.ExpectedTicket, reason: t.Reason) -> None:
    assert verdict(signed(), expected=expected) is reason


def test_every_flipped_bit_is_refused() -> None:
    data = raw(signed())
    for place in range(len(data)):
        for bit in range(8):
            flipped = data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
            assert isinstance(verdict(spelled(flipped)), t.Reason), (place, bit)


def test_every_changed_character_is_refused() -> None:
    """The last character counts, too. Base64 does not use its lowest bits, so without a check one ticket would have
    several spellings.
    """
    text = signed()
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for place in range(len(text)):
        for char in (*alphabet, "=", "+", "/", " ", "\n", "\x00", "é"):
            if char != text[place]:
                assert isinstance(verdict(text[:place] + char + text[place + 1 :]), t.Reason), (place, char)


@pytest.mark.parametrize("decorate", ["{}=", "{}==", " {}", "{}\n", "{}A", "{}AAAA", "A{}", "{0}{0}", "{}\x00"])
def test_other_spellings_are_refused(decorate: str) -> None:
    assert isinstance(verdict(decorate.format(signed())), t.Reason)


def test_every_truncation_is_refused() -> None:
    text, data = signed(), raw(signed())
    assert all(isinstance(verdict(text[:length]), t.Reason) for length in range(len(text)))
    assert all(isinstance(verdict(spelled(data[:length])), t.Reason) for length in range(len(data)))
    assert all(isinstance(verdict(spelled(data[start:])), t.Reason) for start in range(1, len(data)))


CHANGES: dict[str, Any] = {
    "id": TICKET.id._replace(attempt=3),
    "tenant": "evil",
    "producer": InstanceId("prefill-1"),
    "host": "10.66.6.6",
    "port": 5601,
    "consumer": InstanceId("decode-9"),
    "groups": ((4, 5, 6, 7), (100,)),
    "tokens": 71,
    "expires_ms": TICKET.expires_ms + 1,
    "nonce": 1,
    "fields": "AAAA",
}


def test_every_field_of_a_ticket_is_altered_below() -> None:
    assert set(CHANGES) == {field.name for field in fields(t.Ticket)}


@pytest.mark.parametrize("name", CHANGES)
def test_an_altered_field_under_the_old_signature_is_refused(name: str) -> None:
    """With `host` and `port` a client could make an engine connect to a stranger's machine (vllm 47843)."""
    altered, tag = raw(signed(**{name: CHANGES[name]})), raw(signed())[-t.TAG_BYTES :]
    assert verdict(spelled(altered[: -t.TAG_BYTES] + tag)) is t.Reason.FORGED


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tenant": "ab", "producer": "c"}, {"tenant": "a", "producer": "bc"}),
        ({"producer": "a", "consumer": "b"}, {"producer": "b", "consumer": "a"}),
        ({"host": "", "tenant": "10.0.0.5"}, {"host": "10.0.0.5", "tenant": ""}),
        ({"groups": ((1, 2), (3,))}, {"groups": ((1,), (2, 3))}),
        ({"groups": ((1, 2, 3),)}, {"groups": ((1, 2, 3), ())}),
        ({"groups": ((1, 2),)}, {"groups": ((2, 1),)}),
        ({"tokens": 1, "port": 2}, {"tokens": 2, "port": 1}),
    ],
)
def test_fields_cannot_be_shifted_into_one_another(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = raw(signed(**one)), raw(signed(**other))
    assert first[: -t.TAG_BYTES] != second[: -t.TAG_BYTES]
    assert verdict(spelled(first[: -t.TAG_BYTES] + second[-t.TAG_BYTES :])) is t.Reason.FORGED


def _mac(make: Callable[[bytes], bytes]) -> str:
    payload = raw(signed())[: -t.TAG_BYTES]
    return spelled(payload + make(payload))


FORGERIES: dict[str, str] = {
    "no tag": _mac(lambda _: b""),
    "zeros": _mac(lambda _: bytes(32)),
    "a hash without a key": _mac(lambda payload: hashlib.sha256(payload).digest()),
    "a hash with the key in front": _mac(lambda payload: hashlib.sha256(KEY.secret + payload).digest()),
    "an empty key": _mac(lambda payload: hmac.digest(b"", b"baton-ticket\0" + payload, "sha256")),
    "the key's name as key": _mac(lambda payload: hmac.digest(b"k1", b"baton-ticket\0" + payload, "sha256")),
    "sha1": _mac(lambda payload: hmac.digest(KEY.secret, b"baton-ticket\0" + payload, "sha1")),
    "sha512": _mac(lambda payload: hmac.digest(KEY.secret, b"baton-ticket\0" + payload, "sha512")),
    "half of sha512": _mac(lambda payload: hmac.digest(KEY.secret, b"baton-ticket\0" + payload, "sha512")[:32]),
    "blake2": _mac(lambda payload: hashlib.blake2s(payload, key=KEY.secret).digest()),
    "another purpose": _mac(lambda payload: hmac.digest(KEY.secret, payload, "sha256")),
    "the other valid key": _mac(lambda payload: hmac.digest(OLD.secret, b"baton-ticket\0" + payload, "sha256")),
    "another producer's key": t.sign(TICKET, OTHERS),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_signature_is_refused(name: str) -> None:
    assert isinstance(verdict(FORGERIES[name]), t.Reason)


@pytest.mark.parametrize("version", [0, 2, 3, 127, 128, 255])
def test_other_versions_are_malformed(version: int) -> None:
    """A ticket with another first byte is malformed, even with a valid signature. So a sender cannot choose a version
    or an algorithm.
    """
    payload = bytes([version]) + raw(signed())[1 : -t.TAG_BYTES]
    assert verdict(spelled(payload + t._tag(KEY, payload))) is t.Reason.MALFORMED


def test_a_key_cannot_be_chosen_by_the_sender() -> None:
    """The signature is of one valid key; the ticket names the other valid key, or a key that does not exist."""
    body = raw(signed())[4 : -t.TAG_BYTES]
    tag = raw(signed())[-t.TAG_BYTES :]
    for key_id, reason in (("k0", t.Reason.FORGED), ("none", t.Reason.UNKNOWN_KEY), ("", t.Reason.UNKNOWN_KEY)):
        payload = Packer().byte(t.VERSION).text(key_id).raw(body).done()
        assert verdict(spelled(payload + tag)) is reason


@pytest.mark.parametrize(
    "now", [float("nan"), float("inf"), float("-inf"), 0.0, -1e300, 1e300, TICKET.expires_ms / 1000 + 3600]
)
def test_a_wrong_clock_refuses_every_ticket(now: float) -> None:
    assert verdict(signed(), now) in {t.Reason.EXPIRED, t.Reason.LIVES_TOO_LONG}


@pytest.mark.parametrize(
    "junk",
    [
        None,
        0,
        1.5,
        True,
        b"",
        raw(signed()),
        [],
        {},
        ("a",),
        object(),
        "",
        "A" * 43,
        "A" * 10_000_000,
        "\ud800" * 60,
        "😀" * 60,
    ],
    ids=lambda junk: f"{type(junk).__name__} {str(junk)[:8]!r}",
)
def test_junk_of_any_type_and_size_is_refused(junk: object) -> None:
    assert verdict(junk) is t.Reason.MALFORMED


@given(st.text() | st.binary() | st.binary(min_size=33).map(spelled))
def test_check_never_raises(text: object) -> None:
    assert isinstance(verdict(text), t.Reason)


@given(st.binary(max_size=200))
def test_check_never_raises_on_signed_nonsense(body: bytes) -> None:
    """A thief of a key can sign nonsense; the parser still refuses it."""
    payload = Packer().byte(t.VERSION).text("k1").raw(body).done()
    assert isinstance(verdict(spelled(payload + t._tag(KEY, payload))), t.Reason)


def test_a_few_bytes_cannot_stand_for_more_blocks_than_there_are() -> None:
    head = raw(signed(groups=()))[: -t.TAG_BYTES - 1]
    for runs in ([(0, NUMBER_MAX)], [(0, t.BLOCKS_MAX + 1)], [(0, t.BLOCKS_MAX), (0, 1)], [(0, 0)]):
        packer = Packer().raw(head).number(1).number(len(runs))
        for start, length in runs:
            packer.number(2 * start).number(length)
        payload = packer.done()
        assert verdict(spelled(payload + t._tag(KEY, payload))) is t.Reason.MALFORMED, runs


def test_nothing_may_follow_the_last_field() -> None:
    payload = raw(signed())[: -t.TAG_BYTES] + b"\x00"
    assert verdict(spelled(payload + t._tag(KEY, payload))) is t.Reason.MALFORMED


def test_two_tickets_for_one_transfer_have_two_tags() -> None:
    """The router may sign a second ticket for a transfer: for another consumer, or for a later try."""
    tags = {verdict(signed()).tag, verdict(signed(expires_ms=TICKET.expires_ms + 1)).tag, verdict(signed()).tag}
    assert len(tags) == 2


# --- tickets too large -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant": "x" * 256},
        {"tenant": "é" * 128},
        {"port": -1},
        {"tokens": NUMBER_MAX + 1},
        {"groups": ((-1,),)},
        {"groups": (tuple(range(t.BLOCKS_MAX)), (1,))},
        {"groups": ((1 << 32,),)},
        {"host": "x" * 200, "groups": tuple(() for _ in range(t.TEXT_CHARS_MAX))},
    ],
)
def test_a_ticket_that_is_too_large_is_not_signed(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"fit|number|at most"):
        signed(**wrong)


# --- packing ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, NUMBER_MAX))
def test_a_number_has_one_spelling(value: int) -> None:
    data = Packer().number(value).done()
    packed = Packed(data)
    assert packed.number() == value
    packed.end()
    longer = data[:-1] + bytes([data[-1] | 0x80, 0])
    with pytest.raises(MalformedBytes):
        Packed(longer).number()


@pytest.mark.parametrize("blocks", [(1, 2, 3, 4, 5), (9, 1, 7), (), tuple(range(40)), (*range(40), 3)])
def test_a_block_list_is_bounded_by_its_reader(blocks: tuple[int, ...]) -> None:
    data = Packer().blocks(blocks).done()
    assert Packed(data).blocks(len(blocks)) == blocks
    if blocks:
        with pytest.raises(MalformedBytes):
            Packed(data).blocks(len(blocks) - 1)


@given(st.binary(max_size=60))
def test_reading_any_bytes_ends_in_values_or_malformed(data: bytes) -> None:
    readers: list[Callable[[Packed], object]] = [
        Packed.byte,
        Packed.text,
        Packed.number,
        lambda packed: packed.blocks(1000),
        Packed.end,
    ]
    for read in readers:
        packed = Packed(data)
        with contextlib.suppress(MalformedBytes):
            read(packed)
        assert packed._at <= len(data)
