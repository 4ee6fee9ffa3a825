"""The small process beside each engine: its parent, its voice in the registry, and the one that lets it leave in order.

`machine` decides (pure); `agent` and `http` carry out. What differs between prefill and decode instances is given in as
`Rules` (see `prefill.rules`, `decode.rules`): this package knows neither.
"""
