"""GPUs that other models use, as the controllers of one cluster file count them."""

from __future__ import annotations

from cluster.ids import InstanceId
from goodput.actuate.elsewhere import UNSEEN_S, OtherModels
from goodput.actuate.existing import Existing, InstanceLife
from goodput.budget import Footprint

POOLS = {
    "a": {"a-prefill": Footprint(gpu="H100", gpus=2), "a-decode": Footprint(gpu="A100", gpus=1)},
    "b": {"b-both": Footprint(gpu="H100", gpus=4)},
}


def existing(name: str, pool: str, life: InstanceLife = InstanceLife.RUNNING) -> Existing:
    return Existing(instance=InstanceId(name), pool=pool, life=life)


def test_each_model_sees_what_the_others_have() -> None:
    there = [existing("p0", "a-prefill"), existing("p1", "a-prefill", InstanceLife.PENDING), existing("d0", "a-decode")]
    there += [existing("p2", "a-prefill", InstanceLife.FAILED), existing("b0", "b-both"), existing("x", "unknown")]
    others = OtherModels(POOLS)
    assert others.gpus("b", there) == {"H100": 4, "A100": 1}
    assert others.gpus("a", there) == {"H100": 4}


def test_a_start_counts_at_once_until_a_look_sees_it_or_for_a_minute() -> None:
    others = OtherModels(POOLS)
    others.began(InstanceId("b0"), "b-both", 10.0)
    others.began(InstanceId("b1"), "b-both", 10.0)
    assert others.gpus("a", []) == {"H100": 8}
    seen = [existing("b0", "b-both")]
    others.see(seen, 12.0)
    assert others.gpus("a", seen) == {"H100": 8}
    others.see(seen, 10.0 + UNSEEN_S + 1.0)
    assert others.gpus("a", seen) == {"H100": 4}
