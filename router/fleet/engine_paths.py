"""The HTTP paths that each engine lists in its own ``/openapi.json``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice
from typing import Final

from cluster.ids import InstanceId

TEMPLATES_MAX: Final = 1000
"""The number of paths remembered for one engine; vLLM's server has about forty."""

LISTED_MAX: Final = 10_000
"""The number of paths looked at in one engine's list: a hostile list of megabytes costs milliseconds."""

_ID: Final = re.compile(r"\{([A-Za-z_]\w*)(?::path)?\}")
_TEMPLATE: Final = re.compile(r"/[A-Za-z0-9_./{}:-]{0,200}")


@lru_cache(maxsize=4096)
def pattern(template: str) -> re.Pattern[str]:
    """The pattern of a template of ours. An id contains no slash, but a model's name may."""
    pieces = _ID.split(template)
    names = dict.fromkeys(pieces[1::2])
    inner = {name: ".+" if name == "model" else "[^/]+" for name in names}
    made = (f"(?P<{piece}>{inner[piece]})" if number % 2 else re.escape(piece) for number, piece in enumerate(pieces))
    return re.compile("".join(made))


@lru_cache(maxsize=4096)
def engine_pattern(template: str) -> re.Pattern[str]:
    """The pattern of an engine's template. A segment with ids is any text without a slash, or with slashes if it is the
    first one with a model's name. Ids matched one by one within a segment, or several texts with slashes, would keep
    the router of a hostile engine busy for ever.
    """
    made: list[str] = []
    for segment in template.split("/"):
        ids = _ID.findall(segment)
        with_slashes = "model" in ids and ".+" not in made
        made.append((".+" if with_slashes else "[^/]+") if ids else re.escape(segment))
    return re.compile("/".join(made))


def paths_in(openapi: object) -> frozenset[str] | None:
    """The paths of an engine, from its own ``/openapi.json``; None if the document is not one.

    Templates with special characters are left out, as templates become patterns.
    """
    listed = openapi.get("paths") if isinstance(openapi, Mapping) else None
    if not isinstance(listed, Mapping) or not listed:
        return None
    looked_at = islice(listed, LISTED_MAX)
    plain = (path for path in looked_at if isinstance(path, str) and _TEMPLATE.fullmatch(path))
    return frozenset(islice(plain, TEMPLATES_MAX))


class Catalogue:
    """The paths that each instance has listed. One object for a router."""

    def __init__(self) -> None:
        self._paths: Final[dict[InstanceId, frozenset[str] | None]] = {}

    def told(self, instance: InstanceId, paths: frozenset[str] | None) -> None:
        """An engine has listed its paths; None: it does not list them."""
        self._paths[instance] = paths

    def forget(self, instance: InstanceId) -> None:
        """The instance has left."""
        self._paths.pop(instance, None)

    def lacking(self, path: str, instances: Iterable[InstanceId]) -> frozenset[InstanceId]:
        """Those of `instances` that have listed their paths without this one."""
        return frozenset(each for each in instances if not self._may_have(each, path))

    def _may_have(self, instance: InstanceId, path: str) -> bool:
        paths = self._paths.get(instance)
        return (
            paths is None or path in paths or any(engine_pattern(each).fullmatch(path) for each in paths if "{" in each)
        )
