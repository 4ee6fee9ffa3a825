"""The mock: twins behind vLLM's HTTP API, on the wall clock.

    words, prompts     text <-> token ids without a model; what the twin is told of a prompt
    asked, answers     bodies -> requests, tokens -> bytes, as vLLM 0.32 has them
    playback           which tokens of the twin's runs are there by now
    transfer, metrics  the hand-over's fields; `/metrics`
    faults             what goes wrong on purpose
    settings           what one mock is
    clock, http, instance, peers, fleet    the shells: time, connections, one instance, other processes, all of them

docs/mock.md has the table of faults, and what is like vLLM and what is not.
"""
