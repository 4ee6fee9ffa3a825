"""Aliases: other names that clients may use for models. Pure.

An alias stands for a model in clients' requests. Engines see the model's own name, and their answers carry it, as they
pass unchanged. OpenAI does the same: a request for an alias is answered with the name of the model that answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final

from cluster import wire
from cluster.errors import bad_request, no_instance, unknown_model
from router.fleet.columns import InstanceView
from router.fleet.view import FleetView


class Aliases:
    """The aliases of one router."""

    def __init__(self, real: Mapping[str, str]) -> None:
        """`real`: the model's own name, by alias."""
        self._behind: Final = dict(real)

    def real(self, name: str) -> str:
        """The name that engines use."""
        return self._behind.get(name, name)

    def apply(self, body: MutableMapping[str, Any], hides: Callable[[str], bool]) -> bool:
        """Put the model's own name into a request's body; returns whether that changed it. `hides`: whether the model
        does not exist for this tenant, which then must not learn the model's name through an alias.
        """
        name = body.get("model")
        if not self._behind or not isinstance(name, str) or name not in self._behind or hides(self._behind[name]):
            return False
        body["model"] = self._behind[name]
        return True

    def names(self, served: Iterable[str]) -> tuple[str, ...]:
        """All names that clients may use if these models are served."""
        own = tuple(served)
        return own + tuple(alias for alias, real in self._behind.items() if real in own and alias not in own)

    def cards(self, entries: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """``/v1/models`` with the aliases of its models, each as its model's entry with that model as its ``root``."""
        also = (
            {**entries[real], "id": alias, "root": real, "parent": None}
            for alias, real in self._behind.items()
            if real in entries and alias not in entries
        )
        return [*entries.values(), *also]


def check_served(aliases: Aliases, view: FleetView, model: str | None, tenant: str) -> None:
    """Check that an instance serves `model` to this tenant.

    Raises:
        ApiError: 404, naming this tenant's models, if none does; 503 if the last one that did is away.
    """
    if model is not None and view.served.lacks(model, tenant):
        if view.served.away(model, tenant):
            raise no_instance(f"the last instance that served `{model[:200]}` has left, or is starting anew")
        raise unknown_model(model[:200], aliases.names(view.served.names(tenant)))


def usual_model(fleet: Iterable[InstanceView], tenant: str) -> str | None:
    """The model for a request that names none: the first of several that are served to this tenant, so that both legs
    get the same one. None: at most one is served, and each engine takes its own. Adapters are never chosen.
    """
    able = (seen for seen in fleet if seen.instance.serves(tenant))
    served = (entry for seen in able for entry in seen.models_json if not entry.get("parent"))
    names = dict.fromkeys(str(entry["id"]) for entry in served if "id" in entry)
    return next(iter(names)) if len(names) > 1 else None


NAME_BYTES_MAX: Final = 4096
"""The longest model name in a form."""


def in_form(
    aliases: Aliases, raw: bytes, parts: Sequence[wire.FormField], hides: Callable[[str], bool]
) -> tuple[bytes, str | None]:
    """A multipart form with its model's own name in it, and that name; None if it names no model. `hides` as in
    `Aliases.apply`.

    Raises:
        ApiError: 400 for an invalid name.
    """
    named = [part for part in parts if part.field == "model"]
    if len(named) != 1:  # none: the engine's default model; several: the engine shall refuse
        return raw, None
    begin, end = named[0].begin, named[0].end
    if end - begin > NAME_BYTES_MAX:
        raise bad_request(f"`model` has {end - begin:,} bytes; a model's name has {NAME_BYTES_MAX:,} at most.", "model")
    given = raw[begin:end].decode(errors="replace")
    real = aliases.real(given)
    if real != given and hides(real):
        return raw, given
    return (raw if real == given else wire.form_with(raw, named[0], real.encode())), real or None
