"""The consumer's half of a hand-over (pure): how many streams it takes, which blocks it pulls, and when it may use
them.

Run by agents (`rules`), by Baton's connector inside vLLM and by the engine twin (`pulls`, `reads`, `peers`): the same
objects. `table` has the rules of a pull as rows.
"""
