"""Where objects were found, so that a client reads them again without asking the master. Bounded, thread-safe.

A look-up says for how long its places may be remembered: while the object is leased. Until then the object is at that
place, or the node has voided the header there before anybody was told that the key has another value or none
(master/state/voids.py). So a read at a remembered place is as good as one after a look-up, if three things hold: the
read passes all checks of a read, the segment's owner is connected, and the time is not over when the bytes are here.
The last one is checked after the read, so that a process may stand still at any moment.

Only places in memory are remembered. The uses are reported in batches, which leases the objects again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TypeAlias, cast

import msgspec

from moonpool.base.clock import BootClock, Clock
from moonpool.base.errors import MoonpoolError
from moonpool.store.client.master_client import MasterClient
from moonpool.store.messages import ObjectInfo, Placement, RenewLeases

MAX_OBJECTS = 16_384
_REPORTED_USES = 256  # one report for so many
_REPORT_AFTER = 0.25  # of the time for which a place is remembered
_CLOCKS_AGREE = 0.999  # the master's clock may run faster than this machine's by less than that


# The object, with its places in memory only, and until when they count. Plain tuples: a batch makes thousands.
_Remembered: TypeAlias = tuple[ObjectInfo, float]


class RememberedPlaces:
    """`is_memory` returns whether a place is in memory, and not on disk. With `max_objects` 0 nothing is remembered."""

    def __init__(
        self,
        master: MasterClient,
        is_memory: Callable[[Placement], bool],
        *,
        max_objects: int = MAX_OBJECTS,
        clock: Clock | None = None,
    ) -> None:
        self._master = master
        self._is_memory = is_memory
        self.max_objects = max_objects
        self._clock: Clock = clock or BootClock()
        self.now_s = self._clock.now_s
        self._lock = threading.Lock()
        self._objects: dict[bytes, _Remembered] = {}  # oldest first
        self._uses: dict[bytes, ObjectInfo] = {}  # not reported yet
        self._report_at_s = 0.0  # when there are uses

    def add(self, infos: Iterable[ObjectInfo | None], asked_s: float) -> None:
        """Remember what a look-up found that was sent at `asked_s`."""
        if not self.max_objects:
            return
        found: dict[bytes, _Remembered] = {}
        segment, incarnation = "", -1  # of the last place that was in memory: mostly the next one's, too
        for info in infos:
            if info is None or info.remember_s <= 0.0:
                continue
            replicas = info.replicas
            if len(replicas) != 1 or replicas[0].segment != segment or replicas[0].incarnation != incarnation:
                info = self._in_memory(info)
                if not info.replicas:
                    continue
                segment, incarnation = info.replicas[0].segment, info.replicas[0].incarnation
            found[info.key] = (info, asked_s + info.remember_s * _CLOCKS_AGREE)
        with self._lock:
            objects = self._objects
            objects.update(found)
            excess = len(objects) - self.max_objects
            if excess > 0:
                for key in list(islice(objects, excess)):
                    del objects[key]

    def _in_memory(self, info: ObjectInfo) -> ObjectInfo:
        """Return the object with its replicas in memory only."""
        places = tuple([place for place in info.replicas if self._is_memory(place)])
        return info if len(places) == len(info.replicas) else msgspec.structs.replace(info, replicas=places)

    def find(self, keys: Sequence[bytes], now_s: float) -> list[ObjectInfo | None]:
        """Return the objects whose places are remembered."""
        if not self._objects:
            return [None] * len(keys)
        found = list(map(self._objects.get, keys))
        return [None if each is None or each[1] <= now_s else each[0] for each in found]

    def find_one(self, key: bytes, now_s: float) -> ObjectInfo | None:
        """find() of one key."""
        found = self._objects.get(key)
        return None if found is None or found[1] <= now_s else found[0]

    def is_valid(self, info: ObjectInfo, now_s: float) -> bool:
        """Return whether these places were still remembered when their bytes were here: call it after the read."""
        found = self._objects.get(info.key)
        return found is not None and now_s < found[1] and found[0].replicas == info.replicas

    def are_valid(self, infos: Sequence[ObjectInfo], now_s: float) -> bool:
        """Return whether is_valid() is sure for all of them."""
        found = list(map(self._objects.get, [info.key for info in infos]))
        if None in found:
            return False
        known = cast("list[_Remembered]", found)
        return [info for info, _ in known] == infos and now_s < min([until_s for _, until_s in known])

    def forget(self, key: bytes) -> None:
        with self._lock:
            self._objects.pop(key, None)

    def used_one(self, info: ObjectInfo, now_s: float) -> None:
        """used() of one read, at this time."""
        with self._lock:
            uses = self._uses
            if uses:
                uses[info.key] = info
                if len(uses) < _REPORTED_USES and now_s < self._report_at_s:
                    return
        self.used((info,))

    def used(self, infos: Sequence[ObjectInfo]) -> None:
        """Count these reads, and report them when there are many, or when the first is some time ago."""
        now_s = self._clock.now_s()
        with self._lock:
            if not self._uses:
                self._report_at_s = now_s + _REPORT_AFTER * infos[0].remember_s
            self._uses.update([(info.key, info) for info in infos])
            if len(self._uses) < _REPORTED_USES and now_s < self._report_at_s:
                return
            uses, self._uses = self._uses, {}
        self._report(uses)

    def close(self) -> None:
        """Report the uses that were not reported yet."""
        with self._lock:
            uses, self._uses = self._uses, {}
        if uses:
            self._report(uses)

    def _report(self, uses: dict[bytes, ObjectInfo]) -> None:
        asked_s = self._clock.now_s()
        generations = [max([each.generation for each in info.replicas]) for info in uses.values()]
        counts = tuple([len(info.replicas) for info in uses.values()])
        try:
            renewed = self._master.call(RenewLeases(list(uses), generations, counts))
        except MoonpoolError:  # the reads have succeeded; what is remembered is not renewed
            return
        until_s = asked_s + renewed.remember_s * _CLOCKS_AGREE
        with self._lock:
            for (key, used), is_there in zip(uses.items(), renewed.is_there, strict=True):
                found = self._objects.get(key)
                if found is None or found[0].replicas != used.replicas:
                    continue
                if not is_there:
                    del self._objects[key]
                elif until_s > found[1]:
                    self._objects[key] = (found[0], until_s)
