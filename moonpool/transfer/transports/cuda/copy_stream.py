"""Copies between page-locked segments and a GPU that are started, not waited for; many with one call.

The caller brackets them with PinnedSegment.begin_copies() and end_copies(), and calls the latter only when an event
that was recorded behind them is over.
"""

from __future__ import annotations

import threading

import numpy as np

from moonpool.transfer.transports.cuda.driver import Addresses, Device
from moonpool.transfer.transports.cuda.pinning import DeviceCopies, PinnedSegment, cut_copies


class CopyStream:
    """A CUDA stream for copies alone. Thread-safe; what one call starts ends after what earlier ones have started."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.handle = device.stream()
        self._lock = threading.Lock()

    def start_reads(self, segment: PinnedSegment, copies: DeviceCopies) -> None:
        """Start copies from the segment to the GPU. All of them must lie in the part that is page-locked."""
        offsets, addresses, sizes = self._cut(segment, copies)
        with self._lock, self.device.current():
            self.device.copy_batch(addresses, offsets, sizes, self.handle)

    def start_writes(self, segment: PinnedSegment, copies: DeviceCopies) -> int:
        """Start copies from the GPU to the segment. Return an event, which the caller gives to wait()."""
        offsets, addresses, sizes = self._cut(segment, copies)
        event = self.device.event()
        with self._lock, self.device.current():
            try:
                self.device.copy_batch(offsets, addresses, sizes, self.handle)
            finally:  # the memory is in use until what was started is over, whatever failed
                self.device.record(event, self.handle)
        return event

    def wait(self, event: int) -> None:
        """Return when the event is over, and give it back."""
        with self.device.current():
            self.device.wait_event(event)
            self.device.free_event(event)

    def drain(self) -> None:
        """Return when all that was started is over."""
        with self.device.current():
            self.device.wait_stream(self.handle)

    def _cut(self, segment: PinnedSegment, copies: DeviceCopies) -> tuple[Addresses, Addresses, Addresses]:
        """Return addresses in main memory, addresses on the GPU, and sizes."""
        cut = cut_copies(copies, segment.chunk_nbytes)
        assert not len(cut.offsets) or int((cut.offsets + cut.sizes).max()) <= segment.pinned_nbytes, "page-locked"
        here = cut.offsets.astype(np.uint64) + np.uint64(segment.address)
        return here, cut.addresses, cut.sizes.astype(np.uint64)
