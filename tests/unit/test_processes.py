"""`baton router --processes`: their number, settings that several processes cannot have, and their common port."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

import pytest

from baton.commands import router
from baton.processes import ServerProcesses, _Process, held_port
from cluster.errors import UsageError
from cluster.spec import parse
from router.api.config import RouterConfig

CONFIG = RouterConfig(has_registry=True)
REGISTRY = ("--registry", "redis://127.0.0.1:1")


def args(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    router.add_arguments(parser)
    return parser.parse_args(words)


def test_flags_win_over_the_file() -> None:
    spec = parse("models: [{name: m}]\nrouter: {processes: 3}\n", "baton.yaml").usable()
    assert router._processes(args(*REGISTRY), None, CONFIG) == 1
    assert router._processes(args(*REGISTRY), spec, CONFIG) == 3
    assert router._processes(args(*REGISTRY, "--processes", "2"), spec, CONFIG) == 2
    assert router._processes(args("--processes", "1"), None, CONFIG) == 1, "one process needs no registry"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*REGISTRY, "--processes", "0"), "give 1 or more"),
        (("--processes", "2", "--both-url", "http://a"), "without --registry"),
        ((*REGISTRY, "--processes", "2", "--decision-log", "x"), "one process's"),
    ],
)
def test_settings_that_several_processes_cannot_have(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        router._processes(args(*words), None, CONFIG)


def test_ports_that_do_not_exist() -> None:
    last = RouterConfig(has_registry=True, admin_port=65534)
    assert router._processes(args(*REGISTRY, "--processes", "2"), None, last) == 2
    with pytest.raises(UsageError, match="not so many ports"):
        router._processes(args(*REGISTRY, "--processes", "3"), None, last)
    for name in ("port", "admin_port"):
        for wrong in (-1, 65536):
            with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is {wrong}"):
                RouterConfig(has_registry=True, **{name: wrong})


def test_each_process_has_the_next_admin_port_and_no_other_port_of_its_own() -> None:
    config = RouterConfig(has_registry=True, admin_port=9001)
    each = [router._one_of(config, number, 9000) for number in range(3)]
    assert [one.admin_port for one in each] == [9001, 9002, 9003]
    assert all(one.port == 9000 and one.shares_port for one in each)
    free = RouterConfig(has_registry=True, admin_port=0)
    assert router._one_of(free, 2, 9000).admin_port == 0


def test_a_process_that_ended_in_the_same_turn_says_nothing_more() -> None:
    told: list[str] = []
    processes = ServerProcesses(1, lambda *_: None, lambda *urls: told.extend(urls), 1.0)
    processes._ready(_Process(0, 1, word=-1))
    assert not told


@pytest.mark.sockets
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_only_sockets_that_share_a_held_port_may_bind_it(host: str) -> None:
    with held_port(host, 0) as port:
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind(("127.0.0.1", port))
            listening.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=5):  # sockets that only hold it take none
                listening.accept()[0].close()
            with pytest.raises(UsageError, match=f"cannot listen on {host}:{port}"), held_port(host, port):
                pass
        with socket.socket() as alone, pytest.raises(OSError, match="in use"):
            alone.bind(("127.0.0.1", port))


@pytest.mark.sockets
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_two_servers_that_start_at_once_do_not_share_a_port(host: str) -> None:
    """None of their processes listens yet; once they do, the kernel spreads clients over those of both."""
    with held_port(host, 0) as port:
        with pytest.raises(UsageError, match=f"cannot listen on {host}:{port} .*in use"), held_port(host, port):
            pass
        with pytest.raises(UsageError), held_port(host, port):  # a refused one has let go of nothing
            pass
    with held_port(host, port) as again:
        assert again == port


ORPHAN = """
import os, signal, sys
from baton.processes import ServerProcesses

def serve(number, port, tell):
    parent = os.getppid()
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        pass
    print(port, flush=True)
    os.read(int(sys.argv[1]), 1)  # it drains

ServerProcesses(1, serve, print, 1.0).run("127.0.0.1", 0, lifeline=False)
"""


@pytest.mark.sockets
def test_a_process_that_drains_after_its_parents_end_does_not_keep_the_port_from_the_next_server() -> None:
    drains, ends = os.pipe()
    argv = (sys.executable, "-c", ORPHAN, str(drains))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, pass_fds=(drains,)) as parent:
        assert parent.stdout is not None
        port = int(parent.stdout.readline())
        try:
            with held_port("127.0.0.1", port) as again:
                assert again == port
        finally:
            os.close(ends)
            os.close(drains)
