"""Runs one step of the model: chunks in, logits out; the step's KV is written to its pages.

The runner builds the step's index tensors once and passes them to the model. Stale bytes never reach attention: where
attention reads whole pages, a page is zeroed before its first token is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moonpool.engine.attention import QuerySpan
from moonpool.engine.kv_tensor import KvMemory
from moonpool.engine.launched import BatchLimits, StepLauncher
from moonpool.engine.llama import LayerHooks, LlamaModel, Step
from moonpool.engine.ops import LayerOps, TorchOps
from moonpool.engine.sequence import Chunk
from moonpool.engine.step_times import EventMarks, StepTimes

__all__ = ["BatchLimits", "LayerHooks", "Runner"]


class Runner:
    """A model and its KV memory. Not thread-safe: one step at a time."""

    def __init__(
        self, model: LlamaModel, kv: KvMemory, limits: BatchLimits | None = None, ops: LayerOps | None = None
    ) -> None:
        """With `limits`, a GPU gets decode graphs, which can launch steps ahead. `ops` is for tests."""
        assert kv.tensor.dtype in (model.dtype, torch.float8_e4m3fn), "KV is kept in the model's dtype, or in 8 bits"
        assert model.device == kv.tensor.device, "KV lives on the model's device"
        self.model = model
        self.kv = kv
        self.launcher: StepLauncher | None = None
        self.times = StepTimes(EventMarks(kv.stream) if kv.stream is not None else None)
        if ops is not None or not kv.tensor.is_cuda:
            self._ops = ops or TorchOps(model.config, kv)
            return
        # Only here: triton is installed where there is a GPU.
        from moonpool.engine.cuda_ops import CudaOps
        from moonpool.engine.decode_graphs import DecodeGraphs

        self._ops = cuda = CudaOps(model.config, kv, model.dtype)
        if limits is not None:
            self.launcher = DecodeGraphs(model, cuda, limits)

    def warm_up(self, *, decodes: bool = True) -> None:
        """Prepare what the first requests would wait for: on a GPU, compiled kernels and, unless nothing `decodes`,
        decode graphs.
        """
        if self.launcher is not None:
            self.launcher.warm_up(decodes=decodes)

    @torch.inference_mode()
    def execute(self, chunks: Sequence[Chunk], hooks: LayerHooks | None = None) -> torch.Tensor:
        """Compute all chunks; return float32 logits [chunks that want them, vocab], in order of the chunks.

        If it raises, the KV of these chunks from their start on is undefined. On a GPU the work is enqueued when this
        returns; the caller's stream waits for it.
        """
        with torch.cuda.stream(self.kv.stream):  # no effect on the CPU, where there is no stream
            logits = self.model.forward(self._step(chunks), self._ops, hooks).float()
        if self.kv.stream is not None:
            torch.cuda.current_stream(self.model.device).wait_stream(self.kv.stream)
        return logits

    @torch.inference_mode()
    def execute_span(
        self, chunk: Chunk, layers: range, hidden: torch.Tensor | None, hooks: LayerHooks | None = None
    ) -> torch.Tensor:
        """Compute some layers of a chunk, as LlamaModel.forward_span; `hidden` may lie in main memory. Return float32
        logits after the last layer, otherwise hidden states in main memory.
        """
        with torch.cuda.stream(self.kv.stream):
            given = None if hidden is None else hidden.to(self.model.device)
            found = self.model.forward_span(self._step([chunk]), self._ops, layers, given, hooks)
            found = found.float() if layers.stop == self.model.config.num_layers else found.cpu()
        if self.kv.stream is not None:
            torch.cuda.current_stream(self.model.device).wait_stream(self.kv.stream)
        return found

    def _step(self, chunks: Sequence[Chunk]) -> Step:
        if self._ops.reads_whole_pages:
            self.kv.clear(_first_written(chunks, self.kv.layout.block_tokens))
        return self._prepare(chunks)

    def synchronize(self) -> None:
        """Wait until all steps that were executed have been computed."""
        if self.kv.stream is not None:
            self.kv.stream.synchronize()

    def _prepare(self, chunks: Sequence[Chunk]) -> Step:
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        spans = _spans(chunks)
        wanting = [span for span, chunk in zip(spans, chunks, strict=True) if chunk.wants_logits]
        last_tokens = [QuerySpan(row, span.end - 1, 1, span.pages) for row, span in enumerate(wanting)]
        all_wanted = len(wanting) == len(positions)
        last_rows = np.array([span.first_row + span.length - 1 for span in wanting], dtype=np.int64)
        all_tokens = np.concatenate([np.asarray(chunk.tokens) for chunk in chunks])
        tokens, at, write_index, wanted = self._ops.index(
            all_tokens, positions, self._write_rows(chunks, positions), last_rows
        )
        return Step(
            tokens=tokens,
            positions=at,
            write_index=write_index,
            attention=self._ops.plan(spans, len(positions)),
            wanted=None if all_wanted else wanted,
            wanted_attention=None if all_wanted else self._ops.plan(last_tokens, len(wanting)),
        )

    def _write_rows(self, chunks: Sequence[Chunk], positions: np.ndarray) -> np.ndarray:
        block_tokens = self.kv.layout.block_tokens
        pages = np.concatenate([np.asarray(c.pages)[np.arange(c.start, c.end) // block_tokens] for c in chunks])
        return self._ops.write_index(pages, positions % block_tokens)


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
