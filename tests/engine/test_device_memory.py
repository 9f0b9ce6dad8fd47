"""A GPU's memory: what a worker takes beside its pages, and the share of pages that each worker gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import ConfigError, NoSpace
from moonpool.engine.config import ModelConfig, gpu_index
from moonpool.engine.device_memory import DeviceNeed, kv_share, require_kv_fits

LLAMA_8B = ModelConfig(
    architecture="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
    num_heads=32, num_kv_heads=8, head_dim=128, max_position=131_072, rms_norm_eps=1e-5, rope_theta=500_000.0,
)  # fmt: skip
GB = 1_000_000_000
NEED = DeviceNeed(weights_nbytes=16 * GB, step_nbytes=4 * GB, page_nbytes=8_388_608)


def need_of(**changes: int) -> DeviceNeed:
    settings = {"block_tokens": 64, "max_batch_tokens": 8192, "max_num_seqs": 32, **changes}
    return DeviceNeed.of(LLAMA_8B, dtype="bfloat16", **settings)


def test_an_8b_model_in_bfloat16() -> None:
    need = need_of()
    assert need.weights_nbytes == pytest.approx(16.06 * GB, rel=0.001)
    assert need.page_nbytes == 8_388_608
    assert 3 * GB < need.step_nbytes < 6 * GB
    assert need_of(max_batch_tokens=512).step_nbytes < need.step_nbytes


def test_workers_of_a_gpu_get_equal_shares() -> None:
    assert kv_share("cuda:0", 140 * GB, 2, NEED) == 47_500_000_000  # 95 % of 70 - 16 - 4 GB
    assert kv_share("cuda:0", 140 * GB, 1, NEED) == 114_000_000_000


@given(st.integers(0, 300 * GB), st.integers(1, 8))
def test_what_is_shared_out_fits(free_nbytes: int, num_workers: int) -> None:
    try:
        share = kv_share("cuda:0", free_nbytes, num_workers, NEED)
    except NoSpace:
        return
    assert share >= NEED.page_nbytes
    require_kv_fits("cuda:0", free_nbytes, num_workers, NEED, share)


def test_too_little_says_how_much_and_what_to_do() -> None:
    with pytest.raises(NoSpace, match=r"cuda:1 has 24 GB free; each of 2 workers takes 16 GB for weights and 4 GB"):
        kv_share("cuda:1", 24 * GB, 2, NEED)
    with pytest.raises(NoSpace, match=r"30 GB of KV pages \(--kv\) do not fit on cuda:0: 80 GB .*--kv 20000MB"):
        require_kv_fits("cuda:0", 80 * GB, 2, NEED, 30 * GB)
    with pytest.raises(NoSpace, match="use another GPU"):
        require_kv_fits("cuda:0", 10 * GB, 1, NEED, GB)


@pytest.mark.parametrize(("text", "index"), [("cpu", None), ("cuda", 0), ("cuda:0", 0), ("cuda:15", 15)])
def test_devices(text: str, index: int | None) -> None:
    assert gpu_index(text) == index


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:x", "cuda:01", "cuda:-1", "CUDA", "cpu:0", "cuda:0,cuda:1"])
def test_texts_that_name_no_device(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a device; write cpu, cuda or cuda:N"):
        gpu_index(text)
