"""The producer's half of a hand-over (pure): how many legs it takes, what it holds, who may end it, when it may go.

Run by agents (`rules`), by Baton's connector inside vLLM and by the engine twin (`holds`, `leases`): the same objects.
`table` has the rules of a hold as rows.
"""
