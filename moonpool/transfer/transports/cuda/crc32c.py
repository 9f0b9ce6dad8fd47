"""The tables with which a GPU takes CRC-32C (Castagnoli) of many pieces at once. Pure arithmetic on numpy arrays.

A CRC is linear: the register after n words is the exclusive or of what each word contributes, and a word contributes
its own bits advanced over the zero bytes that follow it. So NUM_LANES lanes take every NUM_LANES-th word: before each
of its words a lane advances what it has over one row of words (`row_tables`), and at the end over the words that are
left behind its last one (`lane_folds`). The exclusive or of all lanes is the CRC of the words with a register that
began as 0; leading zeros do not change it, so a piece of any number of words is filled up in front. `initial_value`
accounts for the register that begins, and ends, with all bits set. The kernel is in crc32c_kernel.py.

A linear map of 32 bits is an array of 32 columns: what each single bit becomes.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

NUM_LANES = 1024
WORD_NBYTES = 4
_POLYNOMIAL = 0x82F63B78  # reflected
_ALL_BITS = 0xFFFFFFFF


def apply_map(columns: Words, values: Words) -> Words:
    """Return the map of each value."""
    found = np.zeros_like(values)
    for bit in range(32):
        found ^= ((values >> np.uint32(bit)) & np.uint32(1)) * columns[bit]
    return found


@cache
def zero_advance(nbytes: int) -> Words:
    """Return the map that advances a register over `nbytes` zero bytes."""
    columns = np.uint32(1) << np.arange(32, dtype=np.uint32)
    power = _one_byte()
    while nbytes:
        if nbytes & 1:
            columns = apply_map(power, columns)
        power = apply_map(power, power)
        nbytes >>= 1
    return columns


def _one_byte() -> Words:
    columns = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for _ in range(8):
        columns = (columns >> np.uint32(1)) ^ (columns & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    return columns


@cache
def row_tables(num_lanes: int = NUM_LANES) -> Words:
    """Return [4, 256]: for each byte of a register, what it becomes over one row of words."""
    row = zero_advance(num_lanes * WORD_NBYTES)
    values = np.arange(256, dtype=np.uint32)
    return np.stack([apply_map(row, values << np.uint32(8 * byte)) for byte in range(4)])


@cache
def lane_folds(num_lanes: int = NUM_LANES) -> Words:
    """Return [32, num_lanes]: the columns of each lane's last advance, over its last word and those behind it."""
    word = zero_advance(WORD_NBYTES)
    folds = [word]  # from the last lane to the first: each has one word more behind it
    for _ in range(num_lanes - 1):
        folds.append(apply_map(word, folds[-1]))
    return np.stack(folds[::-1], axis=1)


@cache
def initial_value(nbytes: int) -> int:
    """Return what to exclusive-or to the lanes' sum of a piece of `nbytes`, to get its CRC."""
    return int(apply_map(zero_advance(nbytes), np.array([_ALL_BITS], np.uint32))[0]) ^ _ALL_BITS


def crc32c_by_lanes(words: Words, num_lanes: int = NUM_LANES) -> Words:
    """Return the CRC of each row of `words`, as the kernel computes it. For tests: this is slow."""
    num_pieces, num_words = words.shape
    num_rows = -(-num_words // num_lanes)
    filled = np.zeros((num_pieces, num_rows * num_lanes), np.uint32)
    filled[:, num_rows * num_lanes - num_words :] = words
    tables, lanes = row_tables(num_lanes), np.zeros((num_pieces, num_lanes), np.uint32)
    for row in filled.reshape(num_pieces, num_rows, num_lanes).swapaxes(0, 1):
        advanced = [tables[byte][(lanes >> np.uint32(8 * byte)) & np.uint32(255)] for byte in range(4)]
        lanes = np.bitwise_xor.reduce(advanced) ^ row
    sums = np.zeros_like(lanes)
    for bit, column in enumerate(lane_folds(num_lanes)):
        sums ^= ((lanes >> np.uint32(bit)) & np.uint32(1)) * column
    found: Words = np.bitwise_xor.reduce(sums, axis=1) ^ np.uint32(initial_value(num_words * WORD_NBYTES))
    return found
