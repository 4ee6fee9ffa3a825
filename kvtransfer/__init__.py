"""The handoff: who holds which KV blocks for how long, who may pull them, and how their bytes move.

`ledger` is the machine that owns every block between prefill and decode, `table` its rules as rows, `ticket` the signed
permission to pull. Modules that later run inside vLLM's process import only the standard library and `cluster.ids` or
`cluster.wire` besides each other, so that they work with whatever vLLM pins.
"""
