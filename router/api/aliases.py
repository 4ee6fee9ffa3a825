"""Other names for models: what clients call them, and what engines do. Pure.

An alias stands for a model in what clients send; engines see the model's own name, and their answers, which pass as
they are, carry that. So OpenAI does it, too: who asks for an alias is answered by the name of what answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final

from cluster import wire
from cluster.errors import bad_request, unknown_model
from router.fleet.snapshot import InstanceView
from router.fleet.view import FleetView


class Aliases:
    """Of one router."""

    def __init__(self, real: Mapping[str, str]) -> None:
        """`real`: the model's own name, by alias."""
        self._behind: Final = dict(real)

    def real(self, name: str) -> str:
        """What engines call it."""
        return self._behind.get(name, name)

    def apply(self, body: MutableMapping[str, Any], hides: Callable[[str], bool]) -> bool:
        """Put the model's own name into a request's body; whether that changed it. `hides`: whether there is no such
        model for who asks, who then must not learn by an alias what it is called.
        """
        name = body.get("model")
        if not self._behind or not isinstance(name, str) or name not in self._behind or hides(self._behind[name]):
            return False
        body["model"] = self._behind[name]
        return True

    def names(self, served: Iterable[str]) -> tuple[str, ...]:
        """Everything that clients may ask for where these are served."""
        own = tuple(served)
        return own + tuple(alias for alias, real in self._behind.items() if real in own and alias not in own)

    def cards(self, entries: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """``/v1/models`` with the aliases of what is in it, each as its model's entry with that as its ``root``."""
        also = (
            {**entries[real], "id": alias, "root": real, "parent": None}
            for alias, real in self._behind.items()
            if real in entries and alias not in entries
        )
        return [*entries.values(), *also]


def check_served(aliases: Aliases, view: FleetView, model: str | None, tenant: str) -> None:
    """Raises ApiError: 404 with what there is for this tenant, where nobody serves it this model."""
    if model is not None and view.lacks(model, tenant):
        raise unknown_model(model[:200], aliases.names(view.models(tenant)))


def usual_model(fleet: Iterable[InstanceView], tenant: str) -> str | None:
    """What a tenant's request gets that names no model: as with one engine, the first that is served. None: there is
    only one.

    Both of its legs need the same one. Adapters are never meant.
    """
    able = (seen for seen in fleet if seen.instance.serves(tenant))
    served = (entry for seen in able for entry in seen.models_json if not entry.get("parent"))
    names = dict.fromkeys(str(entry["id"]) for entry in served if "id" in entry)
    return next(iter(names)) if len(names) > 1 else None


NAME_BYTES_MAX: Final = 4096
"""Of a model in a form."""


def in_form(
    aliases: Aliases, raw: bytes, parts: Sequence[wire.Part], hides: Callable[[str], bool]
) -> tuple[bytes, str | None]:
    """A multipart form with its model's own name in it; and that name, None where it has none. `hides` as in
    `Aliases.apply`.

    Raises:
        ApiError: 400 for a name that is none.
    """
    named = [part for part in parts if part.field == "model"]
    if len(named) != 1:  # none: the engine's own; several: the engine shall say which
        return raw, None
    begin, end = named[0].begin, named[0].end
    if end - begin > NAME_BYTES_MAX:
        raise bad_request(f"`model` has {end - begin:,} bytes; a model's name has {NAME_BYTES_MAX:,} at most.", "model")
    given = raw[begin:end].decode(errors="replace")
    real = aliases.real(given)
    if real != given and hides(real):
        return raw, given
    return (raw if real == given else wire.form_with(raw, named[0], real.encode())), real or None
