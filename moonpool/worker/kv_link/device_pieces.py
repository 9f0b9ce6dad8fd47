"""Pieces of KV memory that lies on a GPU: copied by the device itself, and checksummed where they lie.

Streams: steps compute on `kv.stream`; checksums and copies run on others and wait for its events, so that they never
hold up a step from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.base.clock import Deadline
from moonpool.engine.kv_tensor import KvMemory
from moonpool.transfer.memory.buffers import DeviceSpan
from moonpool.transfer.transports.cuda.copy import Placed, mover_of
from moonpool.transfer.transports.cuda.copy_stream import CopyStream
from moonpool.transfer.transports.cuda.crc32c import initial_value
from moonpool.transfer.transports.cuda.driver import Addresses, driver
from moonpool.worker.kv_link.pieces import Checksums, ReadyPoint

_RUN_NBYTES = 1024 * 1024  # a copy of less takes hardly less time


class PendingSums:
    """Checksums that the device is computing."""

    def __init__(self, event: torch.cuda.Event, sums: torch.Tensor, num_layers: int, initial: int) -> None:
        self._event, self._sums = event, sums
        self._num_layers, self._initial = num_layers, initial

    def wait(self) -> Checksums:
        """Return them, [page, layer], when they are here. All that their stream did before is over then."""
        self._event.synchronize()
        found: Checksums = self._sums.numpy().view(np.uint32) ^ np.uint32(self._initial)
        return found.reshape(-1, self._num_layers)


class DevicePieces:
    """The pages of `kv`, which outlives this object."""

    puts_whole = True

    def __init__(self, kv: KvMemory) -> None:
        # Imported here: it needs Triton, which is there with a GPU's torch only.
        from moonpool.transfer.transports.cuda import crc32c_kernel

        assert kv.stream is not None, "pages in device memory"
        self.layout = kv.layout
        self.layer_run = min(kv.layout.num_layers, max(1, _RUN_NBYTES // kv.layout.piece_nbytes))
        self._kv, self._compute_stream = kv, kv.stream
        self._kernel = crc32c_kernel
        self.torch_device = kv.tensor.device
        self._address = kv.tensor.data_ptr()
        self.device = driver().device_of(self._address)
        self._words = kv.tensor.view(-1).view(torch.int32)
        self._tables = [torch.from_numpy(each).to(self.torch_device) for each in crc32c_kernel.host_tables()]
        self._stream = self.new_stream()
        torch.cuda.synchronize(self.torch_device)
        self.checksums([0], range(1))  # compiles the kernel, before a request waits for it

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def memory(self, page: int, layers: range) -> DeviceSpan:
        offset, nbytes = self.layout.piece(page, layers.start)
        return DeviceSpan(self._address + offset, nbytes * len(layers), owner=self._kv.tensor)

    def addresses(self, pages: Sequence[int] | NDArray[np.int64], layer: int) -> Addresses:
        """Return where the layer's piece of each page begins."""
        offsets = np.asarray(pages, np.uint64) * np.uint64(self.layout.page_nbytes)
        found: Addresses = offsets + np.uint64(self._address + layer * self.layout.piece_nbytes)
        return found

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._compute_stream)
        return event

    def compute_after(self, ready: ReadyPoint) -> None:
        """Let what the engine computes from now on wait for this point; does not block."""
        assert isinstance(ready, torch.cuda.Event)
        self._compute_stream.wait_event(ready)

    def checksums(self, pages: Sequence[int], layers: range, ready: ReadyPoint | None = None) -> Checksums:
        if not pages:
            return np.zeros((0, len(layers)), np.uint32)
        if ready is not None:
            assert isinstance(ready, torch.cuda.Event)
            self._stream.wait_event(ready)
        return self.start_checksums(self.to_device(pages, self._stream), layers, self._stream).wait()

    def fill(self, pages: Sequence[int], layers: range, views: Sequence[memoryview], timeout_s: float) -> None:
        """Copy these bytes of main memory to the layers of the pages; they are there when this returns."""
        placed: list[Placed] = [
            (self.memory(page, layers).address, view) for page, view in zip(pages, views, strict=True)
        ]
        mover_of(self.device).write(placed, Deadline(timeout_s))

    def scratch(self) -> DevicePieces:
        """Return one page of memory of its own, on the same GPU."""
        return DevicePieces(KvMemory(replace(self.layout, num_pages=1), device=str(self.torch_device)))

    def new_lane(self) -> PullLane:
        return PullLane(self)

    def to_device(self, pages: Sequence[int], stream: torch.cuda.Stream) -> torch.Tensor:
        """Return page numbers for start_checksums(), copied on the stream."""
        numbers = torch.tensor(list(pages), dtype=torch.int64).pin_memory()
        with torch.cuda.stream(stream):
            return numbers.to(self.torch_device, non_blocking=True)

    def start_checksums(self, pages: torch.Tensor, layers: range, stream: torch.cuda.Stream) -> PendingSums:
        """Compute the checksums of these pages' layers behind what the stream has to do."""
        layout, num_pieces = self.layout, len(pages) * len(layers)
        here = torch.empty(num_pieces, dtype=torch.int32, pin_memory=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            sums = torch.empty(num_pieces, dtype=torch.int32, device=self.torch_device)
            tables = (self._tables[0], self._tables[1])
            self._kernel.launch(self._words, pages, sums, tables, layers, layout.page_nbytes, layout.piece_nbytes)
            here.copy_(sums, non_blocking=True)
            event.record(stream)
        return PendingSums(event, here, len(layers), initial_value(layout.piece_nbytes))


class PullLane:
    """Two streams, for the copies of one pull and for the checksums behind them. For one thread."""

    def __init__(self, memory: DevicePieces) -> None:
        self.copies = CopyStream(memory.device)
        self._memory = memory
        self._copy_stream = torch.cuda.ExternalStream(self.copies.handle, memory.torch_device)  # type: ignore[no-untyped-call]
        self._sum_stream = memory.new_stream()
        self._pages: torch.Tensor | None = None

    def begin(self, pages: Sequence[int], after: ReadyPoint | None) -> None:
        """The copies will be to these pages, and wait for `after`."""
        self._pages = self._memory.to_device(pages, self._sum_stream)
        if after is not None:
            assert isinstance(after, torch.cuda.Event)
            self._copy_stream.wait_event(after)

    def mark(self) -> ReadyPoint:
        """Return the point at which the copies that were started so far are over."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._copy_stream)
        return event

    def start_checksums(self, first: int, last: int, layers: range) -> PendingSums:
        """Compute the checksums of pages `first` to `last` of begin(), behind the copies that were started so far."""
        assert self._pages is not None, "begin() comes first"
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._copy_stream)
        self._sum_stream.wait_event(event)
        return self._memory.start_checksums(self._pages[first:last], layers, self._sum_stream)
