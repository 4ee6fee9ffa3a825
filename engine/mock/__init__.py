"""The mock: twins behind vLLM's HTTP API, on the wall clock.

        words, prompts     text <-> token ids without a model; the twin's form of a prompt
        asked, answers     bodies -> requests, tokens -> bytes, as vLLM 0.32 has them
        playback           which tokens of the twin's runs exist by now
        transfer, metrics  the hand-over's fields; `/metrics`
        faults             faults on purpose
        settings           the settings of one mock
        routes, frontend   paths; the API server, before the engine sees a request
        serving, replies   requests in the engine; what is written, and when
        handoffs, peers    pulls and holds; how a mock reaches the producers of holds
        clock              the twin's time
        listener, http     one port; one connection
        instance, fleet    one instance; all instances of a process

docs/mock.md has the table of faults, and the differences from vLLM.
"""
