"""The instances that an engine must have met if it shares prompts' beginnings, and its heartbeat about them."""

from __future__ import annotations

from dataclasses import replace

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import Heartbeat, Member, Membership, MemberState
from decode.peers import MET
from engine.agent.meetings import Acquainted, EngineEndpoint, HandoffReport, Meetings, PullState, peers

ME = InstanceId("p0")


def fleet(**shares: bool) -> tuple[Member, ...]:
    """Members by name, whose first letter is their role."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    beats = [
        Heartbeat(
            id=InstanceId(name), agent=f"a-{name}", seq=2, role=roles[name[0]], url=f"http://{name}:1",
            models=({"id": "m"},), state=MemberState.READY, peers=shared,
        )
        for name, shared in shares.items()
    ]  # fmt: skip
    found = Membership(6.0)
    found.fold(beats, 0.0, 0.0)
    return tuple(found.snapshot())


def names(members: tuple[Member, ...]) -> set[str]:
    return {member.id for member in members}


def told(*met: str) -> HandoffReport:
    return HandoffReport({}, tuple(PullState(f"e-{name}", InstanceId(name), MET, 0, 0, aside=False) for name in met))


def ends(*known: str) -> dict[InstanceId, EngineEndpoint]:
    return {InstanceId(name): EngineEndpoint(f"e-{name}", 1, "c", ((0, 0, "x"),)) for name in known}


def test_instances_of_one_role_meet_if_both_share() -> None:
    members = fleet(p0=True, p1=True, p2=False, d0=True, d1=False)
    assert names(peers(members, ME, Role.PREFILL, ["m"])) == {"d0", "d1"}
    assert names(peers(members, ME, Role.PREFILL, ["m"], shares=True)) == {"p1", "d0", "d1"}
    assert names(peers(members, InstanceId("d0"), Role.DECODE, ["m"], shares=True)) == {"p0", "p1", "p2"}
    assert not peers(members, ME, Role.PREFILL, ["other"], shares=True)


def test_a_prefill_instance_names_instances_that_it_cannot_pull_from_and_takes_work_all_the_same() -> None:
    """A prefill instance takes work once its consumers can pull from it; its own pulls can wait."""
    members = peers(fleet(p0=True, p1=True, d0=True, d1=False), ME, Role.PREFILL, ["m"], shares=True)
    plain, sharing = Acquainted(), Acquainted()
    for each, shares in ((plain, False), (sharing, True)):
        for seq in (2, 3):  # a consumer that has met this engine says with a later heartbeat whether it can pull
            later = tuple(_at(member, seq) for member in members)
            each.look(ME, Role.PREFILL, later, ends("p1", "d0", "d1"), told("p1"), shares=shares)
    assert (plain.shuns, sharing.shuns) == ((), ("d0",))
    assert plain.enough and sharing.enough


def _at(member: Member, seq: int) -> Member:
    return replace(member, beat=replace(member.beat, seq=seq))


def test_a_decode_instance_waits_for_its_producers_alone() -> None:
    me = InstanceId("d0")
    members = peers(fleet(d0=True, d1=True, p0=True), me, Role.DECODE, ["m"], shares=True)
    found = Acquainted()
    found.look(me, Role.DECODE, members, ends("d1", "p0"), told("p0"), shares=True)
    assert found.shuns == ("d1",) and found.enough
    found.look(me, Role.DECODE, members, ends("d1", "p0"), told("d1"), shares=True)
    assert found.shuns == ("p0",) and not found.enough


def test_a_peer_without_a_link_is_introduced_again_ever_more_rarely() -> None:
    """vLLM drops a peer whose connection was cut, and no router sends a request that would shake hands again."""
    ours = EngineEndpoint("d", 1, "c", ((0, 0, "AA=="),))
    peer = EngineEndpoint("p", 1, "c", ((0, 0, "AA=="),))
    name, found = InstanceId("p0"), {InstanceId("p0"): peer}
    meetings = Meetings()
    meetings.began(ours)
    for ask in meetings.due(found, [name]):
        meetings.told(ask, found)

    def asked(link: str, begin: int, end: int) -> list[int]:
        told = HandoffReport(pulls=(PullState("p", name, link, 0, 0, aside=False),))
        return [now for now in range(begin, end) if meetings.again(found, told, float(now))]

    assert asked("met", 0, 100) == []
    assert asked("gone", 100, 1500) == [115, 145, 205, 325, 565, 865, 1165, 1465]
    assert asked("met", 1500, 1510) == []
    assert asked("met, and rank 0 cannot be read", 1510, 1530) == [1525], "the pauses begin anew"
    assert meetings.again({}, HandoffReport(pulls=(PullState("p", name, "gone", 0, 0, aside=False),)), 9999.0) == []
