"""Connectors that vLLM knows by their names alone. Runs inside vLLM's processes."""

from __future__ import annotations

import contextlib

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def register(connector: type) -> None:
    """Register a connector's class in vLLM: the API server reads a MultiConnector's statistics under the names of its
    connectors' classes.
    """
    with contextlib.suppress(ValueError):  # a second import under another name, in tests
        KVConnectorFactory.register_connector(connector.__name__, connector.__module__, connector.__name__)
