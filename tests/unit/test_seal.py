"""Data that one instance seals for another opens at that instance only."""

from __future__ import annotations

import random

import pytest

from cluster.ids import InstanceId
from kvtransfer.keys import read_fleet
from kvtransfer.seal import NONCE_BYTES, Identity, NotAnIdentity, identity_text, read_identity

FLEET = read_fleet("k1 " + "11" * 32 + "\n")
OTHER = read_fleet("k1 " + "22" * 32 + "\n")
NONCE = bytes(NONCE_BYTES)
P, D, E = InstanceId("prefill-0"), InstanceId("decode-0"), InstanceId("decode-1")


def identity(name: InstanceId, keys=FLEET) -> Identity:
    return read_identity(identity_text(keys, name))


def sealed(data: bytes = b"metadata") -> bytes:
    found = identity(P).seal(data, D, identity(D).credentials(), life="a/1", nonce=NONCE)
    assert found is not None
    return found


def test_only_the_named_receiver_opens_sealed_data() -> None:
    p, d, e = identity(P), identity(D), identity(E)
    assert d.unseal(sealed(), P, p.credentials(), life="a/1") == b"metadata"
    assert b"metadata" not in sealed()
    for who, by, theirs, life in (
        (e, P, p.credentials(), "a/1"),
        (d, E, e.credentials(), "a/1"),
        (d, P, e.credentials(), "a/1"),
        (d, P, p.credentials(), "a/2"),
        (d, P, b"", "a/1"),
        (p, P, p.credentials(), "a/1"),
    ):
        assert who.unseal(sealed(), by, theirs, life=life) is None


def test_an_identity_of_another_fleet_is_not_accepted() -> None:
    stranger = identity(P, OTHER)
    assert stranger.seal(b"x", D, identity(D).credentials(), life="", nonce=NONCE) is None
    assert identity(D).seal(b"x", P, stranger.credentials(), life="", nonce=NONCE) is None


def test_keys_are_replaced_one_by_one() -> None:
    """Two key files with their lines in another order, or with a line that the other file lacks, still have a common
    key. Both sides choose the same key.
    """
    one, two = "k1 " + "11" * 32 + "\n", "k2 " + "33" * 32 + "\n"
    for mine, others in ((one + two, two + one), (one + two, two), (two, one + two)):
        p, d = identity(P, read_fleet(mine)), identity(D, read_fleet(others))
        box = p.seal(b"x", D, d.credentials(), life="", nonce=NONCE)
        assert box is not None and d.unseal(box, P, p.credentials(), life="") == b"x"
    apart = identity(P, read_fleet(one))
    assert apart.seal(b"x", D, identity(D, read_fleet(two)).credentials(), life="", nonce=NONCE) is None


def test_no_bytes_raise_and_none_of_them_opens() -> None:
    p, d = identity(P), identity(D)
    dice = random.Random(4)
    box, said = sealed(), p.credentials()
    for _ in range(400):
        for original in (box, said):
            bad = bytearray(original)
            bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
            cut = bytes(bad[: dice.randint(0, len(bad))]) if dice.random() < 0.3 else bytes(bad)
            seal, credentials = (cut, said) if original is box else (box, cut)
            assert d.unseal(seal, P, credentials, life="a/1") is None
        assert d.unseal(dice.randbytes(60), P, said, life="a/1") is None


def test_a_changed_identity_file_is_refused() -> None:
    text = identity_text(FLEET, P)
    assert "11" * 32 not in text and "prefill-0" in text and repr(read_identity(text)) == "Identity('prefill-0')"
    words = text.split()
    for bad in (
        "",
        "# only a remark",
        text.replace("prefill-0", "prefill-1"),
        text.replace(words[1], "ab" * 32),
        text.replace(words[4], "ab" * 32),
        text + identity_text(FLEET, D),
        "k1 secret",
    ):
        with pytest.raises(NotAnIdentity) as caught:
            read_identity(bad)
        assert words[1] not in str(caught.value)
    with pytest.raises(ValueError, match="cannot stand"):
        identity_text(FLEET, InstanceId("a b"))
