"""Systems compared on equal ground: how much load each serves within its targets, at its own best settings. Pure.

| module | what it knows |
| --- | --- |
| `systems` | pools of instances → a simulated fleet; what a system is called and costs |
| `loads` | the same requests at any rate: common random numbers |
| `goodput` | the highest rate at which a criterion holds, by bisection |
| `tuning` | a system's best among its own variants: P:D split, token budget |
| `contest` | classes of systems: the best of each, with as few runs as that takes |
| `early` | runs that end as soon as their verdict is certain |
| `breakeven` | always, never or sometimes hand over; single decisions both ways |
| `estimate` | where a search begins: rates from costs alone |
| `scenarios` | aggregated against disaggregated: ten published scenarios, and traces |
| `distserve`, `splitwise` | the comparisons of these papers on their own profiles |
| `splitwise_gap` | why ours of the latter differ: its simulator's assumptions, taken over one after the other |

Model sizes and profiles come as a `Shelf`: `bench/compare.py` reads the shipped ones, tests make their own.
"""
