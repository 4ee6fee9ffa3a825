"""The router in front of mock engines: complete hand-overs whose tokens can be checked, and every fault of a mock.

`test_router.py` scripts single answers of engines. Here engines have time, memory, leases and epochs of their own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from support.fleet import eventually
from support.hands_over import hands_over
from support.mock import mock_settings
from support.served import served

from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from engine.mock.fleet import MockFleet
from engine.mock.instance import MockInstance as Mock
from engine.mock.settings import Ends
from router.api.config import RouterConfig
from router.http.upstream import EngineLost, Upstream

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STORY = "Once upon a time a small robot found a bright red lantern near the river. " * 3


@dataclass
class Mocked:
    """A running router, its mock engines and a client."""

    endpoint: str
    mocks: MockFleet
    client: aiohttp.ClientSession
    asked: int = 0

    def body(self, **more: Any) -> dict[str, Any]:
        """A request with a prompt that no request had before."""
        self.asked += 1
        return {"model": "fake", "prompt": f"[{self.asked}] {STORY}", "max_tokens": 12, **more}

    async def ask(self, body: dict[str, Any], path: str = COMPLETIONS, at: str = "", **more: Any) -> tuple[int, Any]:
        async with self.client.post((at or self.endpoint) + path, json=body, **more) as response:
            return response.status, await response.json()

    async def stream(self, body: dict[str, Any], path: str = COMPLETIONS) -> tuple[int, str, list[dict[str, Any]]]:
        """Status, text and events of a stream, which ends with [DONE]."""
        return await self.stream_all(body, path)

    async def stream_all(
        self, body: dict[str, Any], path: str = COMPLETIONS, at: str = ""
    ) -> tuple[int, str, list[dict[str, Any]]]:
        """The same, from the router or from the engine `at`."""
        async with self.client.post((at or self.endpoint) + path, json={**body, "stream": True}) as response:
            raw = await response.text()
        assert raw.endswith("data: [DONE]\n\n"), raw
        events = [json.loads(event.removeprefix("data: ")) for event in raw.strip().split("\n\n")[:-1]]
        choices = [event["choices"][0] for event in events if event.get("choices")]
        return response.status, "".join(each.get("text") or each["delta"]["content"] for each in choices), events

    async def right(self, body: dict[str, Any], path: str = COMPLETIONS) -> Any:
        """The answer of one engine alone, without faults."""
        async with MockFleet([mock_settings("alone", Role.BOTH)]) as alone:
            status, answer = await self.ask(body, path, at=alone.instances["alone"].url)
            assert status == 200, answer
            return _text(answer)

    async def set_fault(self, name: str, fault: str, **more: Any) -> None:
        anybody = next(iter(self.mocks.instances.values()))
        url = f"{anybody.url}/mock/{name}/faults"
        async with self.client.post(url, json={"fault": fault, **more}) as response:
            assert response.status == 200, await response.text()

    @property
    def held(self) -> float:
        """The share of KV-cache blocks in use, summed over all engines."""
        return sum(each.load().kv_usage for each in self.mocks.instances.values() if each.ready.is_set())

    @property
    def busy(self) -> int:
        return sum(each.serving.open_requests for each in self.mocks.instances.values())

    async def settled(self) -> None:
        await eventually(lambda: self.busy == 0 and self.held == 0, "nothing runs and nothing is held")


def _text(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


Start = Callable[..., Awaitable[Mocked]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """`await start(prefill=1, decode=1, mock={...}, **router settings)`: a router that has seen every mock."""
    async with AsyncExitStack() as stack:

        async def starter(
            *,
            prefill: int = 1,
            decode: int = 1,
            mock: dict[str, Any] | None = None,
            pins: bool = False,
            weights: Mapping[str, str] | None = None,
            **router: Any,
        ) -> Mocked:
            counts = {Role.PREFILL: prefill, Role.DECODE: decode}
            settings = [
                mock_settings(f"{role.value}-{number}", role, **(mock or {}))
                for role, count in counts.items()
                for number in range(count)
            ]
            mocks = await stack.enter_async_context(MockFleet(settings))
            instances = tuple(
                Instance(
                    id=InstanceId(name),
                    role=each.settings.role,
                    url=each.url,
                    pins=pins,
                    weights=(weights or {}).get(name, ""),
                )
                for name, each in mocks.instances.items()
            )
            config = RouterConfig(instances=instances, port=0, admin_port=0, drain_s=1.0, **hands_over(router))
            endpoint, _ = await stack.enter_async_context(served(config))
            client = await stack.enter_async_context(aiohttp.ClientSession())
            fleet = Mocked(endpoint, mocks, client)
            await _all_up(fleet)
            return fleet

        yield starter


async def _states(fleet: Mocked) -> list[str]:
    async with fleet.client.get(fleet.endpoint + "/ready") as response:
        return [each["state"] for each in (await response.json())["instances"]]


async def _all_up(fleet: Mocked) -> None:
    async with asyncio.timeout(5):
        while set(await _states(fleet)) != {"up"}:
            await asyncio.sleep(0.01)


# -- nothing is wrong --


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("pins", [False, True], ids=["plain", "seeded"])
async def test_a_handed_over_answer_is_one_engines(start: Start, path: str, streamed: bool, pins: bool) -> None:
    fleet = await start(pins=pins)
    body = fleet.body()
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    expected = await fleet.right(body, path)
    if streamed:
        status, text, _ = await fleet.stream(body, path)
    else:
        status, answer = await fleet.ask(body, path)
        text = _text(answer)
    assert (status, text) == (200, expected)
    assert fleet.mocks.instances["decode-0"].load().external_kv_tokens > 50, "the KV came from prefill"
    await fleet.settled()


async def test_an_answer_limited_to_one_token_is_made_by_prefill(start: Start) -> None:
    fleet = await start()
    body = fleet.body(max_tokens=1)
    status, answer = await fleet.ask(body)
    assert (status, _text(answer)) == (200, await fleet.right(body))
    assert fleet.mocks.instances["decode-0"].load().external_kv_tokens == 0
    await fleet.settled()


async def test_an_answer_of_one_token_leaves_no_hold(start: Start) -> None:
    """End of text at the first token: P's answer is the whole answer, and P holds blocks that no D will pull."""
    fleet = await start(mock={"answers": Ends(1, 1)})
    status, answer = await fleet.ask(fleet.body(temperature=0))
    assert (status, _text(answer)) == (200, "")
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["kv_transfer_params"] is None
    await fleet.settled()


async def test_sixty_four_at_once(start: Start) -> None:
    fleet = await start(prefill=2, decode=2)
    bodies = [fleet.body() for _ in range(64)]
    expected = [await fleet.right(body) for body in bodies[:8]]
    answers = await asyncio.gather(*(fleet.stream(body) for body in bodies))
    assert [text for _, text, _ in answers[:8]] == expected
    assert all(status == 200 and len(text) == 48 for status, text, _ in answers)
    await fleet.settled()


async def test_the_second_turn_finds_the_first_ones_blocks(start: Start) -> None:
    fleet = await start()
    told = [{"role": "user", "content": STORY}]
    _, answer = await fleet.ask({"model": "fake", "messages": told, "max_tokens": 40}, CHAT)
    told += [{"role": "assistant", "content": _text(answer)}, {"role": "user", "content": "Go on."}]
    decode = fleet.mocks.instances["decode-0"].url
    _, again = await fleet.ask({"model": "fake", "messages": told, "max_tokens": 4}, CHAT, at=decode)
    first = answer["usage"]["prompt_tokens"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > first, "D has cached the answer's blocks, too"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("leaves_in", ["prefill", "decode"])
async def test_after_a_client_has_left_nothing_runs_and_nothing_is_held(
    start: Start, leaves_in: str, streamed: bool
) -> None:
    fleet = await start(mock={"step_ms": 20.0})
    body = fleet.body(max_tokens=500, stream=streamed)
    timeout = aiohttp.ClientTimeout(total=0.01 if leaves_in == "prefill" else 0.3)
    with pytest.raises(TimeoutError):
        async with fleet.client.post(fleet.endpoint + COMPLETIONS, json=body, timeout=timeout) as response:
            await response.read()
    await fleet.settled()


# -- a fault before the first byte: the request goes to another instance --

ELSEWHERE: list[tuple[str, str, dict[str, Any]]] = [
    ("prefill-0", "refuse", {"status": 500}),
    ("prefill-0", "break", {}),
    ("prefill-0", "close", {}),
    ("prefill-0", "die", {}),
    ("decode-0", "refuse", {"status": 503, "leg": "decode"}),
    ("decode-0", "break", {}),
    ("decode-0", "error", {}),
    ("decode-0", "close", {}),
    ("decode-0", "die", {}),
    ("decode-0", "fail_pull", {}),
    ("prefill-0", "slow", {"factor": 3}),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("where", "fault", "more"), ELSEWHERE, ids=[f"{row[1]} {row[0]}" for row in ELSEWHERE])
async def test_a_fault_before_the_first_byte_is_not_seen_by_the_client(
    start: Start, where: str, fault: str, more: dict[str, Any], streamed: bool
) -> None:
    fleet = await start(prefill=2, decode=2, mock={"lease_s": 1.0})  # after a failed pull the lease ends the hold
    await fleet.set_fault(where, fault, **more)
    for _ in range(3):
        body = fleet.body()
        expected = await fleet.right(body)
        if streamed:
            status, text, events = await fleet.stream(body)
            assert not any("error" in event for event in events)
        else:
            status, answer = await fleet.ask(body)
            text = _text(answer)
        assert (status, text) == (200, expected)
    await fleet.settled()


async def test_an_unwell_engine_is_left_alone(start: Start) -> None:
    fleet = await start(decode=2)
    await fleet.set_fault("decode-0", "unwell")
    async with asyncio.timeout(5):
        while await _states(fleet) != ["up", "down", "up"]:
            await asyncio.sleep(0.02)
    assert (await fleet.ask(fleet.body()))[0] == 200
    assert fleet.mocks.instances["decode-1"].metrics.ended["length"] == 1
    fleet.mocks.instances["decode-0"].clear_faults()
    await _all_up(fleet)


async def test_a_prefill_engine_that_dies_under_a_leg_is_replaced(start: Start) -> None:
    """The leg is lost with the engine, and runs on the other one; the dead one comes back under another engine id."""
    fleet = await start(prefill=2, mock={"step_ms": 100.0})
    first = fleet.mocks.instances["prefill-0"]
    former = first.handoffs.engine_id
    body = fleet.body(max_tokens=2)
    asked = asyncio.ensure_future(fleet.ask(body))
    await eventually(lambda: fleet.busy > 0, "a leg is under way")
    busy = next(name for name, each in fleet.mocks.instances.items() if each.serving.open_requests)
    await fleet.set_fault(busy, "die", seconds=0)
    status, answer = await asked
    assert (status, _text(answer)) == (200, await fleet.right(body))
    again = fleet.mocks.instances[busy]
    await eventually(again.ready.is_set, "it comes back")
    assert again.epoch == 2
    assert again.handoffs.engine_id not in {former, ""}
    await fleet.settled()


# -- a fault after the first byte: the stream ends with an error event --


@pytest.mark.parametrize("fault", ["break", "hang", "error"])
async def test_a_stream_that_breaks_ends_with_an_error_event(start: Start, fault: str) -> None:
    fleet = await start(stall_s=0.3)
    await fleet.set_fault("decode-0", fault, after_tokens=5)
    body = fleet.body()
    expected = await fleet.right(body)
    status, text, events = await fleet.stream(body)
    assert status == 200
    assert text == expected[: 5 * 4], "the text so far is right"
    assert events[-1]["error"]["code"] >= 500
    await fleet.settled()


async def test_a_stream_on_an_engine_that_dies_ends_with_an_error_event(start: Start) -> None:
    fleet = await start(mock={"step_ms": 5.0})
    decode = fleet.mocks.instances["decode-0"]
    body = fleet.body(max_tokens=1000, stream=True)
    async with fleet.client.post(fleet.endpoint + COMPLETIONS, json=body) as response:
        await response.content.readuntil(b"\n\n")
        await fleet.set_fault("decode-0", "die", seconds=0.05)
        *_, error, done = (await response.text()).strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 502
    assert done == "data: [DONE]"
    await eventually(lambda: decode.epoch == 2 and decode.ready.is_set(), "it comes back under a new epoch")
    await fleet.settled()


async def test_a_leg_that_hangs_ends_at_the_deadline(start: Start) -> None:
    fleet = await start(first_token_s=0.3)
    await fleet.set_fault("prefill-0", "hang")
    status, answer = await fleet.ask(fleet.body())
    assert (status, answer["error"]["type"]) == (504, "DeadlineExceededError")
    await fleet.settled()


# -- wrong blocks and lost holds: tests must see them --


@pytest.mark.parametrize("fault", ["corrupt", "stale"])
async def test_wrong_blocks_are_wrong_words(start: Start, fault: str) -> None:
    """No router can see that D read other bytes than P wrote; a test on mocks sees it, because the answer differs."""
    fleet = await start()
    await fleet.ask(fleet.body())  # something to be stale with
    await fleet.set_fault("decode-0", fault, times=1)
    body = fleet.body()
    status, answer = await fleet.ask(body)
    assert (status, len(_text(answer))) == (200, 48)
    assert _text(answer) != await fleet.right(body)
    body = fleet.body()
    assert _text((await fleet.ask(body))[1]) == await fleet.right(body), "the fault strikes only once"


SHORT_LEASE: dict[str, Any] = {"lease_s": 0.05, "num_blocks": 64, "max_model_len": 1024, "prefix_caching": False}


async def _pulled_too_late(fleet: Mocked) -> tuple[dict[str, Any], str]:
    """A request, and the text of its late decode leg: D pulls after the lease, when other prompts have P's blocks."""
    from cluster import wire

    prefill, decode = (fleet.mocks.instances[name] for name in ("prefill-0", "decode-0"))
    body = fleet.body()
    _, leg = await fleet.ask(wire.prefill_body(body), at=prefill.url)
    transfer = wire.read_transfer(leg)
    assert transfer is not None
    await eventually(lambda: prefill.load().kv_usage == 0, "the lease ends")
    for _ in range(6):
        await fleet.ask(fleet.body(max_tokens=2), at=prefill.url)
    _, late = await fleet.ask(wire.decode_body(body, transfer), at=decode.url)
    return body, _text(late)


async def test_a_reused_block_is_not_used(start: Start) -> None:
    """A hold's lease has ended, and another prompt has its blocks. A late pull finds the hold's slot clear."""
    fleet = await start(mock=SHORT_LEASE)
    body, late = await _pulled_too_late(fleet)
    assert late == await fleet.right(body)
    prefill, decode = (fleet.mocks.instances[name] for name in ("prefill-0", "decode-0"))
    assert _pulled(decode) == 0, "D has read them, and computed the prompt itself"
    assert prefill.metrics.counts["nixl_num_notifications_after_expiry"] == 0, "no notice for a hold that is gone"
    assert prefill.metrics.counts["nixl_num_kv_expired_reqs"] == 1


async def test_without_the_check_of_the_slot_a_reused_block_is_wrong_words(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why D checks the slot's mark, and that the test before this one would fail without that check."""
    monkeypatch.setattr("decode.reads.PullAtRank.saw", lambda _self, _said: None)
    fleet = await start(mock=SHORT_LEASE)
    body, late = await _pulled_too_late(fleet)
    assert late != await fleet.right(body)


def _pulled(decode: Mock) -> int:
    """Prompt tokens that D pulled and used: it neither computed them nor found them in its own cache."""
    metrics = decode.metrics
    return int(metrics.counts["prompt_tokens"] - metrics.local_compute - metrics.local_cache_hit)


@pytest.mark.parametrize("fault", ["corrupt", "stale"])
async def test_with_digests_wrong_blocks_are_not_used(start: Start, fault: str) -> None:
    """As with Baton's connector and digests: D computes the prompt, and P's hold ends as after a good pull."""
    fleet = await start(mock={"digests": True})
    await fleet.ask(fleet.body())  # something to be stale with
    decode, prefill = (fleet.mocks.instances[name] for name in ("decode-0", "prefill-0"))
    await fleet.set_fault("decode-0", fault, times=1)
    body = fleet.body()
    pulled = _pulled(decode)
    assert _text((await fleet.ask(body))[1]) == await fleet.right(body)
    assert decode.faults.active[0].struck == 1
    assert _pulled(decode) == pulled
    await fleet.settled()
    assert prefill.handoffs.holds() == 0
    assert prefill.metrics.counts["nixl_num_kv_expired_reqs"] == 0
    body = fleet.body()
    assert _text((await fleet.ask(body))[1]) == await fleet.right(body)
    assert _pulled(decode) > pulled, "right blocks are used"


async def test_a_name_that_is_given_up_before_is_never_held(start: Start) -> None:
    """A release by the name of a prefill leg works before and after the leg."""
    from cluster import wire
    from cluster.ids import RequestId, TransferId

    fleet = await start()
    prefill = fleet.mocks.instances["prefill-0"]
    early, late = (TransferId(RequestId(name), 1, 1) for name in ("early", "late"))
    for name, holds in ((early, 0), (late, 1)):
        if name is early:
            await fleet.ask(wire.release_by_name(name), at=prefill.url, path=wire.RELEASE_PATH)
        _, leg = await fleet.ask(wire.prefill_body(fleet.body(), transfer=name), at=prefill.url)
        assert (wire.read_transfer(leg) is not None, prefill.handoffs.holds()) == (bool(holds), holds)
    status, _ = await fleet.ask(wire.release_by_name(late), at=prefill.url, path=wire.RELEASE_PATH)
    assert (status, prefill.handoffs.holds()) == (200, 0)
    await eventually(lambda: prefill.load().kv_usage == 0, "the blocks are free after the next step")


async def test_a_dropped_notice_holds_blocks_for_the_lease(start: Start) -> None:
    fleet = await start(mock={"lease_s": 0.6})
    await fleet.set_fault("decode-0", "drop_notice")
    loop = asyncio.get_running_loop()
    body, before = fleet.body(), loop.time()
    assert _text((await fleet.ask(body))[1]) == await fleet.right(body)
    prefill = fleet.mocks.instances["prefill-0"]
    assert prefill.load().kv_usage > 0
    await fleet.settled()
    assert 0.5 < loop.time() - before < 5.0
    assert prefill.handoffs.holds() == 0
    assert prefill.metrics.counts["nixl_num_kv_expired_reqs"] == 1


async def test_a_hold_of_a_former_life_is_not_pulled(start: Start) -> None:
    fleet = await start()
    from cluster import wire

    prefill, decode = (fleet.mocks.instances[name] for name in ("prefill-0", "decode-0"))
    body = fleet.body()
    _, leg = await fleet.ask(wire.prefill_body(body), at=prefill.url)
    transfer = wire.read_transfer(leg)
    assert transfer is not None
    prefill.set_faults(b'{"fault": "die", "seconds": 0}')
    await eventually(lambda: prefill.epoch == 2 and prefill.ready.is_set(), "it starts anew")
    _, answer = await fleet.ask(wire.decode_body(body, transfer), at=decode.url)
    assert _text(answer) == await fleet.right(body), "computed on D"
    assert decode.metrics.counts["nixl_num_failed_transfers"] == 1
    await fleet.settled()


async def test_a_lease_lives_as_long_as_a_d_waits_for_the_hold(start: Start) -> None:
    """D has the request but no room for it: D's heartbeats make P keep the blocks beyond the first lease."""
    fleet = await start(mock={"lease_s": 0.4, "max_num_seqs": 1, "step_ms": 10.0})
    from cluster import wire

    prefill, decode = (fleet.mocks.instances[name] for name in ("prefill-0", "decode-0"))
    long = asyncio.ensure_future(fleet.ask(fleet.body(max_tokens=100), at=decode.url))
    await eventually(lambda: decode.load().running == 1, "D is full for a second")
    body = fleet.body()
    _, leg = await fleet.ask(wire.prefill_body(body), at=prefill.url)
    transfer = wire.read_transfer(leg)
    assert transfer is not None
    waiting = asyncio.ensure_future(fleet.ask(wire.decode_body(body, transfer), at=decode.url))
    while decode.load().external_kv_tokens == 0:
        assert prefill.load().kv_usage > 0
        assert not waiting.done()
        await asyncio.sleep(0.02)
    assert _text((await waiting)[1]) == await fleet.right(body)
    assert (await long)[0] == 200
    assert prefill.metrics.counts["nixl_num_kv_expired_reqs"] == 0
    await fleet.settled()


# -- usage --


async def _cached(fleet: Mocked, body: dict[str, Any], at: str = "", *, streamed: bool) -> int:
    """The number of cached prompt tokens that the answer's usage tells."""
    if not streamed:
        status, answer = await fleet.ask(body, at=at)
        assert status == 200, answer
        usage = answer["usage"]
    else:
        _, _, events = await fleet.stream_all({**body, "stream_options": {"include_usage": True}}, at=at)
        usage = events[-1]["usage"]
        assert usage["completion_tokens"] == body["max_tokens"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


@pytest.mark.parametrize("pins", [False, True], ids=["D speaks first", "seeded"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_usage_tells_what_p_had_cached(start: Start, streamed: bool, pins: bool) -> None:
    """Usage tells P's cached tokens. D's own number would be wrong, because D has all of the prompt from P."""
    fleet = await start(pins=pins)
    body = fleet.body(temperature=0)
    async with MockFleet([mock_settings("alone", Role.BOTH)]) as alone:
        url = alone.instances["alone"].url
        expected = [await _cached(fleet, body, url, streamed=streamed) for _ in range(2)]
    told = [await _cached(fleet, body, streamed=streamed) for _ in range(2)]
    assert told == expected
    assert told[0] == 0 < told[1]
    await fleet.settled()


async def test_usage_of_a_resumed_stream_tells_what_the_first_p_had_cached(start: Start) -> None:
    """The second prefill leg goes to the same P, which has cached the prompt by then. For the client that is no cached
    token.
    """
    fleet = await start(decode=2)
    await fleet.set_fault("decode-0", "break", after_tokens=5, times=1)
    assert await _cached(fleet, fleet.body(temperature=0), streamed=True) == 0
    (fault,) = fleet.mocks.instances["decode-0"].faults.as_json()["faults"]
    assert fault["struck"] == 1, "the stream was resumed"
    prefilled = fleet.mocks.instances["prefill-0"].metrics.ended
    assert prefilled["length"] == 2, "both prefill legs ran on the same P"
    await fleet.settled()


# -- other weights --


@pytest.mark.parametrize("policy", ["least_load", "workload"])
async def test_nothing_is_handed_over_between_other_weights(start: Start, policy: str) -> None:
    """A model is being replaced: a P with the new weights is there, but no D with them."""
    weights = {"prefill-0": "new", "prefill-1": "old", "decode-0": "old"}
    fleet = await start(prefill=2, weights=weights, policy=policy)
    for number in range(6):
        body = fleet.body(prompt=f"{number} {STORY}")
        assert _text((await fleet.ask(body))[1]) == await fleet.right(body)
    ended = {name: each.metrics.ended["length"] for name, each in fleet.mocks.instances.items()}
    assert ended["prefill-0"] == 0 < ended["decode-0"]
    await fleet.settled()


@pytest.mark.parametrize("pins", [False, True], ids=["D speaks first", "seeded"])
@pytest.mark.parametrize("other", ["old", "new"])
async def test_a_stream_goes_on_only_under_its_own_weights(start: Start, other: str, pins: bool) -> None:
    fleet = await start(decode=2, pins=pins, weights={"prefill-0": "old", "decode-0": "old", "decode-1": other})
    await fleet.set_fault("decode-0", "break", after_tokens=5, times=1)
    body = fleet.body(temperature=0)
    expected = await fleet.right(body)
    _, text, _ = await fleet.stream(body)
    (fault,) = fleet.mocks.instances["decode-0"].faults.as_json()["faults"]
    assert fault["struck"] == 1
    assert text == expected
    answered = {name for name, each in fleet.mocks.instances.items() if each.metrics.ended["length"]}
    assert ("decode-1" in answered) == (other == "old"), "otherwise prefill-0 goes on with the stream"
    await fleet.settled()


# -- memory --


async def test_requests_that_have_ended_leave_no_reference_cycles(start: Start) -> None:
    """A reference cycle keeps a request's body and tokens until a full garbage collection, which is seldom.

    (Every request was such a cycle once, and resident memory grew for half an hour; `make soak` found it.)
    """
    fleet = await start()
    await fleet.ask(fleet.body())
    gc.collect()
    gc.disable()
    try:
        await fleet.ask(fleet.body())
        await fleet.stream(fleet.body())
        await fleet.stream({"messages": [{"role": "user", "content": STORY}], "model": "fake", "max_tokens": 4}, CHAT)
        assert (await fleet.ask({**fleet.body(), "max_tokens": -1}))[0] == 400
        for fault in ({"fault": "break", "after_tokens": 4}, {"fault": "error"}, {"fault": "refuse"}):
            await fleet.set_fault("decode-0", times=1, **fault)
            async with fleet.client.post(
                fleet.endpoint + COMPLETIONS, json={**fleet.body(), "stream": True}
            ) as response:
                await response.read()
        async with fleet.client.post(fleet.endpoint + COMPLETIONS, json={**fleet.body(max_tokens=500), "stream": True}):
            pass  # the client leaves
        await fleet.settled()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = Counter(type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("router."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not kept


async def test_probes_of_an_engine_that_is_away_leave_no_reference_cycles() -> None:
    """An engine that is away is probed twice a second, and aiohttp's errors refer to frames that refer to them."""
    upstream = Upstream()
    await upstream.start()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    away = Instance(id=InstanceId("away"), role=Role.DECODE, url=f"http://127.0.0.1:{port}")
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            with pytest.raises(EngineLost, match="Connect call failed"):
                await upstream.call(away, "GET", "/health", None, {})
        assert gc.collect() == 0
    finally:
        gc.enable()
        await upstream.close()
