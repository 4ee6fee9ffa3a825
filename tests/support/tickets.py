"""Keys, tickets and attacks on them, for tests of the engines' guard and of the programs that call a guarded engine."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.cluster import Cluster

from cluster import wire
from cluster.ids import InstanceId, RequestId, TransferId
from kvtransfer.keys import instance_key, read_fleet
from kvtransfer.screen import LIFE_S
from kvtransfer.ticket import SigningKey, Ticket, sign

FLEET = SigningKey("k1", b"\x11" * 32)
OLD = SigningKey("k0", b"\x22" * 32)
STRANGERS = SigningKey("k1", b"\x33" * 32)
"""A key with the name of the fleet's key and other bytes."""

HOLD = wire.prefill_body({})["kv_transfer_params"]
"""Transfer fields that ask an engine to hold a prompt's blocks."""

PULL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "0b5c2f6e",
    "remote_request_id": "cmpl-x-0",
    "remote_block_ids": [[0, 1]],
    "remote_host": "127.0.0.1",
    "remote_port": 9,
    "tp_size": 1,
    "remote_num_tokens": 256,
}
"""Transfer fields that make an engine read from an address that the sender chooses."""

PIN = {wire.FIRST_TOKEN: 5}


def signed(
    fields: Mapping[str, Any],
    to: str,
    *,
    at: float,
    key: SigningKey = FLEET,
    of: Mapping[str, Any] | None = None,
    consumer: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Transfer fields with a ticket, as a router makes them. The keywords make a wrong ticket.

    `of`: sign these fields instead. `consumer`: the ticket names this instance, but is signed with the key of `to`.
    """
    ticket = ticket_for(fields if of is None else of, consumer or to, at=at, **more)
    return {**fields, wire.TICKET: sign(ticket, instance_key(key, InstanceId(to)))}


def ticket_for(
    fields: Mapping[str, Any], consumer: str, *, at: float, life_s: float = LIFE_S, nonce: int = 1
) -> Ticket:
    """The ticket that a router signs."""
    return Ticket(
        id=TransferId(RequestId("req-1"), 1, 1),
        tenant="",
        producer=InstanceId("prefill-0"),
        host="",
        port=0,
        consumer=InstanceId(consumer),
        groups=(),
        tokens=0,
        expires_ms=int((at + life_s) * 1000),
        nonce=nonce,
        fields=wire.fields_digest(fields),
    )


class GuardedUrl(str):
    """The URL of an engine behind a guard, with the instance and the key that a router needs for its tickets."""

    __slots__ = ("instance", "key")

    instance: str
    key: SigningKey

    @classmethod
    def of(cls, cluster: Cluster, instance: str) -> GuardedUrl:
        """The URL of an instance of a running `baton up`."""
        url = cls(cluster.urls[instance])
        url.instance, url.key = instance, fleet_keys(cluster)[0]
        return url


def fleet_keys(cluster: Cluster) -> tuple[SigningKey, ...]:
    """The keys of a running `baton up`, as another router on this machine would find them."""
    (record,) = (cluster.state / "baton" / "clusters").glob("*.json")
    return read_fleet(Path(json.loads(record.read_text())["ticket_keys_file"]).read_text())


def ticketed(url: str, body: Any) -> Any:
    """A body for this URL, with a ticket if the URL has a guard and the body has transfer fields."""
    fields = body.get("kv_transfer_params") if isinstance(body, dict) else None
    if not isinstance(url, GuardedUrl) or not isinstance(fields, dict) or not fields:
        return body
    nonce = next(_NONCES)
    return {**body, "kv_transfer_params": signed(fields, url.instance, at=time.time(), key=url.key, nonce=nonce)}


_NONCES = itertools.count(1_000)


def _escaped(raw: bytes) -> bytes:
    return raw.replace(b"kv_transfer_params", b"kv\\u005ftransfer\\u005fparams")


def smuggled(fields: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, bytes]:
    """Raw JSON bodies that hide these fields from a careless reader, by name. `body` is an ordinary request."""
    text = json.dumps({"kv_transfer_params": fields})
    wrapped: dict[str, Any] = {
        "plain": {"kv_transfer_params": fields},
        "encoder": {"ec_transfer_params": fields},
        "xargs": {"vllm_xargs": {"kv_transfer_params": fields}},
        "xargs text": {"vllm_xargs": {"kv_transfer_params": json.dumps(fields)}},
        "text": {"vllm_xargs": text},
        "text in text": {"vllm_xargs": json.dumps({"extra_args": text})},
        "texts": {"extra_args": [text]},
        "extra args": {"sampling_params": {"extra_args": {"kv_transfer_params": fields}}},
        "message": {"messages": [{"role": "user", "content": "hi", "kv_transfer_params": fields}]},
        "deep": {"a": [[{"b": {"c": [{"kv_transfer_params": fields}]}}]]},
        "inside out": {"kv_transfer_params": {"kv_transfer_params": fields}},
        "both": {"kv_transfer_params": fields, "ec_transfer_params": fields},
        "a word": {"kv_transfer_params": "x"},
        "a list": {"kv_transfer_params": [fields]},
    }
    found = {name: json.dumps({**body, **more}).encode() for name, more in wrapped.items()}
    plain, head = found["plain"], json.dumps(body).encode()[:-1]
    found["escaped"] = _escaped(plain)
    found["escaped in upper case"] = _escaped(plain).replace(b"\\u005f", b"\\u005F")
    found["escaped text"] = found["text"].replace(b"kv_transfer_", b"kv_transfer\\\\u005f")
    found["escaped escape"] = found["text"].replace(b"kv_transfer_", b"kv_transfer\\u005c\\u0075005f")
    found["doubled"] = head + b',"kv_transfer_params":' + json.dumps(fields).encode() + b',"kv_transfer_params":null}'
    found["shadowed"] = head + b',"sampling_params":{"extra_args":' + text.encode() + b'},"sampling_params":{}}'
    found["a list of bodies"] = b"[" + plain + b"]"
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"):
        found[encoding] = plain.decode().encode(encoding)
    return found


def form(boundary: str, *parts: tuple[str, str]) -> bytes:
    """A multipart form. Each part is its disposition and its content."""
    body = "".join(f"--{boundary}\r\nContent-Disposition: {head}\r\n\r\n{content}\r\n" for head, content in parts)
    return f"{body}--{boundary}--\r\n".encode()
