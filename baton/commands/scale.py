"""What the controller of a fleet does and why; stop it, let it go on, or order a size by hand.

Speaks to the controller of `baton up` (`--cluster NAME`), or to the one at `--url`, which `baton controller` prints. An
order holds until it is taken back with `auto`; the controller never works against it.

examples:
  baton scale
  baton scale --pause
  baton scale --resume
  baton scale decode=4
  baton scale decode=auto
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from baton.cluster_flag import cluster_name
from baton.output import emit
from baton.state import must_load
from cluster.errors import UsageError
from cluster.registry.registry import DEFAULT_CLUSTER

COUNT_DIGITS = 6
"""Digits of a number of instances, at most."""

ASK_S = 5.0
"""Longest wait for the controller's answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton scale`."""
    add = parser.add_argument
    add(
        "sizes", nargs="*", metavar="ROLE=N", help="have so many instances of a role; `auto`: as the controller decides"
    )
    add("--model", default="", metavar="NAME", help="which model's, where there are several")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--pause", action="store_true", help="look on and do nothing until --resume")
    group.add_argument("--resume", action="store_true", help="go on")
    add("--url", metavar="URL", help="of the controller (default: that of `baton up`)")
    add(
        "--cluster",
        type=cluster_name,
        default=DEFAULT_CLUSTER,
        metavar="NAME",
        help="which `baton up` (default %(default)s)",
    )
    add("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Send the order, and print the controller's answer: 0."""
    if args.vllm_args:
        raise UsageError("`baton scale` takes no vLLM flags")
    if args.url is not None and not _is_url(args.url):
        raise UsageError(f"--url {args.url}: not a URL; write http://HOST:PORT")
    orders = [_order(word) for word in args.sizes]
    url = (args.url or _url(args.cluster)).rstrip("/")
    for role, count in orders:
        _ask(f"{url}/size", {"model": args.model, "role": role, "instances": count})
    if args.pause or args.resume:
        _ask(f"{url}/{'pause' if args.pause else 'resume'}", {})
    told = _ask(f"{url}/scaling")
    if "leads" not in told:
        raise UsageError(f"{url} is no controller: it answers {str(told)[:100]}")
    if args.json:
        emit(told)
    else:
        print("\n".join(lines(told)))
    return 0


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half a bracket
        return False


def _order(word: str) -> tuple[str, int | None]:
    """``decode=4`` -> ("decode", 4); ``decode=auto`` -> ("decode", None)."""
    role, equals, count = word.partition("=")
    if not equals or (count != "auto" and not (count.isdecimal() and len(count) <= COUNT_DIGITS)):
        raise UsageError(f"{word[:100]}: write ROLE=N or ROLE=auto, such as decode=4")
    return role, None if count == "auto" else int(count)


def _url(cluster: str) -> str:
    url = must_load(cluster).scaling
    if not url:
        raise UsageError(
            f"--cluster {cluster}: nothing resizes it: no pool of its file has a `min` less than its `max`, "
            "or it was started with --no-scale"
        )
    return url


def _ask(url: str, said: dict[str, Any] | None = None) -> dict[str, Any]:
    body = None if said is None else json.dumps(said).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:  # noqa: S310
            told = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise UsageError(_refusal(error)) from None
    except (OSError, ValueError, HTTPException) as error:
        raise UsageError(f"the controller at {url} does not answer: {error}") from None
    if not isinstance(told, dict):
        raise UsageError(f"{url} is no controller: it answers {str(told)[:100]}")
    return told


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the controller answers with status {error.code}"


def lines(told: dict[str, Any]) -> list[str]:
    """The answer to `GET /scaling` in lines for people."""
    if not told["leads"]:
        found = [f"looks on: {told['leader'] or 'the registry does not answer'}"]
    else:
        found = ["paused" if told["paused"] else "acts"]
    found += [f"  order: {each['role']} = {each['instances']}" for each in told["sizes"]]
    for model, now in told["now"].items():
        found.append(f"{model or 'now'}: {now['what']}: {now['because']}")
        for role, need in now["needs"].items():
            found.append(
                f"  {role}: {need['have']:g} there or coming, {need['ready']:g} ready; needed {need['now']} now, "
                f"{need['ahead']} ahead; {need['keep']} to keep"
            )
        found += [f"  ! {condition}" for condition in now["conditions"]]
    found.append("last decisions:")
    shown = [each for each in told["decisions"] if each["what"] != "hold"][-10:]
    for each in shown:
        at = time.strftime("%H:%M:%S", time.localtime(each["at"]))
        found.append(f"  {at} {each['what']:<6} {each['because']}")
    return found if shown else [*found, "  none yet"]
