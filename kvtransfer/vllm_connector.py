"""The former name of `engine.vllm.connector.facade`, for one release: engines that others start may be given it."""

from engine.vllm.connector.facade import BatonConnector

__all__ = ["BatonConnector"]
