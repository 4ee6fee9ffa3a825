"""Load on any OpenAI endpoint: what to send when (pure, also read by the optimizer and the simulator), and the sender.

    arrival               one request that wants to be sent: when, how long, sharing which prefix
    traces, shaping       real traces as arrivals; faster, denser, a window of them
    arrivals, lengths     made-up ones: when, and how many tokens
    servegen              many clients mixed, each with its own rate, burstiness and lengths
    prompts, body         a text or token ids of a wanted length that shares what it should share
    record, report        what happened to each request, and what it adds up to
    stream, http, replay  the open-loop sender: reads streams cheaply, keeps connections, keeps time

Chance comes as a `numpy.random.Generator` that the caller seeds: the same seed gives the same load.
"""
