"""Decode steps on a GPU as CUDA graphs: one graph per batch size, inputs and outputs in fixed memory.

A step of one token per sequence is hundreds of small kernels; started one by one from Python they take longer than they
run. A graph starts all of them at once. A batch is padded to the next size that has a graph.

    launched = graphs.launch(chunks, rows)                     enqueues the step, waits for nothing
    ahead = graphs.launch(next_chunks, rows, after=launched)   the step behind it, whose tokens are still on the GPU
    launched.outcomes()                                        waits; what each row sampled

A row of a step that was launched ahead takes its token from the step before, so the GPU goes on while the host reads
tokens. At most two steps are under way: outcomes() of the first is called before the third is launched.

Penalties, barred tokens and draws are part of the graph. Log-probabilities are computed behind it, by kernels that are
enqueued only where a request wants them: finding the most likely tokens of all rows would slow every step down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from moonpool.engine.cuda_ops import CudaOps, PagedAttention
from moonpool.engine.device_counts import DeviceCounts
from moonpool.engine.kernels.attention import Tiles
from moonpool.engine.kernels.host_memory import deliver, fetch
from moonpool.engine.kernels.penalties import bar_tokens, penalize
from moonpool.engine.kernels.sampling import DRAW_FIELDS, draw_tokens
from moonpool.engine.launched import BatchLimits, LaunchedStep
from moonpool.engine.llama import LlamaModel, Step
from moonpool.engine.sampler import ALL_BARRED, UNUSABLE, SampledToken, SampleRow, log_probabilities
from moonpool.engine.sequence import UNKNOWN_TOKEN, Chunk, pages_for
from moonpool.engine.step_times import timed_event

_ALIGN = 16
_COLUMNS = 6  # of a step's input, beside the block tables
_MAX_BARRED = 32  # tokens of a row: the 16 of the API and those that end every answer; a power of 2
_LOGPROB_ROWS = 16  # whose log-probabilities are computed at once: each takes the memory of three rows of logits


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """The log-probabilities of the rows from `first` on, in page-locked memory: [rows, chosen | values | tokens]."""

    first: int
    wanted: list[int | None]  # by each row
    words: torch.Tensor

    def of(self, row: int, token: int) -> SampledToken:
        number = None if row < self.first or row >= self.first + len(self.wanted) else self.wanted[row - self.first]
        if number is None:
            return SampledToken(token)
        words = self.words[row - self.first].numpy()
        most = len(words) // 2
        chosen, *values = words[: most + 1].view(np.float32).tolist()
        return SampledToken(token, chosen, tuple(zip(words[most + 1 :].tolist(), values, strict=True))[:number])


@dataclass(frozen=True, slots=True)
class Launched:
    """A LaunchedStep whose tokens are copied to page-locked memory when it is done."""

    chunks: Sequence[Chunk]
    rows: dict[str, int]
    best: torch.Tensor  # the token of each row, page-locked
    logprobs: _Logprobs | None
    began: torch.cuda.Event
    ended: torch.cuda.Event

    def outcomes(self) -> list[SampledToken]:
        self.ended.synchronize()
        tokens, logprobs = self.best[: len(self.chunks)].tolist(), self.logprobs
        if logprobs is None:
            return [SampledToken(token) for token in tokens]
        return [logprobs.of(row, token) for row, token in enumerate(tokens)]


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # of the model, in its dtype; the next replay overwrites them


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
        # tokens | row of the step before | length with this token, 0 for padding | slot of counts plus 1 | whether the
        # token is to be counted | number of barred tokens | block tables
        self._inputs = torch.zeros(most * (_COLUMNS + self._width), dtype=torch.int32, device=self._device)
        self._most = most
        self.adjuster = DeviceCounts(
            self._device, model.config.vocab_size, max_num_seqs, min(limits.max_seq_tokens, 2**31 - 1)
        )
        self._barred = torch.zeros(most, _MAX_BARRED, dtype=torch.int32, device=self._device)
        self._staged_barred = [torch.zeros(self._barred.shape, dtype=torch.int32, pin_memory=True) for _ in range(2)]
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

    def fits(self, chunks: Sequence[Chunk], rows: Sequence[SampleRow]) -> bool:
        return (
            len(chunks) <= self._sizes[-1]
            and all(len(each.tokens) == 1 and each.wants_logits and len(each.pages) <= self._width for each in chunks)
            and all(len(row.barred) <= _MAX_BARRED for row in rows)
        )

    @torch.inference_mode()
    def warm_up(self, *, decodes: bool) -> None:
        with torch.cuda.stream(self._stream):
            self._ops.warm_up(self._limits)
            for size in reversed(self._sizes) if decodes else ():  # the largest first: others use its memory again
                self._graph(size)

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk], rows: Sequence[SampleRow], after: LaunchedStep | None = None) -> Launched:
        turn = next(self._turns) % 2
        size = next(size for size in self._sizes if size >= len(chunks))
        try:
            with torch.cuda.stream(self._stream):
                graph = self._graph(size)
                began = timed_event(self._stream)
                self._fill(self._staged[turn].numpy(), self._known[turn], chunks, size, after)
                self._fill_rows(turn, rows, size)
                used = self._most * _COLUMNS + size * self._width
                fetch(self._staged[turn][:used], self._inputs[:used])
                fetch(self._staged_draws[turn][:size], self._draws[:size])
                graph.graph.replay()
                deliver(self._best, self._outputs[turn])
                logprobs = self._log_probabilities(graph.logits, rows)
                ended = timed_event(self._stream)
        except BaseException:
            self.adjuster.clear()
            raise
        numbers = {chunk.request_id: row for row, chunk in enumerate(chunks)}
        return Launched(chunks, numbers, self._outputs[turn], logprobs, began, ended)

    def _fill_rows(self, turn: int, rows: Sequence[SampleRow], size: int) -> None:
        """Stage how the rows are sampled; on the step's stream."""
        columns = self._staged[turn].numpy()[3 * self._most : _COLUMNS * self._most].reshape(3, self._most)
        columns[:, :size] = 0
        columns[:2, : len(rows)] = self.adjuster.place(rows)
        self._staged_draws[turn].numpy()[: len(rows)] = [row.draw() for row in rows]
        barred = self._staged_barred[turn].numpy()
        for number, row in enumerate(rows):
            tokens = [token for token in row.barred if 0 <= token < self._model.config.vocab_size]
            barred[number, : len(tokens)] = tokens
            columns[2, number] = len(tokens)
        if columns[2, :size].any():
            fetch(self._staged_barred[turn], self._barred)

    def _log_probabilities(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> _Logprobs | None:
        """Enqueue the log-probabilities that rows want, from the first to the last of these rows."""
        wanted = [row.params.logprobs for row in rows]
        asking = [number for number, each in enumerate(wanted) if each is not None]
        if not asking:
            return None
        first, end = asking[0], asking[-1] + 1
        most, parts = min(max(each for each in wanted if each is not None), logits.shape[-1]), []
        for start in range(first, end, _LOGPROB_ROWS):
            some = slice(start, min(start + _LOGPROB_ROWS, end))
            logprobs = log_probabilities(logits[some])
            chosen = logprobs.gather(-1, self._best[some].clamp(min=0).long()[:, None])
            best = logprobs.topk(most)
            parts.append(torch.cat([chosen.view(torch.int32), best.values.view(torch.int32), best.indices.int()], -1))
        words = torch.cat(parts)
        here = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
        deliver(words, here)
        return _Logprobs(first, wanted[first:end], here)

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
        tables = staged[_COLUMNS * most :].reshape(most, self._width)
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
        # All rows are padding without penalties: nothing is written to pages or to counts.
        self._inputs[2 * self._most : _COLUMNS * self._most].zero_()
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
        given, sources, lengths, places, due, num_barred = (
            self._inputs[n * most : n * most + size] for n in range(_COLUMNS)
        )
        tables = self._inputs[_COLUMNS * most :].view(most, self._width)
        tokens = torch.where(sources >= 0, self._best.index_select(0, sources.clamp(min=0)), given).clamp_(min=0)
        positions = (lengths - 1).clamp_(min=0)
        block_tokens = self._ops.kv.layout.block_tokens
        pages = tables[:size].gather(1, (positions // block_tokens).long()[:, None])[:, 0]
        slots = torch.where(lengths > 0, pages * block_tokens + positions % block_tokens, -1)
        splits = self._ops.choose_splits(size, self._width * block_tokens)
        tiles = Tiles(self._numbers[:size], lengths, self._ones[:size], self._numbers[:size], tables, 1, splits)
        attention = PagedAttention(self._ops.kv, [tiles], (), (), size)
        step = Step(tokens=tokens, positions=positions, write_index=slots, attention=attention)
        found = self._model.forward(step, self._ops)
        logits, hidden = found.to(torch.float32, copy=True), torch.empty_like(num_barred)
        counts = self.adjuster
        penalize(
            logits, tokens, places, due, self._draws, counts.address, row_counts=counts.row_counts, wide=counts.wide
        )
        bar_tokens(logits, self._barred, num_barred, hidden)
        best = logits.argmax(dim=-1, keepdim=True)  # the index of a NaN if there is one
        value, is_hidden = logits.gather(-1, best), hidden[:, None] > 0
        reason = torch.where(is_hidden & (value == -torch.inf), ALL_BARRED, UNUSABLE)
        self._best[:size] = torch.where(value.isfinite(), best, reason)[:, 0].int()
        draw_tokens(logits, self._draws, self._best)
        return found
