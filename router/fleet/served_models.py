"""Names of the models that a fleet serves, by tenant. Pure."""

from __future__ import annotations

from typing import Final

from router.fleet.snapshot import FleetSnapshot


class ServedModels:
    """The models of all instances, ready or not. A tenant's are made when they are asked for, once for each change."""

    def __init__(self, fleet: FleetSnapshot) -> None:
        self._fleet: Final = fleet
        self._by_tenant: Final[dict[str, tuple[str, ...]]] = {}
        """By tenant that some instances are reserved for."""
        self._version = -1
        """The version of the columns for which `_by_tenant` is valid."""

    def names(self, tenant: str) -> tuple[str, ...]:
        """Names of all models that instances serve for this tenant, in order, once each."""
        version, whose = self._fleet.columns.version, self._fleet.whose(tenant)
        if version != self._version:
            self._version = version
            self._by_tenant.clear()
        found = self._by_tenant.get(whose)
        if found is None:
            serving = (view.models for view in self._fleet if view.instance.serves(whose))
            found = self._by_tenant[whose] = tuple(dict.fromkeys(name for models in serving for name in models))
        return found

    def lacks(self, model: str, tenant: str) -> bool:
        """Whether no instance serves this model to this tenant. False as long as no instance has named its models."""
        return model not in self.names(tenant) and any(view.models for view in self._fleet)
