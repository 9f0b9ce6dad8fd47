"""Whether objects exist, and where: callers mostly ask for a batch of keys first and then read them in that order.

An exist of a few keys brings the places along, unless all are remembered. One of many keys does not, because it would
take several times as long; its keys are kept instead, and the first read of one of them brings the places of its
neighbours along. So a caller that asks for a thousand keys and reads them one by one asks the master once for every
LOCATED_KEYS of them.

A single key whose place is remembered in mapped memory is answered from there, without a message.
"""

from __future__ import annotations

from typing import NamedTuple

from moonpool.base.errors import MoonpoolError
from moonpool.base.object_header import ALIGN_NBYTES, is_void, read_plain
from moonpool.store import messages as m
from moonpool.store.client.directory import SegmentDirectory
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.remembered import RememberedPlaces
from moonpool.store.client.verified_read import check_header, may_be_remembered

LOCATED_KEYS = 64  # whose places come with one answer
_KEPT_S = 10.0  # the default lease of an object; what was not read by then is not leased once more


class _AskedKeys(NamedTuple):
    """The keys of one exist. Each group of LOCATED_KEYS neighbours is fetched once."""

    keys: list[bytes]
    asked_s: float
    groups: dict[bytes, int]  # by key, of the groups that were not fetched; empty: not made yet


class ExistCalls:
    """Thread-safe."""

    def __init__(self, master: MasterClient, directory: SegmentDirectory, remembered: RememberedPlaces) -> None:
        self._master, self._directory, self._remembered = master, directory, remembered
        self._asked: _AskedKeys | None = None

    def exist(self, keys: list[bytes]) -> list[bool]:
        """Return which objects exist, and lease them. A single object that is found without asking keeps the lease that
        it has, of which at least half is left. Counts neither hits nor misses. Objects that are only on segments that
        this client could not read are misses, until the segments can be read again. Keeps `keys`.
        """
        if len(keys) == 1 and self._is_here(keys[0]):
            return [True]
        without, remembered = self._directory.unreadable.listed, self._remembered
        if not without and len(keys) <= LOCATED_KEYS and remembered.max_objects:
            if not self._are_known(keys):
                return [info is not None for info in self._locate(keys)]
        elif len(keys) <= remembered.max_objects:
            self._asked = _AskedKeys(keys, remembered.now_s(), {})
        return self._master.call(m.Exist(keys=keys, without=without))

    def _is_here(self, key: bytes) -> bool:
        """Return whether the object's remembered place is in mapped memory, the object is there, and at least half of
        its lease is left. Sends no message; the checks are those of a get that sends none (small_read.py).
        """
        remembered = self._remembered
        info = self._known(key, remembered.now_s())
        if info is None:
            return False
        place = info.replicas[0]
        try:
            remote = self._directory.open(place)
            memory = remote.view(0, remote.nbytes)
            if memory is None:
                return False
            nbytes = info.nbytes - ALIGN_NBYTES
            if read_plain(memory, place.offset, key, place.generation, nbytes, None) is not None:
                is_there = not is_void(memory, place.offset, place.generation)
            else:
                header = check_header(memory, place.offset, info, place, None)
                is_there = may_be_remembered(memory, place.offset, header)
        except MoonpoolError:  # the master knows more
            return False
        if not is_there:
            remembered.forget(key)
        return is_there and remembered.is_valid(info, remembered.now_s())

    def _known(self, key: bytes, now_s: float) -> m.ObjectInfo | None:
        """Return what is remembered of the object, if half of its lease is left."""
        info = self._remembered.find_one(key, now_s)
        if info is None or self._remembered.find_one(key, now_s + info.remember_s / 2) is None:
            return None
        return info

    def _are_known(self, keys: list[bytes]) -> bool:
        now_s = self._remembered.now_s()
        return all([self._known(key, now_s) is not None for key in keys])  # noqa: C419 - quicker

    def bring_places(self, key: bytes) -> bool:
        """Remember the places of this key and of its neighbours in the last exist of many keys. Return False, and send
        no message, when there was none or it brings nothing new.
        """
        asked = self._asked
        if asked is None or self._directory.unreadable.listed:
            return False
        if self._remembered.now_s() - asked.asked_s > _KEPT_S:
            self._asked = None
            return False
        groups = asked.groups
        if not groups:
            groups.update({each: at // LOCATED_KEYS for at, each in enumerate(asked.keys)})
        group = groups.get(key)
        if group is None:
            return False
        neighbours = asked.keys[group * LOCATED_KEYS : (group + 1) * LOCATED_KEYS]
        for each in neighbours:
            groups.pop(each, None)
        if not groups:
            self._asked = None
        self._locate(neighbours)
        return True

    def _locate(self, keys: list[bytes]) -> list[m.ObjectInfo | None]:
        asked_s = self._remembered.now_s()
        infos = self._master.call(m.Locate(keys=keys))
        self._remembered.add(infos, asked_s)
        return infos
