"""Which LoRA adapters an engine has loaded, by digests of their files: what a name alone does not tell. Pure.

Two engines may serve other weights under one adapter's name, and one may be given new weights under it while it runs.
KV computed with one of them is worth nothing with the other. So an agent tells the digest of each adapter's files as
they are when it first sees the adapter loaded. If the files change while the adapter stays loaded, it is unknown with
which of them the engine computes (vLLM reads them again when it has dropped an adapter from its cache): the digest is
empty from then on, until the name is loaded from another path, or is gone and comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class _Loaded:
    root: str
    marks: tuple[object, ...]
    digest: str


class Adapters:
    """Those of one engine."""

    def __init__(self, digest: Callable[[str], str], marks: Callable[[str], tuple[object, ...]]) -> None:
        """Nothing is loaded.

        Args:
            digest: names the files at a path; may read all of them. Empty: it cannot be told.
            marks: tells, at little cost, whether the files at a path have been touched since.
        """
        self._digest: Final = digest
        self._marks: Final = marks
        self._loaded: Mapping[str, _Loaded] = {}

    @property
    def digests(self) -> dict[str, str]:
        """By adapter's name; empty: unknown."""
        return {name: each.digest for name, each in self._loaded.items()}

    def look(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """The engine's ``/v1/models`` entries, as they are now. Reads the files of adapters that are new."""
        found = {}
        for entry in entries:
            name, root = str(entry.get("id")), str(entry.get("root") or "")
            if not entry.get("parent"):
                continue
            known = self._loaded.get(name)
            found[name] = known if known is not None and known.root == root else self._named(root)
        self._loaded = found
        self.check()

    def check(self) -> bool:
        """Look whether files were touched; whether any of them were."""
        touched = {name for name, each in self._loaded.items() if each.digest and self._marks(each.root) != each.marks}
        if touched:
            self._loaded = {
                name: _Loaded(each.root, each.marks, "" if name in touched else each.digest)
                for name, each in self._loaded.items()
            }
        return bool(touched)

    def restart(self) -> None:
        """Another life of the engine: what it has loaded is read anew."""
        self._loaded = {}

    def _named(self, root: str) -> _Loaded:
        marks = self._marks(root)
        return _Loaded(root, marks, self._digest(root) if marks else "")
