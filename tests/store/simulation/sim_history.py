"""What clients asked and were told, and whether one store without any fault could have told them that.

Every value is put once, so a value read names its put. Reading one is wrong when its key had another value, or none,
for certain since that put had ended and before the read began. A miss is wrong when the object was acknowledged, and
neither removed, nor did the store itself give it up for a reason that it may have.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from moonpool.master.state.changes import RemovalReason

SPARE_S = 2.0  # of view_ledger.py: so that keys are often viewed again before that

NEVER_S = float("inf")
_EVICTED = (
    RemovalReason.EVICTED_WATERMARK,
    RemovalReason.EVICTED_FOR_PUT,
    RemovalReason.EVICTED_FOR_HOT,
    RemovalReason.SSD_EVICTED,
)
# The last one: a node that lost power finds the part of its log damaged that was not on disk yet.
_LOST = (RemovalReason.NODE_GONE, RemovalReason.NOT_RECOVERED, RemovalReason.LOG_DAMAGED)


class Write:
    """A put or a removal. `done_s` is when it had taken effect for certain, `ended_s` when it could not any more."""

    __slots__ = ("began_s", "done_s", "ended_s", "is_pinned", "is_put", "key", "nbytes", "number", "void_s")

    def __init__(self, number: int, key: bytes, is_put: bool, nbytes: int, is_pinned: bool, now_s: float) -> None:
        self.number, self.key, self.is_put, self.nbytes, self.is_pinned = number, key, is_put, nbytes, is_pinned
        self.began_s = now_s
        self.done_s = self.ended_s = NEVER_S
        self.void_s = NEVER_S  # a power loss at that time may have undone it


class History:
    def __init__(self, now: Callable[[], float], violated: Callable[[str], None]) -> None:
        self._now, self._violated = now, violated
        self._writes: dict[bytes, list[Write]] = {}
        self._by_number: dict[int, Write] = {}
        self._fates: dict[bytes, list[tuple[float, RemovalReason]]] = {}
        self._carried_out: dict[int, float] = {}  # numbered calls, and when that was last
        self._overwritten: set[tuple[bytes, float]] = set()  # objects found damaged at that time for a known reason
        self.losses_s: list[float] = []  # of nodes, or of the end of the journal
        self.num_flips = 0
        self.lost_times_s: list[tuple[float, float]] = []  # from when on nothing was durable, and when power was lost
        self._lost_masters: list[int] = []  # their incarnations, as lost_times_s
        self.num_reads = self.num_hits = self.num_acknowledged = 0

    # what was asked

    def put_begins(self, key: bytes, nbytes: int, is_pinned: bool = False) -> Write:
        return self._begin(key, True, nbytes, is_pinned)

    def removal_begins(self, key: bytes) -> Write:
        return self._begin(key, False, 0, False)

    def _begin(self, key: bytes, is_put: bool, nbytes: int, is_pinned: bool) -> Write:
        write = Write(len(self._by_number) + 1, key, is_put, nbytes, is_pinned, self._now())
        self._by_number[write.number] = write
        self._writes.setdefault(key, []).append(write)
        return write

    def ended(self, write: Write, done: bool | None) -> None:
        """True: it is done. False: it is not and never will be. None: nobody knows."""
        if done:
            write.done_s = min(write.done_s, self._now())
            write.ended_s = self._now()
            self.num_acknowledged += write.is_put
        elif done is False:
            write.ended_s = self._now()
            if write.done_s == NEVER_S:
                self._writes[write.key].remove(write)

    # what was told

    def read(self, key: bytes, data: bytes, began_s: float) -> None:
        """A read that began then has brought these bytes now."""
        self.num_reads += 1
        self.num_hits += 1
        write = self._by_number.get(int.from_bytes(data[:8], "little"))
        if write is None or not write.is_put or write.key != key or data != content(write.number, write.nbytes):
            self._violated(f"reading {key!r} brought {len(data)} bytes that nobody put there: {data[:24].hex()}")
            return
        if write not in self._writes[key]:
            self._violated(f"reading {key!r} brought the value of put {write.number}, which was refused")
        for other in self._writes[key]:
            is_void = other.void_s < self._now()
            if other.began_s > write.ended_s and other.done_s < began_s and not is_void and other is not write:
                what = f"put {other.number}" if other.is_put else f"removal {other.number}"
                self._violated(f"reading {key!r} brought the value of put {write.number}, but {what} came after it")
        write.done_s = min(write.done_s, self._now())

    def missed(self, key: bytes, began_s: float, is_away: Callable[[bytes], bool]) -> None:
        """A read that began then has found nothing."""
        self.num_reads += 1
        found = [each for each in self._writes.get(key, ()) if self._is_certain(each, began_s)]
        if not found:
            return
        put = max(found, key=lambda each: each.began_s)
        is_pinned = put.is_pinned and not any(self._may_have_replaced(each, put) for each in self._writes[key])
        reason = self._excuse(key, put.began_s, is_pinned)
        if reason is None and not is_away(key):
            fates = [(round(at_s, 3), fate.name) for at_s, fate in self._fates.get(key, ())]
            self._violated(f"{key!r} was acknowledged at {put.done_s:.3f} (put {put.number}) and is gone; {fates}")

    def _is_certain(self, write: Write, began_s: float) -> bool:
        return write.is_put and write.done_s < began_s and write.void_s == NEVER_S

    def _may_have_replaced(self, other: Write, put: Write) -> bool:
        """Whether the pin of `put` may be gone with it: another put, which need not have been pinned, was under way."""
        return other.is_put and not other.is_pinned and other is not put and other.ended_s >= put.began_s

    def _excuse(self, key: bytes, since_s: float, is_pinned: bool) -> str | None:
        """Why an object stored since then need not be there."""
        for write in self._writes[key]:
            if not write.is_put and write.ended_s >= since_s:
                return "removed"
        for at_s, fate in self._fates.get(key, ()):
            if at_s < since_s:
                continue
            if fate in _EVICTED and not is_pinned:
                return "evicted"
            if fate in _LOST and any(lost_s >= since_s for lost_s in self.losses_s):
                return "lost with its node, or with power"
            if fate is RemovalReason.CORRUPT and self.may_be_damaged(key, at_s):
                return "damaged"
        return None

    def may_be_damaged(self, key: bytes, at_s: float) -> bool:
        """Bits were flipped; or a master that lost power believed in an object that had been overwritten."""
        return bool(self.num_flips) or (key, at_s) in self._overwritten

    def may_be_forgotten(self, began_s: float, ended_s: float, master: int) -> bool:
        """The pin of a view that was opened in this time, by a master that lost power. It may be an earlier view's.
        `master` is the incarnation of the master to which the client was connected then.
        """
        return any(
            durable_s <= ended_s and began_s <= lost_s + SPARE_S and master <= last_lost
            for (durable_s, lost_s), last_lost in zip(self.lost_times_s, self._lost_masters, strict=True)
        )

    # what happened to the world

    def may_be_overwritten(self, key: bytes) -> None:
        """A replica is found damaged now, in memory whose node has not reported to the master that lost power."""
        self._overwritten.add((key, self._now()))

    def note_fate(self, key: bytes, fate: RemovalReason) -> None:
        self._fates.setdefault(key, []).append((self._now(), fate))

    def is_carried_out_once(self, number: int) -> bool:
        """A numbered call is carried out now. Return whether what it did before, if anything, was lost with power."""
        before_s, self._carried_out[number] = self._carried_out.get(number, NEVER_S), self._now()
        return before_s == NEVER_S or any(durable_s <= before_s <= lost_s for durable_s, lost_s in self.lost_times_s)

    def power_lost(self, durable_s: float, master: int) -> None:
        """What was done after that moment, or is being done, may be undone; what had made way for it is not there any
        more. `master` is the highest incarnation so far.
        """
        self._lost_masters.append(master)
        self.losses_s.append(self._now())
        self.lost_times_s.append((durable_s, self._now()))
        for write in self._by_number.values():
            if write.done_s >= durable_s and write.void_s == NEVER_S:
                write.void_s = self._now()

    def keys(self) -> list[bytes]:
        return sorted(self._writes)


def content(number: int, nbytes: int) -> bytes:
    """The bytes of put `number`, unlike those of any other."""
    words = struct.pack("<QQ", number, number * 0x9E3779B97F4A7C15 % 2**64)
    return (words * (nbytes // 16 + 1))[:nbytes]


def describe(value: Any) -> str:
    """Short, for the log of a seed."""
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."
