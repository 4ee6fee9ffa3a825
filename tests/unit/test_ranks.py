"""Data parallel ranks as instances: names, keys, loads, events, and a rank whose engine has another, failed rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.errors import UsageError
from cluster.ids import InstanceId, RequestId, TransferId, engine_of, rank_of, ranks_of
from cluster.instance import Instance, Load, Role
from cluster.registry.layout import users
from cluster.registry.membership import Heartbeat, MemberState, decode, encode
from cluster.wire import TICKET, fields_digest
from engine.agent.meetings import HandoffReport, PullState, exposition
from engine.vllm.evictions import SOCKET, events_path
from engine.vllm.metrics import parse_load, parse_loads
from engine.vllm.spec import EngineSpec, ranks_in
from goodput.actuate.engines import by_engine
from k8s.operator.fleet import known_by
from kvtransfer.asks import door_for, door_of, doors_of
from kvtransfer.keys import InstanceKeys, instance_key
from kvtransfer.proving import FleetProofs, InstanceProofs
from kvtransfer.seal import NONCE_BYTES, identity_text, read_identity
from kvtransfer.signed import Ask, Judge, signed_headers
from kvtransfer.ticket import Accepted, ExpectedTicket, SigningKey, check
from router.core.values import Reported, Wanted
from router.fleet.view import FAILURES_UNTIL_DOWN, FleetView
from router.http.tickets import Tickets
from router.scheduler.scoring.filters import ready

KEY = SigningKey("k1", b"\x11" * 32)
NOW = 1_800_000_000.0
P, P0, P1 = InstanceId("p"), InstanceId("p@0"), InstanceId("p@1")


def test_names_say_engine_and_rank() -> None:
    assert ranks_of(P, 1) == (P,) and ranks_of(P, 2) == (P0, P1)
    assert [engine_of(name) for name in (P, P0, P1)] == [P, P, P]
    assert [rank_of(name) for name in (P, P0, P1, InstanceId("p@12"))] == [None, 0, 1, 12]
    assert [rank_of(InstanceId(name)) for name in ("p@", "p@x", "@1", "p@1@2", "p@01")] == [None] * 5
    assert Instance(id=P1, role=Role.BOTH, url="http://h").rank == 1


def test_the_metrics_of_ranks_have_each_name_once() -> None:
    """A page with two ``# TYPE`` lines for one name is refused by Prometheus' own library."""
    report = HandoffReport({"held": 1}, (PullState("e", InstanceId("q"), "met", 2, 1, aside=True),))
    lines = exposition({P0: report, P1: report}).splitlines()
    types = [line for line in lines if line.startswith("#")]
    assert len(types) == len(set(types)) == 3
    assert [line for line in lines if line.startswith("baton_agent_connector_events_total")] == [
        f'baton_agent_connector_events_total{{instance="{name}",event="held"}} 1' for name in (P0, P1)
    ]


def test_an_engine_has_no_rank_in_its_own_name() -> None:
    spec = EngineSpec(instance=P, role=Role.BOTH, model="m", python="py", device="cpu", port=1, side_channel_port=2)
    assert replace(spec, ranks=2).instances == (P0, P1) and spec.instances == (P,)
    with pytest.raises(UsageError, match="@"):
        replace(spec, instance=P1)
    with pytest.raises(UsageError, match="1 to 1024"):
        replace(spec, ranks=0)


@pytest.mark.parametrize(
    ("args", "ranks"),
    [("", 1), ("-dp 2", 2), ("--data-parallel-size=4 -tp 2", 4), ("-dp 2 -dpn 1", 1), ("-dp 2 -dpe", 1),
     ("-dp 4 -dpl 2 -dph", 1), ("-dp 4 --data-parallel-start-rank 2", 1), ("-dp 0", 1)],
)  # fmt: skip
def test_flags_that_make_ranks_behind_one_port(args: str, ranks: int) -> None:
    assert ranks_in(tuple(args.split())) == ranks


def test_each_rank_has_its_sockets() -> None:
    assert doors_of(P, "/run/p/door", 2) == ((P0, "/run/p/door0"), (P1, "/run/p/door1"))
    assert doors_of(P, "/run/p/door", 1) == ((P, "/run/p/door"),)
    assert door_for("/run/{rank}/door", 2) == "/run/{rank}/door" and door_of("/run/{rank}/door", 3) == "/run/3/door"
    assert events_path(f"/run/p/{SOCKET}", 0) == f"/run/p/{SOCKET}"
    assert events_path(f"/run/p/{SOCKET}", 7) == f"/run/p/{SOCKET}_dp7" and "inproc" in SOCKET, "vLLM's own rule"


def test_each_rank_has_its_load() -> None:
    def page(rank: int, running: int, usage: float) -> str:
        label = f'engine="{rank}",model_name="m"'
        return (
            f"vllm:num_requests_running{{{label}}} {running}.0\nvllm:kv_cache_usage_perc{{{label}}} {usage}\n"
            f'vllm:cache_config_info{{block_size="16",engine="{rank}",num_gpu_blocks="20"}} 1.0\n'
            f'vllm:prompt_tokens_by_source_total{{{label},source="external_kv_transfer"}} {100.0 * rank}\n'
        )

    text = page(0, 3, 0.5) + page(1, 1, 0.25)
    one, two = parse_loads(text, 2)
    assert one == Load(running=3, kv_usage=0.5, kv_tokens=160)
    assert two == Load(running=1, kv_usage=0.25, kv_tokens=160, external_kv_tokens=100)
    assert parse_loads(text, 1) == (parse_load(text),) and parse_load(text).running == 4
    assert parse_loads("", 3) == (Load(),) * 3


@pytest.mark.parametrize(("said", "each"), [("14000", 14_000), ("None", 16_000)])
def test_a_ranks_cache_is_its_own_part_of_the_engines(said: str, each: int) -> None:
    """vLLM writes the same labels for each rank: the sum of all ranks' blocks, and one rank's tokens."""
    text = "".join(
        f'vllm:cache_config_info{{block_size="16",engine="{rank}",kv_cache_size_tokens="{said}",'
        'num_gpu_blocks="2000"} 1.0\n'
        for rank in range(2)
    )
    assert [load.kv_tokens for load in parse_loads(text, 2)] == [each, each]
    assert parse_load(text).kv_tokens == 2 * each


def beat(name: InstanceId, **more: object) -> Heartbeat:
    told = {"agent": "a", "url": "http://h:1", "sent_at": NOW, "state": MemberState.READY, **more}
    return Heartbeat(id=name, **told)  # type: ignore[arg-type]


def test_heartbeats_take_names_of_ranks_and_no_malformed_ones() -> None:
    told = beat(P1, legs={"d@0": (1, 1, 1)}, shuns=("x@3",))
    assert decode(encode(told)) == (told, "")
    for name in ("p@", "p@x", "p@1@2", "@1", "p@12345"):
        with pytest.raises(ValueError, match="no reader would take"):
            encode(beat(InstanceId(name)))


def test_an_engines_keys_are_those_of_its_ranks_and_of_no_other() -> None:
    assert instance_key(KEY, P1) == instance_key(KEY, P) != instance_key(KEY, InstanceId("q@1"))
    agent = InstanceProofs(lambda: InstanceKeys(P, (instance_key(KEY, P),)), lambda: NOW)
    router = FleetProofs(lambda: (KEY,), lambda: NOW)
    proof = agent.prove("c", beat(P1), b"body")
    assert proof and router.fault("c", beat(P1), b"body", proof) == ""
    assert agent.prove("c", beat(InstanceId("q@1")), b"body") == ""


def test_a_ticket_for_a_rank_is_good_at_its_engines_guard() -> None:
    body = {"kv_transfer_params": {"do_remote_decode": True}}
    made = Tickets(lambda: (KEY,), lambda: NOW).stamp(body, P1, TransferId(RequestId("r"), 1, 1), producer=P1)
    fields = dict(made["kv_transfer_params"])
    expected = ExpectedTicket(producer=None, consumer=P, fields=fields_digest(fields))
    assert isinstance(check(fields[TICKET], (instance_key(KEY, P),), NOW, expected), Accepted)
    other = replace(expected, consumer=InstanceId("q"))
    assert not isinstance(check(fields[TICKET], (instance_key(KEY, P),), NOW, other), Accepted)


def test_an_agent_answers_for_its_ranks() -> None:
    def fault(to: InstanceId) -> str:
        ask = Ask(method="POST", path="/drain", by="router", to=to)
        headers = signed_headers(ask, instance_key(KEY, to), now=NOW, nonce=b"\x01" * 16)
        return Judge(P, NOW - 60).fault(headers["x-baton-signature"], ask, (instance_key(KEY, P),), NOW)

    assert fault(P) == fault(P1) == ""
    assert fault(InstanceId("q@1"))


def test_what_is_sealed_for_one_rank_does_not_open_at_another() -> None:
    p, d = (read_identity(identity_text((KEY,), InstanceId(name))) for name in "pd")
    p1, d0, d1 = p.of_rank(P1), d.of_rank(InstanceId("d@0")), d.of_rank(InstanceId("d@1"))
    sealed = p1.seal(b"hello", d0.me, d0.credentials(), life="1", nonce=b"\x02" * NONCE_BYTES)
    assert sealed is not None
    assert d0.unseal(sealed, P1, p1.credentials(), life="1") == b"hello"
    assert d1.unseal(sealed, P1, p1.credentials(), life="1") is None
    assert d0.unseal(sealed, P0, p.credentials(), life="1") is None
    # Ranks of one engine of both roles hand over to each other, too.
    own = p1.seal(b"hello", P0, p.credentials(), life="1", nonce=b"\x03" * NONCE_BYTES)
    assert own is not None and p.of_rank(P0).unseal(own, P1, p1.credentials(), life="1") == b"hello"


def test_an_agents_registry_user_may_write_its_ranks() -> None:
    line = next(each for each in users("c", "p").splitlines() if each.startswith("user baton-agent"))
    assert "epoch:p " in line and "epoch:p@* " in line
    assert "epoch:p* " not in line, "p may not write prefill-0's"


def test_controllers_see_the_ranks_of_an_engine_as_one() -> None:
    listed = [
        beat(P0, load=Load(running=1, kv_usage=0.5, kv_tokens=10), credits=4, epoch=3),
        beat(P1, load=Load(running=2, waiting=3, kv_usage=0.0, kv_tokens=10), credits=5, state=MemberState.DRAINING),
        beat(InstanceId("d")),
    ]
    seen = by_engine(listed)
    assert list(seen) == ["p", "d"] and seen["d"] is listed[2]
    assert (seen["p"].id, seen["p"].state, seen["p"].credits, seen["p"].epoch) == (P, MemberState.DRAINING, 9, 3)
    assert seen["p"].load == Load(running=3, waiting=3, kv_usage=0.25, kv_tokens=20)


def test_the_operator_sees_the_ranks_of_a_pod_as_one() -> None:
    word = {"instances": [{"id": name} for name in ("p@0", "p@1", "d", "e")],
            "pairs": [{"prefill": "p@1", "decode": "d", "apart": "not proven"}]}  # fmt: skip
    known = known_by({"r": word}, frozenset({"r"}))
    assert set(known.known_to) == {"p", "d", "e"}
    assert known.proven("p", "e") and known.proven("d", "e")
    assert not known.proven("p", "d"), "all ranks of p, or none"


@pytest.mark.parametrize(("gives", "proven"), [((3, 3), True), ((3, 0), False), ((0, 3), False), ((3, 4), False)])
def test_a_pod_is_proven_once_all_its_ranks_are_in_one_circle(gives: tuple[int, int], proven: bool) -> None:
    ranks = [{"id": f"p@{rank}", "gives": circle, "takes": 0} for rank, circle in enumerate(gives)]
    word = {"instances": [*ranks, {"id": "d", "gives": 0, "takes": 3}]}
    assert known_by({"r": word}, frozenset({"r"})).proven("p", "d") is proven


# -- in a router's view --


def view(*names: str) -> FleetView:
    made = FleetView()
    told = [
        Reported(
            instance=Instance(id=InstanceId(name), role=Role.BOTH, url=f"http://{name.partition('@')[0]}", epoch=1),
            state="ready", accepting=True, credits=8, grant=None, load=Load(), models=({"id": "m"},),
        )
        for name in names
    ]  # fmt: skip
    made.fold(tuple(told))
    return made


def ready_names(made: FleetView, excluded: set[str]) -> set[str]:
    wanted = Wanted(model="m", hand_over=False, excluded=frozenset(map(InstanceId, excluded)), now=0.0, arrived=0.0)
    return {made.all().at(row).id for row in ready(made.all(), wanted).any.tolist()}


def test_a_rank_that_failed_takes_the_others_of_its_engine_with_it_where_there_is_another_engine() -> None:
    both = view("p@0", "p@1", "q@0", "q@1")
    assert ready_names(both, {"p@0"}) == {"q@0", "q@1"}
    assert ready_names(both, {"p@0", "q@1"}) == {"p@1", "q@0"}, "no other engine is left"
    assert ready_names(view("p@0", "p@1"), {"p@0"}) == {"p@1"}
    assert ready_names(view("p", "q"), {"p"}) == {"q"}


def test_a_refused_connection_takes_all_ranks_out() -> None:
    made = view("p@0", "p@1", "q")
    assert sorted(made.unreachable(P0)) == [P0, P1]
    assert [name for name in ("p@0", "p@1", "q") if made.get(InstanceId(name)).ready] == ["q"]
    assert made.unreachable(P1) == ()
    assert [made.get(each).failures for each in (P0, P1)] == [FAILURES_UNTIL_DOWN] * 2
