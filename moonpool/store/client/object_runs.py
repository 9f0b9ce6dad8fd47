"""Finds small objects of a batch that are neighbours in their segment, so that one copy writes them all. Pure.

The master places a batch in one run of space where it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moonpool.store.messages import GRANULE_NBYTES, Placement

_MAX_RUN_NBYTES = 256 * GRANULE_NBYTES


def neighbours(places: Sequence[Placement], granules: Sequence[int]) -> Iterator[slice]:
    """Yield, in order, which of these places follow each other without a gap. Place number n is `granules[n]` long."""
    start = begin = end = 0
    segment = ""
    for number, (place, count) in enumerate(zip(places, granules, strict=True)):
        offset = place.offset
        if offset != end or end - begin >= _MAX_RUN_NBYTES or place.segment != segment:
            if number > start:
                yield slice(start, number)
            start, begin, segment = number, offset, place.segment
        end = offset + count * GRANULE_NBYTES
    if len(places) > start:
        yield slice(start, len(places))
