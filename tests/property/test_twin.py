"""Laws of the twin under random loads, KV pressure, aborts, holds and pulls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support.twin import Linear, World, ask, check, elsewhere, hold_id, life, right_tokens

from cluster.ids import InstanceId, RequestId
from cluster.instance import Role
from costs.step import StepCost
from costs.ticks import Ticks
from engine.twin import events as ev
from engine.twin.config import Policy, TwinConfig, Version
from engine.twin.request import TwinRequest
from engine.twin.tokens import Prompt, Segment, answer_key

TICKS = Ticks.of(
    StepCost(
        floor_ms=0.0021, start_ms=0.0003, token_ms=0.000017, area_ms=1e-7, decode_ms=0.0013, context_ms=3.3e-6,
        request_ms=1.7e-5, cached_ms=1.3e-5, crowd_ms=1e-5, crowd_from=2,
    )
)  # fmt: skip


@dataclass(frozen=True)
class Script:
    """The events of one twin, in order of time; times in ns."""

    config: TwinConfig
    costs: Linear | Ticks
    events: tuple[tuple[int, ev.Event], ...]
    latency_ns: int
    spoiled: bool

    @property
    def requests(self) -> dict[str, TwinRequest]:
        return {event.request.id: event.request for _, event in self.events if isinstance(event, ev.Submit)}


@st.composite
def configs(draw: st.DrawFn, *, roomy: bool = False) -> TwinConfig:
    block_size = draw(st.integers(1, 5))
    num_blocks = draw(st.integers(30, 120) if roomy else st.integers(4, 24))
    chunked = draw(st.booleans())
    model_len = draw(st.integers(20 if roomy else 2, num_blocks * block_size))
    budget = draw(st.integers(1, 24))
    return TwinConfig(
        role=draw(st.sampled_from(Role)),
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=model_len,
        max_num_batched_tokens=budget if chunked else max(budget, model_len),
        max_num_seqs=draw(st.integers(1, 6)),
        chunked_prefill=chunked,
        prefix_caching=draw(st.booleans()),
        policy=draw(st.sampled_from(Policy)),
        watermark_blocks=draw(st.integers(0, num_blocks - -(-model_len // block_size))),
        recompute_failed_pulls=draw(st.booleans()),
        start_up_ns=draw(st.sampled_from([0, 0, 0, 700])),
        lease_s=draw(st.sampled_from([1e-5, 5e-5, 2e-4])),
        version=Version(
            reserve_full_prompt=draw(st.booleans()),
            async_scheduling=draw(st.booleans()),
            pull_after_forward=draw(st.booleans()),
        ),
    )


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Few different texts, so that prompts share beginnings. Some prompts continue with the answer to a prompt."""
    row = draw(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 9)), min_size=1, max_size=3))
    prompt = tuple(Segment(seed, tokens) for seed, tokens in row)
    more = draw(st.integers(0, 8))
    return (*prompt, Segment(answer_key(prompt), more)) if more > 3 else prompt


@st.composite
def scripts(draw: st.DrawFn, *, transfers: bool = True, disturbed: bool = True, roomy: bool = False) -> Script:
    config = draw(configs(roomy=roomy))
    events: list[tuple[int, ev.Event]] = []
    now = 0
    for number in range(draw(st.integers(1, 9))):
        now += draw(st.one_of(st.integers(0, 50), st.integers(0, 8_000)))
        name = f"r{number}"
        kind = draw(st.integers(0, 5)) if transfers else 0
        prompt, priority = draw(prompts()), draw(st.integers(0, 1))
        stop_after = draw(st.one_of(st.none(), st.integers(1, 20)))
        rest = {"priority": priority, "stop_after": stop_after}
        if kind == 1:
            request = ask(name, prompt, 1, hold=hold_id(name), **rest)
        elif kind == 2:
            tokens = draw(st.integers(1, sum(segment.tokens for segment in prompt)))
            blocks = tuple(range(100, 100 + config.blocks_for(tokens)))
            source = elsewhere(name, blocks, tokens)
            request = ask(name, prompt, draw(st.integers(1, 30)), pull=source, **rest)
        else:
            request = ask(name, prompt, draw(st.integers(1, 30)), **rest)
        events.append((now, ev.Submit(request)))
        if disturbed:
            events += [
                (now + draw(st.integers(0, 30_000)), event) for event in draw(st.lists(others(name), max_size=2))
            ]
    if disturbed and draw(st.integers(0, 3)) == 0:
        death, pause = draw(st.integers(0, 40_000)), draw(st.integers(0, 5_000))
        events += [(death, ev.Die()), (death + pause, ev.StartEngine(2))]
    events.sort(key=lambda row: row[0])
    costs = draw(st.sampled_from([Linear(), Linear(step=20, token=0, request=0, context=1), TICKS]))
    return Script(config, costs, tuple(events), draw(st.integers(0, 9000)), draw(st.booleans()))


def others(name: str) -> st.SearchStrategy[ev.Event]:
    return st.sampled_from(
        [
            ev.AbortRequest(RequestId(name)),
            ev.ReadLoad(),
            ev.ReadBlocks((0, 1, 2, 3)),
            ev.GiveUpHold(str(hold_id(name))),
            ev.Tick(),
        ]
    )


def play(script: Script, *, fast_forward: bool, checks: bool = False) -> World:
    world = World(
        {"e": script.config},
        script.costs,  # type: ignore[arg-type]
        fast_forward=fast_forward,
        latency_ns=script.latency_ns,
        spoil=lambda contents: None if script.spoiled else contents,
    )
    world.checks = checks
    for when, event in script.events:
        world.send(when, "e", event)
    world.play()
    return world


@given(scripts())
@settings(max_examples=400, deadline=None)
def test_fast_forward_equals_step_by_step(script: Script) -> None:
    fast, slow = (play(script, fast_forward=mode) for mode in (True, False))
    here, there = fast.records["e"], slow.records["e"]
    assert here.effects == there.effects
    assert here.steps(fast.costs) == there.steps(slow.costs)
    assert here.tokens(fast.costs) == there.tokens(slow.costs)
    assert len(here.runs) <= len(there.runs)
    pools = [life(world.twins["e"]).scheduler.pool for world in (fast, slow)]
    assert pools[0].contents == pools[1].contents
    assert list(pools[0]._free) == list(pools[1]._free)
    assert pools[0]._cached == pools[1]._cached


def counted(script: Script, *, fast_forward: bool, checks: bool = False, **switches: bool) -> tuple[World, list]:
    """A world, and all its effects, without the parts that depend on the contents of blocks."""
    world = play(replace(script, config=replace(script.config, **switches)), fast_forward=fast_forward, checks=checks)
    return world, [_without_contents(effect) for effect in world.records["e"].said]


def _without_contents(effect: ev.Effect) -> object:
    if isinstance(effect, ev.Contents):
        return effect.at_ns
    if isinstance(effect, ev.StepRun):
        return structs.replace(effect, shares=tuple((share.request, share.first) for share in effect.shares))
    return effect


@given(st.one_of(scripts(), scripts(roomy=True)), st.booleans())
@settings(max_examples=250, deadline=None)
def test_without_contents_all_other_effects_are_the_same(script: Script, fast_forward: bool) -> None:
    there, kept = counted(script, fast_forward=fast_forward)
    here, not_kept = counted(script, fast_forward=fast_forward, checks=script.config.num_blocks < 25, contents=False)
    assert not_kept == kept
    pools = [life(world.twins["e"]).scheduler.pool for world in (here, there)]
    assert pools[0]._free == pools[1]._free
    assert (pools[0]._cached, pools[0]._same) == (pools[1]._cached, pools[1]._same)
    assert not pools[0]._written


@given(st.one_of(scripts(), scripts(roomy=True)), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_without_every_share_only_first_shares_are_kept(script: Script, contents: bool, fast_forward: bool) -> None:
    _, every = counted(script, fast_forward=fast_forward, contents=contents)
    _, first = counted(script, fast_forward=fast_forward, contents=contents, every_share=False)
    assert first == [
        structs.replace(effect, shares=tuple(share for share in effect.shares if share[1] == 0))
        if isinstance(effect, ev.StepRun)
        else effect
        for effect in every
    ]


@given(scripts())
@settings(max_examples=200, deadline=None)
def test_blocks_are_neither_lost_nor_owned_twice_and_everything_ends(script: Script) -> None:
    world = play(script, fast_forward=False, checks=True)
    check(world.twins["e"])
    record, alive = world.records["e"], life(world.twins["e"])
    said = [
        effect.request
        for effect in record.effects
        if isinstance(effect, ev.RequestFinished | ev.RequestRefused | ev.RequestLost)
    ]
    assert sorted(said) == sorted(script.requests), "each request ends once"
    assert not alive._requests
    assert alive.scheduler.pool.free_blocks == script.config.num_blocks, (
        "all blocks are free; holds end by release or lease"
    )
    assert world.twins["e"].next_wakeup() is None
    assert not alive.holds.held


@given(scripts())
@settings(max_examples=100, deadline=None)
def test_the_twin_is_deterministic(script: Script) -> None:
    first, second = (play(script, fast_forward=True).records["e"] for _ in range(2))
    assert first == second


@given(scripts(transfers=False))
@settings(max_examples=150, deadline=None)
def test_tokens_are_right_and_on_time_whatever_is_preempted(script: Script) -> None:
    world = play(script, fast_forward=True)
    record = world.records["e"]
    made = record.tokens(world.costs)
    for name, request in script.requests.items():
        over = [effect for effect in record.of(ev.RequestFinished) if effect.request == name]
        if not over:
            continue
        assert list(made[name]) == list(range(over[0].outputs)), "each token once, in order"
        assert world.answer("e", name) == right_tokens(request, over[0].outputs)
        times = [when for when, _ in made[name].values()]
        assert times == sorted(times)
        assert not times or times[-1] <= over[0].at_ns
        if over[0].reason in {"stop", "length"}:
            assert times[-1] == over[0].at_ns


@given(scripts(transfers=False, disturbed=False))
@settings(max_examples=150, deadline=None)
def test_requests_of_one_priority_start_in_order_of_arrival(script: Script) -> None:
    record = play(script, fast_forward=True).records["e"]
    started = {over.request: over.first_run_ns for over in record.of(ev.RequestFinished)}
    for priority in (0, 1) if script.config.policy is Policy.PRIORITY else (None,):
        line = [
            started[name]
            for name, request in script.requests.items()
            if name in started and priority in {None, request.priority}
        ]
        assert line == sorted(line)


@given(scripts(transfers=False), st.integers(1, 20_000))
@settings(max_examples=60, deadline=None)
def test_a_late_driver_changes_nothing(script: Script, pause: int) -> None:
    """A driver that calls the twin rarely gets the same effects with the same times."""
    script = replace(script, events=tuple((when // pause * pause, event) for when, event in script.events))
    punctual, late = play(script, fast_forward=True), World({"e": script.config}, script.costs)  # type: ignore[arg-type]
    for when, event in script.events:
        late.now = when
        late.tell("e", event)
    late.now = 10**9
    late.tell("e", ev.Tick())
    assert late.records["e"] == punctual.records["e"]


@given(configs(), configs(), prompts(), st.integers(1, 12), st.integers(0, 40_000), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_handoff_is_exact_even_if_the_hold_ends_early(
    here: TwinConfig, there: TwinConfig, prompt: Prompt, max_tokens: int, latency_ns: int, crowded: bool
) -> None:
    """P hands over to D over a link. Blocks that are read too late are computed again, and the tokens are right."""
    p = replace(here, role=Role.PREFILL, start_up_ns=0)
    sizes = {"block_size": p.block_size, "num_blocks": p.num_blocks, "max_model_len": p.max_model_len}
    d = replace(
        there, role=Role.DECODE, max_num_batched_tokens=p.max_model_len, watermark_blocks=0, start_up_ns=0, **sizes
    )
    world = World({"p": p, "d": d}, latency_ns=latency_ns)
    world.checks = True
    request = ask("a", prompt, max_tokens)

    def next_leg(name: str, over: ev.RequestFinished) -> None:
        if over.hold is not None:
            world.send(world.now, "d", ev.Submit(replace(request, pull=over.hold.source(InstanceId("p")))))

    world.on_finish = next_leg
    world.send(0, "p", ev.Submit(replace(request, max_tokens=1, hold=hold_id("a"))))
    for number in range(12 if crowded else 0):
        other = ask(f"x{number}", (Segment(7 + number, min(9, p.max_model_len - 1)),), 3)
        world.send(number * 1000, "p", ev.Submit(other))
    world.play()
    finished = world.records["d"].of(ev.RequestFinished)
    if not finished:
        assert world.records["p"].of(ev.RequestRefused), "the prompt is too long"
        return
    unused = world.records["d"].of(ev.NotUsed)
    assert finished[0].outputs >= 1 or (unused and not d.recompute_failed_pulls)
    assert world.answer("d", "a") == right_tokens(request, finished[0].outputs)
    assert not unused or latency_ns >= p.lease_s * 1e9
    assert [effect.because for effect in unused] == ["the hold did not outlive the read"] * len(unused)
