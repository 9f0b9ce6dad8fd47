"""The operations of a layer on an NVIDIA GPU: our Triton kernels, and the libraries' where those are faster.

Attention of a step is divided by shape. Decode rows and short or oddly placed chunks are tiles of the paged kernel. A
large chunk whose start and length are multiples of `_LIBRARY_TOKENS` goes to cuDNN, which is a third faster but plans
each new shape for tens of milliseconds: first the gathered past without a mask, then the chunk causally, and both
parts are joined by their log-sum-exp.

Nothing here waits for the GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from moonpool.engine.attention import QuerySpan
from moonpool.engine.config import ModelConfig
from moonpool.engine.kernels.attention import Tiles, attend_tiles, join_parts
from moonpool.engine.kernels.gemv import gemv
from moonpool.engine.kernels.host_memory import fetch
from moonpool.engine.kernels.pointwise import add_norm, rotate_and_write, silu_mul
from moonpool.engine.kv_tensor import KvMemory, Rows
from moonpool.engine.launched import BatchLimits
from moonpool.engine.ops import AttentionPlan, CosSin, QkNorms
from moonpool.engine.sequence import pages_for

_LIBRARY_TOKENS = 1024
_DECODE_TOKENS = 4  # spans up to this length are decode-like: tiles of few rows, many parts
_ALIGN = 16  # int32 entries: kernels are compiled again for arrays that lie at other addresses
_KEYS_PER_SPLIT = 64
_MAX_SPLITS = 32
_WAVES = 3  # programs per multiprocessor that keep it busy


class CudaOps:
    """LayerOps on a GPU. In Triton's interpreter, for tests, also on the CPU."""

    reads_whole_pages = False

    def __init__(self, config: ModelConfig, kv: KvMemory, dtype: torch.dtype) -> None:
        """`dtype` is the model's; KV may be kept in a smaller one."""
        self._config, self.kv, self._dtype = config, kv, dtype
        device = kv.tensor.device
        self.has_library = kv.tensor.is_cuda and _library_works(config, dtype, device)
        # Page-locked memory that a kernel has not read yet, oldest first: torch would use it again.
        self._unread: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._num_processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if kv.tensor.is_cuda else 4
        )

    def index(self, *values: np.ndarray) -> list[torch.Tensor]:
        """One kernel reads all of them from page-locked memory."""
        starts = np.cumsum([0] + [-(-each.size // _ALIGN) * _ALIGN for each in values])
        packed = torch.empty(int(starts[-1]), dtype=torch.int32, pin_memory=self.kv.tensor.is_cuda)
        flat = packed.numpy()
        for start, each in zip(starts, values, strict=False):
            flat[start : start + each.size] = each.reshape(-1)
        on_device = self._on_device(packed)
        return [
            on_device[start : start + each.size].view(each.shape) for start, each in zip(starts, values, strict=False)
        ]

    def _on_device(self, packed: torch.Tensor) -> torch.Tensor:
        if not packed.is_pinned():
            return packed
        while self._unread and self._unread[0][0].query():  # type: ignore[no-untyped-call]
            self._unread.popleft()
        on_device = torch.empty(packed.shape, dtype=packed.dtype, device=self.kv.tensor.device)
        fetch(packed, on_device)
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record()
        self._unread.append((read, packed))
        return on_device

    def write_index(self, pages: Rows, slots: Rows) -> np.ndarray:
        return pages * self.kv.layout.block_tokens + slots

    def plan(self, spans: Sequence[QuerySpan], num_rows: int) -> AttentionPlan:
        library = [span for span in spans if self._is_for_library(span)]
        decodes = [span for span in spans if span.length <= _DECODE_TOKENS]
        chunks = [span for span in spans if span.length > _DECODE_TOKENS and not self._is_for_library(span)]
        tiles = [self._tiles(some, tokens) for some, tokens in ((decodes, 1), (chunks, self._chunk_tokens)) if some]
        return PagedAttention(self.kv, tiles, library, [self._past(span) for span in library], num_rows)

    def warm_up(self, limits: BatchLimits) -> None:
        """Compile the paged kernel for every number of parts, and let cuDNN plan the chunks of long prompts, so that no
        request waits for it.
        """
        self._warm_up_tiles()
        if not self.has_library:
            return
        config, dtype, device = self._config, self._dtype, self.kv.tensor.device
        longest = min(limits.max_batch_tokens, limits.max_seq_tokens) // _LIBRARY_TOKENS * _LIBRARY_TOKENS
        for tokens in range(_LIBRARY_TOKENS, longest + 1, _LIBRARY_TOKENS):
            query, key = (
                torch.zeros(tokens, heads, config.head_dim, dtype=dtype, device=device)
                for heads in (config.num_heads, config.num_kv_heads)
            )
            q, k = (x.transpose(0, 1)[None] for x in (query, key))
            _library_attention(q, k, k, is_causal=True)
        for past in range(longest, limits.max_seq_tokens - longest, longest) if longest else ():
            old = torch.zeros(1, config.num_kv_heads, past, config.head_dim, dtype=dtype, device=device)
            _library_attention(q, old, old, is_causal=False)

    def _warm_up_tiles(self) -> None:
        config, device = self._config, self.kv.tensor.device
        query = torch.zeros(self._chunk_tokens, config.num_heads, config.head_dim, dtype=self._dtype, device=device)
        tables = torch.zeros(1, _ALIGN, dtype=torch.int32, device=device)
        padding = torch.zeros(1, dtype=torch.int32, device=device)
        for tile_tokens in (1, self._chunk_tokens):
            for power in range(_MAX_SPLITS.bit_length()):
                tiles = Tiles(padding, padding, padding, padding, tables, tile_tokens, 1 << power)
                attend_tiles(query, self.kv.tensor, self.kv.layout, 0, tiles, torch.empty_like(query))

    def choose_splits(self, num_tiles: int, max_end: int) -> int:
        """Return into how many parts to divide the keys, a power of 2, so that all multiprocessors have work."""
        wanted = _WAVES * self._num_processors // max(1, num_tiles * self.kv.layout.num_kv_heads)
        most = min(_MAX_SPLITS, max(1, max_end // _KEYS_PER_SPLIT))
        return int(1 << (max(1, min(wanted, most)).bit_length() - 1))

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x, add_norm(x, delta, weight, self._config.rms_norm_eps)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return gemv(x, weight, bias) if x.shape[0] == 1 else F.linear(x, weight, bias)

    def rotate_and_write(
        self, qkv: torch.Tensor, norms: QkNorms | None, cos_sin: CosSin, write_index: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self._config
        rows = qkv.shape[0]
        query, key = rotate_and_write(
            qkv, norms, cos_sin, self.kv.tensor, self.kv.layout, layer, write_index,
            num_heads=config.num_heads, eps=config.rms_norm_eps, keep_key=rows >= _LIBRARY_TOKENS,
        )  # fmt: skip
        value = qkv.view(rows, -1, config.head_dim)[:, config.num_heads + config.num_kv_heads :]
        return query, value if key is None else key, value

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up)

    @property
    def _chunk_tokens(self) -> int:
        """Tokens of a tile of a chunk: with the heads that share a KV head, as many rows as a program computes well."""
        rows = 64 if self._dtype != torch.float32 else 32  # 128 rows are slower on an H200
        return max(1, rows // (self._config.num_heads // self._config.num_kv_heads))

    def _is_for_library(self, span: QuerySpan) -> bool:
        is_regular = span.length % _LIBRARY_TOKENS == 0 and span.start % _LIBRARY_TOKENS == 0
        return self.has_library and is_regular and span.length > 0

    def _past(self, span: QuerySpan) -> torch.Tensor | None:
        """Return the rows of K of the pages before the span, for KvMemory.read."""
        if span.start == 0:
            return None
        pages = np.asarray(span.pages[: pages_for(span.start, self.kv.layout.block_tokens)])
        return self.index(self.kv.page_index(pages[None, :]))[0]

    def _tiles(self, spans: Sequence[QuerySpan], tile_tokens: int) -> Tiles:
        rows: list[int] = []
        ends: list[int] = []
        counts: list[int] = []
        table_rows: list[int] = []
        for number, span in enumerate(spans):
            for done in range(0, span.length, tile_tokens):
                count = min(tile_tokens, span.length - done)
                rows.append(span.first_row + done)
                ends.append(span.start + done + count)
                counts.append(count)
                table_rows.append(number)
        block_tokens, max_end = self.kv.layout.block_tokens, max(ends)
        width = -(-pages_for(max_end, block_tokens) // _ALIGN) * _ALIGN
        tables = np.zeros((len(spans), width), dtype=np.int32)
        for table, span in zip(tables, spans, strict=True):
            used = pages_for(span.end, block_tokens)
            table[:used] = span.pages[:used]
        arrays = self.index(*(np.asarray(each, dtype=np.int32) for each in (rows, ends, counts, table_rows)), tables)
        splits = self.choose_splits(len(rows), max_end)
        return Tiles(arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], tile_tokens, splits)


class PagedAttention:
    """AttentionPlan of `tiles` for the paged kernel and of spans for cuDNN, each with the rows of its past."""

    def __init__(
        self,
        kv: KvMemory,
        tiles: Sequence[Tiles],
        library: Sequence[QuerySpan],
        pasts: Sequence[torch.Tensor | None],
        num_rows: int,
    ) -> None:
        self._kv, self._tiles, self._library, self._pasts = kv, tiles, library, pasts
        self._num_rows = num_rows

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        if not self._tiles and len(self._library) == 1 and self._library[0].length == self._num_rows:
            return self._attend_chunk(query, key, value, layer, self._pasts[0]).flatten(1)
        out = torch.empty_like(query)
        for tiles in self._tiles:
            attend_tiles(query, self._kv.tensor, self._kv.layout, layer, tiles, out)
        for span, past in zip(self._library, self._pasts, strict=True):
            rows = slice(span.first_row, span.first_row + span.length)
            out[rows] = self._attend_chunk(query[rows], key[rows], value[rows], layer, past)
        return out.flatten(1)

    def _attend_chunk(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, past: torch.Tensor | None
    ) -> torch.Tensor:
        """Return [tokens, heads, dim]. The tensors are one span's."""
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        chunk, chunk_lse = _library_attention(q, k, v, is_causal=True)
        if past is None:
            return chunk[0].transpose(0, 1)
        old_k, old_v = (each.to(query.dtype) for each in self._kv.read(layer, past, 1))
        old, old_lse = _library_attention(q, old_k, old_v, is_causal=False)
        heads, tokens = query.shape[1], query.shape[0]
        return join_parts(old[0], old_lse.view(heads, tokens), chunk[0], chunk_lse.view(heads, tokens))


def _library_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cuDNN's attention and its log-sum-exp. All are [1, heads, tokens, dim]; there may be fewer KV heads."""
    call = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = call(query, key, value, None, True, 0.0, is_causal, False)[:2]
    return out, lse


def _library_works(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether cuDNN computes this model's attention on this GPU."""
    dim = config.head_dim
    if dtype == torch.float32 or dim & (dim - 1):
        return False
    try:
        query, key = (
            torch.zeros(1, heads, 128, dim, dtype=dtype, device=device)
            for heads in (config.num_heads, config.num_kv_heads)
        )
        _library_attention(query, key, key, is_causal=True)
    except RuntimeError:  # an old GPU, or a torch without cuDNN
        return False
    return True
