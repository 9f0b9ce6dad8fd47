"""Who keeps what: pins by connection, counted, so that they end with the process that asked for them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.store.objects import StoredObject


class PinTable:
    """Keeps StoredObject.num_pins equal to the number of pins held here."""

    def __init__(self) -> None:
        self._pins: dict[int, dict[bytes, list[StoredObject]]] = {}

    def add(self, connection: int, entry: StoredObject) -> None:
        self._pins.setdefault(connection, {}).setdefault(entry.key, []).append(entry)
        entry.num_pins += 1

    def remove(self, connection: int, key: bytes) -> StoredObject | None:
        """Ends one pin: the oldest, should the key have had several objects. None when there is none."""
        held = self._pins.get(connection)
        if held is None or key not in held:
            return None
        entry = held[key].pop(0)
        entry.num_pins -= 1
        if not held[key]:
            del held[key]
        return entry

    def remove_all(self, connection: int) -> list[StoredObject]:
        """Ends all pins of a connection; an object appears once per pin."""
        ended = [entry for entries in self._pins.pop(connection, {}).values() for entry in entries]
        for entry in ended:
            entry.num_pins -= 1
        return ended

    def entries(self) -> Iterator[StoredObject]:
        """Every pinned object, once per pin."""
        for held in self._pins.values():
            for entries in held.values():
                yield from entries
