"""Data that one instance publishes for exactly one other, sealed so that no third party can read or forge it. Pure.

An engine's metadata gives access to its memory. It travels through the registry, where every program with the
registry's password could read it; so each producer seals it for each consumer. Each instance knows only its own
secrets:

- A fleet key gives each instance an *identity*: an X25519 key of its own, and a *credential*. The credential names the
  owner of the public half and has the fleet's signature (Ed25519, by a key that follows from the fleet's). The operator
  makes identities once, where the fleet's keys are (`identity_text`), together with the ticket keys; no later request
  to a central party is needed.
- Two instances that have exchanged credentials share a secret that no third party has, neither the registry nor another
  instance. The keys of what they seal follow from it (AES-256-GCM, one for each direction).
- Sealed data names its sender, its receiver and the sender's life: old data, or data put under another instance's name,
  does not open.

If an instance's identity is stolen, the thief can impersonate that instance and read what was sealed for it; other
instances stay safe. This module needs `cryptography` and runs in agents, never inside vLLM's process.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from cluster.ids import InstanceId, engine_of
from kvtransfer.keys import KEYS_MAX
from kvtransfer.packing import MalformedBytes, Packed, Packer
from kvtransfer.ticket import SigningKey

VERSION = 1
KEY_BYTES = 32
SIGNATURE_BYTES = 64
NONCE_BYTES = 12
SEALED_BYTES_MAX = 8 << 20
"""Hundreds of ranks with tens of kilobytes each."""

_LINE = re.compile(r"(\S{1,16}) ([0-9a-f]{64}) (\S{1,255}) ([0-9a-f]{128}) ([0-9a-f]{64})")


class NotAnIdentity(ValueError):
    """The text is no identity. The message never shows the text, as it holds a secret."""


@dataclass(frozen=True, slots=True)
class Credential:
    """The owner of a public key, signed by one fleet key. Not secret."""

    fleet: str
    """The id of the fleet key."""
    instance: InstanceId
    public: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class _Own:
    credential: Credential
    private: bytes = field(repr=False)
    fleet_public: bytes


class Identity:
    """One instance's proof of itself, under each of the fleet's keys."""

    def __init__(self, me: InstanceId, own: Sequence[_Own]) -> None:
        self.me = me
        self._own = tuple(own)

    def __repr__(self) -> str:
        return f"Identity({self.me!r})"

    def of_rank(self, rank: InstanceId) -> Identity:
        """The same identity for one of the engine's ranks. What is sealed names the rank."""
        return Identity(rank, self._own)

    def credentials(self) -> bytes:
        """What other instances need to know of this one."""
        packer = Packer().byte(VERSION).byte(len(self._own))
        for each in self._own:
            packer.text(each.credential.fleet).text(each.credential.instance)
            packer.raw(each.credential.public).raw(each.credential.signature)
        return packer.done()

    def seal(self, data: bytes, to: InstanceId, theirs: bytes, *, life: str, nonce: bytes) -> bytes | None:
        """Seal data for `to` alone, whose credentials are `theirs`. None if the credentials are not valid, or the data
        is longer than `SEALED_BYTES_MAX`.

        Args:
            data: what to seal.
            to: the receiver.
            theirs: what `to` has published as `credentials`.
            life: names the sender's life; the receiver must expect the same.
            nonce: `NONCE_BYTES` random bytes, new each time.

        Raises:
            ValueError: the nonce has another length, or a name has more than 255 bytes.
        """
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes")
        found = self._pair(to, theirs)
        if found is None or len(data) > SEALED_BYTES_MAX:
            return None
        fleet, secret = found
        head = Packer().byte(VERSION).text(fleet).raw(nonce).done()
        box = AESGCM(_derived(secret, b"seal", self.me, to))
        return head + box.encrypt(nonce, data, head + _names(self.me, to, life))

    def unseal(self, sealed: bytes, by: InstanceId, theirs: bytes, *, life: str) -> bytes | None:
        """The data that `by` sealed for this instance in that life; None for anything else. Never raises."""
        if len(sealed) > SEALED_BYTES_MAX + 1024:
            return None
        try:
            packed = Packed(sealed)
            if packed.byte() != VERSION:
                return None
            fleet = packed.text()
            nonce, box = packed.raw(NONCE_BYTES), packed.rest()
        except MalformedBytes:
            return None
        found = self._pair(by, theirs, fleet)
        if found is None:
            return None
        head = sealed[: len(sealed) - len(box)]
        try:
            key = _derived(found[1], b"seal", by, self.me)
            return AESGCM(key).decrypt(nonce, box, head + _names(by, self.me, life))
        except (InvalidTag, ValueError):
            return None

    def _pair(self, other: InstanceId, theirs: bytes, fleet: str | None = None) -> tuple[str, bytes] | None:
        """The fleet key's id and the secret shared with `other`, under the first fleet key that both have, in the order
        of the instance with the smaller name. `fleet`: under this key only.
        """
        known = {each.fleet: each for each in _read_credentials(theirs) if each.instance == engine_of(other)}
        if other == self.me:
            return None
        for own in self._own if self.me < other else sorted(self._own, key=lambda own: _place(own, known)):
            said = known.get(own.credential.fleet)
            if said is None or fleet not in {None, said.fleet} or not _genuine(said, own.fleet_public):
                continue
            try:
                shared = X25519PrivateKey.from_private_bytes(own.private).exchange(
                    X25519PublicKey.from_public_bytes(said.public)
                )
            except ValueError:  # a point of small order
                continue
            return said.fleet, shared
        return None


def _place(own: _Own, known: dict[str, Credential]) -> int:
    """The position of a shared key in the order of the instance with the smaller name."""
    names = list(known)
    return names.index(own.credential.fleet) if own.credential.fleet in names else len(names)


def identity_text(fleet: Sequence[SigningKey], instance: InstanceId) -> str:
    """The identity file of one instance, made from the fleet's keys: ``ID PRIVATE INSTANCE SIGNATURE FLEET`` a line.

    Raises:
        ValueError: the name cannot stand in such a file.
    """
    if not re.fullmatch(r"[^\s#]{1,255}", instance) or len(instance.encode()) > 255:
        raise ValueError(f"{instance!r} cannot stand in an identity file")
    lines = []
    for key in fleet[:KEYS_MAX]:
        signer = Ed25519PrivateKey.from_private_bytes(_from_key(key, b"fleet"))
        private = _from_key(key, b"identity\x00" + instance.encode())
        public = X25519PrivateKey.from_private_bytes(private).public_key()
        signature = signer.sign(_claim(key.id, instance, _raw(public)))
        lines.append(f"{key.id} {private.hex()} {instance} {signature.hex()} {_raw(signer.public_key()).hex()}\n")
    return "".join(lines)


def read_identity(text: str) -> Identity:
    """The identity in a file.

    Raises:
        NotAnIdentity: the file holds none, or its parts do not match.
    """
    own: list[_Own] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        if match is None or len(own) >= KEYS_MAX:
            raise NotAnIdentity(f"line {number} is not `ID PRIVATE INSTANCE SIGNATURE FLEET`, or one too many")
        private, fleet_public = bytes.fromhex(match[2]), bytes.fromhex(match[5])
        public = _raw(X25519PrivateKey.from_private_bytes(private).public_key())
        said = Credential(match[1], InstanceId(match[3]), public, bytes.fromhex(match[4]))
        if not _genuine(said, fleet_public):
            raise NotAnIdentity(f"line {number} does not hold together")
        own.append(_Own(said, private, fleet_public))
    if len({each.credential.instance for each in own}) != 1:
        raise NotAnIdentity("an identity is of one instance")
    return Identity(own[0].credential.instance, own)


def _read_credentials(data: bytes) -> tuple[Credential, ...]:
    """All credentials, unchecked; none if they cannot be read."""
    try:
        packed = Packed(data)
        if packed.byte() != VERSION:
            return ()
        found = []
        for _ in range(min(packed.byte(), KEYS_MAX)):
            fleet, instance = packed.text(), InstanceId(packed.text())
            found.append(Credential(fleet, instance, packed.raw(KEY_BYTES), packed.raw(SIGNATURE_BYTES)))
        packed.end()
    except MalformedBytes:
        return ()
    return tuple(found)


def _genuine(said: Credential, fleet_public: bytes) -> bool:
    try:
        signed = _claim(said.fleet, said.instance, said.public)
        Ed25519PublicKey.from_public_bytes(fleet_public).verify(said.signature, signed)
    except (InvalidSignature, ValueError):
        return False
    return True


def _claim(fleet: str, instance: str, public: bytes) -> bytes:
    return b"baton-credential\x00" + Packer().text(fleet).text(instance).raw(public).done()


def _names(by: str, to: str, life: str) -> bytes:
    return Packer().text(by).text(to).text(life).done()


def _derived(shared: bytes, use: bytes, first: str, second: str) -> bytes:
    """HKDF-SHA256 (RFC 5869) of one block, without salt."""
    pseudorandom = hmac.digest(bytes(32), shared, hashlib.sha256)
    info = b"baton-pair\x00" + use + b"\x00" + Packer().text(first).text(second).done()
    return hmac.digest(pseudorandom, info + b"\x01", hashlib.sha256)


def _from_key(key: SigningKey, use: bytes) -> bytes:
    return hmac.digest(key.secret, b"baton-seal\x00" + use, hashlib.sha256)


def _raw(public: X25519PublicKey | Ed25519PublicKey) -> bytes:
    return public.public_bytes(Encoding.Raw, PublicFormat.Raw)
