"""Whose pins there are, while records are read: objects are not what they will be yet, so pins go by key. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.segments import Place


class _Held:
    """An object's pins, and the space that it left to them."""

    __slots__ = ("nbytes", "pins", "places")

    def __init__(self) -> None:
        self.pins: Counter[int] = Counter()  # by session
        self.places: list[Place] = []
        self.nbytes = 0


class RecoveredPins:
    def __init__(self) -> None:
        self._held: dict[bytes, list[_Held]] = {}  # by key: removed objects, oldest first, then the one it has
        self._keys_of: dict[int, set[bytes]] = {}  # by session

    def sessions(self) -> set[int]:
        return set(self._keys_of)

    def pinned(self, session: int, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._held.setdefault(key, [_Held()])[-1].pins[session] += 1
            self._keys_of.setdefault(session, set()).add(key)

    def unpinned(self, session: int, keys: Iterable[bytes]) -> None:
        for key in keys:
            held = next((each for each in self._held.get(key, ()) if each.pins[session]), None)
            if held is not None:
                self._remove(key, held, session, 1)

    def viewed(self, key: bytes, places: Sequence[Place], nbytes: int, ended: bool) -> None:
        held = self._held.get(key)
        if held is None or not held[-1].pins:
            return  # pinned by connections, which are gone
        held[-1].places += places
        held[-1].nbytes = nbytes
        if ended:
            held.append(_Held())

    def ended(self, sessions: Iterable[int]) -> None:
        for session in sessions:
            for key in list(self._keys_of.get(session, ())):
                for held in [each for each in self._held[key] if each.pins[session]]:
                    self._remove(key, held, session, held.pins[session])

    def restore(self, index: ObjectIndex) -> None:
        """Makes them pins again."""
        for key, several in self._held.items():
            *removed, current = several
            for held in removed:
                index.pins.add_removed(held.pins.elements(), key, held.places, held.nbytes)
            slot = index.table.find(key)
            if slot is None or not current.pins:
                continue
            for session in current.pins.elements():
                index.pin(session, slot)
            index.pins.keep(slot, current.places, 0.0)

    def _remove(self, key: bytes, held: _Held, session: int, count: int) -> None:
        held.pins[session] -= count
        held.pins = +held.pins
        several = self._held[key]
        if not held.pins and held is not several[-1]:
            several.remove(held)
        elif not held.pins:
            several[-1] = _Held()
        if not any(each.pins[session] for each in several):
            self._keys_of[session].discard(key)
            if not self._keys_of[session]:
                del self._keys_of[session]
        if not any(each.pins for each in several):
            del self._held[key]
