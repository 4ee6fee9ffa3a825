"""A whole cluster on this machine: a router, prefill engines and decode engines, each a stock vLLM server.

Without a model it serves the tiny one that ships with Baton (`baton-tiny`): no GPU and no download needed. Everything
after `--` goes to every vLLM verbatim. Ctrl-C stops all of it; a second Ctrl-C stops it at once.

Examples:
  baton up
  baton up Qwen/Qwen3-0.6B --prefill 1 --decode 1 -- --max-model-len 8192
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
from dataclasses import dataclass, field

import aiohttp

from baton.board import Board
from baton.demo import QUESTION, ask
from baton.local import Event, Program, free_port
from baton.output import announce_ready, emit
from cluster.errors import UsageError
from cluster.instance import Role
from engine.vllm.hardware import find_hardware
from engine.vllm.placement import Share, share

ENGINE_PORT = 8100
SIDE_CHANNEL_PORT = 5600
SIDE_CHANNEL_STEP = 32
"""vLLM adds its tensor-parallel rank to a side channel's port: leave room between two engines."""

DRAIN_S = 40.0
"""How long after Ctrl-C the programs may take to end by themselves: the router's drain and the engines' own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton up`."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="Hugging Face name or folder (default: the bundled tiny model)"
    )
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill instances (default %(default)s)")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="decode instances (default %(default)s)")
    parser.add_argument(
        "--both", type=int, default=0, metavar="N", help="instances of both roles (default %(default)s)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address of the router (default %(default)s)")
    parser.add_argument(
        "--port", type=int, default=8000, help="port of the router, 0 = a free one (default %(default)s)"
    )
    parser.add_argument(
        "--admin-port", type=int, default=8001, help="metrics and readiness, 0 = free (default %(default)s)"
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="name in the API (default: MODEL)")
    parser.add_argument(
        "--demo",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask one question once it serves (default: with the bundled model)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")


def run(args: argparse.Namespace) -> int:
    """Start everything, serve until Ctrl-C or SIGTERM; 0 when it ended as asked, 1 when a part failed for good."""
    for name in ("prefill", "decode", "both"):
        if getattr(args, name) < 0:
            raise UsageError(f"--{name} is {getattr(args, name)}: it must be 0 or more")
    if args.prefill + args.decode + args.both == 0:
        raise UsageError("--prefill, --decode and --both are all 0: nothing would serve")
    if args.demo is None:
        args.demo = args.model is None
    return asyncio.run(_Cluster(args).run())


@dataclass(slots=True)
class _Member:
    """One engine of this cluster."""

    name: str
    role: Role
    port: int
    side_channel: int
    placed: Share
    program: Program
    model: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Cluster:
    """The programs of one `baton up`, from start to stop."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.board = Board(f"baton up {args.model or 'baton-tiny'}", quiet=args.json)
        self.members = self._plan()
        self.router = Program("router", self._router_words(), self._on_event)
        self.router_ready = asyncio.Event()
        self.endpoint = self.admin = ""
        self.stopping = asyncio.Event()
        self.failure: str | None = None
        self.codes: dict[str, int] = {}

    # -- planning --

    def _plan(self) -> list[_Member]:
        roles = [Role.PREFILL] * self.args.prefill + [Role.DECODE] * self.args.decode + [Role.BOTH] * self.args.both
        hardware = find_hardware()
        shares = share(len(roles), hardware.gpus, hardware.cores)
        taken: set[int] = set()
        counts: dict[Role, int] = {}
        members = []
        for role, placed in zip(roles, shares, strict=True):
            name = f"{role.value}-{counts.get(role, 0)}"
            counts[role] = counts.get(role, 0) + 1
            port = free_port("127.0.0.1", ENGINE_PORT, taken)
            side_channel = free_port("127.0.0.1", SIDE_CHANNEL_PORT, taken, step=SIDE_CHANNEL_STEP)
            words = self._engine_words(name, role, port, side_channel, placed)
            members.append(_Member(name, role, port, side_channel, placed, Program(name, words, self._on_event)))
        return members

    def _engine_words(self, name: str, role: Role, port: int, side_channel: int, placed: Share) -> list[str]:
        words = ["engine", *([self.args.model] if self.args.model else []), "--name", name, "--role", role.value]
        words += ["--port", str(port), "--side-channel-port", str(side_channel), *placed.flags()]
        if self.args.served_model_name:
            words += ["--served-model-name", self.args.served_model_name]
        return words

    def _router_words(self) -> list[str]:
        words = [
            "router",
            "--host",
            self.args.host,
            "--port",
            str(self.args.port),
            "--admin-port",
            str(self.args.admin_port),
        ]
        for member in self.members:
            words += [f"--{member.role.value}-url", f"{member.name}={member.url}"]
        return words

    # -- running --

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted)
        with self.board:
            self.board.add("router", f"{self.args.host}:{self.args.port}")
            for member in self.members:
                self.board.add(member.name, f"{member.url} on {member.placed}")
            async with asyncio.TaskGroup() as group:
                programs = [self.router, *(member.program for member in self.members)]
                watched = [group.create_task(self._watch(program), name=program.name) for program in programs]
                serving = group.create_task(self._serve(), name="serve")
                await asyncio.wait(watched)
                serving.cancel()
        return self._verdict()

    async def _watch(self, program: Program) -> None:
        """Run one program; when it ends unasked, the cluster ends with it."""
        code = await program.run()
        self.codes[program.name] = code
        if self.stopping.is_set():
            self.board.update(program.name, "stopped")
            return
        self.board.update(program.name, "failed", f"exit code {code}")
        self.failure = self.failure or self._why(program, code)
        self._stop()

    @staticmethod
    def _why(program: Program, code: int) -> str:
        said = [line for line in program.last_words if line.strip()]
        return "\n".join([f"{program.name} ended with exit code {code}:", *(f"  {line}" for line in said)])

    async def _serve(self) -> None:
        await self.router_ready.wait()
        await asyncio.gather(*(member.ready.wait() for member in self.members))  # noqa: TID251 - events, not tasks
        await self._wait_until_routable()
        self.board.settle()
        instances = [{"id": member.name, "role": member.role.value, "url": member.url} for member in self.members]
        model = self.members[0].model
        if self.args.json:
            announce_ready("baton", self.endpoint, as_json=True, admin=self.admin, model=model, instances=instances)
        else:
            print(f"\nready baton {self.endpoint}\n", flush=True)
            self.board.say(_how_to_use(self.endpoint, model))
        if self.args.demo:
            await self._demo(model)
        self.board.say("\nServing. Ctrl-C stops everything.")

    async def _wait_until_routable(self) -> None:
        """The router probes once a second: wait until it has seen everybody."""
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.admin}/ready") as response:
                        seen = await response.json()
                        if all(instance["state"] == "up" for instance in seen["instances"]):
                            return
                await asyncio.sleep(0.2)

    async def _demo(self, model: str) -> None:
        self.board.say(f"\n> {QUESTION}")
        pullers = [member.url for member in self.members if member.role.decodes]
        show = (lambda _: None) if self.args.json else _show
        try:
            demo = await ask(self.endpoint, model, pullers, show)
        except (aiohttp.ClientError, ValueError) as error:
            self.failure = f"the first completion failed: {error}"
            self._stop()
            return
        if self.args.json:
            emit({"event": "demo", "text": demo.text, "first_token_s": demo.first_s, "pulled_tokens": demo.pulled})
            return
        print(flush=True)
        self.board.say(
            f"\nfirst token after {demo.first_s * 1000:.0f} ms, whole answer after {demo.total_s:.1f} s; "
            f"the KV cache of {demo.pulled} prompt tokens went from prefill to decode over NIXL"
        )

    # -- events of the programs --

    def _on_event(self, name: str, event: Event) -> None:
        if name == "router":
            self._router_event(event)
            return
        member = next(each for each in self.members if each.name == name)
        if event.get("event") == "ready":
            member.model = str(event.get("model", ""))
            self.board.update(name, "ready")
            member.ready.set()
        elif event.get("event") == "state" and not (event["state"] == "ready" and member.ready.is_set()):
            self.board.update(name, str(event["state"]), str(event.get("detail", "")))

    def _router_event(self, event: Event) -> None:
        if event.get("event") == "ready":
            self.endpoint, self.admin = str(event["endpoint"]), str(event["admin"])
            self.board.update("router", "ready")
            self.router_ready.set()

    # -- stopping --

    def _interrupted(self) -> None:
        if self.stopping.is_set():
            self._kill()
        else:
            self.board.say("\nStopping; Ctrl-C again stops at once.")
            self._stop()

    def _stop(self) -> None:
        """Router and engines drain together: the router finishes its streams, the engines wait for them."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        for program in self._programs():
            program.stop()
            if program.running:
                self.board.update(program.name, "stopping")
        asyncio.get_running_loop().call_later(DRAIN_S, self._kill)

    def _kill(self) -> None:
        for program in self._programs():
            program.kill()

    def _programs(self) -> list[Program]:
        return [self.router, *(member.program for member in self.members)]

    def _verdict(self) -> int:
        if self.failure is None:
            return 0
        print(self.failure, file=sys.stderr)
        return 2 if 2 in self.codes.values() else 1


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _how_to_use(endpoint: str, model: str) -> str:
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "{QUESTION}"}}], "stream": true}}'
    curl = f"curl -N {endpoint}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    python = (
        f'OpenAI(base_url="{endpoint}/v1", api_key="none").chat.completions.create('
        f'model="{model}", messages=[{{"role": "user", "content": "{QUESTION}"}}])'
    )
    return f"  {curl}\n\n  from openai import OpenAI; print({python})"
