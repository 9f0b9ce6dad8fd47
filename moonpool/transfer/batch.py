"""What is asked of the engine and what became of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from moonpool.base.clock import Deadline
from moonpool.base.errors import DeadlineExceeded, MoonpoolError
from moonpool.transfer.buffers import Buffer, as_bytes_views, cut, total_nbytes
from moonpool.transfer.paths import MultiPathRemote
from moonpool.transfer.plan import Slice, cut_batch
from moonpool.transfer.transports.base import RemoteSegment


class TransferOp(Enum):
    READ = "read"
    WRITE = "write"


class TransferStatus(Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class TransferRequest:
    """READ fills the buffers with the remote bytes from `offset` on; WRITE puts theirs there."""

    op: TransferOp
    remote: RemoteSegment
    offset: int
    buffers: Sequence[Buffer]
    generation: int = 0


class Batch:
    """Requests on their way. Their buffers are the engine's until done(), after a failed wait() too."""

    def __init__(self, requests: Sequence[TransferRequest], *, timeout_s: float, slice_nbytes: int) -> None:
        self._requests = list(requests)
        self._timeout_s = timeout_s
        self._deadline = Deadline(timeout_s)
        self._views = [as_bytes_views(r.buffers, writable=r.op is TransferOp.READ) for r in requests]
        sizes = [total_nbytes(views) for views in self._views]
        self.slices = cut_batch(sizes, [_limit(r, n, slice_nbytes) for r, n in zip(requests, sizes, strict=True)])
        self._slices_left = [0] * len(self._requests)
        for part in self.slices:
            self._slices_left[part.request] += 1
        self._errors: list[MoonpoolError | None] = [None] * len(self._requests)
        self._requests_left = len(self._requests)
        self._first_error: MoonpoolError | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        if not self._requests:
            self._done.set()

    def __len__(self) -> int:
        return len(self._requests)

    def done(self) -> bool:
        """True when every request has succeeded or failed and no buffer is touched any more."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when all is done; raises the first error there was. DeadlineExceeded when it takes longer than
        `timeout_s` (None: the batch's own deadline ends it); the transfers go on then.
        """
        if not self._done.wait(timeout_s):
            raise DeadlineExceeded(f"the batch is not done after {timeout_s:g} s")
        if self._first_error is not None:
            raise self._first_error

    def status(self, request: int) -> TransferStatus:
        if self._slices_left[request]:
            return TransferStatus.PENDING
        return TransferStatus.DONE if self._errors[request] is None else TransferStatus.FAILED

    def error(self, request: int) -> MoonpoolError | None:
        """Why this request failed; None while it is pending or when it succeeded."""
        return self._errors[request] if not self._slices_left[request] else None

    def run(self, part: Slice) -> None:
        """Executes one slice, for the engine. Once a slice has failed the rest of its request is skipped."""
        error = self._errors[part.request]
        if error is None:
            try:
                self._transfer(part)
            except MoonpoolError as caught:
                error = caught
        self.settle(part, error)

    def settle(self, part: Slice, error: MoonpoolError | None) -> None:
        """Records a slice's end, for the engine."""
        with self._lock:
            if error is not None and self._errors[part.request] is None:
                self._errors[part.request] = error
                self._first_error = self._first_error or error
            self._slices_left[part.request] -= 1
            if self._slices_left[part.request] == 0:
                self._requests_left -= 1
            if self._requests_left == 0:
                self._done.set()

    def _transfer(self, part: Slice) -> None:
        request = self._requests[part.request]
        remaining_s = self._deadline.remaining_s()
        if remaining_s <= 0.0:
            raise DeadlineExceeded(f"the batch was not done within {self._timeout_s:g} s")
        views = cut(self._views[part.request], part.start, part.nbytes)
        offset = request.offset + part.start
        if request.op is TransferOp.READ:
            request.remote.read_into(offset, views, timeout_s=remaining_s)
        else:
            request.remote.write_from(offset, views, generation=request.generation, timeout_s=remaining_s)


def _limit(request: TransferRequest, nbytes: int, slice_nbytes: int) -> int:
    """A remote of several paths cuts by itself, and better when it sees the whole."""
    return max(nbytes, slice_nbytes) if isinstance(request.remote, MultiPathRemote) else slice_nbytes
