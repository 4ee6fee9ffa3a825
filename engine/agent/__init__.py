"""The agent: a small process beside each engine. It starts the engine, speaks for it in the registry, and drains it.

`machine` decides (pure); `agent` and `http` carry out. The difference between prefill and decode instances is in their
`RoleRules` (`prefill.rules`, `decode.rules`): this package imports neither.
"""
