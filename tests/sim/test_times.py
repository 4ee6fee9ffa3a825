"""Simulated times that can be calculated by hand, to the nanosecond."""

from itertools import pairwise

import numpy as np
import pytest
from support.simulated import COSTS, every, members, one, simulate

from cluster.instance import Role
from costs.step import decoding, prompt
from loadgen.arrival import Arrival
from loadgen.arrivals import poisson
from sim.result import HANDED_OVER, SEEDED

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH
US, MS = 1_000, 1_000_000

ROUTER, HOP, FRONT, PULL_FRONT = 300 * US, 100 * US, 5 * MS, 2 * MS
"""Defaults of `SimSettings`, and `prompt_front_ns` of the members here, in ns."""
PREFILL = COSTS.step_ns(prompt(100))
FIRST_AT_ROUTER = ROUTER + HOP + FRONT + PREFILL + HOP
PULL = 20 * US + 7 * 1_000_000 // 10
"""In ns: the latency, and seven blocks of a megabyte at 10 bytes a nanosecond."""
STEPS = [COSTS.step_ns(decoding(1, 100 + number)) for number in range(20)]
"""D's step times in ns. The first step computes the prompt's last token again, each later one the next token."""


def test_a_seeded_request_is_the_sum_of_its_parts() -> None:
    _, result = simulate(members(P, D), every(1.0, 1))
    (row,) = result.columns
    arrived_at_d = FIRST_AT_ROUTER + HOP + PULL_FRONT + PULL
    assert row["first_ns"] == FIRST_AT_ROUTER
    assert row["second_ns"] == arrived_at_d + sum(STEPS[:2]) + HOP
    assert row["last_ns"] == row["end_ns"] == arrived_at_d + sum(STEPS) + HOP
    assert row["flags"] == HANDED_OVER | SEEDED
    assert row["made_tokens"] == 20


def test_without_seeding_the_first_token_waits_for_the_handoff() -> None:
    _, result = simulate(members(P, D), every(1.0, 1), seeding=False)
    (row,) = result.columns
    first = FIRST_AT_ROUTER + HOP + PULL_FRONT + PULL + STEPS[0] + HOP
    assert (row["first_ns"], row["second_ns"]) == (first, first + STEPS[1])


def test_one_instance_alone_has_no_handoff() -> None:
    _, result = simulate(members(B), every(1.0, 1))
    (row,) = result.columns
    decodes = [COSTS.step_ns(decoding(1, 101 + number)) for number in range(19)]
    assert row["first_ns"] == FIRST_AT_ROUTER
    assert row["second_ns"] == FIRST_AT_ROUTER + decodes[0]
    assert row["end_ns"] == FIRST_AT_ROUTER + sum(decodes)
    assert row["flags"] == 0


def test_a_run_that_is_cut_after_the_first_token_brings_the_second_with_the_next() -> None:
    """A second pull ends while D makes the first request's first token. That run of many steps is cut to one step, and
    the next step is for both requests."""
    _, both = simulate(members(P, P, D), every(0.0005, 2), seeding=False)
    tt2t_ns = both.columns["second_ns"] - both.columns["first_ns"]
    assert tt2t_ns[0] == COSTS.step_ns(decoding(2, 101 + 100))


def test_the_clients_round_trip_is_added_to_all_times() -> None:
    near, far = (simulate(members(P, D), every(1.0, 1), client_us=us)[1].columns[0] for us in (0.0, 1000.0))
    for name in ("first_ns", "second_ns", "last_ns", "end_ns"):
        assert far[name] == near[name] + 2 * MS, name


def test_a_first_pull_waits_for_the_handshake_and_the_second_does_not() -> None:
    _, result = simulate(members(P, D), every(1.0, 2), handshake_ms=200)
    tt2t = result.columns["second_ns"] - result.columns["first_ns"]
    assert tt2t[0] == tt2t[1] + 200 * MS


def test_two_pulls_share_the_nic_of_the_instance_they_read_from() -> None:
    """Two prompts arrive while P is busy. One step computes both; two Ds pull at once, each with half of P's NIC."""
    fleet = [one("p", P), one("d0", D), one("d1", D)]
    busy = Arrival(at_s=0.0, input_tokens=100, output_tokens=1)
    pair = [Arrival(at_s=0.001, input_tokens=100, output_tokens=20)] * 2
    _, alone = simulate(fleet, [busy, pair[0]])
    _, both = simulate(fleet, [busy, *pair])
    gap, shared = ((run.columns["second_ns"] - run.columns["first_ns"])[1:].tolist() for run in (alone, both))
    assert shared == [gap[0] + 700_000] * 2


def test_a_queue_before_one_prefill_instance_grows_as_it_must() -> None:
    """A D/D/1 queue with a service time of 2 ms and an arrival each millisecond: request n waits n milliseconds."""
    fleet = [
        one("p", P, config={"max_num_batched_tokens": 100, "max_model_len": 1000}),
        one("d", D, config={"max_num_seqs": 20}),
    ]
    _, result = simulate(fleet, every(0.001, 20))
    waited = result.columns["first_ns"] - result.columns["at_ns"] - FIRST_AT_ROUTER
    assert waited.tolist() == [number * MS for number in range(20)]


def test_poisson_arrivals_wait_as_lindley_says() -> None:
    """An M/D/1 queue at half load. Each wait follows from the last one; the mean is rho * s / (2 (1 - rho)) = 1 ms."""
    fleet = [one("p", P, config={"max_num_batched_tokens": 100})]
    times = poisson(250.0, np.random.default_rng(4))
    load = [Arrival(at_s=next(times), input_tokens=100, output_tokens=1) for _ in range(3000)]
    _, result = simulate(fleet, load, checks=False)
    at_ns = result.columns["at_ns"].tolist()
    waits = [0]
    for before, now in pairwise(at_ns):
        waits.append(max(0, waits[-1] + PREFILL - (now - before)))
    assert (result.columns["first_ns"] - result.columns["at_ns"] - FIRST_AT_ROUTER).tolist() == waits
    assert np.mean(waits) / MS == pytest.approx(1.0, rel=0.15)


def test_a_cold_fleet_answers_once_it_is_up() -> None:
    _, result = simulate(members(P, D), every(1.0, 1), cold_start=True)
    (row,) = result.columns
    assert row["outcome"] == 3, "no instance is up, and the router answers so at once"
    _, late = simulate(members(P, D), [Arrival(at_s=2.5, input_tokens=100, output_tokens=20)], cold_start=True)
    assert late.columns[0]["outcome"] == 1
