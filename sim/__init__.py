"""A whole cluster on virtual time, made of the product's own parts (law 3). Pure: no clock, no chance, no files.

Everything that runs here is imported, never rewritten: `router.core.journey.Journey`, `router.fleet.view.FleetView`,
`router.scheduler.scoring.policies.POLICIES`, `router.scheduler.scheduler.Scheduler` (places and the flow-control
queue), `engine.agent.machine.AgentMachine` with the rules of `prefill` and `decode`, `engine.twin.Twin` with their
rules of holds and pulls inside it, `costs` for steps and transfers, `loadgen` for arrivals and reports. This package
carries out their effects, as sockets, clocks and processes do live.

    from sim.fleet import member                # one instance: name, role, model, costs, TwinConfig
    from sim.settings import SimSettings
    from sim.world import World

    world = World(members, SimSettings(seed=1), policy=POLICIES["least_load"])
    result = world.run(arrivals)                # any iterable of loadgen.arrival.Arrival, in order of time
    result.report(Targets(ttft_ms=500))         # loadgen's `LoadReport`, as `baton load` prints it
    result.columns                              # numpy, one row per request, times in ns

| module | what it knows |
| --- | --- |
| `kernel` | the clock: a heap of (time, sequence, call); nanoseconds as integers |
| `link` | NICs that flows share fairly |
| `instance` | one twin, its agent, its epoch, its clock |
| `lives` | starts and deaths, heartbeats, the registry, the prober |
| `startup`, `roughness` | how long starts take; engines, networks and estimates that scatter |
| `legs` | legs between routers and engines |
| `pulls` | KV on its way, and the notices that end holds |
| `front`, `passage` | the router; one request, whose journey's effects are carried out |
| `prefilling`, `answering`, `sourcing` | a request's prefill legs, its answering leg, its source legs |
| `world`, `settings` | all of them wired together, one run; its delays and limits |
| `provisioning`, `changes` | a fleet that changes during the run; the changes, read from a file |
| `scaling`, `controlled`, `meters` | a scaler on a fleet; the product's controller as one; the figures that it reads |
| `evaluate`, `checked` | whether a fleet keeps promises; the same as a controller's check |
| `faults` | what goes wrong and when, from a seed |
| `checks` | what must hold after every event |
| `fleet`, `engine_args` | from the cluster file's instances to members |
| `energy` | the power that engines draw |
| `result` | compact per-request rows and what they add up to |
| `trace_view` | a window of a run for chrome://tracing and Perfetto |
| `replay` | a router's decision log, decided again |

Policies are the router's: `(FleetSnapshot, Wanted) -> Chosen`. Equal seed, arrivals and members give equal bytes.
"""
