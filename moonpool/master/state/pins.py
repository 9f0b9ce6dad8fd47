"""Pins, counted by owner, so that they end with the connection or the process that owns them. Pure.

If a pinned object loses replicas (one moved away, or all because it was removed by force or replaced), their space is
freed when the last pin ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from moonpool.master.state.segments import Place


class PinnedObject:
    """`slot` is None after the object was removed; `left` is space to free when the pins end, not
    before `free_at_s`.
    """

    __slots__ = ("free_at_s", "key", "left", "nbytes", "num_pins", "serial", "slot")

    def __init__(self, key: bytes, slot: int | None, nbytes: int) -> None:
        self.key = key
        self.slot = slot
        self.nbytes = nbytes
        self.num_pins = 0
        self.left: list[Place] = []
        self.free_at_s = 0.0
        self.serial = 0  # rises with every pinned object


class PinTable:
    def __init__(self) -> None:
        self._last_serial = 0
        self._of_slot: dict[int, PinnedObject] = {}
        self._of_owner: dict[int, dict[bytes, list[PinnedObject]]] = {}

    def add(self, owner: int, key: bytes, slot: int, nbytes: int) -> bool:
        """Add a pin. Return whether it is the object's first."""
        pinned = self._of_slot.get(slot)
        if pinned is None:
            pinned = self._of_slot[slot] = self._made(PinnedObject(key, slot, nbytes))
        pinned.num_pins += 1
        self._of_owner.setdefault(owner, {}).setdefault(key, []).append(pinned)
        return pinned.num_pins == 1

    def add_removed(self, owners: Iterable[int], key: bytes, places: Sequence[Place], nbytes: int) -> None:
        """Add pins on an object that was removed. Call this before pins on later objects of the key are added."""
        pinned = self._made(PinnedObject(key, None, nbytes))
        pinned.left = list(places)
        for owner in owners:
            pinned.num_pins += 1
            self._of_owner.setdefault(owner, {}).setdefault(key, []).append(pinned)

    def remove(self, owner: int, key: bytes) -> PinnedObject | None:
        """End one pin, the oldest if the key had several objects. Return the object if that was its last pin."""
        held = self._of_owner.get(owner)
        if held is None or key not in held:
            return None
        pinned = held[key].pop(0)
        if not held[key]:
            del held[key]
            if not held:
                del self._of_owner[owner]
        return pinned if self._end(pinned) else None

    def remove_all(self, owner: int) -> list[PinnedObject]:
        """End all pins of an owner. Return the objects that have no pin left."""
        held = self._of_owner.pop(owner, {})
        return [pinned for several in held.values() for pinned in several if self._end(pinned)]

    def detach(self, slot: int, places: Sequence[Place], free_at_s: float) -> None:
        """Remove a pinned object. Keep its space until its pins end."""
        pinned = self._of_slot.pop(slot)
        pinned.slot = None
        pinned.left.extend(places)
        pinned.free_at_s = max(pinned.free_at_s, free_at_s)

    def keep(self, slot: int, places: Sequence[Place], free_at_s: float) -> None:
        """Keep the space of replicas that a pinned object lost, until its pins end."""
        pinned = self._of_slot[slot]
        pinned.left.extend(places)
        pinned.free_at_s = max(pinned.free_at_s, free_at_s)

    def all(self) -> Iterator[tuple[PinnedObject, list[int]]]:
        """Yield every pinned object with the owners of its pins; objects of one key in the order they were stored."""
        owners: dict[int, list[int]] = {}
        objects: dict[int, PinnedObject] = {}
        for owner, held in self._of_owner.items():
            for pinned in (each for several in held.values() for each in several):
                objects[id(pinned)] = pinned
                owners.setdefault(id(pinned), []).append(owner)
        for pinned in sorted(objects.values(), key=lambda each: each.serial):
            yield pinned, owners[id(pinned)]

    def owners(self) -> list[int]:
        """Return all owners of pins."""
        return list(self._of_owner)

    def counts(self) -> Counter[int]:
        """Return the number of pins by slot, of objects that are in the table."""
        return Counter({slot: pinned.num_pins for slot, pinned in self._of_slot.items()})

    def spans(self) -> Iterator[tuple[Place, int]]:
        """Yield the space that is freed when pins end."""
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
