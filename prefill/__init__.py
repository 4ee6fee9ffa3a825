"""The producer's half of a hand-over (pure): how many legs it takes, which blocks it holds, and what ends a hold.

Run by agents (`rules`), by Baton's connector inside vLLM and by the engine twin (`holds`, `leases`): the same objects.
`table` has the rules of a hold as rows.
"""
