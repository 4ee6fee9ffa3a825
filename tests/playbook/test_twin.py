"""The twin as readable scripts: what came in, and what one vLLM engine did about it."""

import pytest
from support.twin import MS, Linear, World, ask, elsewhere, hold_id, life, right_tokens, text

from cluster.ids import InstanceId, RequestId
from cluster.instance import Load, Role
from costs.step import StepWork
from engine.twin import events as ev
from engine.twin.config import Policy, TwinConfig, Version
from engine.twin.tokens import Segment, answer_key
from kvtransfer.notes import Beat

SMALL = TwinConfig(block_size=4, num_blocks=16, max_model_len=32, max_num_batched_tokens=16, max_num_seqs=4)
ASYNC = Version(async_scheduling=True)


def change(config: TwinConfig, **changes: object) -> TwinConfig:
    names = config.__dataclass_fields__
    return TwinConfig(**{name: changes.get(name, getattr(config, name)) for name in names})  # type: ignore[arg-type]


def alone(config: TwinConfig = SMALL, **rest: object) -> World:
    return World({"e": config}, **rest)  # type: ignore[arg-type]


def test_one_request() -> None:
    world = alone()
    request = ask("a", text((1, 10)), 5)
    world.send(100, "e", ev.Submit(request))
    world.play()
    assert world.answer("e", "a") == right_tokens(request, 5)
    over = world.records["e"].finished("a")
    assert (over.reason, over.outputs, over.first_run_ns) == ("length", 5, 100)
    # a prompt of 10 tokens, then four decode steps with contexts of 11 to 14 tokens
    assert over.at_ns == 100 + (1000 + 100) + sum(1007 + 3 * context for context in (11, 12, 13, 14))
    assert len(world.records["e"].runs) == 2, "one run for the prompt, one for all decode steps"


def test_end_of_text_comes_before_the_limit() -> None:
    world = alone()
    world.send(0, "e", ev.Submit(ask("a", text((1, 3)), 9, stop_after=2)))
    world.play()
    assert (world.records["e"].finished("a").reason, world.records["e"].finished("a").outputs) == ("stop", 2)


def test_a_prompt_is_computed_in_chunks_beside_requests_that_decode() -> None:
    world = alone()
    world.send(0, "e", ev.Submit(ask("a", text((1, 4)), 8)))
    world.send(1, "e", ev.Submit(ask("b", text((2, 20)), 2)))
    world.play()
    rows = [row[1:] for row in world.records["e"].steps(world.costs)]
    assert rows[:3] == [(0, 0, 4), (1, 5, 15), (1, 6, 5)]


class Noted(Linear):
    """The same costs; notes the work of each step with prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[StepWork] = []

    def step_ns(self, work: StepWork) -> int:
        self.works.append(work)
        return super().step_ns(work)


def test_a_step_says_its_longest_prefix() -> None:
    """Of the chunks of prompts: the context of requests that decode beside them is another number."""
    costs = Noted()
    world = alone(change(SMALL, num_blocks=40), costs=costs)
    world.send(0, "e", ev.Submit(ask("a", text((1, 20)), 9)))  # chunks of 16 and 4 tokens
    world.send(1, "e", ev.Submit(ask("b", text((2, 30)), 2)))  # 12 beside the 4, then 15 beside the first request, 3
    world.play()
    assert [(work.new_tokens, work.longest_cached, work.batch) for work in costs.works] == [
        (16, 0, 0),
        (16, 16, 0),
        (15, 12, 1),
        (3, 27, 1),
    ]
    assert [work.area for work in costs.works] == [16**2, 4 * 36 + 12**2, 15 * 39, 3 * 57]


def test_an_arrival_cuts_a_run_at_the_end_of_its_step() -> None:
    world = alone()
    world.send(0, "e", ev.Submit(ask("a", text((1, 4)), 20)))
    world.send(5000, "e", ev.Submit(ask("b", text((2, 4)), 1)))
    world.play(until=5000)
    run, steps = world.records["e"].runs[2]
    assert (run.steps, steps) == (19, 4)
    world.play()
    assert world.records["e"].finished("b").first_run_ns == run.at_ns + world.costs.decode_run_ns(1, 5, 4)


def test_asynchronous_scheduling_sees_an_arrival_one_step_later() -> None:
    world = alone(change(SMALL, version=ASYNC))
    world.send(0, "e", ev.Submit(ask("a", text((1, 4)), 20)))
    world.send(5000, "e", ev.Submit(ask("b", text((2, 4)), 1)))
    world.play()
    run, _ = world.records["e"].runs[2]
    assert world.records["e"].finished("b").first_run_ns == run.at_ns + world.costs.decode_run_ns(1, 5, 5)
    assert world.answer("e", "a") == right_tokens(ask("a", text((1, 4)), 20), 20)


def test_asynchronous_scheduling_makes_one_step_too_many_after_an_unforeseen_end() -> None:
    for version, steps in ((Version(), 3), (ASYNC, 4)):
        world = alone(change(SMALL, version=version))
        world.send(0, "e", ev.Submit(ask("a", text((1, 4)), 9, stop_after=3)))
        world.play()
        assert len(world.records["e"].steps(world.costs)) == steps
        assert world.records["e"].finished("a").outputs == 3


def test_a_prefix_is_found_in_the_cache() -> None:
    world = alone()
    world.send(0, "e", ev.Submit(ask("a", text((1, 12), (2, 3)), 1)))
    world.send(1 * MS, "e", ev.Submit(ask("b", text((1, 12), (3, 1)), 2)))
    world.play()
    assert world.records["e"].finished("b").local_tokens == 12
    assert world.answer("e", "b") == right_tokens(ask("b", text((1, 12), (3, 1))), 2)


def test_the_last_token_is_always_computed() -> None:
    world = alone()
    world.send(0, "e", ev.Submit(ask("a", text((1, 12)), 1)))
    world.send(1 * MS, "e", ev.Submit(ask("b", text((1, 12)), 1)))
    world.play()
    assert world.records["e"].finished("b").local_tokens == 8


def test_the_longest_unused_cached_block_goes_first() -> None:
    world = alone(change(SMALL, num_blocks=8))
    for number, name in enumerate("abc"):  # 2 blocks each; c's need pushes nothing out yet
        world.send(number * MS, "e", ev.Submit(ask(name, text((number, 8)), 1)))
    world.send(3 * MS, "e", ev.Submit(ask("a again", text((0, 9)), 1)))
    world.send(4 * MS, "e", ev.Submit(ask("d", text((4, 16)), 1)))  # 4 blocks: two never used, then b's
    world.send(5 * MS, "e", ev.Submit(ask("a still", text((0, 9)), 1)))
    world.send(6 * MS, "e", ev.Submit(ask("b gone", text((1, 9)), 1)))
    world.play()
    record = world.records["e"]
    assert [record.finished(name).local_tokens for name in ("a again", "a still", "b gone")] == [8, 8, 0]


def test_the_newest_is_preempted_and_computed_anew() -> None:
    world = alone(change(SMALL, num_blocks=8))
    requests = [ask("a", text((1, 12)), 16), ask("b", text((2, 12)), 16)]
    for request in requests:
        world.send(0, "e", ev.Submit(request))
    world.play()
    (lost,) = world.records["e"].of(ev.Preempted)
    assert lost.request == "b"
    assert [world.answer("e", request.id) for request in requests] == [right_tokens(one, 16) for one in requests]
    assert world.records["e"].finished("b").at_ns > world.records["e"].finished("a").at_ns


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    for reserve, waits in ((True, True), (False, False)):
        world = alone(change(SMALL, num_blocks=8, version=Version(reserve_full_prompt=reserve)))
        world.send(0, "e", ev.Submit(ask("a", text((1, 14)), 10)))
        world.send(1, "e", ev.Submit(ask("b", text((2, 24)), 1)))
        world.play()
        record = world.records["e"]
        assert (record.finished("b").first_run_ns >= record.finished("a").at_ns) is waits


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_request_that_waits_for_blocks_starts_when_another_has_computed_some_of_them(fast_forward: bool) -> None:
    world = alone(change(SMALL, num_blocks=7, max_model_len=28), fast_forward=fast_forward)
    first = ask("a", text((1, 5)), 20)
    second = ask("b", (*first.prompt, Segment(answer_key(first.prompt), 20)), 1)
    world.send(0, "e", ev.Submit(first))
    world.send(1, "e", ev.Submit(second))  # 7 blocks, of which a has computed one, and has another; 5 are free
    world.play()
    over = world.records["e"].finished("b")
    assert over.local_tokens == 8
    assert over.first_run_ns == 1050 + sum(1007 + 3 * context for context in (6, 7)), "with a's 8th token"
    assert world.answer("e", "b") == right_tokens(second, 1)


def test_priority() -> None:
    world = alone(change(SMALL, policy=Policy.PRIORITY, max_num_seqs=1))
    world.send(0, "e", ev.Submit(ask("a", text((1, 4)), 3)))
    world.send(1, "e", ev.Submit(ask("late", text((2, 4)), 3, priority=5)))
    world.send(2, "e", ev.Submit(ask("first", text((3, 4)), 3, priority=-1)))
    world.play()
    assert [over.request for over in world.records["e"].of(ev.RequestFinished)] == ["a", "first", "late"]


def test_an_abort_takes_effect_when_the_step_is_over() -> None:
    world = alone()
    world.send(0, "e", ev.Submit(ask("a", text((1, 4)), 20)))
    world.send(3000, "e", ev.AbortRequest(ask("a", text((1, 4))).id))
    world.play()
    over = world.records["e"].finished("a")
    assert (over.reason, over.outputs) == ("abort", 2)
    assert over.at_ns == 1040 + world.costs.decode_run_ns(1, 5, 2)
    assert life(world.twins["e"]).scheduler.pool.free_blocks == 16


def test_a_hold_ends_with_its_release_or_its_lease() -> None:
    world = alone(change(SMALL, role=Role.PREFILL, lease_s=0.01))
    for name in ("a", "b"):
        world.send(0, "e", ev.Submit(ask(name, text((ord(name), 6)), 1, hold=hold_id(name))))
    world.play(until=1 * MS)
    hold = world.records["e"].finished("a").hold
    assert hold is not None and (len(hold.blocks), hold.tokens) == (2, 6)
    pool = life(world.twins["e"]).scheduler.pool
    assert pool.free_blocks == 12
    world.send(2 * MS, "e", ev.released(hold.source(InstanceId("e")), InstanceId("d")))
    world.play(until=3 * MS)
    assert pool.free_blocks == 14
    world.play()
    assert pool.free_blocks == 16
    assert world.now >= 10 * MS, "the other's lease had to end"


def test_a_heartbeat_lets_a_hold_live_longer() -> None:
    world = alone(change(SMALL, lease_s=0.01))
    world.send(0, "e", ev.Submit(ask("a", text((1, 6)), 1, hold=hold_id("a"))))
    world.send(9 * MS, "e", ev.Notice(InstanceId("d"), Beat((RequestId("a"),))))
    world.play(until=12 * MS)
    pool = life(world.twins["e"]).scheduler.pool
    assert pool.free_blocks == 14
    world.play()
    assert pool.free_blocks == 16


def test_an_aborted_prefill_holds_nothing() -> None:
    world = alone()
    world.send(0, "e", ev.Submit(ask("a", text((1, 30)), 1, hold=hold_id("a"))))
    world.send(10, "e", ev.AbortRequest(hold_id("a").request))
    world.play()
    assert world.records["e"].finished("a").hold is None
    assert life(world.twins["e"]).scheduler.pool.free_blocks == 16


def test_a_name_that_was_given_up_before_is_never_held() -> None:
    """vllm 25067: also while the leg runs; the hold of another name stands until its lease ends."""
    for when in (0, 500, 1050):
        world = alone()
        world.send(when, "e", ev.GiveUpHold(str(hold_id("a"))))
        world.send(0, "e", ev.Submit(ask("a", text((1, 6)), 1, hold=hold_id("a"))))
        world.send(0, "e", ev.Submit(ask("b", text((2, 6)), 1, hold=hold_id("b"))))
        world.play(until=1 * MS)
        assert world.records["e"].finished("a").hold is None
        assert world.records["e"].finished("b").hold is not None
        assert life(world.twins["e"]).scheduler.pool.free_blocks == 14


def test_a_hold_is_given_up_by_its_name() -> None:
    world = alone()
    world.send(0, "e", ev.Submit(ask("a", text((1, 6)), 1, hold=hold_id("a"))))
    world.send(1 * MS, "e", ev.GiveUpHold(str(hold_id("a"))))
    world.send(2 * MS, "e", ev.GiveUpHold(str(hold_id("a"))))
    world.play()
    assert [effect.because for effect in world.records["e"].of(ev.HoldEnded)] == ["given up"]
    assert life(world.twins["e"]).scheduler.pool.free_blocks == 16 and world.now == 2 * MS


def test_a_notice_of_a_former_life_ends_nothing() -> None:
    """A mark belongs to one life of an engine: in the next life the same name and slot have another mark."""
    world = alone()
    world.send(0, "e", ev.Submit(ask("a", text((1, 6)), 1, hold=hold_id("a"))))
    world.play(until=1 * MS)
    former = world.records["e"].finished("a").hold
    assert former is not None and former.slot is not None
    world.send(2 * MS, "e", ev.StartEngine(2))
    world.send(3 * MS, "e", ev.Submit(ask("a", text((1, 6)), 1, hold=hold_id("a", epoch=2))))
    world.send(4 * MS, "e", ev.released(former.source(InstanceId("e")), InstanceId("d")))
    world.play(until=5 * MS)
    assert life(world.twins["e"]).holds.held == 1
    assert life(world.twins["e"]).holds.slot(former.slot.index) != former.slot.mark


def handed_over(prompt_tokens: int, **rest: object) -> World:
    """P computes a prompt, D pulls it."""
    configs = {"p": change(SMALL, role=Role.PREFILL, lease_s=0.01), "d": change(SMALL, role=Role.DECODE)}
    world = World(configs, **rest)  # type: ignore[arg-type]
    prompt = text((1, prompt_tokens))

    def next_leg(name: str, over: ev.RequestFinished) -> None:
        if over.hold is not None:
            source = over.hold.source(InstanceId("p"))
            world.send(world.now + 100, "d", ev.Submit(ask("a", prompt, 6, pull=source)))

    world.on_finish = next_leg
    world.send(0, "p", ev.Submit(ask("a", prompt, 1, hold=hold_id("a"))))
    return world


@pytest.mark.parametrize("prompt_tokens", [1, 3, 4, 5, 8, 15])
def test_handoff(prompt_tokens: int) -> None:
    world = handed_over(prompt_tokens)
    world.play()
    assert world.answer("d", "a") == right_tokens(ask("a", text((1, prompt_tokens))), 6)
    over = world.records["d"].finished("a")
    assert over.remote_tokens == prompt_tokens
    assert world.records["d"].steps(world.costs)[0][1:] == (1, prompt_tokens, 0), "one token is computed, no prompt"
    assert life(world.twins["p"]).scheduler.pool.free_blocks == 16
    assert world.now < 10 * MS, "released, not expired"


@pytest.mark.parametrize("read_ns", [1 * MS, 12 * MS])
def test_a_hold_that_does_not_outlive_the_read_is_not_used(read_ns: int) -> None:
    """The lease ends before or after the bytes were read, and other prompts get the blocks: the outcome is the same."""
    world = handed_over(15, latency_ns=12 * MS, read_ns=read_ns)
    for number in range(8):
        world.send(11 * MS + number, "p", ev.Submit(ask(f"x{number}", text((9 + number, 15)), 4)))
    world.play()
    assert [effect.because for effect in world.records["d"].of(ev.NotUsed)] == ["the hold did not outlive the read"]
    assert not world.records["d"].of(ev.GiveBack), "the hold has ended: no producer is told"
    assert world.answer("d", "a") == right_tokens(ask("a", text((1, 15))), 6)


def test_a_stale_block_would_make_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the consumer checks the slot's mark: without the check, the same run answers from other prompts' blocks."""
    monkeypatch.setattr("decode.reads.PullAtRank.saw", lambda _self, _said: None)
    world = handed_over(15, latency_ns=12 * MS)
    for number in range(8):
        world.send(11 * MS + number, "p", ev.Submit(ask(f"x{number}", text((9 + number, 15)), 4)))
    world.play()
    assert len(world.answer("d", "a")) == 6
    assert world.answer("d", "a") != right_tokens(ask("a", text((1, 15))), 6)


def test_a_producer_whose_blocks_do_not_come_is_set_aside() -> None:
    """Three reads in a row have failed: D computes the next prompts at once."""
    world = World({"d": change(SMALL, role=Role.DECODE)}, spoil=lambda _: None)
    for number in range(5):
        source = elsewhere(f"r{number}", (1, 2), 8)
        world.send(number * MS, "d", ev.Submit(ask(f"r{number}", text((number, 8)), 2, pull=source)))
    world.play()
    assert len(world.records["d"].of(ev.PullBlocks)) == 3
    assert len(world.records["d"].of(ev.GiveBack)) == 5, "the producer need not hold any of them"
    assert life(world.twins["d"]).pulls.wants.recomputed_tokens == 5 * 8


def test_a_swapped_block_makes_wrong_tokens() -> None:
    world = handed_over(12, spoil=lambda contents: (contents[0], contents[0], contents[2]))
    world.play()
    assert not set(world.answer("d", "a")) & set(right_tokens(ask("a", text((1, 12))), 6))


def test_a_failed_pull_is_computed_here() -> None:
    world = handed_over(12, spoil=lambda _: None)
    world.play()
    assert world.answer("d", "a") == right_tokens(ask("a", text((1, 12))), 6)
    assert world.records["d"].finished("a").remote_tokens == 0


def test_an_abort_during_a_pull_keeps_the_blocks_until_it_has_ended() -> None:
    world = handed_over(12, latency_ns=2 * MS)
    world.send(1 * MS, "d", ev.AbortRequest(hold_id("a").request))
    world.play(until=1 * MS + 1)
    pool = life(world.twins["d"]).scheduler.pool
    assert world.records["d"].finished("a").reason == "abort"
    assert pool.free_blocks == 13
    world.play()
    assert pool.free_blocks == 16


def test_an_abort_before_the_pull_gives_the_hold_back() -> None:
    world = handed_over(12)
    for number in range(4):  # D's batch is full, so that the decode leg waits
        world.send(0, "d", ev.Submit(ask(f"x{number}", text((9 + number, 2)), 12)))
    world.send(4000, "d", ev.AbortRequest(hold_id("a").request))
    world.play()
    assert not world.records["d"].of(ev.PullBlocks)
    assert life(world.twins["p"]).scheduler.pool.free_blocks == 16
    assert world.now < 10 * MS


def test_death_and_a_new_life() -> None:
    world = alone(change(SMALL, start_up_ns=500))
    world.send(10, "e", ev.Submit(ask("early", text((1, 4)), 3)))
    world.send(600, "e", ev.Submit(ask("a", text((1, 4)), 9)))
    world.send(700, "e", ev.Submit(ask("b", text((1, 4)), 1, hold=hold_id("b"))))
    world.send(4000, "e", ev.Die())
    world.send(4500, "e", ev.StartEngine(2))
    world.send(6000, "e", ev.Submit(ask("a", text((1, 4)), 2)))
    world.play()
    record = world.records["e"]
    assert [refused.request for refused in record.of(ev.RequestRefused)] == ["early"]
    assert [(ready.at_ns, ready.epoch) for ready in record.of(ev.EngineReady)] == [(500, 1), (5000, 2)]
    assert [lost.request for lost in record.of(ev.RequestLost)] == ["a"]
    assert record.finished("a").local_tokens == 0, "nothing of the former life is left"
    assert world.records["e"].effects[-1] == record.finished("a")


def test_load() -> None:
    world = alone(change(SMALL, max_num_seqs=1))
    for name in ("a", "b"):
        world.send(0, "e", ev.Submit(ask(name, text((ord(name), 6)), 4)))
    world.send(50, "e", ev.ReadLoad())
    world.play()
    (said,) = world.records["e"].of(ev.LoadIs)
    assert said.load == Load(running=1, waiting=1, kv_usage=2 / 16)


def test_bad_requests_are_refused() -> None:
    world = alone()
    world.send(0, "e", ev.Submit(ask("long", text((1, 32)), 1)))
    world.send(0, "e", ev.Submit(ask("a", text((1, 31)), 99)))
    world.send(0, "e", ev.Submit(ask("a", text((1, 3)), 1)))
    world.send(0, "e", ev.Submit(ask("h", text((1, 3)), 2, hold=hold_id("h"))))
    world.play()
    assert [refused.request for refused in world.records["e"].of(ev.RequestRefused)] == ["long", "a", "h"]
    assert world.records["e"].finished("a").outputs == 1, "the model's length ends it"
    with pytest.raises(ValueError, match="at least one token"):
        ask("none", ())
