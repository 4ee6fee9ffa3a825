"""Mock engines: the twin of a vLLM engine behind vLLM's HTTP API, with no model and no GPU.

Each instance has its own port and answers both OpenAI endpoints with words that follow from the prompt. It takes the
time that the model would take on the GPU (or --step-ms), and holds and pulls KV blocks as vLLM's NixlConnector does.
`POST /mock/faults` on its port makes it misbehave. docs/mock.md lists faults and what is unlike vLLM.
SIGTERM or Ctrl-C lets answers end; a second one ends at once.

examples:
  baton mock                                                   # one prefill and one decode engine on 9000 and 9001
  baton mock --instances prefill=2,decode=2 --speed 10
  baton mock --instances both=1 --port 0 --step-ms 5 --json
  curl -d '{"fault": "hang", "after_tokens": 5, "times": 1}' http://127.0.0.1:9001/mock/faults
"""

from __future__ import annotations

import argparse
import asyncio

from baton import compiled
from baton.descriptors import raise_descriptor_limit
from baton.lifeline import watch_lifeline
from baton.mock_settings import settings_of
from baton.output import announce_ready
from baton.signals import stopping_signals
from cluster.errors import ApiError, UsageError
from cluster.telemetry import configure_logging
from engine.mock.fleet import MockFleet
from engine.mock.settings import MockSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton mock`."""
    add = parser.add_argument
    add("--instances", default="prefill=1,decode=1", metavar="LIST", help="how many of each role (default %(default)s)")
    add("--host", default="127.0.0.1", help="address they listen on (default %(default)s)")
    add("--port", type=int, default=9000, help="port of the first, others follow; 0 = free ones (default %(default)s)")
    add("--name", metavar="NAME", help="name of a single instance, or what names begin with (default: the role)")
    add("--model", default="meta-llama/Llama-3.1-8B", metavar="NAME", help="pretend to be it (default %(default)s)")
    add("--served-model-name", metavar="NAME", help="name in the API (default: --model)")
    add("--gpu", default="H100-SXM", metavar="NAME", help="pretend to run on it (default %(default)s)")
    add("--tp", type=int, default=1, metavar="N", help="GPUs of one instance (default %(default)s)")
    add("--dp", type=int, default=1, metavar="N", help="data parallel ranks of one, at one port (default %(default)s)")
    add("--power-cap-w", type=float, metavar="W", help="each GPU is capped to it (default: what it can draw)")
    add("--step-ms", type=float, metavar="MS", help="milliseconds of every step, instead of the model's cost")
    add("--prefill-ms-per-1k", type=float, metavar="MS", help="milliseconds that 1,000 prompt tokens add to a step")
    add(
        "--timing",
        choices=["gpu", "cpu"],
        default="gpu",
        help="schedule steps as vLLM does on it (default %(default)s)",
    )
    add("--link-gb-s", type=float, metavar="GB/S", help="rate of KV transfers (default: the GPU's NIC)")
    add("--speed", type=float, default=1.0, metavar="X", help="so many times faster than real time (default 1)")
    add(
        "--output-tokens",
        metavar="N[-M]",
        help="an answer ends after N tokens, or after N to M (default: at max_tokens)",
    )
    _add_engine_arguments(parser)
    add("--fault", action="append", default=[], metavar="JSON", help="a fault from the start, on every instance")
    add("--seed", type=int, default=0, help="seed of the faults' random draws (default %(default)s)")
    add("--start-up-s", type=float, default=0.0, metavar="S", help="real time until an engine is ready (default 0)")
    add("--drain-s", type=float, default=30.0, metavar="S", help="time for answers after SIGTERM (default %(default)s)")
    add("--json", action="store_true", help="one JSON object a line on stdout")
    add("--lifeline", action="store_true", help="end at once when standard input (a pipe) ends: the parent died")


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Settings that vLLM has, too, under vLLM's names."""
    add = parser.add_argument
    add("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer (default 32768, or what fits)")
    add("--max-num-seqs", type=int, metavar="N", help="requests in a step (default: vLLM's for the GPU)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="tokens in a step (default: vLLM's for the GPU)")
    add(
        "--kv-cache-dtype",
        metavar="NAME",
        default="auto",
        help="format of the KV cache, as in vLLM (fp8: half the bytes a token)",
    )
    add("--block-size", type=int, default=16, metavar="N", help="tokens of a KV block (default %(default)s)")
    add("--kv-blocks", type=int, metavar="N", help="KV blocks (default: what the GPU has room for)")
    add("--digests", action="store_true", help="compare what is pulled with what is held, as Baton's connector can")
    add(
        "--lease-s",
        type=float,
        default=30.0,
        metavar="S",
        help="real time that an unpulled hold lives (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until stopped: 0."""
    configure_logging("INFO")
    compiled.log_it()
    raise_descriptor_limit()
    if args.vllm_args:
        raise UsageError("`baton mock` takes no vLLM flags")
    settings = settings_of(args)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_serve(args, settings))
    return uvloop.run(_serve(args, settings))


async def _serve(args: argparse.Namespace, settings: list[MockSettings]) -> int:
    stop = asyncio.Event()
    fleet = MockFleet(settings, host=args.host, port=args.port, drain_s=args.drain_s)

    def end() -> None:
        if stop.is_set():
            fleet.hurry()
        stop.set()

    def end_now() -> None:
        fleet.hurry()
        stop.set()

    with stopping_signals(end):
        if args.lifeline:
            watch_lifeline(end_now)
        async with fleet:
            _set_faults(fleet, args.fault)
            for name, instance in fleet.instances.items():
                more = {"instance": name, "role": instance.settings.role, "model": instance.settings.model}
                announce_ready(name, instance.url, as_json=args.json, **more)
            await stop.wait()
    return 0


def _set_faults(fleet: MockFleet, faults: list[str]) -> None:
    for text in faults:
        for instance in fleet.instances.values():
            try:
                instance.set_faults(text.encode())
            except ApiError as error:
                raise UsageError(f"--fault {text}: {error.message}") from None
