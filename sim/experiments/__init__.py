"""Systems compared on equal ground: how much load each serves within its targets, at its own best settings. Pure.

| module | what it knows |
| --- | --- |
| `systems` | pools of instances → a simulated fleet; what a system is called and costs |
| `loads` | the same requests at any rate: common random numbers |
| `goodput` | the highest rate at which a criterion holds, by bisection |
| `tuning` | a system's best among its own variants: P:D split, token budget |
| `estimate` | where a search begins: rates from costs alone |
| `scenarios` | aggregated against disaggregated: ten published scenarios, and traces |
| `distserve`, `splitwise` | the comparisons of these papers on their own profiles |

Model sizes and profiles come as a `Shelf`: `bench/compare.py` reads the shipped ones, tests make their own.
"""
