"""KV memory: pieces tile it without gaps, and tensors over a buffer put bytes where the layout says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import ConfigError
from moonpool.engine.config import EngineConfig, KvDType
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.kv_tensor import KvMemory

small = st.integers(1, 5)


@given(small, small, small, st.integers(16, 40), small, st.sampled_from(["float32", "bfloat16", "float16"]))
def test_pieces_tile_the_memory(pages: int, layers: int, heads: int, tokens: int, dim: int, dtype: KvDType) -> None:
    layout = KvLayout(
        num_pages=pages, num_layers=layers, num_kv_heads=heads, block_tokens=tokens, head_dim=dim, dtype=dtype
    )
    end = 0
    for page in range(pages):
        assert layout.page(page) == (end, layout.page_nbytes)
        for layer in range(layers):
            assert layout.piece(page, layer) == (end, layout.piece_nbytes)
            end += layout.piece_nbytes
    assert end == layout.total_nbytes


def test_writes_land_where_the_layout_says_and_reads_find_them() -> None:
    layout = KvLayout(num_pages=4, num_layers=3, num_kv_heads=2, block_tokens=16, head_dim=8, dtype="float32")
    buffer = bytearray(layout.total_nbytes)
    kv = KvMemory(layout, buffer=memoryview(buffer))
    k, v = torch.randn(2, 5, 2, 8)
    pages, slots = np.array([2, 2, 0, 0, 0]), np.array([14, 15, 0, 1, 2])
    kv.write(1, torch.from_numpy(kv.token_index(pages, slots)), k, v)

    offset, nbytes = layout.piece(2, 1)
    piece = np.frombuffer(buffer, np.float32, nbytes // 4, offset).reshape(2, 2, 16, 8)  # K/V, head, token, dim
    assert np.array_equal(piece[0, :, 14:], k[:2].transpose(0, 1).numpy())
    assert np.array_equal(piece[1, :, 14:], v[:2].transpose(0, 1).numpy())

    found_k, found_v = kv.read(1, torch.from_numpy(kv.page_index(np.array([[2, 0]]))), 1)
    assert torch.equal(found_k[0, :, 14:19], k.transpose(0, 1))
    assert torch.equal(found_v[0, :, 14:19], v.transpose(0, 1))
    assert np.count_nonzero(np.frombuffer(buffer, np.float32)) == 2 * k.numel()


def test_clear_zeroes_only_its_pages() -> None:
    layout = KvLayout(num_pages=3, num_layers=1, num_kv_heads=1, block_tokens=16, head_dim=4, dtype="bfloat16")
    kv = KvMemory(layout)
    kv.tensor.fill_(1)
    kv.clear([1])
    assert kv.tensor.sum(dim=(1, 2, 3, 4, 5)).tolist() == [128, 0, 128]


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_pages": 0},
        {"block_tokens": 8},
        {"dtype": "int8"},
        {"device": "tpu"},
        {"threads": 0},
        {"kv_dtype": "float8_e4m3fn"},
        {"kv_dtype": "float8_e4m3fn", "device": "cuda"},
        {"kv_dtype": "bfloat16"},
    ],
)
def test_impossible_engine_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(**({"num_pages": 4} | wrong))  # type: ignore[arg-type]
