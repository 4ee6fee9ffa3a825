"""What Baton's connector refuses, and what it leaves to vLLM's own: checked on vLLM's classes, without an engine."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of libraries that vLLM imports
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup"),
]


@pytest.mark.parametrize(
    ("version", "wire", "fits"),
    [("0.32.0", 14, True), ("0.32.0+cpu", 14, True), ("0.32.7", 14, True), ("0.33.0", 14, False), ("0.31.2", 14, False),
     ("0.320.0", 14, False), ("0.32.0", 15, False)],
)  # fmt: skip
def test_another_vllm_is_refused_with_a_way_out(
    version: str, wire: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.vllm.connector import facade as c

    monkeypatch.setattr(c.vllm, "__version__", version)
    monkeypatch.setattr(c, "NIXL_CONNECTOR_VERSION", wire)
    if fits:
        c.check_version()
    else:
        with pytest.raises(RuntimeError, match="connector: nixl"):
            c.check_version()


def caches(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=each) for each in specs])


def test_one_group_of_full_attention_alone_is_served() -> None:
    """The rest of the rule is tested in `tests/unit/test_connector_served.py`."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, RSWASpec, SlidingWindowSpec

    from engine.vllm.connector.facade import not_served

    parallel = {"pipeline_parallel_size": 1, "prefill_context_parallel_size": 1, "data_parallel_size": 1}
    transfer = SimpleNamespace(kv_buffer_device="cpu", engine_id="e", get_from_extra_config={}.get)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel, data_parallel_index=0, data_parallel_external_lb=False),
        kv_transfer_config=transfer,
        num_prefill_lookahead_tokens=0,
    )
    size: Any = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full, sliding = FullAttentionSpec(**size), SlidingWindowSpec(**size, sliding_window=64)
    assert not_served(config, caches(full)) is None
    assert not_served(config, caches(MLAAttentionSpec(**size))) is None
    for kinds in (caches(full, sliding), caches(sliding), caches(RSWASpec(**size, rswa_window=64)), caches()):
        assert "kinds of KV cache" in (not_served(config, kinds) or "")


def test_inside_a_multi_connector_its_statistics_are_read_by_its_name() -> None:
    """vLLM's API server knows a child of a MultiConnector by the name of its class alone."""
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

    ours = {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "kvtransfer.vllm_connector",
        "kv_role": "kv_both",
    }
    theirs = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    whole = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [ours, theirs]}
    )
    config = SimpleNamespace(kv_transfer_config=whole)
    classes = [each.__name__ for each, _ in MultiConnector._get_connector_classes_and_configs(config)]
    assert classes == ["BatonConnector", "ExampleConnector"]
    told = NixlKVConnectorStats()
    told.record_failed_transfer()
    read = MultiConnector.build_kv_connector_stats({"BatonConnector": told.data})
    assert isinstance(read["BatonConnector"], NixlKVConnectorStats) and not read.is_empty()


def test_the_connector_and_the_twin_run_the_same_rules() -> None:
    """Law 3: vLLM runs the same classes and functions as the simulator and the mocks."""
    import decode.peers
    import decode.pulls
    import decode.reads
    import decode.table
    import engine.twin.holds
    import engine.twin.pulls
    import prefill.holds
    import prefill.leases
    from engine.vllm.connector import held_slots, scheduler, worker

    assert scheduler.Holds is engine.twin.holds.Legs is prefill.holds.Holds
    assert held_slots.Leases is engine.twin.holds.Leases is prefill.leases.Leases
    assert held_slots.terms is engine.twin.holds.terms is prefill.leases.terms
    assert scheduler.Pulls is engine.twin.pulls.Wants is decode.pulls.Pulls
    assert scheduler.ProducerPeers is engine.twin.pulls.ProducerPeers is decode.peers.ProducerPeers
    assert scheduler.worth_pulling is engine.twin.pulls.worth_pulling
    assert worker.Reads is decode.reads.Reads and engine.twin.pulls.PullAtRank is decode.reads.PullAtRank
    assert engine.twin.pulls.Reading is decode.table.Reading


def test_a_steps_message_is_whole_at_the_worker_and_carries_only_what_is_said() -> None:
    import pickle

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

    from engine.vllm.connector.metadata import BatonMetadata, ExpectedHold

    silent, full = BatonMetadata(NixlConnectorMetadata()), BatonMetadata(NixlConnectorMetadata())
    full.scheduler_clock = 7.5
    full.forgotten, full.expected = ("e",), {"r": ExpectedHold(None)}
    full.orders.held.append("h")
    full.heartbeat_by_engine = {"e": "beat"}
    for sent in (silent, full):
        arrived = pickle.loads(pickle.dumps(sent))
        assert type(arrived) is BatonMetadata and vars(arrived) == vars(sent)
    assert len(pickle.dumps(silent)) < len(pickle.dumps(NixlConnectorMetadata())) / 2
