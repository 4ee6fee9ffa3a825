"""One run of Vidur, in Vidur's own environment: `python -I bench/vidur_theirs.py JOB.json FOUND.json`.

Only the loop of events is measured (`Simulator.run`): not the imports, the tables, or reading the trace. The tables are
read by Vidur's own code from where it would keep what it downloads; nothing is trained, nothing is downloaded. Plots
are never drawn; metrics and the Chrome trace, which it writes at the end of `run`, are kept where the job says so. `-I`
because of the module beside this one that is called `vidur`, too.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(WANDB_MODE="disabled", HF_HUB_OFFLINE="1", DO_NOT_TRACK="1")


def _configured(job: dict[str, Any], output: str) -> Any:
    """Vidur's settings for this job."""
    from vidur import config  # noqa: PLC0415 - exists in its own environment only

    return config.SimulationConfig(
        cluster_config=config.ClusterConfig(
            num_replicas=job["replicas"],
            replica_config=config.ReplicaConfig(
                model_name=job["their_model"],
                num_pipeline_stages=1,
                tensor_parallel_size=1,
                device=job["their_device"],
                network_device=f"{job['their_device']}_dgx",
            ),
            cache_config=config.CacheConfig(num_blocks=job["blocks"], watermark_blocks_fraction=0.0),
            global_scheduler_config=config.RoundRobinGlobalSchedulerConfig(),
            replica_scheduler_config=config.SarathiSchedulerConfig(
                chunk_size=job["chunk"], batch_size_cap=job["batch"]
            ),
        ),
        request_generator_config=config.TraceRequestGeneratorConfig(
            trace_file=job["trace"],
            date=job["date"],
            prefill_scale_factor=1,
            decode_scale_factor=1,
            time_scale_factor=1,
            max_tokens=job["tokens"],
        ),
        execution_time_predictor_config=config.RandomForrestExecutionTimePredictorConfig(
            kv_cache_prediction_granularity=job["granularity"],
            prediction_max_prefill_chunk_size=job["chunk"],
            prediction_max_batch_size=job["batch"],
            prediction_max_tokens_per_request=job["tokens"],
            attention_decode_batching_overhead_fraction=0.0,
            use_native_execution_time_predictor=job["native"],
            cache_dir=f"{output}/cache",
        ),
        metrics_config=config.MetricsConfig(
            write_metrics=job["metrics"],
            enable_chrome_trace=job["metrics"],
            store_plots=False,
            output_dir=output,
        ),
    )


def _with_our_tables(folder: str, output: str) -> None:
    """Make Vidur find this folder where it asks its hub for predictions; for those of a network, which one GPU lacks,
    none.
    """
    from vidur.execution_time_predictor import sklearn_execution_time_predictor as predictor  # noqa: PLC0415

    empty = Path(output) / "network"
    empty.mkdir()

    def found(*, cache_dir: str, **_: Any) -> str:
        return str(empty) if "network" in cache_dir else folder

    predictor.snapshot_download = found


def _peak_mb() -> float:
    """The peak memory of this process. `ru_maxrss` would count its parent's before the fork."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def run(job: dict[str, Any], output: str) -> dict[str, Any]:
    """The cost of the run, and its result."""
    from vidur.simulator import Simulator  # noqa: PLC0415
    from vidur.utils.random import set_seeds  # noqa: PLC0415

    set_seeds(1)
    _with_our_tables(job["tables"], output)
    simulator = Simulator(_configured(job, output))
    requests = [event._request for _, event in simulator._event_queue]  # noqa: SLF001 - it keeps none of its results
    before_mb = _peak_mb()
    gc.collect()
    gc.disable()  # for both simulators
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    simulator.run()
    cpu_s, wall_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
    peak_mb = _peak_mb()
    done = [each for each in requests if each.completed]
    begun_s, end_s = min(each.arrived_at for each in requests), max(each.completed_at for each in done)
    return {
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "before_mb": before_mb,
        "peak_mb": peak_mb,
        "served": len(done),
        "requests_s": len(done) / (end_s - begun_s),
        "ttft_ms": sum(each.prefill_completed_at - each.arrived_at for each in done) / len(done) * 1000,
        "e2e_ms": sum(each.e2e_time for each in done) / len(done) * 1000,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        found = run(json.loads(Path(sys.argv[1]).read_text()), made)
    Path(sys.argv[2]).write_text(json.dumps(found))
