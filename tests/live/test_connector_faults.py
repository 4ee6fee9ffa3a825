"""Baton's connector in real engines with faults: reads cut, notices lost, engines killed halfway, clients that leave.

On cores UCX uses TCP alone here. A read from a stopped process then waits in its middle, so that a process is killed
during a transfer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import device
from support.cluster import within
from support.connector_fleet import BLOCK, PATH, FaultyFleet, faulty_fleet
from support.engine_pair import Open, get, load

from cluster import wire
from decode.peers import FAILURES

pytestmark = [pytest.mark.live, pytest.mark.long]

BLOCKS = 24
"""KV-cache blocks of each engine: too few for eight requests at once."""
CLIENTS = 8
EACH = 50
"""Prompts between two role flips; four times that in all."""
ENV = {} if device.gpus() else {"UCX_TLS": "tcp", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
"""oneDNN caches something for each shape of a step. The cache is kept small, so that a storm shows other growth."""
FAULTS = {"cut": 0.06, "drop": 0.1, "blind": 0.06}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyFleet]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    flags = ("--num-gpu-blocks-override", str(BLOCKS))
    # On a GPU no digests: its blocks are not in host memory.
    with faulty_fleet(tmp_path_factory.mktemp("f"), digests=not device.gpus(), flags=flags, env=ENV) as running:
        yield running


@pytest.fixture
def fleet(started: FaultyFleet) -> Iterator[FaultyFleet]:
    """After each test both engines live, and nothing is held."""
    yield started
    for name in "pd":
        assert started.engines.running[name].alive(), started.engines.running[name].tail()
    within(15, started.nothing_is_held)
    within(5, lambda: all(load(started.url(name)).kv_usage == 0 for name in "pd"))


# --- two hundred prompts ---------------------------------------------------------------------------------------------


def prompts(fleet: FaultyFleet, chance: random.Random) -> list[list[int]]:
    """Prompts of many lengths, also on both sides of block edges. Half of them share their beginning with others."""
    stems = [fleet.prompt(chance.choice((BLOCK, 2 * BLOCK, 3 * BLOCK + 5))) for _ in range(6)]
    made = []
    for number in range(4 * EACH):
        stem = chance.choice(stems) if number % 2 else []
        edge = chance.randrange(1, 6) * BLOCK + chance.choice((-1, 0, 1))
        length = edge if number % 3 == 0 else chance.randrange(2, 700)
        made.append(stem + fleet.prompt(length))
    return made


def preemptions(fleet: FaultyFleet) -> float:
    total = 0.0
    for name in "pd":
        text = get(fleet.url(name), "/metrics")[1].decode()
        found = [line for line in text.splitlines() if line.startswith("vllm:num_preemptions_total")]
        total += sum(float(line.rsplit(" ", 1)[1]) for line in found)
    return total


@pytest.mark.timeout(900)
def test_two_hundred_prompts_are_one_engines_whatever_fails(fleet: FaultyFleet) -> None:
    """Block edges, shared prefixes, preemption, role changes under load, cut reads, lost notices, unreadable marks."""
    chance = random.Random(41)
    asked = [(prompt, chance.choice((6, 30, 120))) for prompt in prompts(fleet, chance)]
    preempted, before = preemptions(fleet), {name: fleet.state(name)["counts"] for name in "pd"}
    for number, name in enumerate("pd"):
        fleet.fault(name, chances=FAULTS, seed=number)
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers: list[Future[list[int]]] = []
        for way in ("pd", "dp", "pd", "dp"):
            # One hand-over of the other direction may still run. With more, holds of both could wait for each other.
            within(300, lambda: sum(not each.done() for each in answers) <= 1)  # noqa: B023 - called here
            more = asked[len(answers) : len(answers) + EACH]
            answers += [clients.submit(fleet.hand_over, prompt, way, tokens) for prompt, tokens in more]
        told = [each.result() for each in answers]
    for name in "pd":
        fleet.fault(name, chances={})
    within(15, fleet.nothing_is_held)
    with ThreadPoolExecutor(4) as clients:
        alone = list(clients.map(lambda each: fleet.alone(each[1][0], "pd"[each[0] % 2], each[1][1]), enumerate(asked)))
    assert told == alone, [number for number, pair in enumerate(zip(told, alone, strict=True)) if pair[0] != pair[1]]
    happened = {
        what: sum(fleet.counted(what, name) - before[name].get(what, 0) for name in "pd")
        for what in ("confirmed", "a read failed", "the slot could not be read", "a block is not what was held")
    }
    assert happened.pop("a block is not what was held") == 0
    assert all(happened.values()) and happened["confirmed"] > EACH, happened
    assert preemptions(fleet) > preempted, "the KV space was small enough"


# --- a pair that does not work ---------------------------------------------------------------------------------------


@pytest.mark.timeout(200)
def test_a_pair_that_does_not_work_is_set_aside_and_let_in_again(fleet: FaultyFleet) -> None:
    def aside() -> bool:
        (peer,) = fleet.state("d")["peers"].values()
        return bool(peer["aside"])

    def handed_over(way: str = "pd") -> None:
        prompt = fleet.prompt(300)
        assert fleet.hand_over(prompt, way) == fleet.alone(prompt)

    fleet.fault("d", chances={"cut": 1.0})
    for _ in range(FAILURES):
        handed_over()
    within(5, aside)
    refused = fleet.counted("set aside")
    handed_over()
    assert fleet.counted("set aside") == refused + 1
    before = fleet.pulled("p")
    handed_over("dp")
    within(5, lambda: fleet.pulled("p") > before)  # the other direction works
    fleet.fault("d", chances={})

    def let_in() -> bool:
        handed_over()
        return not aside()

    within(60, let_in)
    before = fleet.pulled()
    handed_over()
    within(5, lambda: fleet.pulled() > before)


# --- killed during a transfer ----------------------------------------------------------------------------------------


class Halfway:
    """A pull that stands still in its middle, because P's process is stopped."""

    def __init__(self, fleet: FaultyFleet) -> None:
        self.fleet = fleet
        self.name, self.prompt = fleet.name(), fleet.prompt(1500)
        self.right = fleet.alone(self.prompt)
        self.fields = fleet.leg(self.prompt, "p", self.name)
        self._clients = ThreadPoolExecutor(1)

    def begin(self) -> None:
        self.fleet.send("p", signal.SIGSTOP)
        self.answer: Future[list[int]] = self._clients.submit(self.fleet.decode, self.prompt, self.fields)
        within(20, lambda: self.fleet.state("d")["pulls"] == 1)
        self.fleet.alone(self.fleet.prompt(3), "d", 4)  # some steps later
        assert self.fleet.state("d")["pulls"] == 1 and not self.answer.done()

    def close(self) -> None:
        with contextlib.suppress(AssertionError):  # P was killed
            self.fleet.send("p", signal.SIGCONT)
        self._clients.shutdown()


@pytest.fixture
def halfway(fleet: FaultyFleet) -> Iterator[Halfway]:
    if device.gpus():
        pytest.skip("a stopped process stops no read of its GPU memory")
    made = Halfway(fleet)
    try:
        made.begin()
        yield made
    finally:
        made.close()


def works_again(fleet: FaultyFleet) -> None:
    for way in ("pd", "dp"):
        prompt, before = fleet.prompt(600), fleet.pulled(way[1])
        assert fleet.hand_over(prompt, way) == fleet.alone(prompt)
        within(5, lambda: fleet.pulled(way[1]) > before)  # noqa: B023 - called here


@pytest.mark.timeout(400)
def test_p_is_killed_during_a_transfer(fleet: FaultyFleet, halfway: Halfway) -> None:
    fleet.send("p", signal.SIGKILL)
    assert halfway.answer.result(60) == halfway.right, "D computes it"
    within(10, lambda: fleet.state("d")["pulls"] == 0)
    fleet.engines.start_again("p")
    assert fleet.decode(fleet.prompt(50), halfway.fields), "before D knows of P's new life"
    fleet.introduce()
    works_again(fleet)
    prompt, before = fleet.prompt(1500), fleet.counted("not pulled")
    assert fleet.decode(prompt, halfway.fields) == fleet.alone(prompt), "a hold of P's former life"
    within(5, lambda: fleet.counted("not pulled") == before + 1)


@pytest.mark.timeout(400)
def test_d_is_killed_during_a_transfer(fleet: FaultyFleet, halfway: Halfway) -> None:
    """P gets no notice. Over TCP P itself sends what D reads, and UCX may end a process that fails at that ("Fatal:
    unexpected error: Endpoint timeout"). P lives and frees the hold, or it dies and starts again: both are right."""
    fleet.send("d", signal.SIGKILL)
    with pytest.raises(OSError):
        halfway.answer.result(30)
    fleet.send("p", signal.SIGCONT)
    try:
        assert fleet.state("p")["holds"] == 1
        fleet.release(halfway.name)
        within(2, lambda: fleet.state("p")["holds"] == 0)
        within(5, lambda: load(fleet.url("p")).kv_usage == 0)
        assert fleet.alone(halfway.prompt) == halfway.right, "there is room for it only now"
        dead = ["d"]
    except (AssertionError, OSError):
        log = fleet.engines.running["p"].log.read_text(errors="replace")
        assert "ucp_request.inl" in log, "P died of something else, or lives and is wrong"
        within(60, lambda: not fleet.engines.running["p"].alive())
        dead = ["p", "d"]
    fleet.start_again(*dead)
    works_again(fleet)


@pytest.mark.timeout(400)
def test_both_are_killed_during_a_transfer(fleet: FaultyFleet, halfway: Halfway) -> None:
    fleet.send("p", signal.SIGKILL)
    fleet.send("d", signal.SIGKILL)
    with pytest.raises(OSError):
        halfway.answer.result(30)
    fleet.start_again("p", "d")
    works_again(fleet)


@pytest.mark.timeout(200)
def test_p_stands_still_for_a_while_and_goes_on(fleet: FaultyFleet, halfway: Halfway) -> None:
    fleet.send("p", signal.SIGCONT)
    assert halfway.answer.result(60) == halfway.right
    fleet.release(halfway.name)


# --- clients that leave ----------------------------------------------------------------------------------------------


def resident_mib(fleet: FaultyFleet, name: str) -> float:
    total = 0.0
    for each in fleet.processes(name):
        text = Path(f"/proc/{each}/status").read_text()
        total += float(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])
    return total / 1024


WARM_S = 40
"""Seconds of load after which an engine and oneDNN have allocated what they allocate only once."""


def storm(fleet: FaultyFleet, seconds: float) -> int:
    """Eight clients send requests one after another, and leave each at a random time; return how many were left."""
    until = time.monotonic() + seconds

    def leaves(seed: int) -> int:
        chance, left = random.Random(seed), 0
        while time.monotonic() < until:
            name, prompt = fleet.name(), [chance.randrange(97, 123) for _ in range(chance.randrange(50, 900))]
            body: dict[str, Any] = {**fleet.body(prompt, 60), "stream": True}
            way = chance.choice(("pd", "dp"))
            if chance.random() < 0.5:
                leg = Open(fleet.url(way[0]), PATH, wire.prefill_body(fleet.body(prompt), transfer=name))
            else:
                fields = fleet.leg(prompt, way[0], name)
                leg = Open(fleet.url(way[1]), PATH, dict(wire.decode_body(body, wire.TransferFields(fields))))
            time.sleep(chance.random() * 0.3)  # clients leave when they like
            leg.leave()
            fleet.release(name, way[0])
            left += 1
        return left

    with ThreadPoolExecutor(8) as clients:
        return sum(clients.map(leaves, range(8)))


@pytest.mark.parametrize("seconds", [pytest.param(20, id="20 s"), pytest.param(600, id="10 min")])
@pytest.mark.timeout(900)
def test_a_storm_of_clients_that_leave(fleet: FaultyFleet, seconds: int) -> None:
    """More requests than the engines can compute, all left by their clients: memory is flat, nothing stays held, and
    the engines serve on.
    """
    storm(fleet, WARM_S)
    early = {name: resident_mib(fleet, name) for name in "pd"}
    left = storm(fleet, seconds)
    assert left > seconds
    within(15, fleet.nothing_is_held)
    late = {name: resident_mib(fleet, name) for name in "pd"}
    assert all(late[name] - early[name] < 64 for name in "pd"), (early, late, left)
    works_again(fleet)
