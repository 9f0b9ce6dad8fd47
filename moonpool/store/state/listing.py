"""Walking through all objects in steps, so that nobody waits: listing, and removing by pattern. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from moonpool.base.errors import InvalidInput
from moonpool.store.messages import ListedObject, ObjectPage, RemovedCount
from moonpool.store.state.fates import Fate
from moonpool.store.state.index import ObjectIndex
from moonpool.store.state.table import Flag

STEP_SLOTS = 8192
MAX_PAGE = 10_000


class Listing:
    def __init__(self, index: ObjectIndex) -> None:
        self._index = index

    def page(self, pattern: str | None, cursor: int, limit: int, now_s: float) -> ObjectPage:
        """Objects from slot `cursor` on; fewer than `limit`, even none, is not the end while there is a cursor."""
        if limit < 1:
            raise InvalidInput("a page has room for one object at least", param="limit")
        found: list[ListedObject] = []
        at, end = _start(cursor), self._index.table.end
        for at, key in self._matching(pattern, cursor):
            if len(found) >= min(limit, MAX_PAGE):
                return ObjectPage(found, at)
            found.append(self._describe(at, key, now_s))
        at = min(cursor + STEP_SLOTS, end)
        return ObjectPage(found, at if at < end else None)

    def remove(self, pattern: str | None, force: bool, cursor: int, now_s: float) -> RemovedCount:
        num_removed = num_kept = 0
        for slot, _ in self._matching(pattern, cursor):
            if remove(self._index, slot, force, now_s):
                num_removed += 1
            else:
                num_kept += 1
        at, end = _start(cursor) + STEP_SLOTS, self._index.table.end
        return RemovedCount(num_removed, num_kept, at if at < end else None)

    def _matching(self, pattern: str | None, cursor: int) -> Iterator[tuple[int, bytes]]:
        search = None if pattern is None else _compiled(pattern).search
        for at, key in enumerate(self._index.table.keys[_start(cursor) : cursor + STEP_SLOTS], cursor):
            if key is not None and (search is None or search(key)):
                yield at, key

    def _describe(self, slot: int, key: bytes, now_s: float) -> ListedObject:
        table = self._index.table
        return ListedObject(
            key,
            table.nbytes[slot],
            self._index.tier(slot),
            len(self._index.placements(slot)),
            table.lease_until_s[slot] > now_s,
            bool(table.flags[slot] & (Flag.PINNED | Flag.HARD_PIN)),
        )


def remove(index: ObjectIndex, slot: int, force: bool, now_s: float) -> bool:
    """Leased and pinned objects stay unless `force`."""
    table = index.table
    kept = table.flags[slot] & (Flag.PINNED | Flag.HARD_PIN) or table.lease_until_s[slot] > now_s
    if kept and not force:
        return False
    index.counters["removed"] += 1
    index.drop(slot, Fate.REMOVED, now_s)
    return True


def _start(cursor: int) -> int:
    if cursor < 0:
        raise InvalidInput("a cursor is what an earlier answer gave, or 0", param="cursor")
    return cursor


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[bytes]:
    try:
        return re.compile(pattern.encode())
    except (re.error, UnicodeEncodeError) as error:
        raise InvalidInput(f"{pattern!r} is no regular expression: {error}", param="pattern") from error
