"""Many new objects at once: columns are written by numpy, the eviction order is told once. Pure.

For plain objects, which most are: one replica, no pin, no group, under a key that has no object. Eight times as fast
as one by one (ObjectIndex.insert), with the same outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.unfinished_puts import PendingPut

LEAST = 16  # fewer are quicker one by one


def are_plain(puts: Sequence[PendingPut]) -> bool:
    last = None
    for put in puts:
        terms = put.terms
        if terms is not last and (terms.flags or terms.soft_pin_s):
            return False
        if put.group or len(put.places) != 1:
            return False
        last = terms
    return True


def insert_plain(index: ObjectIndex, puts: Sequence[PendingPut]) -> list[int]:
    """The slots of the new objects. Parents stand before their children."""
    table = index.table
    keys = [put.key for put in puts]
    generations = [put.generation for put in puts]
    slots = table.add_many(keys)
    table.fill(
        slots,
        {
            "nbytes": [put.nbytes for put in puts],
            "version": generations,
            "dram_segment": [put.places[0][0] for put in puts],
            "dram_offset": [put.places[0][1] for put in puts],
            "dram_generation": generations,
            "identity": [put.terms.identity for put in puts],
        },
    )
    parents = _link(index, puts, slots) if any(put.parent for put in puts) else None
    index.policy.insert_many(slots, parents, list(map(crc32, keys)))
    index.fates.forget_many(keys)
    index.changes.stored_many(keys)
    index.counters["stored"] += len(keys)
    return slots


def _link(index: ObjectIndex, puts: Sequence[PendingPut], slots: Sequence[int]) -> list[int | None]:
    table = index.table
    parents = table.find_many([put.parent or b"" for put in puts])
    for slot, parent in zip(slots, parents, strict=True):
        if parent is not None:
            table.parent[slot], table.child[parent] = parent + 1, slot + 1
    return parents
