"""Start, watch, restart and stop a stock vLLM server as a child. Nothing of vLLM is imported.

Read in this order: `spec` (what one engine is), `command` (its argument list and environment), `placement` (who gets
which cores and GPUs), `supervise` (the life cycle, a pure machine), `child` (the shell that drives it), `keeper` (the
small process between us and vLLM, so that nothing is ever left behind), `probe` and `metrics` (what the engine says).
"""
