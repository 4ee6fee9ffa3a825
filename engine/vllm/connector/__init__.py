"""Baton's connector inside vLLM: a thin shell over `prefill` (holds) and `decode` (pulls).

vLLM loads `facade`; `scheduler` and `worker` are its halves. Nothing is imported here, as an agent on a machine without
vLLM reads `served` and `written_for` as well.
"""
