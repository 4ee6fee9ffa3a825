"""The command line of a mock in the place of a vLLM server, under an agent. Pure: a function of its `EngineSpec`."""

from __future__ import annotations

from engine.vllm.spec import EngineSpec

MOCK_MODEL = "meta-llama/Llama-3.1-8B"
"""What a mock pretends to be where nobody said."""


def mock_command(spec: EngineSpec) -> list[str]:
    """`baton mock` with one instance, at the engine's own address; the user's flags last."""
    words = [spec.python, "-m", "baton", "mock", "--instances", f"{spec.role.value}=1", "--name", spec.instance]
    words += ["--host", spec.host, "--port", str(spec.port), "--model", spec.model]
    words += ["--drain-s", str(spec.shutdown_timeout_s)]
    if spec.served_name is not None:
        words += ["--served-model-name", spec.served_name]
    if spec.kv_lease_s is not None:
        words += ["--lease-s", str(spec.kv_lease_s)]
    if spec.digests:
        words.append("--digests")
    return [*words, *spec.extra_args]
