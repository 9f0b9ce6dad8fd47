"""The memory of other processes, as `mooncake.engine` addresses it: a peer's name and an address in its memory.

A peer lists its registered ranges at its tcp port. The list is kept, and asked for again when an address is in none of
the ranges known or a transfer found that a range is gone: the peer registered more, or restarted.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.engine_memory import RANGE_PREFIX, range_start
from moonpool.transfer.batch import TransferOp, TransferRequest
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.buffers import DeviceSpan, Memory


class RangePlace(NamedTuple):
    segment: SegmentDescriptor
    offset: int


class PeerRanges:
    """What one peer has registered, at one moment. Immutable."""

    def __init__(self, segments: Sequence[SegmentDescriptor]) -> None:
        """`segments` are sorted by name, which is the order of their addresses."""
        self.segments = tuple(segments)
        self._starts = [range_start(each.name) for each in segments]

    def find(self, address: int, nbytes: int) -> RangePlace | None:
        """Return where the bytes are; None unless one range holds all of them."""
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        segment, offset = self.segments[at], address - self._starts[at]
        return RangePlace(segment, offset) if offset + nbytes <= segment.nbytes else None

    @property
    def first_address(self) -> int:
        """The lowest address; 0 when nothing is registered."""
        return self._starts[0] if self._starts else 0


class EnginePeers:
    """Thread-safe. `resolve(name)` returns a peer's `host:port`; both raise MoonpoolError."""

    def __init__(self, engine: TransferEngine, resolve: Callable[[str], str]) -> None:
        self._engine = engine
        self._resolve = resolve
        self._lock = threading.Lock()
        self._known: dict[str, PeerRanges] = {}

    def ranges(self, peer: str) -> PeerRanges:
        """Return the peer's ranges as they were when it was last asked."""
        with self._lock:
            known = self._known.get(peer)
        return known or self.look_again(peer)

    def look_again(self, peer: str) -> PeerRanges:
        """Ask the peer, and keep the answer. Handles of ranges that are gone are closed."""
        try:
            found = PeerRanges(self._engine.list_segments(self._resolve(peer), RANGE_PREFIX))
        except BaseException:
            self.forget(peer)
            raise
        with self._lock:
            before = self._known.get(peer)
            self._known[peer] = found
        for segment in set(before.segments if before is not None else ()) - set(found.segments):
            self._engine.forget(segment)
        return found

    def forget(self, peer: str) -> None:
        """Ask the peer again before the next transfer."""
        with self._lock:
            before = self._known.pop(peer, None)
        for segment in before.segments if before is not None else ():
            self._engine.forget(segment)

    def place(self, peer: str, addresses: Sequence[int], sizes: Sequence[int]) -> tuple[list[RangePlace], PeerRanges]:
        """Return where each span of the peer's memory is, and the ranges by which it was found. InvalidInput when a
        span is not registered there.
        """
        ranges, is_new = self.ranges(peer), False
        found: list[RangePlace] = []
        for address, nbytes in zip(addresses, sizes, strict=True):
            place = ranges.find(address, nbytes)
            if place is None and not is_new:
                ranges, is_new = self.look_again(peer), True
                place = ranges.find(address, nbytes)
            if place is None:
                raise InvalidInput(f"{peer} has not registered {nbytes} bytes at {address:#x}")
            found.append(place)
        return found, ranges

    def requests(
        self, op: TransferOp, places: Sequence[RangePlace], memories: Sequence[Memory]
    ) -> list[TransferRequest]:
        """Open the segments, and return one request for each run of places that follow each other in a segment."""
        runs: list[tuple[RangePlace, list[Memory]]] = []
        end, kind = None, None
        for place, memory in zip(places, memories, strict=True):
            if place == end and type(memory) is kind:
                runs[-1][1].append(memory)
            else:
                runs.append((place, [memory]))
            end, kind = RangePlace(place.segment, place.offset + memory.nbytes), type(memory)
        return [TransferRequest(op, self._engine.open(place.segment), place.offset, buffers) for place, buffers in runs]


def is_on_gpu(request: TransferRequest) -> bool:
    """Return whether the caller's side of the request is memory of a GPU."""
    return any(isinstance(buffer, DeviceSpan) for buffer in request.buffers)
