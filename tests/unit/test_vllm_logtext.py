"""Reading vLLM's log: the stages of a start, and the line with the reason of a failure. Lines are from vLLM 0.32."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.vllm.logtext import _STAGES, FIRST_STAGE, SILENT_DEATH, hangs, has_draft, reason, stage, worth_showing

API = "(APIServer pid=4338) "
ERROR = "(EngineCore pid=8170) ERROR 11-20 16:16:58 [core.py:1512] "


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{API}INFO 11-20 16:05:36 [api_utils.py:286] non-default args: {{}}", "reading the model's configuration"),
        (
            "(EngineCore pid=1) INFO 11-20 16:05:50 [core.py:133] Initializing a V1 LLM engine",
            "starting the engine core",
        ),
        ("(Worker pid=1) INFO 11-20 16:05:57 [x.py:68] Starting to load model /m...", "loading weights"),
        ("Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00]", "loading weights, 50 %"),
        ("(Worker pid=1) INFO 11-20 16:05:58 [x.py:2327] GPU KV cache size: 524,288 tokens", "allocating the KV cache"),
        ("(Worker pid=1) INFO 11-20 16:05:59 [x.py:865] Detected kv cache layout LBHNC", "warming up"),
        (
            "(EngineCore pid=1) INFO 1 2 [core.py:402] init engine (profile, create kv cache)",
            "starting the HTTP server",
        ),
        ("INFO:     Application startup complete.", "first token"),
        (f"{API}WARNING 11-20 16:05:44 [vllm.py:1703] Enforce eager set, disabling torch.compile", FIRST_STAGE),
        ("", FIRST_STAGE),
    ],
)
def test_stage(line: str, words: str) -> None:
    assert stage(line) == words


CORE = "(EngineCore pid=6316) INFO 11-26 06:37:24 "
TO_WEIGHTS = (
    (f"{API}INFO 11-26 06:36:32 [api_utils.py:286] non-default args: {{}}", "reading the model's configuration"),
    (f"{CORE}[core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'", "starting the engine core"),
    (f"{CORE}[model_runner.py:392] Loading model from scratch...", "loading weights"),
    ("Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]", "loading weights, 0 %"),
    ("Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 162.70it/s]", "loading weights, 100 %"),
    (f"{CORE}[default_loader.py:501] Loading weights took 0.01 seconds", "preparing the model"),
)
COMPILED = (
    (f"{CORE}[monitor.py:40] [backbone] Starting torch.compile", "compiling"),
    (f"{CORE}[backends.py:1166] [backbone] Dynamo bytecode transform time: 1.57 s", "compiling"),
    (f"{CORE}[backends.py:398] [backbone] Compiling a graph for compile range (1, 8192) takes 7.81 s", "compiling"),
)
LOADED = (
    (f"{CORE}[caching.py:342] reconstructed serializable fn from standalone compile artifacts.", "preparing the model"),
    (f"{CORE}[decorators.py:319] [backbone] Directly load AOT compilation from path /c/model", "preparing the model"),
)
MEASURED = (
    (f"{CORE}[monitor.py:62] [backbone] torch.compile took 10.93 s in total", "measuring memory"),
    ("Capturing CUDA graphs (PIECEWISE):   2%|        | 1/51 [00:00<00:27,  1.84it/s]", "measuring memory"),
    (f"{CORE}[gpu_worker.py:759] Available KV cache memory: 61.45 GiB", "allocating the KV cache"),
)
TO_THE_END = (
    (f"{CORE}[kv_cache_utils.py:2327] GPU KV cache size: 32,219,424 tokens", "allocating the KV cache"),
    (f"{CORE}[base_worker.py:516] Initializing NIXL worker 7781246c", "opening NIXL"),
    (f"{CORE}[base_worker.py:865] Detected kv cache layout LBHNC", "warming up"),
    (f"{CORE}[kernel_warmup.py:176] JIT kernel warmup starting.", "warming up"),
)
SERVES = (
    (
        f"{CORE}[core.py:395] init engine (profile, create kv cache, warmup model) took 22.92 s",
        "starting the HTTP server",
    ),
    ("INFO:     Application startup complete.", "first token"),
)
CAPTURED = (("Capturing CUDA graphs (FULL):  27%|██▋       | 14/51", "capturing CUDA graphs"),)


@pytest.mark.parametrize(
    "log",
    [
        pytest.param((*TO_WEIGHTS, *COMPILED, *MEASURED, *TO_THE_END, *CAPTURED, *SERVES), id="compiles"),
        pytest.param((*TO_WEIGHTS, *LOADED, *MEASURED, *TO_THE_END, *CAPTURED, *SERVES), id="from the cache"),
        pytest.param((*TO_WEIGHTS, *TO_THE_END, *SERVES), id="eager, with a given size of the KV cache"),
        pytest.param((*TO_WEIGHTS, *TO_THE_END, *CAPTURED, *SERVES), id="graphs, with a given size of the KV cache"),
    ],
)
def test_a_start_on_a_gpu(log: tuple[tuple[str, str], ...]) -> None:
    """Lines of an H200's logs, in their order."""
    reached, shown = FIRST_STAGE, []
    for line, _ in log:
        reached = stage(line, reached)
        shown.append(reached)
    assert shown == [words for _, words in log]


def test_a_start_goes_on_when_workers_and_draft_models_write_lines_of_a_stage_that_is_over() -> None:
    assert stage("Loading safetensors checkpoint shards:  50% Completed | 1/2", "warming up") == "warming up"
    assert stage(f"{CORE}[x.py:68] Starting to load model /m", "loading weights, 50 %") == "loading weights, 50 %"
    assert stage(f"{CORE}[monitor.py:40] Starting torch.compile", "measuring memory") == "measuring memory"


def shards(percent: int) -> str:
    return f"Loading safetensors checkpoint shards: {percent:3}% Completed | 1/2"


@pytest.mark.parametrize("names_it", [True, False])
def test_the_progress_of_a_draft_model_is_its_own(*, names_it: bool) -> None:
    """One of vLLM's model runners writes "Loading drafter model", the other one nothing."""
    told = f"{CORE}[core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', speculative_config="
    assert has_draft(told + "SpeculativeConfig(method='eagle', model='d', num_spec_tokens=3)")
    assert not has_draft(told + "None, tokenizer='m'")
    took = f"{CORE}[default_loader.py:501] Loading weights took 0.01 seconds"
    named = (f"{CORE}[gpu_model_runner.py:5071] Loading drafter model...",) * names_it
    lines = (shards(0), shards(50), shards(100), took, *named, shards(0), shards(50), shards(100), took)
    reached, seen = "loading weights", []
    for line in lines:
        reached = stage(line, reached, drafts=True)
        seen.append(reached)
    draft = ["loading the draft model, 0 %", "loading the draft model, 50 %", *["loading the draft model, 100 %"] * 2]
    target = ["loading weights, 0 %", "loading weights, 50 %", "loading weights, 100 %", "preparing the model"]
    assert seen == [*target, *["loading the draft model"] * names_it, *draft]


def test_the_highest_percentage_stays() -> None:
    """Ranks with weights of their own, and a model's second set of weights, count from 0 % again."""
    assert stage(shards(0), "loading weights, 100 %", drafts=True) == "loading weights, 100 %"
    assert stage(shards(50), "preparing the model", drafts=True) == "preparing the model", "of another rank"
    assert stage(shards(0), "preparing the model") == "preparing the model", "there is no draft model"
    assert stage(shards(20), "loading the draft model, 40 %", drafts=True) == "loading the draft model, 40 %"


def test_a_wrong_flag() -> None:
    lines = ["usage: api_server.py [-h] [--headless]", "api_server.py: error: unrecognized arguments: --bad-flag"]
    assert reason(lines) == "unrecognized arguments: --bad-flag"


def test_a_wrong_value_with_its_explanation() -> None:
    lines = [
        "api_server.py: error: argument --kv-transfer-config: 1 validation error for KVTransferConfig",
        "  Invalid JSON: key must be a string [type=json_invalid, input_value='{bad', input_type=str]",
        "    For further information visit https://errors.pydantic.dev",
    ]
    assert reason(lines) == (
        "argument --kv-transfer-config: 1 validation error for KVTransferConfig Invalid JSON: key must be a string"
    )


def test_a_traceback_in_a_warning_is_not_the_reason() -> None:
    """Seen on a GPU: vLLM warns that an optional package cannot be imported and goes on. Triton's failure ends it."""
    warning = "(EngineCore pid=2744) WARNING 11-26 06:32:39 [import_utils.py:417] "
    lines = [
        f"{warning}Traceback (most recent call last):",
        f'{warning}  File "/site-packages/vllm/utils/import_utils.py", line 415, in _has_module',
        f"{warning}    importlib.import_module(module_name)",
        f"{warning}ModuleNotFoundError: No module named 'nixl_ep_cu13.nixl_ep_cpp_torch213'",
        f"{ERROR}Traceback (most recent call last):",
        f'{ERROR}  File "/site-packages/vllm/v1/engine/core.py", line 1482, in run_engine_core',
        f"{ERROR}PermissionError: [Errno 13] Permission denied: '/site-packages/triton/backends/nvidia/bin/ptxas'",
    ]
    denied = "PermissionError: [Errno 13] Permission denied: '/site-packages/triton/backends/nvidia/bin/ptxas'"
    assert reason(lines) == denied
    assert reason(lines[:4]) is None


def test_the_first_traceback_counts_not_those_of_other_processes() -> None:
    lines = [
        f"{ERROR}Traceback (most recent call last):",
        f'{ERROR}  File "/site-packages/vllm/v1/engine/core.py", line 1500, in run',
        f"{ERROR}    raise ValueError(",
        f"{ERROR}ValueError: Available memory is less than requested (9999.0 GiB).",
        f"{API}Traceback (most recent call last):",
        f"{API}    raise RuntimeError(",
        f"{API}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}",
    ]
    assert reason(lines) == "ValueError: Available memory is less than requested (9999.0 GiB)."


def caused(*errors: str, by: str = "") -> list[str]:
    """A traceback in which each error is the direct cause of the next one."""
    lines: list[str] = []
    for error in errors:
        lines += ["", "The above exception was the direct cause of the following exception:", ""] * bool(lines)
        lines += [
            "Traceback (most recent call last):",
            '  File "/hub.py", line 537, in f',
            "    f()",
            *error.split("\n"),
        ]
    return [f"{by}{line}" for line in lines]


UNAUTHORIZED = (
    "httpx2.HTTPStatusError: Client error '401 Unauthorized' for url 'https://huggingface.co/m/l/resolve/main/config.json'"
    "\nFor more information check: https://developer.mozilla.org/en-US/docs/Web/HTTP/Status/401"
)


@pytest.mark.parametrize(
    ("hub", "last", "said"),
    [
        (
            "huggingface_hub.errors.GatedRepoError: 401 Client Error.\n\nCannot access gated repo for url https://h/c.json.",
            "OSError: You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/m/l.",
            "OSError: You are trying to access a gated repo.",
        ),
        (
            "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error.\n\nRepository Not Found for url: https://h/c.",
            "OSError: m/l is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'",
            "OSError: m/l is not a local folder and is not a valid model identifier listed on "
            "'https://huggingface.co/models'",
        ),
    ],
    ids=["gated", "no such model"],
)
def test_of_an_error_and_its_causes_the_last_one_counts(hub: str, last: str, said: str) -> None:
    """Hugging Face answers 401 for a name that does not exist, too: the first error sounds like a wrong token."""
    lines = caused(UNAUTHORIZED, hub, last)
    assert reason(lines) == said
    assert reason([*lines, *caused("RuntimeError: of another process", by=API)]) == said
    assert reason(caused(UNAUTHORIZED, hub, last, by=ERROR)) == said


def test_a_cause_is_of_the_same_process_and_points_to_no_other_error() -> None:
    worker = "(Worker_TP1 pid=7) "
    lines = [*caused("ValueError: why", by=ERROR), *caused("KeyError: 1", "TypeError: 2", by=worker)]
    assert reason(lines) == "ValueError: why"
    pointer = "RuntimeError: Engine core initialization failed. See root cause above."
    assert reason(caused("ValueError: why", pointer)) == "ValueError: why"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Limit: 101376.",
            "OutOfResources: out of resource: shared memory, Required: 147456, Limit: 101376.",
        ),
        (
            "Exception: data did not match any variant of untagged enum ModelWrapper at line 757443 column 3",
            "Exception: data did not match any variant of untagged enum ModelWrapper at line 757443 column 3",
        ),
    ],
    ids=["triton", "tokenizers"],
)
def test_errors_of_other_names(error: str, said: str) -> None:
    """The first one is Triton's on GPUs with little shared memory, the second one tokenizers' on newer files."""
    lines = [
        *caused(error, by=ERROR),
        *caused("RuntimeError: Engine core initialization failed. See root cause above.", by=API),
    ]
    assert reason(lines) == said


def test_that_a_worker_did_not_start_points_to_another_error() -> None:
    lines = [
        *caused(
            "Exception: WorkerProc initialization failed due to an exception in a background process. "
            "See stack trace for root cause.",
            by=ERROR,
        ),
        *caused("RuntimeError: Engine core initialization failed. See root cause above.", by=API),
    ]
    assert reason(lines) == SILENT_DEATH


def test_an_error_that_only_points_to_another_one_has_a_text_of_ours() -> None:
    lines = [
        f"{API}ERROR 11-20 16:32:28 [async_llm.py:906] Traceback (most recent call last):",
        f"{API}ERROR 11-20 16:32:28 [async_llm.py:906]     raise self._format_exception(outputs) from None",
        f"{API}ERROR 11-20 16:32:28 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore"
        " encountered an issue. See stack trace (above) for the root cause.",
    ]
    assert reason(lines) == SILENT_DEATH


def test_module_paths_and_pydantics_tail_are_left_out() -> None:
    lines = [
        "    s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, max_model_len (99999) is too great. [type=value_error, input_value=ArgsKwargs((), {'m...'})]",
    ]
    assert (
        reason(lines)
        == "ValidationError: 1 validation error for ModelConfig Value error, max_model_len (99999) is too great."
    )


def test_an_error_without_text() -> None:
    assert reason(["    assert final_res is not None", "AssertionError"]) == "AssertionError"


@pytest.mark.parametrize(
    "line", ["cannot start /nowhere/python: No such file or directory", "/env/bin/python: No module named vllm"]
)
def test_a_command_that_cannot_be_started(line: str) -> None:
    assert reason(["something", line]) == line


def test_a_start_whose_handshake_listener_died_hangs() -> None:
    log = [
        "(EngineCore pid=3838) INFO 11-26 22:14:10 [base_scheduler.py:109] Initializing NIXL Scheduler 1411c6ae",
        "Exception in thread nixl_handshake_listener:",
        "Traceback (most recent call last):",
        '  File "zmq/backend/cython/_zmq.py", line 190, in zmq.backend.cython._zmq._check_rc',
        "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:44371')",
    ]
    assert hangs(log) == "the side channel of vLLM's connector does not listen (--side-channel-port)"
    assert reason(log) == "ZMQError: Address already in use (addr='tcp://127.0.0.1:44371')"
    assert hangs(log[:1]) is None


def test_no_reason_in_a_healthy_log() -> None:
    assert reason([f"{API}INFO 1-1 1:1 [x.py:1] TypeError: is a word here", "TypeError: quoted, not raised"]) is None


def test_lines_worth_showing_leave_out_noise() -> None:
    lines = [
        "usage: x [-h]",
        "       [--a A] [--b {c,d}]",
        "       [model_tag]",
        "",
        "  foo(",
        "  ^^^^",
        "x: error: bad",
    ]
    assert worth_showing(lines, 10) == ["  foo(", "x: error: bad"]
    assert worth_showing(lines, 1) == ["x: error: bad"]


@given(st.lists(st.text(max_size=80), max_size=20))
def test_any_log_can_be_read(lines: list[str]) -> None:
    assert isinstance(reason(lines), str | None)
    assert len(worth_showing(lines, 5)) <= 5


PHRASES = (
    *(phrase for _, phrases in _STAGES for phrase in phrases),
    *(f"Loading pt checkpoint shards: {at}%" for at in (0, 20, 50)),
)
NAMES = [FIRST_STAGE, *(words for words, _ in _STAGES)]


LINES = st.tuples(st.text(max_size=9), st.sampled_from(["", *PHRASES]), st.text(max_size=9)).map("".join)


@given(st.lists(LINES), st.booleans())
def test_no_log_leads_back_to_an_earlier_stage_or_a_smaller_percentage(lines: list[str], drafts: bool) -> None:
    places, reached = [(0, 0)], FIRST_STAGE
    for line in lines:
        reached = stage(line, reached, drafts=drafts)
        name, _, percent = reached.partition(", ")
        places.append((NAMES.index(name), int(percent.removesuffix(" %") or 0)))
    assert places == sorted(places)
