"""Listing objects, and removing them by pattern, in bounded steps. Pure.

A pattern is a regular expression in RE2's syntax, searched for in the bytes of a key. RE2 needs at most time
proportional to the key's length times the pattern's size. Both are limited, and so is the work of one step; the master
serves other calls between two steps.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import re2

from moonpool.base.errors import InvalidInput
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.table import Flag
from moonpool.store.messages import ListedObject, ObjectPage, RemovedCount

STEP_SLOTS = 8192
STEP_REMOVALS = 1024  # about 10 us each, so one step delays other calls by about 10 ms at most
MAX_PAGE = 10_000
MAX_PATTERN_CHARS = 4096
MAX_PATTERN_SIZE = 1000  # instructions that RE2 compiles a pattern to
# Work is counted in RE2's steps (instructions x bytes of the key), at most 10 ns each: a step takes 20 ms at most.
STEP_WORK = 2_000_000
_WORK_PER_SEARCH = 350  # the cost of a call to RE2, in the same unit
_PATTERN_MEMORY_NBYTES = 256 * 1024  # RE2 keeps up to 128 patterns
_MAX_CACHED_PATTERNS = 16


class _KeyPattern:
    """A compiled pattern. `work` is the highest cost of searching one byte."""

    def __init__(self, pattern: str) -> None:
        """Raise InvalidInput if RE2 does not accept the syntax, or the pattern is too large."""
        if len(pattern) > MAX_PATTERN_CHARS:
            raise InvalidInput(
                f"a pattern has at most {MAX_PATTERN_CHARS} characters, not {len(pattern)}", param="pattern"
            )
        options = re2.Options()
        options.encoding = re2.Options.Encoding.LATIN1  # keys are bytes, and so is the pattern
        options.max_mem = _PATTERN_MEMORY_NBYTES
        options.never_capture = True
        options.log_errors = False
        try:
            compiled = re2.compile(pattern.encode(), options)
        except (re2.error, UnicodeEncodeError) as error:
            raise InvalidInput(_refusal(pattern, error), param="pattern") from error
        self.work = max(compiled.programsize, compiled.reverseprogramsize)
        if self.work > MAX_PATTERN_SIZE:
            raise InvalidInput(
                f"{_shown(pattern)} is too large: it compiles to {self.work} instructions, at most {MAX_PATTERN_SIZE}"
                " are allowed; use fewer or smaller repetitions",
                param="pattern",
            )
        self.search = compiled.search


class ObjectListing:
    def __init__(self, index: ObjectIndex) -> None:
        self._index = index

    def page(self, pattern: str | None, cursor: int, limit: int, now_s: float) -> ObjectPage:
        """Return objects from slot `cursor` on. A page may have fewer than `limit` objects, or none; the listing ends
        when the page has no cursor.
        """
        if limit < 1:
            raise InvalidInput("a page has room for one object at least", param="limit")
        found, at = self._matching(pattern, cursor, min(limit, MAX_PAGE))
        return ObjectPage([self._describe(slot, key, now_s) for slot, key in found], at)

    def remove(self, pattern: str | None, force: bool, cursor: int, now_s: float, prefix: bytes = b"") -> RemovedCount:
        """Remove objects from slot `cursor` on, whose keys begin with `prefix` and match in the rest."""
        num_removed = num_kept = 0
        found, at = self._matching(pattern, cursor, STEP_REMOVALS, prefix)
        for slot, _ in found:
            if remove(self._index, slot, force, now_s):
                num_removed += 1
            else:
                num_kept += 1
        return RemovedCount(num_removed, num_kept, at)

    def _matching(
        self, pattern: str | None, cursor: int, limit: int, prefix: bytes = b""
    ) -> tuple[list[tuple[int, bytes]], int | None]:
        """Return up to `limit` slots and keys from slot `cursor` on, and the slot to continue at,
        None after the last.
        """
        if cursor < 0:
            raise InvalidInput("a cursor is what an earlier answer gave, or 0", param="cursor")
        compiled = None if pattern is None else _compiled(pattern)
        found: list[tuple[int, bytes]] = []
        at, work_left = cursor, STEP_WORK
        for key in self._index.table.keys[cursor : cursor + STEP_SLOTS]:
            if len(found) >= limit or work_left <= 0:
                return found, at
            if key is not None and key.startswith(prefix):
                if compiled is None:
                    found.append((at, key))
                else:
                    work_left -= _WORK_PER_SEARCH + compiled.work * len(key)
                    if compiled.search(key[len(prefix) :]):
                        found.append((at, key))
            at += 1
        return found, at if at < self._index.table.end else None

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
    """Remove an object. Return False if it is leased or pinned and not `force`."""
    if not force and _is_kept(index, slot, now_s):
        return False
    index.counters["removed"] += 1
    index.drop(slot, RemovalReason.REMOVED, now_s)
    return True


def remove_replicas(index: ObjectIndex, slot: int, numbers: Collection[int], now_s: float) -> bool:
    """Remove the object's replicas in memory of these segments, and the object if it has no other. Return False if
    there is none, or the object is leased or pinned.
    """
    table = index.table
    replicas = table.dram_replicas(slot)
    gone = [each for each in replicas if each.segment in numbers]
    if not gone:
        return False
    if len(gone) == len(replicas) and not table.ssd_segment[slot]:
        return remove(index, slot, False, now_s)
    if _is_kept(index, slot, now_s):
        return False
    index.drop_replicas(slot, gone, now_s)
    return True


def _is_kept(index: ObjectIndex, slot: int, now_s: float) -> bool:
    table = index.table
    return bool(table.flags[slot] & (Flag.PINNED | Flag.HARD_PIN)) or table.lease_until_s[slot] > now_s


@lru_cache(maxsize=_MAX_CACHED_PATTERNS)
def _compiled(pattern: str) -> _KeyPattern:
    return _KeyPattern(pattern)


def _refusal(pattern: str, error: Exception) -> str:
    why = error.args[0].decode(errors="replace") if isinstance(error, re2.error) else str(error)
    return (
        f"{_shown(pattern)} is no regular expression that can be searched for in bounded time: {why} (RE2's syntax:"
        " no backreferences, no look-ahead or look-behind, repetitions up to 1000)"
    )


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 100 else pattern[:100] + "...")
