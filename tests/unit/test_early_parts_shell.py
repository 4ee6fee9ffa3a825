"""Parts in the two halves of the connector, with a notice channel and reads that the test controls."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from support.notice_channel import NoticeChannel

pytest.importorskip("torch", reason="make setup installs torch")
pytest.importorskip("vllm", reason="make setup installs vLLM")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own deprecations as it is imported
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

    from engine.vllm.connector import early
    from engine.vllm.connector.early import EarlyHandoffs
    from engine.vllm.connector.links import NotServed
    from engine.vllm.connector.metadata import ExpectedHold, WorkerReport
    from engine.vllm.connector.part_reads import BROKEN, NOT_AWAITED, NOT_HELD, EarlyReadsHere, PartsWorker, wanted
    from engine.vllm.connector.scheduler import BatonScheduler
    from engine.vllm.connector.worker import BatonWorker

from cluster.ids import RequestId, TransferId
from cluster.wire import EARLY, TRANSFER
from decode.early_reads import PartRead, Place
from decode.peers import ProducerPeers
from decode.pulls import Pulls
from decode.reads import PullOutcome
from kvtransfer.asks import Introduce, Payload
from kvtransfer.early_notes import CHANNEL_STAGE, Part, Ready, Want, encode

B, TOKENS = 16, 160
MINE = str(TransferId(RequestId("mine"), 1, 1))
HOLD = list(range(100, 110))


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> NoticeChannel:
    found = NoticeChannel()
    monkeypatch.setattr(early, "open_channel", lambda: found)
    return found


def handoffs(channel: NoticeChannel, *, reads: bool = True) -> EarlyHandoffs:
    peers = ProducerPeers()
    made = EarlyHandoffs(peers, B, reads_parts=reads)
    peers.met("other", "other", 0.0)
    made.meet(Introduce("other", "other", (Payload(CHANNEL_STAGE, 0, channel.payload),)))
    made.blocks.rates.saw("other", 100, 1.0)
    return made


def leg() -> Any:
    return SimpleNamespace(
        request_id="leg", kv_transfer_params={EARLY: "other", TRANSFER: MINE}, prompt_token_ids=[1] * TOKENS
    )


def core(free: int = 1000) -> Any:
    pool = SimpleNamespace(get_num_free_blocks=lambda: free)
    return SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=pool)))


def blocks(cached: int) -> Any:
    """What vLLM gives the leg: `cached` blocks of its prefix cache, and one more than the prompt needs."""
    group = [SimpleNamespace(block_hash=b"h" if n < cached else None, is_null=False) for n in range(11)]
    return SimpleNamespace(blocks=(group,), get_unhashed_block_ids_all_groups=lambda: (list(range(cached, 11)),))


def part(first: int, ids: tuple[int, ...], life: int = 0) -> bytes:
    return encode(Part(MINE, "r", life, first, ids, TOKENS, 32, B, 1.0))


def hold(life: int = 0) -> bytes:
    fields = {"remote_engine_id": "other", "remote_request_id": "r", "do_remote_prefill": True,
              "remote_num_tokens": TOKENS, "remote_block_ids": [HOLD]}  # fmt: skip
    return encode(Ready(MINE, fields, 5, 0, life))


# --- the scheduler half ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("life", [0, 1])
def test_a_leg_reads_what_is_complete_and_pulls_the_rest(channel: NoticeChannel, life: int) -> None:
    both, request = handoffs(channel), leg()
    assert both.opened(request) and both.reads(request, 0, core()) == 0
    channel.comes = [("other", part(0, (100, 101, 102)))]
    assert both.hear() == [] and both.has_parts
    assert both.reads(request, 16, core()) == TOKENS - 16
    assert both.reserved(request, blocks(1), TOKENS - 16) and not both.waits("leg") and both.waiting == 1
    assert both.blocks.take() == ({"leg": PartRead("other", "r", 1, (101, 102), (1, 2))}, {})
    channel.comes = [("other", hold(life))]
    assert both.hear() == [request] and both.blocks.has("leg")
    local = tuple(range(1, 10))
    assert both.place(request) == (None if life else Place(local, 1)) and both.waiting == 0
    assert both.blocks.take()[1] == ({"leg": PartRead("other", "r", 1, (), local)} if life else {})
    assert both.blocks.busy == bool(life)


@pytest.mark.parametrize("how", ["digests", "no core", "full", "another engine", "set aside"])
def test_a_leg_waits_without_blocks(channel: NoticeChannel, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    both, request = handoffs(channel, reads=how != "digests"), leg()
    both.opened(request)
    channel.comes = [("other" if how != "another engine" else "third", part(0, (100, 101, 102)))]
    both.hear()
    if how == "set aside":
        monkeypatch.setattr(both._peers, "may_pull", lambda *_: False)
    assert both.reads(request, 0, None if how == "no core" else core(10 if how == "full" else 1000)) == 0
    assert not both.reserved(request, blocks(0), 0) and both.waits("leg")


def test_blocks_that_come_for_an_ordinary_pull_are_not_taken_for_an_early_read(channel: NoticeChannel) -> None:
    """vLLM was asked for blocks and had none; before it has some, the hold is there."""
    both, request = handoffs(channel), leg()
    both.opened(request)
    channel.comes = [("other", part(0, (100, 101, 102)))]
    both.hear()
    assert both.reads(request, 0, core()) == TOKENS
    channel.comes = [("other", hold())]
    assert both.hear() == [request] and not both.blocks.has("leg")
    assert not both.reserved(request, blocks(0), TOKENS)
    assert both.place(request) is None and both.blocks.take() == ({}, {})


@pytest.mark.parametrize("how", ["finished", "lost"])
def test_a_leg_that_ends_gives_its_blocks_back(channel: NoticeChannel, how: str) -> None:
    both, request = handoffs(channel), leg()
    both.opened(request)
    channel.comes = [("other", part(0, (100, 101, 102)))]
    both.hear()
    both.reads(request, 0, core())
    both.reserved(request, blocks(0), TOKENS)
    both.blocks.take()
    if how == "finished":
        both.finished("leg")
    else:
        both._peers.forgotten("other")
        both.forget("other")
        both.ask()
    assert list(both.blocks.take()[1]) == ["leg"] and both.blocks.busy
    both.blocks.ended("leg")
    both.finished("leg")
    assert not both.blocks.busy and both.blocks.take() == ({}, {})


def test_the_rate_of_a_link_goes_with_its_engine(channel: NoticeChannel) -> None:
    """Also if a pull that was under way ends later: engines' ids are never used again."""
    both = handoffs(channel)
    both.timed({"other": (10, 0.001)})
    assert both.blocks.rates.of("other") > 1.0
    both._peers.forgotten("other")
    both.forget("other")
    both.timed({"other": (10, 0.001)})
    assert both.blocks.rates.of("other") == 0.0


def test_a_producer_tells_those_who_asked_after_each_step(channel: NoticeChannel) -> None:
    both = handoffs(channel)
    request = SimpleNamespace(request_id="r", prompt_token_ids=[1] * TOKENS, output_token_ids=[7])
    both.prefills(request, MINE)
    channel.comes = [("other", encode(Want(MINE)))]
    both.hear()
    none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    new = SimpleNamespace(req_id="r", block_ids=([100, 101],), num_computed_tokens=0)
    first = SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=none, num_scheduled_tokens={"r": 40})
    more = SimpleNamespace(
        req_ids=["r"], new_block_ids=[([102, 103],)], num_computed_tokens=[40], resumed_req_ids={"r"}
    )
    again = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=more, num_scheduled_tokens={"r": 24})
    numbers = [both.step(first), both.step(again)]
    for number in [0, *numbers]:
        both.computed(number)
    ((engine, told),) = channel.told
    assert engine == "other" and isinstance(told, Part), "what was announced of the former life would be wrong"
    assert (told.life, told.first, told.blocks, told.chunk) == (1, 0, (102, 103), 24)
    both.filled(request, {TRANSFER: MINE, "remote_engine_id": "me"})
    (_, ready) = channel.told[-1]
    assert isinstance(ready, Ready) and ready.life == 1 and both.step(first) == 0


@pytest.mark.parametrize("because", ["", "its adapter has other weights here"])
def test_a_pull_goes_on_only_where_it_would_begin(channel: NoticeChannel, because: str) -> None:
    """The checks of an ordinary pull (adapter, slot, introduction) come before anything that was read early is used."""
    made: Any = object.__new__(BatonScheduler)
    both, request = handoffs(channel), leg()
    made._early, made.block_size, made._reqs_need_recv = both, B, {}
    made._pulls = Pulls(both._peers)
    made._matched = lambda *_: (0, False) if because else (TOKENS, True)
    both.opened(request)
    channel.comes = [("other", part(0, (100, 101, 102)))]
    both.hear()
    both.reads(request, 0, core())
    assert both.reserved(request, blocks(1), TOKENS - 16)
    channel.comes = [("other", hold())]
    both.hear()
    made._go_on(request)
    waits = request.kv_transfer_params["do_remote_prefill"]
    if because:
        assert waits and not made._reqs_need_recv and list(both.blocks.take()[1]) == ["leg"], "vLLM asks once more"
    else:
        assert made._reqs_need_recv == {"leg": (request, (list(range(1, 10)),), (1,), True)} and not waits
        assert made._pulls.under_way == 1 and both.blocks.take()[1] == {}


# --- the worker half -------------------------------------------------------------------------------------------------


class _Reads:
    """Instead of `decode.reads.Reads`."""

    def __init__(self) -> None:
        self.added: dict[str, tuple[list[Any], int, str]] = {}

    def add(self, request: str, handles: Any, sources: Any, mark: bytes, **more: Any) -> None:
        wrong = more.get("wrong")
        self.added[request] = (list(handles), len(sources), wrong() if wrong else "")

    def under_way(self, request: str) -> bool:
        return request in self.added


class _Nixl:
    def __init__(self) -> None:
        self.early = False

    def pulling_early(self) -> Any:
        return self

    def __enter__(self) -> None:
        self.early = True

    def __exit__(self, *_: object) -> None:
        self.early = False


class _Worker(PartsWorker):
    """A rank of D. Its reads only get names."""

    def __init__(self) -> None:
        self.fails = False
        self._parts, self._reads, self.nixl_wrapper = EarlyReadsHere(), _Reads(), _Nixl()  # type: ignore[assignment]
        self._follower = SimpleNamespace(wake=lambda: None)  # type: ignore[assignment]
        self._told, self._expected = WorkerReport(Counter(), {}, {}), {}
        self._recving_metadata, self._recving_transfers = {}, defaultdict(list)
        self._recv_failures, self._remote_agents, self._invalid_remote_engines = set(), {"p": {}}, set()
        self._physical_blocks_per_logical_kv_block = 1
        self.use_host_buffer = self.enable_permute_local_kv = self.enable_heterogeneous_attn_post_process = False
        self.cut = True

    def __del__(self) -> None:
        pass

    def _logical_to_kernel_block_ids(self, block_ids: Any, ratio: int) -> Any:
        return block_ids

    def _cut(self, meta: Any) -> bool:
        return self.cut

    def _read(self, req_id: str, meta: Any, expected: ExpectedHold, early: Any = ()) -> None:
        assert not self.nixl_wrapper.early, "the rest is an ordinary pull"
        NixlPullConnectorWorker._read_blocks_for_req(self, req_id, meta)
        if req_id in self._recv_failures:
            return
        handles = self._recving_transfers[req_id]
        handles[:0] = early
        self._reads.add(req_id, handles, ("source",), b"mark")  # type: ignore[arg-type]


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> _Worker:
    made = _Worker()

    def read(self: Any, req_id: str, meta: Any) -> None:
        if made.fails:
            made._recv_failures.add(req_id)
            return
        (local,), (remote,) = meta.local_block_ids, meta.remote.block_ids
        remote = remote[-len(local) :]  # as vLLM: the end of the list
        made._recving_transfers[req_id].append(dict(zip(remote, local, strict=True)))

    monkeypatch.setattr(NixlPullConnectorWorker, "_read_blocks_for_req", read)
    return made


def begin(one: _Worker, **fields: Any) -> None:
    one._begin_parts(SimpleNamespace(**{"parts": {}, "parts_over": {}, **fields}))  # type: ignore[arg-type]


def rest(cached: int = 1, remote: list[int] | None = None) -> Any:
    """The pull of all, as the scheduler half orders it once the hold is there."""
    ids = tuple(HOLD if remote is None else remote)
    meta = wanted(PartRead("p", "r", cached, ids, tuple(range(cached, 10))))
    meta.local_num_computed_blocks = (cached,)
    return meta


FIRST = PartRead("p", "r", 1, (101, 102), (1, 2))
SECOND = PartRead("p", "r", 3, (103,), (3,))


def test_the_rest_joins_what_was_read_and_all_is_confirmed_together(one: _Worker) -> None:
    begin(one, parts={"leg": FIRST})
    begin(one, parts={"leg": SECOND})
    assert not one._recving_transfers, "vLLM would report a request once its reads have ended"
    assert "leg" in one._recving_metadata, "vLLM keeps the peer"
    early, meta = one._parts.take("leg"), rest()
    assert early is not None
    one._join("leg", meta, early)
    handles, sources, wrong = one._reads.added["leg"]  # type: ignore[attr-defined]
    assert handles == [{101: 1, 102: 2}, {103: 3}, {n + 100: n for n in range(4, 10)}]
    assert (sources, wrong) == (1, "") and meta.local_block_ids == (list(range(1, 10)),)
    one._time("leg", PullOutcome("", (SimpleNamespace(postDuration=1, xferDuration=1),)))
    assert not one._told.took, "its early reads say nothing of the wire"


@pytest.mark.parametrize("how", ["other block", "other cached", "broken", "gone", "fails at the end"])
def test_nothing_of_a_pull_is_used_that_cannot_be_joined_and_all_reads_are_followed(one: _Worker, how: str) -> None:
    begin(one, parts={"leg": FIRST})
    if how == "broken":
        one.fails = True
        begin(one, parts={"leg": SECOND})
        assert not one._recv_failures, "vLLM would report the request while its first read is under way"
    early = one._parts.take("leg")
    assert early is not None
    if how == "gone":
        one._remote_agents.clear()
    one.fails = how == "fails at the end"
    meta = rest(2 if how == "other cached" else 1, [*HOLD[:2], 200, *HOLD[3:]] if how == "other block" else None)
    whole = meta.local_block_ids
    one._join("leg", meta, early)
    handles, sources, wrong = one._reads.added["leg"]  # type: ignore[attr-defined]
    assert handles == [{101: 1, 102: 2}] and not sources and wrong
    assert one._recving_metadata["leg"] is meta and meta.local_block_ids == whole
    assert wrong == {"broken": BROKEN, "other block": NOT_HELD, "other cached": NOT_HELD}.get(how, wrong)


def test_a_leg_that_is_not_awaited_is_reported_once_its_reads_have_ended(one: _Worker) -> None:
    over = PartRead("p", "r", 1, (), tuple(range(1, 10)))
    begin(one, parts={"leg": FIRST})
    begin(one, parts_over={"leg": over, "unread": over})
    added = one._reads.added  # type: ignore[attr-defined]
    assert (
        added["leg"][0] == [{101: 1, 102: 2}] and added["unread"][0] == [] and all(each[2] for each in added.values())
    )
    assert one._recving_transfers.keys() == added.keys() == one._recving_metadata.keys()


@pytest.mark.parametrize("how", ["not met", "permuted", "cut otherwise"])
def test_what_cannot_be_read_early_is_an_ordinary_pull(one: _Worker, how: str) -> None:
    if how == "not met":
        one._remote_agents.clear()
    one.enable_permute_local_kv, one.cut = how == "permuted", how != "cut otherwise"
    begin(one, parts={"leg": FIRST})
    one._remote_agents["p"] = {}
    begin(one, parts={"leg": SECOND})
    early = one._parts.take("leg")
    assert early is not None and not early.handles
    one._join("leg", rest(), early)
    assert one._reads.added["leg"][0] == [{n + 100: n for n in range(1, 10)}]  # type: ignore[attr-defined]


def test_the_wire_is_timed_by_ordinary_pulls(one: _Worker) -> None:
    one.tp_mappings = {"p": SimpleNamespace(all_source_ranks=(0,))}
    one._recving_metadata["leg"] = rest()
    clock = SimpleNamespace(postDuration=500_000, xferDuration=500_000)
    one._time("leg", PullOutcome("", (clock, clock)))
    one._time("leg", PullOutcome("bad", (clock,)))
    assert one._told.took == {"p": (9, 2.0)}
    ranks = one._told.aggregate(WorkerReport(Counter(), {}, {}, {"p": (9, 3.0)}, 7))
    assert ranks.took == {"p": (9, 3.0)} and ranks.step == 0, "a step is over when all ranks say so"


def test_a_pull_that_is_refused_says_why(one: _Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an ordinary pull's, and not that an early read was at fault."""
    begin(one, parts={"leg": FIRST})

    def refuse(*_: Any) -> None:
        raise NotServed("rank 0 of p has no slot 7")

    monkeypatch.setattr(one, "_read", refuse)
    early = one._parts.take("leg")
    assert early is not None
    one._join("leg", rest(), early)
    handles, _, wrong = one._reads.added["leg"]  # type: ignore[attr-defined]
    assert handles == [{101: 1, 102: 2}] and wrong == "rank 0 of p has no slot 7"


def test_vllm_keeps_an_engine_while_early_reads_of_it_are_under_way(one: _Worker) -> None:
    """It asks this before it drops the descriptors of an engine after NIXL has lost the metadata."""
    assert one._engines_with_inflight_transfers() == set()
    begin(one, parts={"leg": FIRST})
    assert not one._recving_transfers and one._engines_with_inflight_transfers() == {"p"}
    begin(one, parts_over={"leg": PartRead("p", "r", 1, (), tuple(range(1, 10)))})
    assert one._recving_transfers and one._engines_with_inflight_transfers() == {"p"}
    del one._recving_transfers["leg"]
    assert one._engines_with_inflight_transfers() == set()


@pytest.mark.parametrize("because", [NOT_AWAITED, NOT_HELD])
def test_a_leg_that_has_ended_is_not_said_to_be_computed_here(
    because: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: Any = object.__new__(BatonWorker)
    outcome = PullOutcome(because)
    made._reads = SimpleNamespace(under_way=lambda _: True, take=lambda _: outcome)
    made._told, made.xfer_stats, made._recving_metadata = WorkerReport(Counter(), {}, {}), None, {}
    made._parts, made._recv_failures = EarlyReadsHere(), set()
    monkeypatch.setattr(BatonWorker, "_handle_failed_transfer", lambda *_, **__: True)
    assert made._pop_done_transfers({"leg": []}) == ({"leg"}, {"leg"})
    assert ("computed here" in caplog.text) == (because == NOT_HELD)
    made.shutdown = lambda: None
