"""Load on any OpenAI endpoint: the arrivals to send (pure; optimizer and simulator read them, too), and the sender.

    arrival               one request to send: when, how long, which prefix it shares
    traces, shaping       real traces as arrivals; faster, denser, a window of them
    arrivals, lengths     made-up arrival times, and made-up token counts
    servegen              many clients mixed, each with its own rate, burstiness and lengths
    prompts, body         a text or token ids of a wanted length that shares the wanted prefix
    record, report        the result of each request, and of a whole load
    stream, http, replay  the open-loop sender: reads streams cheaply, keeps connections, keeps time
    sessions              conversations in a closed loop
    search, faults        the search for goodput; actions on the fleet during a load
    compare, summary      two results compared; the properties of a load before it is sent
    measure               points that show what an engine's steps cost

Chance comes as a `numpy.random.Generator` that the caller seeds: the same seed gives the same load.
"""
