"""CRC-32C of pieces where they lie, on the GPU: the Triton kernel for the tables of crc32c.py.

Imports Triton, so it is imported only where a GPU is used. Tensors come from the caller, and the kernel runs on the
caller's current stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

from moonpool.transfer.transports.cuda.crc32c import NUM_LANES, WORD_NBYTES, Words, lane_folds, row_tables

_NUM_WARPS = 8


@triton.jit(do_not_specialize=["first_layer", "num_layers", "num_rows"])  # type: ignore[untyped-decorator,unused-ignore]
def _crc32c_pieces(  # type: ignore[no-untyped-def]
    memory, pages, sums, tables, folds, first_layer, num_layers, page_words, piece_words, num_rows, LANES: tl.constexpr
):
    """One program per piece: layer `first_layer + p % num_layers` of page `pages[p // num_layers]`."""
    program = tl.program_id(0)
    page = tl.load(pages + program // num_layers)
    layer = first_layer + program % num_layers
    lane = tl.arange(0, LANES)
    at = lane - (num_rows * LANES - piece_words)  # the first row is filled up with zeros in front
    start = memory + page * page_words + layer.to(tl.int64) * piece_words
    lanes = tl.zeros((LANES,), tl.uint32)
    for row in range(num_rows):
        word = tl.load(start + at + row * LANES, mask=at + row * LANES >= 0, other=0).to(tl.uint32, bitcast=True)
        a = tl.load(tables + (lanes & 255)).to(tl.uint32, bitcast=True)
        b = tl.load(tables + 256 + ((lanes >> 8) & 255)).to(tl.uint32, bitcast=True)
        c = tl.load(tables + 512 + ((lanes >> 16) & 255)).to(tl.uint32, bitcast=True)
        d = tl.load(tables + 768 + (lanes >> 24)).to(tl.uint32, bitcast=True)
        lanes = a ^ b ^ c ^ d ^ word
    folded = tl.zeros((LANES,), tl.uint32)
    for bit in range(32):
        column = tl.load(folds + bit * LANES + lane).to(tl.uint32, bitcast=True)
        folded = folded ^ (((lanes >> bit) & 1) * column)
    tl.store(sums + program, tl.xor_sum(folded, 0).to(tl.int32, bitcast=True))


def host_tables() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the two arrays of int32 that launch() needs on the device."""
    return _as_int32(row_tables()), _as_int32(lane_folds())


def _as_int32(words: Words) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(words).reshape(-1).view(np.int32)


def launch(
    memory: Any, pages: Any, sums: Any, tables: tuple[Any, Any], layers: range, page_nbytes: int, piece_nbytes: int
) -> None:
    """Start the kernel. `memory` is a tensor of int32 over all pages, `pages` one of int64; the value of each layer of
    each page is put into `sums` (int32), and is the CRC once it is combined with initial_value(piece_nbytes).
    """
    assert piece_nbytes % WORD_NBYTES == 0 == page_nbytes % WORD_NBYTES, "pieces are of whole words"
    piece_words = piece_nbytes // WORD_NBYTES
    _crc32c_pieces[(len(pages) * len(layers),)](
        memory,
        pages,
        sums,
        *tables,
        layers.start,
        len(layers),
        page_nbytes // WORD_NBYTES,
        piece_words,
        -(-piece_words // NUM_LANES),
        NUM_LANES,
        num_warps=_NUM_WARPS,
    )
