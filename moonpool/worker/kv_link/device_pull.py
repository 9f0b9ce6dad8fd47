"""Pool -> pages of a GPU: the device copies, and verifies what has arrived.

Blocks come straight from page-locked memory of a node (transfer/transports/cuda/pinning.py), each with one copy where
all layers are wanted at once, layer by layer where the step computes meanwhile. What is not page-locked yet goes
through pinned slots; what is not in memory of this machine is read into main memory, verified there, and then copied.
Behind the copies of a bundle the device takes the checksums of what lies in the pages now, and the host compares them
with the headers. A block that is wrong there is read once more, by way of main memory, where a bad replica is found and
reported. If the engine was told of it before, the step may have used it, and the good prefix ends with the block before
it.

The host starts copies and never waits for one before it has started the next few; a layer's event tells the engine's
stream when its pieces are there. Whole blocks are passed on, to be handed over, bundle by bundle as they are verified,
while later ones still come; layers when their copies are started, because a step computes with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import Corrupt, MoonpoolError
from moonpool.store import Store
from moonpool.store.client.read_session import ReadSession
from moonpool.transfer.memory.buffers import DeviceSpan
from moonpool.transfer.transports.base import RemoteSegment
from moonpool.transfer.transports.cuda.pinning import DeviceCopies, PinnedSegment
from moonpool.transfer.transports.mapped import MappedRemote
from moonpool.worker.kv_link.device_pieces import DevicePieces, PendingSums, PullLane
from moonpool.worker.kv_link.pieces import Checksums, ReadyPoint
from moonpool.worker.kv_link.pull_job import PullJob, StoredBlocks

_BUNDLE_BLOCKS = 32  # opened and copied together, where whole blocks are copied
_FIRST_BLOCKS = 8  # of the first bundle: the link waits for it
_NUM_UNDER_WAY = 8  # bundles of one job
_STAGED_NBYTES = 32 * 1024 * 1024  # of main memory, for blocks that the device cannot copy itself
_MIN_OVERLAP = 0.25
_TIMEOUT_S = 10.0
_Numbers: TypeAlias = NDArray[np.int64]


def goes_by_layer(pull_s: float, compute_s: float) -> bool:
    """Return whether to pull layer by layer: the step may then compute for `compute_s` while later layers come. Small
    copies cost some of the link's speed, so it takes a computation that is worth it.
    """
    return compute_s >= _MIN_OVERLAP * pull_s


class _Bundle(NamedTuple):
    """Pieces under way: these layers of these blocks, in place once `ready` is reached. `held` are the segments that
    they are copied from.
    """

    blocks: range
    layers: range
    ready: ReadyPoint
    sums: PendingSums
    held: list[PinnedSegment]


class DevicePull:
    """The blocks of one job. For one thread."""

    def __init__(
        self,
        job: PullJob,
        blocks: StoredBlocks,
        store: Store,
        memory: DevicePieces,
        lane: PullLane,
        *,
        by_layer: bool,
    ) -> None:
        self._job, self._blocks, self._store = job, blocks, store
        self._memory, self._lane, self._by_layer = memory, lane, by_layer
        self._pages = job.admitted.pages
        self._page_numbers = np.array(self._pages, np.int64)
        self._places: dict[RemoteSegment, tuple[_Numbers, _Numbers]] | None = None
        self._sessions: list[ReadSession] = []
        self._under_way: deque[_Bundle] = deque()
        self._num_good = len(blocks)  # leading blocks of which no piece has failed so far
        self._failure: MoonpoolError | None = None  # of the first block that is not whole
        self._num_announced = 0  # layers that the engine may use
        self._after: ReadyPoint | None = None  # before it, earlier steps may use the pages

    def run(self, after: ReadyPoint | None) -> tuple[list[ReadSession], MoonpoolError | None]:
        """Fill the pages, once `after` is reached. Return the sessions whose blocks are whole, verified in the pages
        and still valid, and why not all are. Nothing is written to the pages when this has returned or raised.
        """
        if not len(self._blocks):
            return [], self._blocks.failure
        self._after = after
        self._lane.begin(self._pages[: len(self._blocks)], after)
        try:
            if self._by_layer:
                self._pull_layers()
            else:
                self._pull_blocks()
            while self._under_way and not self._job.left_behind:
                self._finish_first()
        finally:
            self._lane.copies.drain()
            for bundle in self._under_way:
                _release(bundle.held)
        if self._job.left_behind:
            return [], self._failure
        return self._blocks.finish(self._sessions[: self._num_good], self._failure)

    def _pull_blocks(self) -> None:
        """Start all copies, block by block; the layers are ready together."""
        layers, number = self._job.layers, _FIRST_BLOCKS
        while (opened := self._blocks.open(number)) and not self._job.left_behind:
            first = len(self._sessions)
            self._sessions += opened
            self._start(range(first, len(self._sessions)), layers)
            self._make_room()
            number = min(2 * number, _BUNDLE_BLOCKS)
        self._num_good = min(self._num_good, len(self._sessions))
        ready, self._num_announced = self._lane.mark(), layers.stop
        self._job.layers_done(layers, ready)

    def _pull_layers(self) -> None:
        self._sessions = self._blocks.open(len(self._blocks))
        self._num_good = len(self._sessions)
        for layer in self._job.layers:
            if self._num_good and not self._job.left_behind:
                self._start(range(self._num_good), range(layer, layer + 1))
                self._make_room()
            self._num_announced, ready = layer + 1, self._lane.mark()
            self._job.pass_on(range(layer, layer + 1), range(self._num_good), ready)
            self._job.layers_done(range(layer, layer + 1), ready)

    def _start(self, blocks: range, layers: range) -> None:
        """Start the copies of these layers of the blocks, and the checksums behind them."""
        held: list[PinnedSegment] = []
        try:
            self._copy_staged(self._start_direct(blocks, layers, held), layers)
            ready = self._lane.mark()
            sums = self._lane.start_checksums(blocks.start, blocks.stop, layers)
        except BaseException:
            self._lane.copies.drain()
            _release(held)
            raise
        self._under_way.append(_Bundle(blocks, layers, ready, sums, held))

    def _start_direct(self, blocks: range, layers: range, held: list[PinnedSegment]) -> list[int]:
        """Start copies of the blocks that lie in memory of this machine. Return the others."""
        rest: list[int] = []
        for remote, (members, offsets) in self._places_of(blocks).items():
            keep = members < blocks.stop
            some, at = members[keep], offsets[keep] + self._memory.layout.piece_nbytes * layers.start
            try:
                if not isinstance(remote, MappedRemote):
                    rest += some.tolist()
                elif len(some):
                    self._start_mapped(remote, some, at, layers, held)
            except MoonpoolError:  # its owner is gone: the other way tries other replicas
                rest += some.tolist()
        return sorted(rest)

    def _places_of(self, blocks: range) -> dict[RemoteSegment, tuple[_Numbers, _Numbers]]:
        """Return by segment the blocks that lie there, and the offset of each block's first piece. What was found for
        one layer is used for the next ones.
        """
        if self._places is None or not self._by_layer:
            found: dict[RemoteSegment, list[tuple[int, int]]] = {}
            for block in blocks:
                remote, offset = self._sessions[block].place()
                found.setdefault(remote, []).append((block, offset))
            arrays = {remote: np.array(places, np.int64).T for remote, places in found.items()}
            self._places = {remote: (array[0], array[1]) for remote, array in arrays.items()}
        return self._places

    def _start_mapped(
        self, remote: MappedRemote, blocks: _Numbers, offsets: _Numbers, layers: range, held: list[PinnedSegment]
    ) -> None:
        """Start copies from these offsets of a segment of this machine. Those from memory that is not page-locked are
        over when this returns.
        """
        pinning, nbytes = self._store.directory.engine.pinning, self._memory.layout.piece_nbytes * len(layers)
        segment = None if pinning is None else pinning.add(remote, _TIMEOUT_S)
        direct = offsets + nbytes <= (0 if segment is None else segment.pinned_nbytes)
        if segment is not None and direct.any():
            segment.begin_copies()
            held.append(segment)
            addresses = self._memory.addresses(self._page_numbers[blocks[direct]], layers.start)
            sizes = np.full(len(addresses), nbytes, np.int64)
            self._lane.copies.start_reads(segment, DeviceCopies(offsets[direct], addresses, sizes))
        if not direct.all():
            self._wait_for_pages()
            slow = zip(offsets[~direct].tolist(), blocks[~direct].tolist(), strict=True)
            remote.read_many([(offset, self._span(block, layers)) for offset, block in slow], timeout_s=_TIMEOUT_S)

    def _span(self, block: int, layers: range) -> DeviceSpan:
        return self._memory.memory(self._pages[block], layers)

    def _wait_for_pages(self) -> None:
        """Copies that do not run on the lane's stream wait here for earlier steps that use the pages."""
        if self._after is not None:
            self._after.synchronize()

    def _copy_staged(self, blocks: Sequence[int], layers: range) -> None:
        """Copy blocks by way of main memory; those that cannot be read end the good prefix."""
        step = max(1, _STAGED_NBYTES // (self._memory.layout.piece_nbytes * len(layers)))
        for first in range(0, len(blocks), step):
            some = blocks[first : first + step]
            for block, error in zip(some, self._read_staged(some, layers), strict=True):
                if error is not None:
                    self._end_prefix(block, error)

    def _read_staged(self, blocks: Sequence[int], layers: range) -> list[MoonpoolError | None]:
        """Read the layers of these blocks into main memory, where they are verified, and copy them to their pages.
        Return the error of each block.
        """
        piece_nbytes = self._memory.layout.piece_nbytes
        memory = memoryview(bytearray(len(blocks) * len(layers) * piece_nbytes))
        views = [memory[at : at + piece_nbytes] for at in range(0, memory.nbytes, piece_nbytes)]
        places = [(self._sessions[block], layer) for block in blocks for layer in layers]
        outcomes = self._store.piece_reads.read(
            [(session, layer, view) for (session, layer), view in zip(places, views, strict=True)]
        )
        errors = [
            next((each for each in outcomes[at : at + len(layers)] if each is not None), None)
            for at in range(0, len(outcomes), len(layers))
        ]
        nbytes = len(layers) * piece_nbytes
        right = [at for at in range(len(blocks)) if errors[at] is None]
        self._wait_for_pages()
        self._memory.fill(
            [self._pages[blocks[at]] for at in right],
            layers,
            [memory[at * nbytes : (at + 1) * nbytes] for at in right],
            _TIMEOUT_S,
        )
        return errors

    def _make_room(self) -> None:
        while len(self._under_way) >= _NUM_UNDER_WAY:
            self._finish_first()

    def _finish_first(self) -> None:
        """Wait for the oldest bundle and compare its checksums with the headers."""
        blocks, layers, ready, sums, held = self._under_way[0]
        found = sums.wait()
        self._under_way.popleft()
        _release(held)
        wrong = [block for block in self._wrong_blocks(blocks, layers, found) if block < self._num_good]
        if wrong:
            self._store.piece_reads.count(damaged=len(wrong))
            self._read_again(wrong, layers)
        good = range(blocks.start, min(blocks.stop, self._num_good))
        self._count(good, layers)
        if not self._by_layer:
            self._job.pass_on(layers, good, ready)

    def _wrong_blocks(self, blocks: range, layers: range, found: Checksums) -> list[int]:
        """Return the blocks of which a piece does not have the checksum that its header states."""
        stated = found.copy()
        for row, block in enumerate(blocks):
            checksums = self._sessions[block].checksums
            if checksums is not None:
                stated[row] = checksums[layers.start : layers.stop]
        return [blocks[row] for row in np.flatnonzero((stated != found).any(axis=1)).tolist()]

    def _read_again(self, blocks: Sequence[int], layers: range) -> None:
        """Read blocks once more that were wrong in their pages. They are good only if the engine has not used them."""
        for block in blocks:
            (error,) = self._read_staged([block], layers)
            if error is None and layers.start < self._num_announced:
                error = Corrupt(f"block {block} was damaged on its way to the GPU")
            if error is None:
                found = self._memory.checksums([self._pages[block]], layers)
                if self._wrong_blocks(range(block, block + 1), layers, found):
                    error = Corrupt(f"block {block} does not arrive as it is stored: the GPU or its bus is faulty")
            if error is not None:
                self._end_prefix(block, error)
                return

    def _end_prefix(self, block: int, error: MoonpoolError) -> None:
        if block < self._num_good:
            self._num_good, self._failure = block, error

    def _count(self, blocks: range, layers: range) -> None:
        nbytes = self._memory.layout.piece_nbytes * len(layers)
        self._store.piece_reads.count(nbytes=nbytes * len(blocks))
        for block in blocks:
            self._job.moved(nbytes, self._sessions[block].is_on_disk)


def _release(segments: Sequence[PinnedSegment]) -> None:
    for segment in segments:
        segment.end_copies()
