"""The mock: twins behind vLLM's HTTP API, on the wall clock.

        words, prompts     text <-> token ids without a model; the twin's form of a prompt
        asked, answers     bodies -> requests, tokens -> bytes, as vLLM 0.32 has them
        playback           which tokens of the twin's runs exist by now
        transfer, metrics  the hand-over's fields; `/metrics`
        faults             faults on purpose
        settings           the settings of one mock
        frontend, serving, replies    the API server; requests in the engine; what is written, and when
        clock, http, instance, peers, fleet    the shells: time, connections, one instance, other processes, all of them

docs/mock.md has the table of faults, and what is like vLLM and what is not.
"""
