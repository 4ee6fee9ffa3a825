"""Faults and their times: values, made from a seed or read from a file. Pure; the world carries them out.

Each kind draws from a stream of its own, so more faults of one kind change nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cluster.ids import InstanceId, TransferId
from engine.twin.tokens import mix
from sim.entries import count, known_only, one_of, read_entries, seconds, share
from sim.kernel import NS
from sim.pulls import SimulatedPull

if TYPE_CHECKING:
    from sim.instance import SimInstance
    from sim.passage import Passage
    from sim.world import World

KINDS: Final[Mapping[str, str]] = {
    "kill": "the engine's process dies; its agent starts another, which takes the start-up time",
    "slow": "the whole process runs `factor` times slower for `duration_s`",
    "link": "its NIC has 1/`factor` of its bandwidth for `duration_s`",
    "partition": "no message gets in or out for `duration_s`",
    "notices": "`share` of the notices that end its holds get lost for `duration_s`",
    "corrupt": "`share` of the pulls from it read something else for `duration_s`",
    "leave": "`share` of the requests that are open then lose their client",
}
"""The meaning of each kind."""


FACTOR_MAX: Final = 1_000_000_000
"""The largest factor of `slow` and `link`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    at_s: float
    kind: str
    instance: InstanceId | None = None
    """The instance; None: all of them (`leave`)."""
    duration_s: float = 10.0
    factor: int = 4
    share: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError: a field has a value that it must not have; names the field, its value and what fits."""
        one_of("kind", self.kind, KINDS)
        seconds("at_s", self.at_s)
        seconds("duration_s", self.duration_s, above_0=True)
        count("factor", self.factor, FACTOR_MAX)
        share("share", self.share)


def read_faults(text: str, names: Sequence[InstanceId]) -> tuple[Fault, ...]:
    """Faults, in the order of their times.

    Args:
        text: a JSON list of objects, or one object a line.
        names: the instances that can have a fault.

    Raises:
        UsageError: an entry is not a fault; names the entry, the field, its value and what fits.
    """
    found = read_entries(text, "fault", lambda fields: _fault(fields, names))
    return tuple(sorted(found, key=lambda each: each.at_s))


def _fault(fields: Mapping[str, Any], names: Sequence[InstanceId]) -> Fault:
    known_only(fields, Fault.__dataclass_fields__, "fault")
    fault = Fault(**{"at_s": None, "kind": None, **fields})
    if fault.kind != "leave":
        one_of("instance", fault.instance, names)
    return fault


PRESETS: Final[Mapping[str, tuple[str, ...]]] = {
    "kills": ("kill",),
    "slow": ("slow", "link"),
    "partitions": ("partition",),
    "notices": ("notices",),
    "corrupt": ("corrupt",),
    "clients": ("leave",),
    "chaos": ("kill", "slow", "link", "partition", "notices", "leave"),
}
"""Kinds by name; `chaos` is every kind except wrong memory, which no part of Baton protects from."""


def preset(
    name: str, seed: int, names: Sequence[InstanceId], span_s: float, every_s: float | None = None
) -> tuple[Fault, ...]:
    """The faults of a preset, each kind on average every `every_s` seconds (None: six times in the run)."""
    every_s = every_s or max(span_s / 6, 1e-3)
    found = [fault for kind in PRESETS[name] for fault in _stream(kind, seed, names, span_s, every_s)]
    return tuple(sorted(found, key=lambda each: (each.at_s, each.kind)))


def _stream(kind: str, seed: int, names: Sequence[InstanceId], span_s: float, every_s: float) -> Iterator[Fault]:
    rng = np.random.default_rng([seed, sorted(KINDS).index(kind)])
    at_s = 0.0
    while True:
        at_s += float(rng.exponential(every_s))
        if at_s >= span_s:
            return
        yield Fault(
            at_s=round(at_s, 6),
            kind=kind,
            instance=None if kind == "leave" else names[int(rng.integers(len(names)))],
            duration_s=round(float(rng.uniform(0.2, 1.0)) * every_s, 6),
            factor=int(rng.integers(2, 9)),
            share=round(float(rng.uniform(0.2, 1.0)), 3),
        )


def as_json(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """The faults in the form that `read_faults` reads."""
    return [asdict(each) for each in faults]


class Faults:
    """The faults of one world. Randomness (which notice, which pull) follows from the seed and the names.

    Of faults of one kind that overlap on one instance, each lasts its own time, and the strongest acts.
    """

    def __init__(self, world: World, faults: Sequence[Fault], seed: int) -> None:
        self._world: Final = world
        self._seed: Final = seed
        self._lasting: Final[dict[tuple[str, InstanceId], list[Fault]]] = {}
        """Faults in force of the kinds that are undone at their end, by kind and instance."""
        self._windows: Final[dict[tuple[str, InstanceId], list[tuple[int, float]]]] = {}
        """End, in nanoseconds, and share of each fault that concerns a share of notices or pulls."""
        begin: dict[str, Callable[[Fault, SimInstance], None]] = {
            "kill": lambda _, at: world.lives.kill(at),
            "slow": self._slow,
            "link": self._link,
            "partition": self._partition,
            "notices": self._window,
            "corrupt": self._window,
        }
        for fault in faults:
            when_ns = round(fault.at_s * NS)
            if fault.kind == "leave":
                world.kernel.at(when_ns, self._leave, fault)
            else:
                world.kernel.at(when_ns, self._begin, (begin[fault.kind], fault))
        world.pulls.loses_notice = self._loses
        world.pulls.spoil = self._spoil

    def _begin(self, word: tuple[Callable[[Fault, SimInstance], None], Fault]) -> None:
        """Begin a fault. If its instance has not come yet, or has left, nothing happens."""
        begin, fault = word
        assert fault.instance is not None
        at = self._world.by_name.get(fault.instance)
        if at is None or at.gone:
            self._world.counts["faults_missed"] += 1
        else:
            begin(fault, at)

    def _end_ns(self, fault: Fault) -> int:
        return self._world.kernel.now_ns + round(fault.duration_s * NS)

    def _last(self, fault: Fault, at: SimInstance, act: Callable[[Sequence[Fault]], None]) -> None:
        """Let `act` carry out the faults in force, at the beginning and at the end of this fault."""
        lasting = self._lasting.setdefault((fault.kind, at.name), [])

        def end(_: object) -> None:
            lasting.remove(fault)
            act(lasting)

        lasting.append(fault)
        act(lasting)
        self._world.kernel.at(self._end_ns(fault), end)

    def _slow(self, fault: Fault, at: SimInstance) -> None:
        self._world.counts["slowed"] += fault.factor > 1
        self._last(fault, at, lambda lasting: self._world.lives.slow(at, (1, _strongest(lasting))))

    def _link(self, fault: Fault, at: SimInstance) -> None:
        pulls, whole = self._world.pulls, at.member.nic_gb_s
        self._last(fault, at, lambda lasting: pulls.slow(at, whole / _strongest(lasting)))

    def _partition(self, fault: Fault, at: SimInstance) -> None:
        lives = self._world.lives

        def act(lasting: Sequence[Fault]) -> None:
            if bool(lasting) != at.cut_off:
                (lives.cut_off if lasting else lives.heal)(at)

        self._last(fault, at, act)

    def _window(self, fault: Fault, at: SimInstance) -> None:
        self._windows.setdefault((fault.kind, at.name), []).append((self._end_ns(fault), fault.share))

    def share_of(self, kind: str, at: InstanceId) -> float:
        """The share of this instance's notices (`notices`) or pulls (`corrupt`) that have the fault now."""
        now_ns = self._world.kernel.now_ns
        return max((share for end_ns, share in self._windows.get((kind, at), ()) if now_ns < end_ns), default=0.0)

    def _happens(self, kind: str, at: InstanceId, *names: int) -> bool:
        share = self.share_of(kind, at)
        return share > 0 and mix(self._seed, *names) % 1_000_000 < share * 1_000_000

    def _loses(self, producer: InstanceId, transfer: TransferId) -> bool:
        lost = self._happens("notices", producer, _number(transfer), 1)
        self._world.counts["notices_lost"] += lost
        return lost

    def _spoil(self, pull: SimulatedPull, read: tuple[int, ...]) -> tuple[int, ...]:
        source = pull.effect.source
        if not self._happens("corrupt", source.producer, _number(source.transfer), 2):
            return read
        self._world.counts["pulls_corrupt"] += 1
        return (*read[:-1], read[-1] ^ 1)

    def _leave(self, fault: Fault) -> None:
        """Clients leave all at once, as when a front end restarts."""
        listed: list[Passage] = list(self._world.book.open.values())
        for passage in listed:
            if mix(self._seed, passage.number, 3) % 1_000_000 < fault.share * 1_000_000:
                self._world.counts["clients_left"] += 1
                passage.leave()


def _strongest(faults: Sequence[Fault]) -> int:
    """The largest factor; 1 without a fault."""
    return max((each.factor for each in faults), default=1)


def _number(transfer: TransferId) -> int:
    """A number that is the same in every run: it follows from the request's name."""
    return int(transfer.request) * 64 + transfer.attempt
