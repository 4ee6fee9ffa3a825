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
| `splitwise_gap` | why our figures for Splitwise differ: its simulator's assumptions, taken over one after the other |
| `rivals` | every rival's routing policy on the same load and GPUs |
| `curves` | attainment over rate, and goodput from a fitted curve |
| `ceiling` | a bound on attainment that no policy can beat |
| `overload` | how many requests keep their targets where classes refuse |
| `scaling`, `scaling_loads`, `scaling_ours` | scalers on loads that change; the loads; the product's controller |

A `Shelf` has the model sizes and profiles: `bench/compare.py` reads the shipped ones, tests make their own.
"""
