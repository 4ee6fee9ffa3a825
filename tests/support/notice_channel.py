"""A notice channel between engines without NIXL."""

from __future__ import annotations

from kvtransfer.early_notes import Note, parse


class NoticeChannel:
    """It records the notices that are sent, and delivers those in `comes`."""

    payload = b"channel"

    def __init__(self) -> None:
        self.told: list[tuple[str, Note | None]] = []
        self.comes: list[tuple[str, bytes]] = []
        self._met: set[str] = set()

    def __contains__(self, engine: str) -> bool:
        return engine in self._met

    def meet(self, engine: str, payload: bytes) -> None:
        assert payload == self.payload
        self._met.add(engine)

    def part(self, engine: str) -> None:
        self._met.remove(engine)

    def tell(self, engine: str, note: bytes) -> bool:
        self.told.append((engine, parse(note)))
        return True

    def heard(self) -> list[tuple[str, bytes]]:
        found, self.comes = self.comes, []
        return found
