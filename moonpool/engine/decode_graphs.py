"""Decode steps on a GPU as CUDA graphs: one graph per batch size, inputs and outputs in fixed memory.

A step of one token per sequence is hundreds of small kernels; started one by one from Python they take longer than they
run. A graph starts all of them at once. A batch is padded to the next size that has a graph.

    launched = graphs.launch(chunks, draws)                     enqueues the step, waits for nothing
    ahead = graphs.launch(next_chunks, draws, after=launched)   the step behind it, whose tokens are still on the GPU
    launched.tokens()                                           waits; the token of each row, -1: there is none

A row of a step that was launched ahead takes its token from the step before, so the GPU goes on while the host reads
tokens. At most two steps are under way: tokens() of the first is called before the third is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from moonpool.engine.cuda_ops import CudaOps, PagedAttention
from moonpool.engine.kernels.attention import Tiles
from moonpool.engine.kernels.host_memory import deliver, fetch
from moonpool.engine.kernels.sampling import DRAW_FIELDS, draw_tokens
from moonpool.engine.launched import BatchLimits, LaunchedStep
from moonpool.engine.llama import LlamaModel, Step
from moonpool.engine.sampler import Draw
from moonpool.engine.sequence import UNKNOWN_TOKEN, Chunk, pages_for

_ALIGN = 16


@dataclass(frozen=True, slots=True)
class Launched:
    """A LaunchedStep whose tokens are copied to page-locked memory when it is done."""

    chunks: Sequence[Chunk]
    rows: dict[str, int]
    logits: torch.Tensor
    best: torch.Tensor  # the token of each row, page-locked
    done: torch.cuda.Event

    def tokens(self) -> list[int]:
        self.done.synchronize()
        found: list[int] = self.best[: len(self.chunks)].tolist()
        return found


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes that get a graph, ascending: padding adds at most a third."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_num_seqs:
        last = sizes[-1]
        sizes += [last + last // 2, 2 * last] if last >= 8 else [2 * last]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """The StepLauncher of one model and its KV memory; for the engine's thread only."""

    def __init__(self, model: LlamaModel, ops: CudaOps, limits: BatchLimits) -> None:
        self._model, self._ops, self._limits = model, ops, limits
        self._device = model.device
        assert ops.kv.stream is not None, "graphs are for a GPU"
        self._stream = ops.kv.stream
        max_num_seqs, layout = limits.max_num_seqs, ops.kv.layout
        # One token more than a sequence may have: it is launched ahead and dropped.
        max_pages = min(layout.num_pages, pages_for(limits.max_seq_tokens + 1, layout.block_tokens))
        self._sizes = batch_sizes(max_num_seqs)
        self._width = -(-max_pages // _ALIGN) * _ALIGN
        most = -(-max_num_seqs // _ALIGN) * _ALIGN
        # tokens | row of the step before | length with this token, 0 for padding | block tables
        self._inputs = torch.zeros(most * (3 + self._width), dtype=torch.int32, device=self._device)
        self._most = most
        self._best = torch.zeros(most, dtype=torch.int32, device=self._device)
        self._numbers = torch.arange(most, dtype=torch.int32, device=self._device)
        self._ones = torch.ones(most, dtype=torch.int32, device=self._device)
        self._staged = [torch.zeros(self._inputs.shape, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._draws = torch.zeros(most, DRAW_FIELDS, dtype=torch.float64, device=self._device)
        self._staged_draws = [torch.zeros(self._draws.shape, dtype=torch.float64, pin_memory=True) for _ in range(2)]
        self._outputs = [torch.zeros(most, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._known: list[list[tuple[int, ...]]] = [[() for _ in range(most)] for _ in range(2)]
        self._turns = count()
        self._graphs: dict[int, _Graph] = {}
        self.on_prepare: Callable[[str], None] = lambda what: None

    def fits(self, chunks: Sequence[Chunk]) -> bool:
        return len(chunks) <= self._sizes[-1] and all(
            len(chunk.tokens) == 1 and chunk.wants_logits and len(chunk.pages) <= self._width for chunk in chunks
        )

    @torch.inference_mode()
    def warm_up(self, *, decodes: bool) -> None:
        with torch.cuda.stream(self._stream):
            self._ops.warm_up(self._limits)
            for size in reversed(self._sizes) if decodes else ():  # the largest first: others use its memory again
                self._graph(size)

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk], draws: Sequence[Draw], after: LaunchedStep | None = None) -> Launched:
        turn = next(self._turns) % 2
        size = next(size for size in self._sizes if size >= len(chunks))
        staged, best = self._staged[turn], self._outputs[turn]
        self._fill(staged.numpy(), self._known[turn], chunks, size, after)
        self._staged_draws[turn].numpy()[: len(chunks)] = draws
        with torch.cuda.stream(self._stream):
            graph = self._graph(size)
            used = self._most * 3 + size * self._width
            fetch(staged[:used], self._inputs[:used])
            fetch(self._staged_draws[turn][:size], self._draws[:size])
            graph.graph.replay()
            deliver(self._best, best)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        # What samples from the logits runs on the caller's stream.
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        rows = {chunk.request_id: row for row, chunk in enumerate(chunks)}
        return Launched(chunks, rows, graph.logits[: len(chunks)], best, done)

    def _fill(
        self,
        staged: np.ndarray,
        known: list[tuple[int, ...]],
        chunks: Sequence[Chunk],
        size: int,
        after: LaunchedStep | None,
    ) -> None:
        most = self._most
        tokens, sources, lengths = staged[:most], staged[most : 2 * most], staged[2 * most : 3 * most]
        tables = staged[3 * most :].reshape(most, self._width)
        sources[:size], lengths[:size], tokens[:size] = UNKNOWN_TOKEN, 0, 0
        for row, chunk in enumerate(chunks):
            (token,) = chunk.tokens
            if token == UNKNOWN_TOKEN:
                assert after is not None, "an unknown token comes from a step before"
                sources[row] = after.rows[chunk.request_id]
            else:
                tokens[row] = token
            lengths[row] = chunk.end
            old, new = known[row], chunk.pages
            start = len(old) if new[: len(old)] == old else 0  # mostly the table grows at its end
            tables[row, start : len(new)] = new[start:]
            known[row] = new

    def _graph(self, size: int) -> _Graph:
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._capture(size)
        return graph

    def _capture(self, size: int) -> _Graph:
        self.on_prepare(f"the capture of a CUDA graph for {size} sequences")
        torch.cuda.current_stream(self._device).synchronize()
        saved = self._best.clone()
        self._inputs[2 * self._most : 3 * self._most].zero_()  # all rows are padding: nothing is written to pages
        self._step(size)  # compiles the kernels and lets the libraries choose theirs
        torch.cuda.current_stream(self._device).synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        # Other threads copy and allocate meanwhile, on streams of their own.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = self._step(size)
        self._best.copy_(saved)
        return _Graph(graph, logits)

    def _step(self, size: int) -> torch.Tensor:
        most = self._most
        given, sources, lengths = (self._inputs[n * most : n * most + size] for n in range(3))
        tables = self._inputs[3 * most :].view(most, self._width)
        tokens = torch.where(sources >= 0, self._best.index_select(0, sources.clamp(min=0)), given).clamp_(min=0)
        positions = (lengths - 1).clamp_(min=0)
        block_tokens = self._ops.kv.layout.block_tokens
        pages = tables[:size].gather(1, (positions // block_tokens).long()[:, None])[:, 0]
        slots = torch.where(lengths > 0, pages * block_tokens + positions % block_tokens, -1)
        splits = self._ops.choose_splits(size, self._width * block_tokens)
        tiles = Tiles(self._numbers[:size], lengths, self._ones[:size], self._numbers[:size], tables, 1, splits)
        attention = PagedAttention(self._ops.kv, [tiles], (), (), size)
        step = Step(tokens=tokens, positions=positions, write_index=slots, attention=attention)
        logits = self._model.forward(step, self._ops).float()
        best = logits.argmax(dim=-1, keepdim=True)  # the index of a NaN if there is one
        is_sound = logits.gather(-1, best).isfinite()
        self._best[:size] = torch.where(is_sound, best, -1)[:, 0].int()
        draw_tokens(logits, self._draws, self._best)
        return logits
