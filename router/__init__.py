"""The front door: takes OpenAI requests, chooses a prefill and a decode instance, and carries the answer back.

Deciding modules (`journey`, `exact`, `view`, `body`, `policy`) are pure; `server`, `exchange`, `upstream` and `prober`
are the shells that own sockets and clocks.
"""
