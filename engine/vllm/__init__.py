"""Start, watch, restart and stop a stock vLLM server as a child. Nothing of vLLM is imported.

Read in this order:

- `spec`: the settings of one engine; `command`: its argument list and environment;
- `placement`: the cores and GPUs of each engine;
- `supervise`: the life cycle, a pure machine; `child`: the shell that drives it;
- `keeper`: the small process between Baton and vLLM, so that nothing is ever left behind;
- `probe` and `metrics`: what the engine reports.
"""
