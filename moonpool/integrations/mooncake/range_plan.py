"""The ranges of one get_into_ranges() call, sorted by key. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

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
