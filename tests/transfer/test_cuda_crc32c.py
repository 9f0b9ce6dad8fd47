"""CRC-32C by lanes: the tables against google_crc32c, and the kernel in Triton's interpreter where Triton is."""

from __future__ import annotations

import os
import subprocess
import sys

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.transfer.transports.cuda.crc32c import apply_map, crc32c_by_lanes, initial_value, zero_advance


def sums_of(words: np.ndarray) -> list[int]:
    return [google_crc32c.value(piece.tobytes()) for piece in words]


@given(st.integers(1, 300), st.sampled_from([1, 2, 8, 64]), st.integers(0, 99))
def test_lanes_give_the_crc_of_any_number_of_words(num_words: int, num_lanes: int, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 2**32, (3, num_words), dtype=np.uint32)
    assert crc32c_by_lanes(words, num_lanes).tolist() == sums_of(words)


@pytest.mark.parametrize("num_words", [1, 1023, 1024, 1025, 5000])
def test_the_kernel_s_number_of_lanes(num_words: int) -> None:
    words = np.random.default_rng(num_words).integers(0, 2**32, (2, num_words), dtype=np.uint32)
    assert crc32c_by_lanes(words).tolist() == sums_of(words)


@given(st.integers(0, 5000), st.integers(0, 5000))
@settings(max_examples=30)
def test_advancing_is_additive(first: int, second: int) -> None:
    assert np.array_equal(apply_map(zero_advance(first), zero_advance(second)), zero_advance(first + second))


@pytest.mark.parametrize("nbytes", [0, 4, 4096])
def test_zeros_have_the_initial_value(nbytes: int) -> None:
    assert initial_value(nbytes) == google_crc32c.value(bytes(nbytes))


_KERNEL = """
import google_crc32c, numpy as np, torch
from moonpool.transfer.transports.cuda.crc32c import initial_value
from moonpool.transfer.transports.cuda.crc32c_kernel import host_tables, launch
for piece_words, num_layers in ((64, 3), (1025, 2), (2048, 2)):
    page_words = piece_words * num_layers
    words = np.random.default_rng(1).integers(0, 2**32, (4, page_words), dtype=np.uint32)
    memory, tables = torch.from_numpy(words.view(np.int32)), tuple(torch.from_numpy(each) for each in host_tables())
    for layers in (range(num_layers), range(1, 2)):
        sums = torch.zeros(2 * len(layers), dtype=torch.int32)
        launch(memory, torch.tensor([3, 1]), sums, tables, layers, 4 * page_words, 4 * piece_words)
        found = sums.numpy().view(np.uint32) ^ np.uint32(initial_value(4 * piece_words))
        pieces = words.reshape(4, num_layers, piece_words)
        wanted = [google_crc32c.value(pieces[page, layer].tobytes()) for page in (3, 1) for layer in layers]
        assert found.tolist() == wanted, (found, wanted)
print("equal")
"""


def test_the_kernel_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", _KERNEL],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr
