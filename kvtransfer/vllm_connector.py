"""The former name of `engine.vllm.connector.facade`, kept for one release for engines started with it."""

from engine.vllm.connector.facade import BatonConnector

__all__ = ["BatonConnector"]
