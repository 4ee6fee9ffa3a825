"""The agent: a small process beside each engine. It starts the engine, speaks for it in the registry, and drains it.

`machine` decides (pure); `agent` and `http` carry out. `Rules` hold the difference between prefill and decode instances
(see `prefill.rules`, `decode.rules`): this package knows neither.
"""
