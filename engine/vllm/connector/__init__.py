"""Baton's connector inside vLLM: a thin shell over `prefill` (holds) and `decode` (pulls).

`facade` is what vLLM loads, `scheduler` and `worker` are its halves. Nothing is imported here: an agent on a machine
without vLLM looks at `served` and `written_for` as well.
"""
