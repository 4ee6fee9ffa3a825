"""Engines, which run the model: a stock vLLM server as a watched child, its twin, the mock, and a tiny model."""
