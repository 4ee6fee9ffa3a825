"""Baton's connector in two real engines, without router or agents: exact answers, holds, and wrong or hostile input."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.cluster import within
from support.engine_pair import Open, ask, load
from support.two_engines import TwoEngines, real_engines

from bench.pair import cores_used
from cluster import wire
from cluster.ids import RequestId, TransferId
from kvtransfer.door import ask as knock
from kvtransfer.hold_marks import FIELD

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(600)]

PATH = "/v1/completions"
BLOCK = 128
"""Tokens in a block of a CPU engine."""
EDGES = (2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 8 * BLOCK, 1900)


class Fleet(TwoEngines):
    """The two engines, and their legs."""

    seed = 11

    def leg(self, prompt: list[int], name: TransferId | None = None) -> wire.TransferFields:
        status, answer = ask(self.p, PATH, wire.prefill_body(self.body(prompt), transfer=name or self.name()))
        assert status == 200, answer
        transfer = wire.read_transfer(answer)
        assert transfer is not None, answer
        return transfer

    def decode(self, prompt: list[int], transfer: wire.TransferFields | dict[str, Any] | None) -> list[int]:
        transfer = wire.TransferFields(transfer) if isinstance(transfer, dict) else transfer
        status, answer = ask(self.d, PATH, wire.decode_body(self.body(prompt), transfer))
        assert status == 200, answer
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def release(self, name: TransferId) -> None:
        assert knock(self.engines.door("p"), {"ask": "release", "transfer_id": str(name)}) == {"ok": True}

    def pulled(self) -> int:
        return load(self.d).external_kv_tokens


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with real_engines(tmp_path_factory.mktemp("c")) as running:
        made = Fleet(running)
        made.met()
        yield made


@pytest.fixture
def fleet(started: Fleet) -> Iterator[Fleet]:
    yield started
    started.both_live()


# --- exact -----------------------------------------------------------------------------------------------------------


def test_tokens_equal_one_engines_at_block_edges_and_anywhere(fleet: Fleet) -> None:
    lengths = (*EDGES, *(fleet.chance.randrange(2, 1900) for _ in range(20)))
    for length in lengths:
        prompt, before = fleet.prompt(length), fleet.pulled()
        assert fleet.decode(prompt, fleet.leg(prompt)) == fleet.alone(prompt), length
        within(5, lambda: fleet.pulled() - before == length)  # noqa: B023 - called here


@pytest.mark.parametrize("held", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("more", [1, 2, BLOCK, BLOCK + 7])
def test_a_prompt_longer_than_the_hold_pulls_all_of_the_hold(fleet: Fleet, held: int, more: int) -> None:
    prompt, before = fleet.prompt(held + more), fleet.pulled()
    assert fleet.decode(prompt, fleet.leg(prompt[:held])) == fleet.alone(prompt)
    within(5, lambda: fleet.pulled() - before == held)


@pytest.mark.parametrize("held", [BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("less", [1, BLOCK, BLOCK + 7])
def test_of_a_longer_hold_the_prompts_own_blocks_are_read(fleet: Fleet, held: int, less: int) -> None:
    prompt = fleet.prompt(held)
    short = prompt[: max(2, held - less)]
    assert fleet.decode(short, fleet.leg(prompt)) == fleet.alone(short)


def test_a_prefix_that_d_has_is_not_pulled_again(fleet: Fleet) -> None:
    prompt = fleet.prompt(5 * BLOCK)
    longer = prompt + fleet.prompt(2 * BLOCK + 9)
    fleet.decode(prompt, fleet.leg(prompt))
    before = fleet.pulled()
    assert fleet.decode(longer, fleet.leg(longer)) == fleet.alone(longer)
    within(5, lambda: 0 < fleet.pulled() - before <= 3 * BLOCK + 9)


def test_eight_at_once(fleet: Fleet) -> None:
    prompts = [fleet.prompt(fleet.chance.randrange(100, 1200)) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: fleet.decode(prompt, fleet.leg(prompt)), prompts))
    # In bf16 near ties would depend on the batch: the model runs in float32.
    assert answers == [fleet.alone(prompt) for prompt in prompts]


# --- holds -----------------------------------------------------------------------------------------------------------


def test_a_hold_is_released_by_its_name_within_a_second(fleet: Fleet) -> None:
    name = fleet.name()
    fleet.leg(fleet.prompt(600), name)
    assert fleet.state("p")["holds"] == 1
    fleet.release(name)
    within(1, lambda: fleet.state("p")["holds"] == 0)
    within(5, lambda: load(fleet.p).kv_usage == 0)
    fleet.release(name)  # a second release changes nothing


def test_a_hold_is_released_while_p_is_busy(fleet: Fleet) -> None:
    busy = Open(fleet.p, PATH, {**fleet.body(fleet.prompt(100), 1500), "stream": True})
    busy.first_line()
    try:
        name = fleet.name()
        fleet.leg(fleet.prompt(300), name)
        fleet.release(name)
        assert within(1, lambda: fleet.state("p")["holds"] == 0) < 1
    finally:
        busy.leave()


def test_a_name_given_up_before_is_never_held(fleet: Fleet) -> None:
    name = fleet.name()
    fleet.release(name)
    status, answer = ask(fleet.p, PATH, wire.prefill_body(fleet.body(fleet.prompt(300)), transfer=name))
    assert status == 200 and wire.read_transfer(answer) is None
    assert fleet.state("p")["holds"] == 0


def test_a_leg_whose_client_leaves_is_released_at_every_stage(fleet: Fleet) -> None:
    for wait_s in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4):
        name = fleet.name()
        leg = Open(fleet.p, PATH, wire.prefill_body(fleet.body(fleet.prompt(1200)), transfer=name))
        time.sleep(wait_s)
        leg.leave()
        fleet.release(name)
    assert within(3, fleet.nothing_is_held) < 3


# --- never wrong text ------------------------------------------------------------------------------------------------


def counted(fleet: Fleet, what: str) -> int:
    return int(fleet.state("d")["counts"].get(what, 0))


def test_a_hold_that_is_gone_is_computed_again(fleet: Fleet) -> None:
    name, prompt = fleet.name(), fleet.prompt(700)
    transfer = fleet.leg(prompt, name)
    fleet.release(name)
    within(1, lambda: fleet.state("p")["holds"] == 0)
    for _ in range(4):
        fleet.alone(fleet.prompt(1800))  # other prompts now have the hold's blocks
    before = counted(fleet, "the hold did not outlive the read")
    assert fleet.decode(prompt, transfer) == fleet.alone(prompt)
    within(5, lambda: counted(fleet, "the hold did not outlive the read") == before + 1)


@pytest.mark.parametrize("wrong", ["mark", "slot", "far slot", "none"])
def test_a_hold_that_cannot_be_confirmed_is_computed_again(fleet: Fleet, wrong: str) -> None:
    name, prompt = fleet.name(), fleet.prompt(500)
    fields = dict(fleet.leg(prompt, name).fields)
    index, proof = fields[FIELD]
    fields[FIELD] = {
        "mark": [index, "ab" * 16], "slot": [index + 1, proof], "far slot": [1 << 19, proof], "none": None
    }[wrong]  # fmt: skip
    assert fleet.decode(prompt, fields) == fleet.alone(prompt)
    fleet.release(name)


def test_a_hold_with_impossible_fields_is_computed_again(fleet: Fleet) -> None:
    prompt = fleet.prompt(500)
    for change in (
        {"remote_block_ids": [[1 << 40] * 4]},
        {"remote_block_ids": [[0]]},
        {"remote_block_ids": []},
        {"remote_block_ids": 5},
        {"remote_block_ids": True},
        {"remote_engine_id": "nobody"},
        {"remote_num_tokens": "many"},
        {"remote_request_id": ["a"]},
        {"tp_size": "x"},
    ):
        name, before = fleet.name(), fleet.state("d")["recomputed_tokens"]
        transfer = fleet.leg(prompt, name)
        assert fleet.decode(prompt, {**transfer.fields, **change}) == fleet.alone(prompt), change
        assert fleet.state("d")["recomputed_tokens"] - before == 500, change
        fleet.release(name)
        prompt = fleet.prompt(500)


# --- hostile input ---------------------------------------------------------------------------------------------------


def test_garbage_at_the_agent_socket_ends_nothing(fleet: Fleet) -> None:
    for raw in (b"\x00\xff\n", b'{"ask":"introduce"}\n', b"[" * 100_000 + b"\n", b'{"ask":', b"\n" * 1000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(fleet.engines.door("p")))
            client.sendall(raw)
    lie = {"ask": "introduce", "engine_id": "liar", "instance": "liar", "payloads": [{"rank": 0, "data": "eHl6"}]}
    for name in "pd":
        assert knock(fleet.engines.door(name), lie) == {"ok": True}
        assert knock(fleet.engines.door(name), {"ask": "forget", "engine_id": "liar"}) == {"ok": True}
        assert knock(fleet.engines.door(name), {"ask": "forget", "engine_id": "nobody"}) == {"ok": True}
    prompt = fleet.prompt(300)
    assert fleet.decode(prompt, fleet.leg(prompt)) == fleet.alone(prompt)


def test_notices_from_a_stranger_end_nothing_and_free_nothing(fleet: Fleet) -> None:
    """Any process that has P's metadata can send P notices; without a hold's mark they change nothing."""
    from nixl._api import nixl_agent, nixl_agent_config

    told = knock(fleet.engines.door("p"), {"ask": "metadata"})
    stranger = nixl_agent("stranger", nixl_agent_config())
    name, prompt = fleet.name(), fleet.prompt(400)
    transfer = fleet.leg(prompt, name)
    request = transfer.fields["remote_request_id"]
    running = Open(fleet.p, PATH, wire.prefill_body(fleet.body(fleet.prompt(1800)), transfer=fleet.name()), "victim")
    peer = stranger.add_remote_agent(_agent_metadata(told))
    wrong_mark = f"{request}:1:{'ab' * 16}"
    for note in (f"{request}:1", wrong_mark, f"HB:{request}", "HB:" + "x," * 99, "cmpl-victim-0:1", ":"):
        stranger.send_notif(peer, notif_msg=note.encode())
    for raw in (b"", b"\xff\xfe", b"x:99999999999"):
        stranger.send_notif(peer, notif_msg=raw)
    assert running.answer()[0] == 200
    fleet.alone(fleet.prompt(50))
    assert fleet.state("p")["holds"] == 2
    assert fleet.decode(prompt, transfer) == fleet.alone(prompt)
    fleet.release(TransferId(RequestId(f"live-{fleet.made}"), 1, 1))


def _agent_metadata(told: dict[str, Any]) -> bytes:
    import base64

    import msgspec

    handshake = msgspec.msgpack.decode(base64.b64decode(told["payloads"][0]["data"]))
    raw: bytes = msgspec.msgpack.decode(handshake["agent_metadata_bytes"])["agent_metadata"]
    return raw


def test_two_hundred_clients_that_leave_hold_nothing(fleet: Fleet) -> None:
    chance, lock = random.Random(5), threading.Lock()

    def leave(number: int) -> None:
        with lock:
            name, prompt, wait_s = fleet.name(), fleet.prompt(chance.randrange(50, 900)), chance.random() * 0.4
        if number % 2:
            leg = Open(fleet.p, PATH, wire.prefill_body(fleet.body(prompt), transfer=name))
            time.sleep(wait_s)
            leg.leave()
        else:
            transfer = fleet.leg(prompt, name)
            leg = Open(fleet.d, PATH, dict(wire.decode_body({**fleet.body(prompt), "stream": True}, transfer)))
            time.sleep(wait_s / 4)
            leg.leave()
        fleet.release(name)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(200)))
    within(10, fleet.nothing_is_held)
    within(5, lambda: all(load(url).kv_usage == 0 for url in (fleet.p, fleet.d)))
    prompt = fleet.prompt(300)
    assert fleet.decode(prompt, fleet.leg(prompt)) == fleet.alone(prompt)


def test_no_port_is_open_beside_the_servers_own(fleet: Fleet) -> None:
    for name in "pd":
        with socket.socket() as caller:
            assert caller.connect_ex(("127.0.0.1", fleet.engines.running[name].spec.side_channel_port)) != 0


def test_an_idle_engine_takes_little_of_a_core(fleet: Fleet) -> None:
    """An engine that only holds blocks is idle, too. With vLLM's own it would run a step every millisecond."""
    running = fleet.engines.running
    for name in ("p", "d"):  # the least of three samples: earlier tests may still use the engine
        assert min(cores_used(running[name], 3.0) for _ in range(3)) < 0.05, name
    name = fleet.name()
    fleet.leg(fleet.prompt(300), name)
    time.sleep(2)
    held = cores_used(running["p"], 6.0)
    fleet.release(name)
    assert held < 0.15, f"{held:.2f} of a core"


def test_the_agent_socket_tells_the_state(fleet: Fleet) -> None:
    state = fleet.state("d")
    assert json.loads(json.dumps(state)) == state
    assert [each["instance"] for each in state["peers"].values()] == ["p"]
    assert state["counts"]["confirmed"] > 0
