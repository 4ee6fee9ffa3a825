"""The controller under any load and any failures: it never exceeds the budget, never ends the last instance of a role,
and never uses a name twice.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pretend_fleet import drive

from cluster.instance import Role
from goodput import actions as do
from goodput.budget import Budget

PARTS = st.lists(
    st.tuples(st.sampled_from((0.0, 0.3, 1.5, 4.0, 9.0)), st.sampled_from((400, 4000, 16_000)), st.booleans()),
    min_size=1,
    max_size=4,
)


@settings(max_examples=12, deadline=None)
@given(PARTS, st.integers(8, 24), st.integers(0, 5), st.sampled_from((10.0, 60.0)))
def test_budget_roles_and_names(parts: list[tuple[float, int, bool]], most: int, seed: int, startup_s: float) -> None:
    at = drive(startup_s=startup_s, budget=Budget(gpus={"A100": most}, price_per_hour=most * 1.5))
    rng = np.random.default_rng(seed)
    for rate, prompt, hears in parts:
        at.fleet.prompt, at.fleet.hears = prompt, hears
        for _ in range(30):
            at.run(lambda _, rate=rate: rate, 5.0, rng)
            assert 2 * len(at.fleet.instances) <= most
            for role in (Role.PREFILL, Role.DECODE):
                assert at.fleet.of_role(role) >= 1
    assert at.fleet.most_gpus <= most
    names = [each.instance for _, each in at.fleet.actions if isinstance(each, do.Start)]
    assert len(names) == len(set(names))
