"""`SessionCalls`: objects written and read in ranges, over several calls or in one.

Upstream's sessions move one layer of many objects with each call. Results are by position; a key that fails does not
affect the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound
from moonpool.integrations.mooncake.base_store import StoreBase
from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.piece_assembly import piece_sizes
from moonpool.integrations.mooncake.range_sessions import OpenPuts, OpenReads, Ranges
from moonpool.integrations.mooncake.session import MooncakeSession
from moonpool.integrations.mooncake.types import ReplicateConfig
from moonpool.store import Store
from moonpool.store.client import PutRequest

Numbers: TypeAlias = Sequence[Sequence[int]]
Results: TypeAlias = list[list[list[int]]]


class WantedRange(NamedTuple):
    """`nbytes` from `source` of the value to `address`; its result is results[buffer][key_at][range_at]."""

    buffer: int
    key_at: int
    range_at: int
    address: int
    source: int
    nbytes: int


class SessionCalls(StoreBase):
    # writing

    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Reserve space for objects of these sizes. Return 0 by key, -705 when the key is taken, -600 when this store
        is writing it already.
        """
        config = config or ReplicateConfig()
        refusal = config.check(len(keys))
        if refusal is not ErrorCode.OK or len(keys) != len(sizes):
            return [refusal or ErrorCode.INVALID_PARAMS] * len(keys)
        usable = [at for at, size in enumerate(sizes) if size > 0 and keys[at]]

        def start(_: Store) -> list[MoonpoolError | None]:
            options = config.options(self._segments_of(config.preferred))
            return self._open_puts().start(
                [
                    PutRequest(
                        key=self._key(keys[at]),
                        piece_nbytes=piece_sizes(sizes[at]),
                        options=options,
                        group=self._group(config, at),
                    )
                    for at in usable
                ]
            )

        return self._spread("put", keys, usable, self._ask("put", start, lambda code: code))

    def batch_put_from_multi_buffer_ranges(
        self, keys: Sequence[str], all_buffer_ptrs: Numbers, all_sizes: Numbers, all_dst_offsets: Numbers
    ) -> list[int]:
        """Write registered buffers to these places of started objects. Return how many bytes by key; -600 for a key
        that was not started, or a range that is outside its object or changes what was written.
        """
        usable, items = self._range_items("put", keys, all_buffer_ptrs, all_sizes, all_dst_offsets)
        written = self._ask("put", lambda _: self._open_puts().write(items), lambda code: code)
        return self._spread("put", keys, usable, written)

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Make started objects readable; bytes that were never written are 0. Return 0 by key, or an error; a put that
        failed is given up.
        """
        return self._end_puts(keys, OpenPuts.end)

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Give started objects up. Return 0 by key; -600 for a key that was not started."""
        return self._end_puts(keys, OpenPuts.revoke)

    # reading

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Find objects and lease them for the ranges that follow. Return 0 by key, -704 when there is none."""

        def start(_: Store) -> list[MoonpoolError | None]:
            return self._open_reads().start([self._key(key) for key in keys])

        return self._spread("get", keys, range(len(keys)), self._ask("get", start, lambda code: code))

    def batch_get_into_multi_buffer_ranges(
        self, keys: Sequence[str], all_buffer_ptrs: Numbers, all_sizes: Numbers, all_src_offsets: Numbers
    ) -> list[int]:
        """Read ranges of started objects into registered buffers. Return how many bytes by key; -600 for a key that was
        not started or a range outside its object, -707 when the object is gone.
        """
        usable, items = self._range_items("get", keys, all_buffer_ptrs, all_sizes, all_src_offsets)
        read = self._ask("get", lambda _: self._open_reads().read(items), lambda code: code)
        return self._spread("get", keys, usable, read)

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """Forget started objects. Return 0, also for keys that were not started."""

        def end(_: Store) -> int:
            self._open_reads().end([self._key(key) for key in keys])
            return ErrorCode.OK

        return self._ask("get", end, lambda code: code)

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Numbers],
        all_src_offsets: Sequence[Numbers],
        all_sizes: Sequence[Numbers],
    ) -> list[list[list[int]]]:
        """Read many ranges of many objects. Item [b][k][r] of the lists is range r of key k for buffer b: from which
        place of the value, to which place of the buffer, how many bytes. Return the bytes or the error of each range.
        """
        lists = (buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes)
        results, wanted = plan_ranges(*lists, refused=ErrorCode.INVALID_PARAMS)
        for key, ranges in wanted.items():
            for each, outcome in zip(ranges, self._read_ranges(key, ranges), strict=True):
                results[each.buffer][each.key_at][each.range_at] = outcome
        return results

    def _read_ranges(self, key: str, ranges: Sequence[WantedRange]) -> list[int]:
        """Read all ranges of one value at once. Return the bytes or the error of each; those that cannot be are left
        out and refused alone.
        """

        def read(client: Store) -> list[int]:
            nbytes = client.size(self._key(key))
            if nbytes is None:
                raise NotFound("no such object")
            inside = [each.source >= 0 <= each.nbytes and each.source + each.nbytes <= nbytes for each in ranges]
            views = [
                self._view("get", key, [each.address], [each.nbytes]) if is_inside else []
                for each, is_inside in zip(ranges, inside, strict=True)
            ]
            chosen = [(each.source, view) for each, found in zip(ranges, views, strict=True) for view in found]
            if chosen and client.get_ranges(self._key(key), chosen) is None:
                raise NotFound("the object was removed meanwhile")
            return [
                each.nbytes if found or (is_inside and not each.nbytes) else ErrorCode.INVALID_PARAMS
                for each, found, is_inside in zip(ranges, views, inside, strict=True)
            ]

        return self._ask(f"get {key}", read, lambda code: [code] * len(ranges))

    def _range_items(
        self, what: str, keys: Sequence[str], pointers: Numbers, sizes: Numbers, offsets: Numbers
    ) -> tuple[list[int], list[tuple[bytes, Ranges]]]:
        """Return the positions of the keys whose lists and memory can be used, and their ranges."""
        if self._session is None or not len(keys) == len(pointers) == len(sizes) == len(offsets):
            return [], []
        usable: list[int] = []
        items: list[tuple[bytes, Ranges]] = []
        for at, key in enumerate(keys):
            if not len(pointers[at]) == len(sizes[at]) == len(offsets[at]) or not all(size > 0 for size in sizes[at]):
                continue
            views = self._view(what, key, pointers[at], sizes[at])
            if len(views) == len(offsets[at]):
                usable.append(at)
                items.append((self._key(key), list(zip(offsets[at], views, strict=True))))
        return usable, items

    def _end_puts(
        self, keys: Sequence[str], end: Callable[[OpenPuts, Sequence[bytes]], list[MoonpoolError | None]]
    ) -> list[int]:
        ended = self._ask("put", lambda _: end(self._open_puts(), [self._key(key) for key in keys]), lambda code: code)
        return self._spread("put", keys, range(len(keys)), ended)

    def _spread(
        self,
        what: str,
        keys: Sequence[str],
        usable: Sequence[int],
        outcomes: int | Sequence[int | MoonpoolError | None],
    ) -> list[int]:
        """Return a number by key: of the outcomes, which belong to the `usable` keys, or -600."""
        results: list[int] = [ErrorCode.INVALID_PARAMS] * len(keys)
        for number, at in enumerate(usable):
            outcome = outcomes if isinstance(outcomes, int) else outcomes[number]
            results[at] = self._code(what, keys[at], outcome)
        return results

    def _open_puts(self) -> OpenPuts:
        return self._opened().open_puts

    def _open_reads(self) -> OpenReads:
        return self._opened().open_reads

    def _opened(self) -> MooncakeSession:
        if self._session is None:
            raise InvalidInput("this store was closed")
        return self._session


def plan_ranges(
    buffer_ptrs: Sequence[int],
    all_keys: Sequence[Sequence[str]],
    all_dst_offsets: Sequence[Numbers],
    all_src_offsets: Sequence[Numbers],
    all_sizes: Sequence[Numbers],
    refused: int,
) -> tuple[Results, dict[str, list[WantedRange]]]:
    """Return the results, all of them `refused` for now, and the ranges to read by key. Lists that differ in length
    make the ranges below them refused.
    """
    results = [
        [[refused] * len(offsets) for offsets in all_dst_offsets[at]] if at < len(all_dst_offsets) else []
        for at in range(len(buffer_ptrs))
    ]
    wanted: dict[str, list[WantedRange]] = {}
    columns = (all_keys, all_dst_offsets, all_src_offsets, all_sizes)
    if any(len(column) != len(buffer_ptrs) for column in columns):
        return results, wanted
    for buffer, (pointer, keys, *groups) in enumerate(zip(buffer_ptrs, *columns, strict=True)):
        if any(len(group) != len(keys) for group in groups):
            continue
        for key_at, (key, targets, sources, sizes) in enumerate(zip(keys, *groups, strict=True)):
            if not len(targets) == len(sources) == len(sizes):
                continue
            for range_at, (target, source, nbytes) in enumerate(zip(targets, sources, sizes, strict=True)):
                address = pointer + target if target >= 0 else 0
                wanted.setdefault(key, []).append(WantedRange(buffer, key_at, range_at, address, source, nbytes))
    return results, wanted
