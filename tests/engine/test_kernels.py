"""The Triton kernels against plain torch: on a GPU with `-m gpu`, elsewhere in Triton's interpreter if it is here."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="triton comes with torch's CUDA builds", exc_type=ImportError)

from moonpool.engine.config import ModelConfig  # noqa: E402
from moonpool.engine.cuda_ops import CudaOps  # noqa: E402
from moonpool.engine.device_counts import DeviceCounts  # noqa: E402
from moonpool.engine.kernels.attention import Tiles, attend_tiles, join_parts  # noqa: E402
from moonpool.engine.kernels.gemv import gemv  # noqa: E402
from moonpool.engine.kernels.host_memory import deliver, fetch  # noqa: E402
from moonpool.engine.kernels.penalties import bar_tokens  # noqa: E402
from moonpool.engine.kernels.pointwise import add_norm, rotate_and_write, silu_mul  # noqa: E402
from moonpool.engine.kernels.sampling import draw_tokens  # noqa: E402
from moonpool.engine.kv_memory import KvLayout  # noqa: E402
from moonpool.engine.kv_tensor import KvMemory  # noqa: E402
from moonpool.engine.llama import LlamaModel  # noqa: E402
from moonpool.engine.ops import LayerOps, TorchOps, rotate  # noqa: E402
from moonpool.engine.runner import Runner  # noqa: E402
from moonpool.engine.sampler import HostAdjuster, SampledToken, SampleRow, sample  # noqa: E402
from moonpool.engine.sequence import Chunk, SamplingParams  # noqa: E402
from moonpool.engine.weights import random_weights  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_GPU else []
DEVICE = "cuda" if ON_GPU else "cpu"


def layout(block_tokens: int = 16, kv_heads: int = 2, dim: int = 32) -> KvLayout:
    return KvLayout(
        num_pages=12, num_layers=2, num_kv_heads=kv_heads, block_tokens=block_tokens, head_dim=dim, dtype="float32"
    )


def pages_of(shape: KvLayout) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape.shape, generator=generator).to(DEVICE)


def int32(values: list[int] | list[list[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def expected(q: torch.Tensor, kv: torch.Tensor, layer: int, pages: list[int], end: int) -> torch.Tensor:
    """Attention of queries at the last positions before `end`: [tokens, heads, dim]."""
    tokens, heads, dim = q.shape
    k, v = (
        torch.cat([kv[page, layer, which] for page in pages], dim=1)[:, :end].repeat_interleave(heads // kv.shape[3], 0)
        for which in (0, 1)
    )
    scores = torch.einsum("thd,hkd->htk", q, k) * dim**-0.5
    seen = torch.arange(end, device=DEVICE) <= torch.arange(end - tokens, end, device=DEVICE)[:, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("htk,hkd->thd", weights, v)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("block_tokens", "heads", "kv_heads", "dim"), [(16, 4, 2, 32), (64, 6, 2, 16), (24, 3, 1, 24), (16, 7, 1, 64)]
)
def test_decode_attends_to_each_sequence_up_to_its_end(
    splits: int, block_tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    shape = layout(block_tokens, kv_heads, dim)
    kv = pages_of(shape)
    tables = [[3, 1, 4, 5], [2, 6, 7, 0], [9, 8, 0, 0]]
    ends = [4 * block_tokens - 3, 1, 0]  # the last one is padding
    for table, end in zip(tables, ends, strict=True):
        for block, page in enumerate(table[: -(-end // block_tokens)]):
            kv[page, :, :, :, max(0, end - block * block_tokens) :] = float("nan")  # stale bytes behind the end
    q = torch.randn(3, heads, dim, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    tiles = Tiles(int32([0, 1, 2]), int32(ends), int32([1, 1, 1]), int32([0, 1, 2]), int32(tables), 1, splits)
    found = torch.full_like(q, float("nan"))
    attend_tiles(q, kv, shape, 1, tiles, found)
    for row in (0, 1):
        torch.testing.assert_close(found[row : row + 1], expected(q[row : row + 1], kv, 1, tables[row], ends[row]))
    assert found[2].abs().max() == 0


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_a_chunk_sees_its_past_and_itself(splits: int) -> None:
    shape = layout()
    kv, start, length, tile_tokens = pages_of(shape), 21, 30, 8
    q = torch.randn(length, 4, 32, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    rows = list(range(0, length, tile_tokens))
    counts = [min(tile_tokens, length - row) for row in rows]
    ends = [start + row + count for row, count in zip(rows, counts, strict=True)]
    tiles = Tiles(
        int32(rows), int32(ends), int32(counts), int32([0] * len(rows)), int32([[3, 1, 4, 5]]), tile_tokens, splits
    )
    found = torch.empty_like(q)
    attend_tiles(q, kv, shape, 0, tiles, found)
    torch.testing.assert_close(found, expected(q, kv, 0, [3, 1, 4, 5], start + length))


def test_two_parts_join_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(3, n, 16, generator=generator).to(DEVICE) for n in (5, 11, 11))

    def part(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ k[:, keys].transpose(1, 2)
        return scores.softmax(-1) @ v[:, keys], scores.logsumexp(-1)

    joined = join_parts(*part(slice(0, 7)), *part(slice(7, 11)))
    torch.testing.assert_close(joined, part(slice(0, 11))[0].transpose(0, 1))


@pytest.mark.parametrize("with_delta", [False, True])
def test_add_norm(with_delta: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    x, delta = (torch.randn(3, 48, generator=generator).to(DEVICE) for _ in range(2))
    weight = torch.rand(48, generator=generator).to(DEVICE)
    summed = x + delta if with_delta else x.clone()
    found = add_norm(x, delta if with_delta else None, weight, 1e-5)
    torch.testing.assert_close(found, torch.nn.functional.rms_norm(summed, (48,), weight, 1e-5))
    torch.testing.assert_close(x, summed)


@pytest.mark.parametrize("with_norm", [False, True])
def test_rotate_and_write(with_norm: bool) -> None:
    shape, heads, rows = layout(kv_heads=3, dim=24), 6, 4
    kv, generator = pages_of(shape), torch.Generator().manual_seed(6)
    before = kv.clone()
    qkv = torch.randn(rows, (heads + 6) * 24, generator=generator).to(DEVICE)
    angles = torch.randn(rows, 12, generator=generator).to(DEVICE)
    one, other = (torch.rand(24, generator=generator).to(DEVICE) for _ in range(2)) if with_norm else (None, None)
    norms = None if one is None or other is None else (one, other)
    slots = int32([5 * 16 + 3, 5 * 16 + 4, -1, 0])
    query, key = rotate_and_write(
        qkv, norms, (angles.cos(), angles.sin()), kv, shape, 1, slots, num_heads=heads, eps=1e-5, keep_key=True
    )
    split = qkv.view(rows, heads + 6, 24)
    q, k, v = split[:, :heads], split[:, heads : heads + 3], split[:, heads + 3 :]
    if norms is not None:
        q, k = (torch.nn.functional.rms_norm(x, (24,), w, 1e-5) for x, w in zip((q, k), norms, strict=True))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    torch.testing.assert_close(query, rotate(q, cos, sin))
    torch.testing.assert_close(key, rotate(k, cos, sin))
    for row, (page, place) in ((0, (5, 3)), (1, (5, 4)), (3, (0, 0))):
        before[page, 1, 0, :, place] = rotate(k, cos, sin)[row]
        before[page, 1, 1, :, place] = v[row]
    torch.testing.assert_close(kv, before)


def test_silu_mul() -> None:
    gate_up = torch.randn(3, 2 * 40, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(silu_mul(gate_up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("biased", [False, True])
def test_gemv(biased: bool) -> None:
    generator = torch.Generator().manual_seed(8)
    vector, matrix = torch.randn(1, 1100, generator=generator).to(DEVICE), torch.randn(37, 1100, generator=generator)
    bias = torch.randn(37, generator=generator).to(DEVICE) if biased else None
    matrix = matrix.to(DEVICE)
    torch.testing.assert_close(
        gemv(vector, matrix, bias), torch.nn.functional.linear(vector, matrix, bias), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("qk_norm", [False, True])
def test_steps_of_the_whole_model_equal_those_in_plain_torch(qk_norm: bool) -> None:
    """Chunks with and without a past, several sequences, decode rows among them."""
    model = LlamaModel(
        config := ModelConfig(
            architecture="llama", vocab_size=96, hidden_size=48, intermediate_size=80, num_layers=2, num_heads=4,
            num_kv_heads=2, head_dim=16, max_position=256, rms_norm_eps=1e-5, rope_theta=10_000.0, qk_norm=qk_norm,
            qkv_bias=not qk_norm,
        ),
        random_weights(config, dtype="float32", device=DEVICE, seed=3),
    )  # fmt: skip
    shape = KvLayout.of(config, num_pages=16, block_tokens=16, dtype="float32")
    kvs = [KvMemory(shape, device=DEVICE) for _ in range(2)]
    ops: list[LayerOps] = [TorchOps(config, kvs[0]), CudaOps(config, kvs[1], torch.float32)]
    runners = [Runner(model, kv, ops=own) for kv, own in zip(kvs, ops, strict=True)]
    steps = [
        [Chunk("a", 0, tuple(range(40)), (3, 1, 4), False), Chunk("b", 0, (7,), (5,), True)],
        [Chunk("a", 40, tuple(range(8)), (3, 1, 4), True), Chunk("b", 1, (9, 11), (5,), True)],
        [Chunk("a", 48, (5,), (3, 1, 4, 9), True), Chunk("b", 3, (6,), (5,), True)],
        [Chunk("b", 4, (6,), (5,), True)],
    ]
    for step in steps:
        plain, ours = (runner.execute(step) for runner in runners)
        torch.testing.assert_close(ours, plain, atol=2e-4, rtol=2e-4)
    used = [3, 1, 4, 5]
    torch.testing.assert_close(
        kvs[1].tensor[used][:, :, :, :, :3], kvs[0].tensor[used][:, :, :, :, :3], atol=2e-4, rtol=2e-4
    )


def drawn(logits: torch.Tensor, params: list[SamplingParams]) -> tuple[list[int], list[int]]:
    """Tokens drawn by the kernel and by the host's sampler."""
    rows = [SampleRow(each, tokens=[1] * (3 + at), num_prompt_tokens=1) for at, each in enumerate(params)]
    on_host = [each.token for each in sample(logits, rows) if isinstance(each, SampledToken)]
    draws = torch.tensor([row.draw() for row in rows], dtype=torch.float64, device=DEVICE)
    best = logits.argmax(-1).int()
    draw_tokens(logits, draws, best)
    return best.tolist(), on_host


def test_draws_are_those_of_the_host() -> None:
    logits = torch.randn(60, 300, generator=torch.Generator().manual_seed(9)).to(DEVICE) * 3
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}, {"top_k": 1},
        {"top_k": 20, "top_p": 0.6}, {"min_p": 0.1}, {"top_p": 0.01}, {"temperature": 3.0, "top_k": 299},
        {"top_k": 900},
    ]  # fmt: skip
    params = [SamplingParams(max_tokens=1, seed=at, **choices[at % len(choices)]) for at in range(60)]
    ours, host = drawn(logits, params)
    assert ours == host


def test_tokens_that_tie_with_the_last_kept_one_are_kept() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, -2.0]] * 64, device=DEVICE)
    for filters in ({"top_k": 2}, {"top_p": 0.3}, {"top_k": 2, "top_p": 0.9}):
        params = [SamplingParams(max_tokens=1, seed=at, **filters) for at in range(64)]
        ours, host = drawn(logits, params)
        assert ours == host
        assert set(ours) == {1, 2, 3}


def test_excluded_tokens_and_unusable_rows_are_never_drawn() -> None:
    logits = torch.full((40, 70), float("-inf"), device=DEVICE)
    logits[:, 66] = -4.0
    logits[39] = float("nan")
    fields = [[at / 40, 1e30, 0, 1.0, 0.0, 1.0, 0.0, 0.0] for at in range(40)]
    draws = torch.tensor(fields, dtype=torch.float64, device=DEVICE)
    best = torch.tensor([66] * 39 + [-1], dtype=torch.int32, device=DEVICE)
    draw_tokens(logits, draws, best)
    assert best.tolist() == [66] * 39 + [-1]


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.05},
    {},
    {"repetition_penalty": 0.7, "presence_penalty": 0.3, "frequency_penalty": 0.07},
    {"frequency_penalty": -1.3},
    {"repetition_penalty": 1e30, "presence_penalty": -1e30},
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of an overflow, in Triton's interpreter
@pytest.mark.parametrize("max_seq_tokens", [32_768, 32_769], ids=["int16", "int32"])
def test_penalties_are_those_of_the_host_to_the_last_bit(max_seq_tokens: int) -> None:
    """Over several steps: sequences grow, come back, and are more than there are slots."""
    vocab, generator = 3001, torch.Generator().manual_seed(11)
    ours = DeviceCounts(torch.device(DEVICE), vocab, 3, max_seq_tokens)
    host = HostAdjuster(3, max_seq_tokens)
    histories = [torch.randint(vocab, (40 + 9 * n,), generator=generator).tolist() for n in range(5)]
    for step, batch in enumerate([(0, 1, 2), (0, 2), (0, 1, 2), (3, 4, 0), (2, 3), (3, 2), (4,)]):
        logits = torch.randn(len(batch), vocab, generator=generator) * 5
        logits[0, 5:9] = torch.tensor([float("-inf"), 3.4e38, -3.4e38, 0.0])
        if step == 2:
            logits[1, 700], logits[2, 3000] = float("nan"), float("inf")
        rows = [
            SampleRow(SamplingParams(max_tokens=9, **PENALTIES[n]), histories[n], 20, frozenset({n, 77, vocab + 5}))
            for n in batch
        ]
        with host.adjusted(logits, rows) as adjusted:
            wanted, best = adjusted.logits.clone(), adjusted.best
        with ours.adjusted(logits.to(DEVICE), rows) as adjusted:
            torch.testing.assert_close(adjusted.logits.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
            assert adjusted.best == best
        for n in batch:
            histories[n].append(int(torch.randint(vocab, (1,), generator=generator)))


def test_barring_tells_whether_it_hid_a_possible_token() -> None:
    logits = torch.full((4, 50), float("-inf"), device=DEVICE)
    logits[0, 3] = logits[1, 4] = logits[2, 3] = 1.0
    logits[2, 9] = float("nan")
    barred, hidden = int32([[3, 7, 0, 0], [3, 7, 0, 0], [9, 9, 0, 0], [3, 0, 0, 0]]), int32([5, 5, 5, 5])
    bar_tokens(logits, barred, int32([2, 2, 2, 0]), hidden)
    assert hidden.tolist() == [1, 0, 0, 0]
    assert logits[0].max() == float("-inf")
    assert logits[1, 4] == 1.0
    assert logits[2].max().isnan()


def test_kv_in_8_bits_is_near_to_kv_in_the_models_type() -> None:
    shapes = [replace(layout(kv_heads=2, dim=32), dtype=dtype) for dtype in ("bfloat16", "float8_e4m3fn")]
    generator = torch.Generator().manual_seed(10)
    qkv = torch.randn(40, 8 * 32, generator=generator).to(DEVICE, torch.bfloat16)
    angles = torch.zeros(40, 16, device=DEVICE)
    slots = int32([16 * 3 + at for at in range(40)])
    found = []
    for shape in shapes:
        kv = KvMemory(shape, device=DEVICE)
        query, _ = rotate_and_write(
            qkv, None, (angles.cos(), angles.sin()), kv.tensor, shape, 1, slots, num_heads=4, eps=1e-5, keep_key=False
        )
        tiles = Tiles(int32([39]), int32([40]), int32([1]), int32([0]), int32([[3, 4, 5]]), 1, 1)
        out = torch.zeros_like(query)
        attend_tiles(query, kv.tensor, shape, 1, tiles, out)
        k, _ = kv.read(1, torch.from_numpy(kv.page_index(np.array([[3, 4, 5]]))).to(DEVICE), 1)
        found.append((out[39].float(), k.float()))
    torch.testing.assert_close(found[1][1], found[0][1], atol=0.02, rtol=0.07)
    torch.testing.assert_close(found[1][0], found[0][0], atol=0.1, rtol=0.1)


def test_words_go_to_the_gpu_and_back_without_a_copy_engine() -> None:
    here = torch.arange(2500, dtype=torch.int32, pin_memory=ON_GPU)
    there, back = torch.zeros(2500, dtype=torch.int32, device=DEVICE), torch.zeros_like(here, pin_memory=ON_GPU)
    fetch(here, there)
    deliver(there, back)
    if ON_GPU:
        torch.cuda.synchronize()
    assert back.tolist() == there.tolist() == here.tolist()
