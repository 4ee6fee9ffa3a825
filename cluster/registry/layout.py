"""The keys of a fleet in Redis, and what each kind of program may do with them. Pure.

All keys begin with ``baton:CLUSTER:``; each expires by itself:

    KIND:lock:NAME           string   id of the agent that owns the name                            ttl
    KIND:beat:NAME:AGENT     string   that agent's last heartbeat, JSON, with its proof             ttl
    KIND:members             set      ``NAME AGENT`` of all writers; readers remove the silent      1 day
    KIND:changed             channel  tells readers that something other than load has changed      -
    router:notes             channel  what routers tell each other of their load in flight           -
    posted:NAME:AGENT:EPOCH  hash     items that one life of an instance posted, by reader's name   ttl
    epoch:NAME               string   the last epoch given out                                      30 days

`users` writes these rights down as Redis' access control lists (Redis 7): ``deploy/redis/users.acl``.
"""

from __future__ import annotations

from typing import Final

from cluster.ids import RANK_MARK
from cluster.registry.membership import MemberKind

MemberKey = tuple[MemberKind, str, str]
"""Kind, name and agent of the member that a heartbeat is of."""

ANY: Final = "*"
"""Stands for all names, as in Redis' patterns."""

_READS: Final = ("smembers", "mget", "multi", "exec", "discard")
_HEARS: Final = ("subscribe", "unsubscribe", "ping")
_WRITES: Final = ("get", "set", "del", "pexpire", "expire", "sadd", "srem", "publish")
_WATCHES: Final = ("watch", "unwatch", "time")
_POSTS: Final = ("hset", "hmget")

USERS: Final = ("baton-router", "baton-agent", "baton-controller", "baton-reader")

CONTROLLER: Final = "controller"
"""The one name that all controllers of a fleet compete for."""

NUDGED: Final = (MemberKind.INSTANCE, MemberKind.ROUTER)
"""Kinds whose changes wake readers. A controller's heartbeat can wait for the next regular reading."""


class Keys:
    """Builds the keys of one cluster."""

    def __init__(self, cluster: str) -> None:
        self.prefix: Final = f"baton:{cluster}:"

    def lock(self, kind: MemberKind, name: str) -> str:
        """Key of the agent that owns a name."""
        return f"{self.prefix}{kind.value}:lock:{name}"

    def beat(self, kind: MemberKind, name: str, agent: str) -> str:
        """Key of one agent's last heartbeat."""
        return f"{self.prefix}{kind.value}:beat:{name}:{agent}"

    def members(self, kind: MemberKind) -> str:
        """Key of the set of all writers."""
        return f"{self.prefix}{kind.value}:members"

    def changed(self, kind: MemberKind) -> str:
        """The channel that announces changes."""
        return f"{self.prefix}{kind.value}:changed"

    @property
    def notes(self) -> str:
        """The channel of routers' notes to each other."""
        return f"{self.prefix}{MemberKind.ROUTER.value}:notes"

    def posted(self, name: str, agent: str, epoch: int | str) -> str:
        """Key of the items that one life of an instance posted."""
        return f"{self.prefix}posted:{name}:{agent}:{epoch}"

    def epoch(self, name: str) -> str:
        """Key of the last epoch given out."""
        return f"{self.prefix}epoch:{name}"


def users(cluster: str, instance: str = ANY) -> str:
    """The lines of an ACL file: routers, agents (of one instance, or of all), and readers. The operator fills the
    passwords in.
    """
    keys, rights = Keys(cluster), {}
    mine = (instance,) if instance == ANY else (instance, f"{instance}{RANK_MARK}{ANY}")  # and its ranks
    rights["baton-router"] = [
        *_rw(
            keys.lock(MemberKind.ROUTER, ANY), keys.beat(MemberKind.ROUTER, ANY, ANY), keys.members(MemberKind.ROUTER)
        ),
        *_rw(keys.members(MemberKind.INSTANCE), keys.members(MemberKind.CONTROLLER)),
        *_r(keys.lock(MemberKind.INSTANCE, ANY), keys.beat(MemberKind.INSTANCE, ANY, ANY)),
        *_r(keys.lock(MemberKind.CONTROLLER, ANY), keys.beat(MemberKind.CONTROLLER, ANY, ANY)),
        *_channels(keys),
        f"&{keys.notes}",
        *_may(*_READS, *_HEARS, *_WRITES, *_WATCHES),
    ]
    rights["baton-agent"] = [
        *_rw(
            *(
                key
                for name in mine
                for key in (keys.lock(MemberKind.INSTANCE, name), keys.beat(MemberKind.INSTANCE, name, ANY))
            )
        ),
        *_rw(keys.members(MemberKind.INSTANCE)),
        *_rw(*(key for name in mine for key in (keys.posted(name, ANY, ANY), keys.epoch(name)))),
        *_rw(keys.members(MemberKind.ROUTER)),
        *_r(keys.lock(MemberKind.INSTANCE, ANY), keys.beat(MemberKind.INSTANCE, ANY, ANY), keys.posted(ANY, ANY, ANY)),
        *_r(keys.lock(MemberKind.ROUTER, ANY), keys.beat(MemberKind.ROUTER, ANY, ANY)),
        *_channels(keys),
        *_may(*_READS, *_HEARS, *_WRITES, *_WATCHES, *_POSTS),
    ]
    rights["baton-controller"] = [
        *_rw(
            keys.lock(MemberKind.CONTROLLER, ANY),
            keys.beat(MemberKind.CONTROLLER, ANY, ANY),
            keys.members(MemberKind.CONTROLLER),
        ),
        *_rw(keys.members(MemberKind.INSTANCE), keys.members(MemberKind.ROUTER), keys.epoch(CONTROLLER)),
        *(right for kind in NUDGED for right in _r(keys.lock(kind, ANY), keys.beat(kind, ANY, ANY))),
        *_channels(keys),
        f"&{keys.changed(MemberKind.CONTROLLER)}",
        *_may(*_READS, *_HEARS, *_WRITES, *_WATCHES),
    ]
    rights["baton-reader"] = [
        *(
            right
            for kind in MemberKind
            for right in _r(keys.lock(kind, ANY), keys.beat(kind, ANY, ANY), keys.members(kind))
        ),
        *_may(*_READS, "ping"),
    ]
    assert tuple(rights) == USERS
    lines = [f"user {name} on >{name}-PASSWORD {' '.join(words)}\n" for name, words in rights.items()]
    return "".join(["user default off\n", *lines])


def _rw(*keys: str) -> list[str]:
    return [f"~{key}" for key in keys]


def _r(*keys: str) -> list[str]:
    return [f"%R~{key}" for key in keys]


def _channels(keys: Keys) -> list[str]:
    return [f"&{keys.changed(kind)}" for kind in NUDGED]


def _may(*commands: str) -> list[str]:
    return [f"+{name}" for name in commands]
