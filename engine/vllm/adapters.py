"""The LoRA adapters that an engine has loaded, with digests of their files: a name alone does not identify one. Pure.

Run by an engine's agent, for its heartbeats, and by Baton's connector inside the engine, for each hand-over.

Two engines may serve different weights under one adapter's name, and an engine may get new weights under it while it
runs. KV computed with one set of weights is useless with the other. So an agent announces the digest of each adapter's
files as they are when it first sees the adapter loaded. If the files change while the adapter stays loaded, the agent
cannot know which version the engine uses: vLLM reads them again after it has dropped an adapter from its cache. The
digest is then empty until the name is loaded from another path, or is unloaded and loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

LOADED_MAX: Final = 4096
"""Most adapters that one engine's connector remembers (`cluster.instance.MODELS_MAX`)."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    root: str
    load: int
    marks: tuple[object, ...]
    digest: str


class Adapters:
    """The adapters of one engine."""

    def __init__(self, digest: Callable[[str], str], marks: Callable[[str], tuple[object, ...]]) -> None:
        """Nothing is loaded at first.

        Args:
            digest: gives the digest of the files at a path; may read all of them. Empty: unknown.
            marks: tells, at little cost, whether the files at a path have been touched since.
        """
        self._digest: Final = digest
        self._marks: Final = marks
        self._loaded: dict[str, _Loaded] = {}

    @property
    def digests(self) -> dict[str, str]:
        """Digests by adapter name; empty: unknown."""
        return {name: each.digest for name, each in self._loaded.items()}

    def look(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Take the engine's present ``/v1/models`` entries. Reads the files of new adapters."""
        found = {}
        for entry in entries:
            name, root = str(entry.get("id")), str(entry.get("root") or "")
            if not entry.get("parent"):
                continue
            known = self._loaded.get(name)
            found[name] = known if known is not None and known.root == root else self._named(root, 0)
        self._loaded = found
        self.check()

    def asked(self, lora_request: Any) -> str | None:
        """The digest of the adapter that a `LoRARequest` of vLLM names (see `of`); None: the request has no adapter."""
        if lora_request is None:
            return None
        return self.of(lora_request.lora_name, lora_request.lora_path, lora_request.lora_int_id)

    def of(self, name: str, root: str, load: int) -> str:
        """The digest of one adapter; call this at each of its requests. The first call reads the adapter's files.

        `load`: the engine's number for it (vLLM's ``lora_int_id``): a new one means that it was loaded anew.
        """
        known = self._loaded.pop(name, None)
        if known is None or (known.root, known.load) != (root, load):
            known = self._named(root, load)
        elif known.digest and self._marks(root) != known.marks:
            known = replace(known, digest="")
        self._loaded[name] = known
        if len(self._loaded) > LOADED_MAX:
            del self._loaded[next(iter(self._loaded))]  # the one asked for longest ago; its files are read again
        return known.digest

    def check(self) -> bool:
        """Check whether any adapter's files were touched; True if some were."""
        touched = {name for name, each in self._loaded.items() if each.digest and self._marks(each.root) != each.marks}
        if touched:
            self._loaded = {
                name: replace(each, digest="") if name in touched else each for name, each in self._loaded.items()
            }
        return bool(touched)

    def restart(self) -> None:
        """Forget everything: a new life of the engine loads its adapters anew."""
        self._loaded = {}

    def _named(self, root: str, load: int) -> _Loaded:
        marks = self._marks(root)
        return _Loaded(root, load, marks, self._digest(root) if marks else "")
