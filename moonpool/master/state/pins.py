"""Who keeps what: pins by holder, counted, so that they end with the connection or the process that has them. Pure.

What a pinned object gives up (a replica that moved away, or all of them when it is removed by force or replaced)
stays in the hands of its pins: it is freed when the last of them ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from moonpool.master.state.segments import Place

if TYPE_CHECKING:
    from moonpool.master.state.index import ObjectIndex


class PinnedObject:
    """`slot` is None once the object was removed; `left` is space to free when the pins end, `free_at_s` at the
    earliest.
    """

    __slots__ = ("free_at_s", "key", "left", "nbytes", "num_pins", "serial", "slot")

    def __init__(self, key: bytes, slot: int | None, nbytes: int) -> None:
        self.key = key
        self.slot = slot
        self.nbytes = nbytes
        self.num_pins = 0
        self.left: list[Place] = []
        self.free_at_s = 0.0
        self.serial = 0  # later ones have higher ones


class PinTable:
    def __init__(self) -> None:
        self._last_serial = 0
        self._of_slot: dict[int, PinnedObject] = {}
        self._of_holder: dict[int, dict[bytes, list[PinnedObject]]] = {}

    def add(self, holder: int, key: bytes, slot: int, nbytes: int) -> bool:
        """One pin more. True when it is the object's first."""
        pinned = self._of_slot.get(slot)
        if pinned is None:
            pinned = self._of_slot[slot] = self._made(PinnedObject(key, slot, nbytes))
        pinned.num_pins += 1
        self._of_holder.setdefault(holder, {}).setdefault(key, []).append(pinned)
        return pinned.num_pins == 1

    def add_removed(self, holders: Iterable[int], key: bytes, places: Sequence[Place], nbytes: int) -> None:
        """Pins on an object that is not in the table any more; before those on later ones."""
        pinned = self._made(PinnedObject(key, None, nbytes))
        pinned.left = list(places)
        for holder in holders:
            pinned.num_pins += 1
            self._of_holder.setdefault(holder, {}).setdefault(key, []).append(pinned)

    def remove(self, holder: int, key: bytes) -> PinnedObject | None:
        """Ends one pin: the oldest, should the key have had several objects. The object when that was its last."""
        held = self._of_holder.get(holder)
        if held is None or key not in held:
            return None
        pinned = held[key].pop(0)
        if not held[key]:
            del held[key]
            if not held:
                del self._of_holder[holder]
        return pinned if self._end(pinned) else None

    def remove_all(self, holder: int) -> list[PinnedObject]:
        """Ends all pins of a holder; the objects that have none left."""
        held = self._of_holder.pop(holder, {})
        return [pinned for several in held.values() for pinned in several if self._end(pinned)]

    def detach(self, slot: int, places: Sequence[Place], free_at_s: float) -> None:
        """The pinned object is removed from the table, its space goes to its pins."""
        pinned = self._of_slot.pop(slot)
        pinned.slot = None
        pinned.left.extend(places)
        pinned.free_at_s = max(pinned.free_at_s, free_at_s)

    def keep(self, slot: int, places: Sequence[Place], free_at_s: float) -> None:
        """Some replicas of a pinned object are given up; their space goes to its pins."""
        pinned = self._of_slot[slot]
        pinned.left.extend(places)
        pinned.free_at_s = max(pinned.free_at_s, free_at_s)

    def all(self) -> Iterator[tuple[PinnedObject, list[int]]]:
        """Every pinned object with the holders of its pins; those of one key in the order they were stored in."""
        holders: dict[int, list[int]] = {}
        objects: dict[int, PinnedObject] = {}
        for holder, held in self._of_holder.items():
            for pinned in (each for several in held.values() for each in several):
                objects[id(pinned)] = pinned
                holders.setdefault(id(pinned), []).append(holder)
        for pinned in sorted(objects.values(), key=lambda each: each.serial):
            yield pinned, holders[id(pinned)]

    def holders(self) -> list[int]:
        """All that hold a pin."""
        return list(self._of_holder)

    def counts(self) -> Counter[int]:
        """Pins by slot, for objects that are in the table."""
        return Counter({slot: pinned.num_pins for slot, pinned in self._of_slot.items()})

    def spans(self) -> Iterator[tuple[Place, int]]:
        """Space that waits for pins to end."""
        for pinned, _ in self.all():
            for place in pinned.left:
                yield place, pinned.nbytes

    def _made(self, pinned: PinnedObject) -> PinnedObject:
        self._last_serial += 1
        pinned.serial = self._last_serial
        return pinned

    def _end(self, pinned: PinnedObject) -> bool:
        pinned.num_pins -= 1
        if pinned.num_pins:
            return False
        if pinned.slot is not None:
            del self._of_slot[pinned.slot]
        return True


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
