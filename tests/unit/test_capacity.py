"""The KV capacity that engines report reaches the step model and the prefix-cache index."""

from __future__ import annotations

import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from engine.mock.metrics import Metrics, merged
from engine.vllm.metrics import parse_load
from router.core.values import Reported
from router.fleet.view import FleetView
from router.predict.prefix_cache import PrefixCacheIndex

ONE = Instance(id=InstanceId("one"), role=Role.BOTH, url="http://one", epoch=1)
INFO = 'vllm:cache_config_info{{block_size="{}",cache_dtype="auto",engine="{}",num_gpu_blocks="{}",x="None"}} 1.0\n'
SIZED = 'vllm:cache_config_info{{block_size="16",kv_cache_size_tokens="{}",num_gpu_blocks="1000"}} 1.0\n'


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (INFO.format(16, 0, 1000), 16_000),
        (INFO.format(16, 0, 1000) + INFO.format(16, 1, 1000), 16_000),
        (SIZED.format(9000), 9000),
        (SIZED.format("None"), 16_000),
        (SIZED.format(0), 16_000),
        (SIZED.format("9" * 400), 16_000),
        (INFO.format(16, 0, "None"), 0),
        (INFO.format(16, 0, "9" * 400), 0),
        ("# HELP vllm:cache_config_info x\n", 0),
        ('vllm:cache_config_info{my_block_size="16",num_gpu_blocks="3"} 1.0\n', 0),
        (Metrics("m", 16, 300).text(Load()), 4800),
        (merged([Metrics("m", 16, 300, rank).text(Load(), ranks=2) for rank in range(2)]), 9600),
        (Metrics("m").text(Load()), 0),
    ],
)
def test_engines_tell_the_size_of_their_cache(text: str, tokens: int) -> None:
    assert parse_load(text).kv_tokens == tokens


def test_a_probe_sets_the_capacity_in_the_step_model_and_the_index() -> None:
    view = FleetView()
    fleet = view.all()
    prefixes = fleet.prefixes = PrefixCacheIndex()
    view.add(ONE)
    row = view.get(ONE.id).row
    guessed = fleet.inflight.step_model.rows[row].capacity
    view.seen(ONE.id, None, Load())
    assert fleet.inflight.step_model.rows[row].capacity == guessed, "a probe without a capacity keeps the guess"
    prefixes.sent(row, (1, 2, 3), 0.0)
    view.seen(ONE.id, None, Load(kv_tokens=9000))
    assert fleet.inflight.step_model.rows[row].capacity == prefixes._held[row].capacity_tokens == 9000
    prefixes.sent(row, (1, 2, 3), 0.0)
    view.seen(ONE.id, None, Load(kv_tokens=9000))
    assert len(prefixes) == 3, "the same report again forgets nothing"


def test_a_heartbeat_sets_the_capacity() -> None:
    view = FleetView()
    load = Load(kv_tokens=5000)
    view.fold((Reported(instance=ONE, state="ready", accepting=True, credits=3, load=load, models=()),))
    assert view.all().inflight.step_model.rows[view.get(ONE.id).row].capacity == 5000
