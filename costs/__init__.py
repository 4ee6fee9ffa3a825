"""Costs of a step on given hardware: time, bytes, memory, power. Pure but for `shipped`, which reads its data files.

    hardware      facts about GPUs                     model, config   facts about models, from a config.json
    step          the one form of a step's time        ticks           the same in integer nanoseconds, for the twin
    profile, fit  coefficients fitted to measurements  roofline        coefficients computed from the facts
    memory, transfer, power                            bounds          the least time that a step can take
    cost          the facade: `costs_of(...)` and `Costs`

docs/costs.md has the formulas, their sources, how well each fits, and what is not modelled.
"""
