"""Proofs of a heartbeat's sender, and what a reader does with heartbeats that lack one. Pure.

Any holder of the registry's password can write anything there. So a heartbeat carries a proof: the last field of its
JSON object, made from all bytes before it with the sender's keys. `kvtransfer.proving` holds the keys; this layer knows
none. Readers of another version see an unknown field, and ignore it.

A proof covers the bytes as they were written. Bytes that are decoded and encoded again would not do: a reader of
another version drops unknown fields, and would find every proof wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from cluster.registry.membership import HEARTBEAT_BYTES_MAX, Heartbeat, MemberKind, decode, encode

TOLD_MAX: Final = 1000
"""Most unreadable or unproven entries that are reported by name: one program may write millions."""

PROOF_CHARS_MAX: Final = 1024
"""Longest proof read. Eight keys, the most of a key file (`kvtransfer.keys`), make one of 655 characters."""

PROOF_BYTES_MAX: Final = len(',"proof":""') + PROOF_CHARS_MAX
"""Most bytes that a proof adds to a heartbeat."""

_PROOF: Final = re.compile(rb',"proof":"([A-Za-z0-9_. -]{0,%d})"\}\Z' % PROOF_CHARS_MAX)


class Proofs(Protocol):
    """Proves a program's own heartbeats, and judges other programs' heartbeats."""

    @property
    def judges_all(self) -> bool:
        """Whether `fault` can judge every instance and router. An agent can judge heartbeats of its own name only."""

    @property
    def accepts_unproven(self) -> bool:
        """Whether heartbeats without any proof are accepted, too: while a fleet is upgraded to proofs."""

    def prove(self, cluster: str, beat: Heartbeat, body: bytes) -> str:
        """The proof of `beat`, whose JSON is `body`; empty where this program cannot prove it."""

    def fault(self, cluster: str, beat: Heartbeat, body: bytes, proof: str) -> str:
        """Why the proof is wrong, in words; empty: it is right, or this program has no key to judge it. Never
        raises.
        """


def proven(beat: Heartbeat, cluster: str, proofs: Proofs | None) -> bytes:
    """The bytes of one heartbeat as written: JSON, with a proof where this program has keys.

    Raises:
        ValueError: the heartbeat is larger than readers accept.
    """
    body = encode(beat)
    proof = "" if proofs is None else proofs.prove(cluster, beat, body)
    if not proof:
        return body
    payload = body[:-1] + b',"proof":"' + proof.encode() + b'"}'
    if len(payload) > HEARTBEAT_BYTES_MAX:
        raise ValueError(f"a heartbeat of {beat.id!r} is larger than readers take: {len(payload)} bytes with its proof")
    return payload


def parted(payload: bytes) -> tuple[bytes, str]:
    """The bytes that the proof covers, and the proof; an empty proof if there is none."""
    match = _PROOF.search(payload, max(0, len(payload) - PROOF_BYTES_MAX - 1))
    if match is None:
        return payload, ""
    return payload[: match.start()] + b"}", match[1].decode()


class Hearing:
    """One reader's filter: decodes heartbeats, judges their proofs, and reports once each one that it leaves out."""

    def __init__(self, cluster: str, proofs: Proofs | None, warn: Callable[[str], None]) -> None:
        """`warn` gets one line for each entry that is left out."""
        self._warn: Final = warn
        self.cluster: Final = cluster
        self.proofs: Final = proofs
        self._told: Final[set[tuple[MemberKind, str, str]]] = set()
        self._unproven: Final[dict[MemberKind, dict[str, str]]] = {kind: {} for kind in MemberKind}
        self._former: Final[dict[MemberKind, dict[tuple[str, str], tuple[bytes, Heartbeat]]]] = {
            kind: {} for kind in MemberKind
        }
        self._heard: Final[dict[MemberKind, dict[tuple[str, str], tuple[bytes, Heartbeat]]]] = {
            kind: {} for kind in MemberKind
        }
        """Accepted heartbeats of the last reading and this one, by name and agent. Readers read twice as often as
        programs write; a heartbeat that is read again is not new.
        """

    @property
    def all_proven(self) -> bool:
        """Whether every accepted heartbeat has proven its sender."""
        return self.proofs is not None and self.proofs.judges_all and not self.proofs.accepts_unproven

    def begin(self, kind: MemberKind) -> None:
        """Begin another reading of this kind."""
        self._unproven[kind] = {}
        self._former[kind], self._heard[kind] = self._heard[kind], {}

    def unproven(self, kind: MemberKind) -> Mapping[str, str]:
        """By name, why the entry at the last reading did not prove its sender."""
        return self._unproven[kind]

    def hear(self, kind: MemberKind, name: str, agent: str, payload: bytes) -> Heartbeat | None:
        """The heartbeat under this name and agent; None if it cannot be read, or its proof is not accepted."""
        known = self._former[kind].get((name, agent))
        if known is None or known[0] != payload:
            beat = self._judged(kind, name, agent, payload)
            if beat is None:
                return None
            known = (payload, beat)
        if not self._unproven[kind].get(name):  # an accepted heartbeat without proof is reported at each reading
            self._heard[kind][name, agent] = known
        return known[1]

    def _judged(self, kind: MemberKind, name: str, agent: str, payload: bytes) -> Heartbeat | None:
        beat, fault = decode(payload)
        if beat is not None and (beat.kind, beat.id, beat.agent) != (kind, name, agent):
            beat, fault = None, "it stands under another's name"
        if beat is None:
            self._say(kind, name, agent, f"a heartbeat of {printable(name)} that cannot be read is ignored: {fault}")
            return None
        if self.proofs is None:
            self._told.discard((kind, name, agent))
            return beat
        body, proof = parted(payload)
        fault = self.proofs.fault(self.cluster, beat, body, proof)
        if not fault:
            self._told.discard((kind, name, agent))
            return beat
        if len(self._unproven[kind]) < TOLD_MAX:
            self._unproven[kind][name] = fault
        accepted = not proof and self.proofs.accepts_unproven
        end = "it is heard all the same (--accept-unproven)" if accepted else "it is ignored"
        self._say(kind, name, agent, f"{kind.value} {name} at {beat.url} does not prove itself: {fault}; {end}")
        return beat if accepted else None

    def gone(self, kind: MemberKind, name: str, agent: str) -> None:
        """Note that this name and agent have no entry any more."""
        self._told.discard((kind, name, agent))

    def _say(self, kind: MemberKind, name: str, agent: str, line: str) -> None:
        if (kind, name, agent) not in self._told and len(self._told) < TOLD_MAX:
            self._told.add((kind, name, agent))
            self._warn(line)


def printable(text: str, chars_max: int = 128, mark: str = "?") -> str:
    """`text` for a log or a terminal: cut, and with `mark` for each control character."""
    return "".join(char if char.isprintable() else mark for char in text[:chars_max])
