"""Flows and NICs of the simulator, with end times worked out by hand; and the order of the kernel's calls."""

import math

from sim.kernel import Kernel
from sim.link import Flow, Nic, join, leave, slowed


def test_a_flow_alone_has_the_smaller_of_the_two_nics() -> None:
    flow = Flow(Nic(10.0), Nic(4.0), 1000.0)
    assert join(flow, 5) == [flow]
    assert flow.end_ns == 5 + 250


def test_two_flows_of_one_sender_get_half_each_and_all_of_it_afterwards() -> None:
    source, first, second = Nic(10.0), Nic(10.0), Nic(10.0)
    one, two = Flow(source, first, 1000.0), Flow(source, second, 1000.0)
    join(one, 0)
    assert set(join(two, 50)) == {one, two}
    assert (one.end_ns, two.end_ns) == (50 + 100, 50 + 200)  # 500 bytes are left of the first one
    assert leave(one, 150) == [two]
    assert two.end_ns == 150 + 50


def test_a_receiver_is_shared_as_a_sender_is() -> None:
    target = Nic(6.0)
    flows = [Flow(Nic(6.0), target, 600.0) for _ in range(3)]
    for flow in flows:
        join(flow, 0)
    assert [flow.end_ns for flow in flows] == [300] * 3


def test_the_two_directions_of_a_nic_are_independent() -> None:
    here, there = Nic(10.0), Nic(10.0)
    out, back = Flow(here, there, 1000.0), Flow(there, here, 1000.0)
    join(out, 0)
    assert join(back, 0) == [back]
    assert (out.end_ns, back.end_ns) == (100, 100)


def test_a_limited_flow_does_not_give_its_unused_share_to_others() -> None:
    """The rest is not given to the other flow: slower than max-min fairness, as `sim/link.py` says."""
    source = Nic(10.0)
    slow, other = Flow(source, Nic(10.0), 100.0, limit_gb_s=1.0), Flow(source, Nic(10.0), 500.0)
    join(slow, 0)
    join(other, 0)
    assert (slow.end_ns, other.end_ns) == (100, 100)


def test_flows_that_share_nothing_are_left_alone() -> None:
    one, two = (Flow(Nic(1.0), Nic(1.0), 10.0) for _ in range(2))
    join(one, 0)
    assert join(two, 3) == [two]
    assert leave(two, 4) == []
    assert one.end_ns == 10


def test_a_nic_that_slows_down_and_recovers() -> None:
    source = Nic(10.0)
    flow = Flow(source, Nic(10.0), 1000.0)
    join(flow, 0)
    assert slowed(source, 1.0, 50) == [flow]
    assert flow.end_ns == 50 + 500
    assert slowed(source, 10.0, 150) == [flow]
    assert flow.end_ns == 150 + 40


def test_an_unlimited_flow_and_an_empty_flow_end_at_once() -> None:
    endless = Flow(Nic(math.inf), Nic(math.inf), 1e12)
    empty = Flow(Nic(1.0), Nic(1.0), 0.0)
    join(endless, 7)
    join(empty, 7)
    assert (endless.end_ns, empty.end_ns) == (7, 7)


def test_the_kernel_keeps_the_order_of_equal_times() -> None:
    kernel, said = Kernel(), []

    def note(word: str) -> None:
        said.append((kernel.now_ns, word))
        if word == "b":
            kernel.at(5, note, "d")
            kernel.at(9, note, "e")

    for when, word in ((5, "b"), (2, "a"), (5, "c")):
        kernel.at(when, note, word)
    kernel.run()
    assert said == [(2, "a"), (5, "b"), (5, "c"), (5, "d"), (9, "e")]
    assert kernel.events == 5
