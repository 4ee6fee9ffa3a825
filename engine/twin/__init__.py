"""One vLLM instance as a pure machine in whole nanoseconds: scheduler, paged KV cache, holds, the time of each step.

Read `machine.py` first, then `schedule.py`. docs/twin.md says what is modelled, what is not, and which line of vLLM
each rule is from.
"""
