"""A worker's KV memory as tensors: the pages, and the two flat views through which steps write and read them.

On the CPU the tensor is a view of a buffer that the caller owns (in a worker a mapped memfd, so that other processes
reach the same bytes); on a GPU it is device memory. Offsets are those of kv_memory.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from moonpool.base.errors import NoSpace
from moonpool.engine.config import Device
from moonpool.engine.kv_memory import KvLayout

Rows = npt.NDArray[np.int64]


class KvMemory:
    """Pages of KV. `tensor` is [page, layer, 2, kv head, token, dim].

    One index serves all layers: a row index is made for layer 0's K, and the view for another layer (or for V) is the
    same memory with a later start.

    On a GPU, steps are computed on `stream`; copies of pages on other streams wait for its events. None on the CPU.
    """

    def __init__(self, layout: KvLayout, *, device: Device = "cpu", buffer: memoryview | None = None) -> None:
        """Allocate zeroed memory, or use `buffer`, which must be writable and outlive this object."""
        self.layout = layout
        dtype: torch.dtype = getattr(torch, layout.dtype)
        if buffer is None:
            self.tensor = _own_memory(layout, dtype, device)
        else:
            assert device == "cpu", "a buffer is for the CPU only"
            assert buffer.nbytes >= layout.total_nbytes, "the buffer is smaller than its pages"
            count = layout.total_nbytes // dtype.itemsize
            self.tensor = torch.frombuffer(buffer, dtype=dtype, count=count).view(layout.shape)
        self.stream = _compute_stream(self.tensor.device) if self.tensor.is_cuda else None
        self._token_rows = self.tensor.view(-1, layout.head_dim)
        self._page_rows = _plain(self.tensor).view(-1, layout.block_tokens * layout.head_dim)

    def token_index(self, pages: Rows, slots: Rows) -> Rows:
        """Return the rows for K of tokens, for `write`: [tokens * kv heads]."""
        heads = np.arange(self.layout.num_kv_heads)
        rows = (self._first_row(pages)[:, None] + heads) * self.layout.block_tokens + slots[:, None]
        return rows.reshape(-1)

    def page_index(self, pages: Rows) -> Rows:
        """Return the rows of K of whole pages, for `read`: [sequences, table] -> [sequences * kv heads * table]."""
        heads = np.arange(self.layout.num_kv_heads)
        return (self._first_row(pages)[:, None, :] + heads[:, None]).reshape(-1)

    def write(self, layer: int, index: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [tokens, kv heads, dim] to the rows of `token_index`."""
        for which, values in enumerate((k, v)):
            start = self._plane(layer, which) * self.layout.block_tokens
            self._token_rows[start:].index_copy_(0, index, values.reshape(-1, self.layout.head_dim))

    def read(self, layer: int, index: torch.Tensor, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of `page_index` as new tensors, each [sequences, kv heads, table * block_tokens, dim]."""
        shape = (num_sequences, self.layout.num_kv_heads, -1, self.layout.head_dim)
        rows = (self._page_rows[self._plane(layer, which) :].index_select(0, index) for which in (0, 1))
        k, v = (each.view(self.tensor.dtype).view(shape) for each in rows)
        return k, v

    def clear(self, pages: list[int]) -> None:
        """Zero pages, so that bytes of an earlier sequence or of a failed transfer cannot reach attention."""
        for page in pages:
            _plain(self.tensor[page]).zero_()

    def _plane(self, layer: int, which: int) -> int:
        return (layer * 2 + which) * self.layout.num_kv_heads

    def _first_row(self, pages: Rows) -> Rows:
        return pages * (self.layout.num_layers * 2 * self.layout.num_kv_heads)


def _compute_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that starts after what was enqueued so far (the memory was zeroed, the weights are loaded)."""
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]  # before copies and checksums
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a type that torch can copy: it has few operations on 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _own_memory(layout: KvLayout, dtype: torch.dtype, device: Device) -> torch.Tensor:
    plain = torch.uint8 if dtype.itemsize == 1 else dtype
    try:
        return torch.zeros(layout.shape, dtype=plain, device=device).view(dtype)
    except RuntimeError as error:  # out of memory, on either device
        raise NoSpace(f"no memory for {layout.total_nbytes} bytes of KV: {error}") from error
