"""Runs one step of the model: chunks in, logits out; the step's KV is written to its pages.

The runner builds the step's index tensors once and passes them to the model. Stale bytes never reach attention: a page
is zeroed before its first token is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moonpool.engine.attention import AttentionGroup, QuerySpan, plan_attention
from moonpool.engine.kv_tensor import KvMemory
from moonpool.engine.llama import LayerHooks, LlamaModel, Step
from moonpool.engine.sequence import Chunk

__all__ = ["LayerHooks", "Runner"]


class Runner:
    """A model and its KV memory. Not thread-safe: one step at a time."""

    def __init__(self, model: LlamaModel, kv: KvMemory) -> None:
        assert model.dtype == kv.tensor.dtype, "KV is kept in the model's dtype"
        assert model.device == kv.tensor.device, "KV lives on the model's device"
        self.model = model
        self.kv = kv

    @torch.inference_mode()
    def execute(self, chunks: Sequence[Chunk], hooks: LayerHooks | None = None) -> torch.Tensor:
        """Compute all chunks; return float32 logits [chunks that want them, vocab], in order of the chunks.

        If it raises, the KV of these chunks from their start on is undefined.
        """
        with torch.cuda.stream(self.kv.stream):  # no effect on the CPU, where there is no stream
            self.kv.clear(_first_written(chunks, self.kv.layout.block_tokens))
            logits = self.model.forward(self._prepare(chunks), self.kv, hooks).float()
        if self.kv.stream is not None:
            torch.cuda.current_stream(self.model.device).wait_stream(self.kv.stream)
        return logits

    def _prepare(self, chunks: Sequence[Chunk]) -> Step:
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        spans = _spans(chunks)
        wanting = [span for span, chunk in zip(spans, chunks, strict=True) if chunk.wants_logits]
        last_tokens = [QuerySpan(row, span.end - 1, 1, span.pages) for row, span in enumerate(wanting)]
        all_wanted = len(wanting) == len(positions)
        last_rows = np.array([span.first_row + span.length - 1 for span in wanting], dtype=np.int64)
        return Step(
            tokens=self._index(np.concatenate([np.asarray(chunk.tokens) for chunk in chunks])),
            positions=self._index(positions),
            write_index=self._index(self._write_rows(chunks, positions)),
            groups=self._plan(spans, len(positions)),
            wanted=None if all_wanted else self._index(last_rows),
            wanted_groups=[] if all_wanted else self._plan(last_tokens, len(wanting)),
        )

    def _plan(self, spans: Sequence[QuerySpan], num_rows: int) -> list[AttentionGroup]:
        return plan_attention(spans, self.kv, num_rows=num_rows, dtype=self.model.dtype, device=self.model.device)

    def _write_rows(self, chunks: Sequence[Chunk], positions: np.ndarray) -> np.ndarray:
        block_tokens = self.kv.layout.block_tokens
        pages = np.concatenate([np.asarray(c.pages)[np.arange(c.start, c.end) // block_tokens] for c in chunks])
        return self.kv.token_index(pages, positions % block_tokens)

    def _index(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.model.device)


def _spans(chunks: Sequence[Chunk]) -> list[QuerySpan]:
    """Return each chunk's rows of the step."""
    spans, row = [], 0
    for chunk in chunks:
        spans.append(QuerySpan(row, chunk.start, len(chunk.tokens), chunk.pages))
        row += len(chunk.tokens)
    return spans


def _first_written(chunks: Sequence[Chunk], block_tokens: int) -> list[int]:
    """Return the pages whose first token is in these chunks."""
    return [
        chunk.pages[block]
        for chunk in chunks
        for block in range(-(-chunk.start // block_tokens), -(-chunk.end // block_tokens))
    ]
