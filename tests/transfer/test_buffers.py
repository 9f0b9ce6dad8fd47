from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import InvalidInput
from moonpool.transfer.memory.buffers import as_bytes_view, as_bytes_views, cut, total_nbytes


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(24),
        memoryview(bytearray(24)),
        np.zeros((2, 3), dtype=np.float32),
        np.zeros(12, dtype=np.float16),
        np.zeros(3, dtype=[("a", "<u4"), ("b", "<f4")]),
        np.zeros(24, dtype=np.int8),
        np.asfortranarray(np.zeros((24, 1), dtype=np.uint8)),
    ],
)
def test_every_kind_of_memory_becomes_plain_bytes(buffer: object) -> None:
    view = as_bytes_view(buffer, writable=True)  # type: ignore[arg-type]
    assert (view.format, view.ndim, view.nbytes, view.readonly) == ("B", 1, 24, False)
    view[0] = 1
    assert memoryview(buffer).tobytes()[0] == 1  # type: ignore[arg-type]


def test_empty_and_mapped_memory() -> None:
    assert as_bytes_view(np.zeros((0, 5), dtype=np.float32), writable=True).nbytes == 0
    with mmap.mmap(-1, 4096) as mapped:
        view = as_bytes_view(mapped, writable=True)
        assert view.nbytes == 4096
        view.release()


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match="read-only"):
        as_bytes_view(b"abc", writable=True)
    with pytest.raises(InvalidInput, match="contiguous"):
        as_bytes_view(np.zeros((4, 4))[:, :2], writable=False)
    with pytest.raises(InvalidInput, match="buffer protocol"):
        as_bytes_view(3, writable=False)  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=9), max_size=8), st.data())
def test_cut_equals_slicing_the_concatenation(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    start = data.draw(st.integers(0, len(whole)))
    nbytes = data.draw(st.integers(0, len(whole) - start))
    views = as_bytes_views(pieces, writable=False)
    assert total_nbytes(views) == len(whole)
    parts = cut(views, start, nbytes)
    assert b"".join(parts) == whole[start : start + nbytes]
    assert all(part.nbytes for part in parts)
