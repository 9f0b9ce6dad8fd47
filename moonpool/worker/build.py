"""The start of a worker's engine: model files, weights, KV memory, scheduler, CPU threads, and a few measured runs.

A step that takes seconds logs its progress, so that a first start, which prepares the weights, does not look hung.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.cluster import DecodeSample, PrefillSample
from moonpool.base.errors import ConfigError
from moonpool.base.keys import CacheIdentity
from moonpool.base.limits import CorePresence, available_cores
from moonpool.base.units import format_nbytes
from moonpool.engine.config import ModelConfig
from moonpool.engine.device_memory import kv_share, require_kv_fits
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.load import kv_layout, load_runner, make_scheduler
from moonpool.engine.model_files import ModelFiles, cache_identity, read_config, require_weights, resolve
from moonpool.engine.runner import Runner
from moonpool.engine.scheduler import Scheduler
from moonpool.engine.sequence import Chunk
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.cuda.segment import DeviceSegment
from moonpool.worker.config import HOST_KV_NBYTES, WorkerConfig
from moonpool.worker.kv_link.device_pieces import DevicePieces
from moonpool.worker.kv_link.pieces import HostPieces, PieceMemory

_LOG = logging.getLogger(__name__)
_LOG_EVERY_S = 1.0
_COUNT_EVERY_S = 2.0
# Runs of a calibration: (tokens, of which prefix) of a prompt, (sequences, tokens of each) of a decode step.
_PREFILLS = ((32, 0), (128, 0), (256, 128), (256, 0), (512, 384), (512, 0), (1024, 768), (1024, 0), (2048, 0))
_DECODES = ((1, 32), (1, 512), (4, 128), (8, 128), (8, 512), (16, 256), (32, 512))


@dataclass(frozen=True, slots=True)
class Built:
    """Everything a worker computes with. Close `segment` last."""

    files: ModelFiles
    identity: CacheIdentity
    layout: KvLayout
    segment: Segment
    pieces: PieceMemory
    runner: Runner
    scheduler: Scheduler


def build(config: WorkerConfig, incarnation: int) -> Built:
    """Load the model and allocate its KV memory. Raise ModelError, NoSpace or ConfigError with text for the user."""
    _require_device(config)
    files = resolve(config.model, random_weights=config.random_weights)
    require_weights(files)
    model = read_config(files)
    engine = config.engine(_num_pages(config, model))
    layout = kv_layout(model, engine)
    identity = cache_identity(model, files, config.dtype, config.block_tokens, config.kv_dtype)
    progress, name = _ProgressLog(f"preparing {files.name}"), f"{config.name}/kv"
    segment: Segment
    pieces: PieceMemory
    if config.gpu is None:
        segment = Segment.allocate(
            name,
            layout.total_nbytes,
            granule_nbytes=layout.page_nbytes,
            incarnation=incarnation,
            numa_node=config.numa_node,
        )
        runner = load_runner(files, model, engine, buffer=segment.memory, progress=progress)
        pieces = HostPieces(segment.memory, layout)
    else:
        runner = load_runner(files, model, engine, buffer=None, progress=progress)
        segment = DeviceSegment.adopt(
            name, runner.kv.tensor, granule_nbytes=layout.page_nbytes, incarnation=incarnation
        )
        pieces = DevicePieces(runner.kv)
    _warm_up(runner, layout)
    return Built(files, identity, layout, segment, pieces, runner, make_scheduler(model, engine))


def _require_device(config: WorkerConfig) -> None:
    """Raise ConfigError if torch cannot use the device."""
    count = torch.cuda.device_count() if config.gpu is not None and torch.cuda.is_available() else 0
    if config.gpu is None or config.gpu < count:
        return
    if count:
        why = f"sees {count} GPUs, cuda:0 to cuda:{count - 1} (CUDA_VISIBLE_DEVICES may hide others)"
    else:
        why = "sees no GPU (try nvidia-smi)" if torch.version.cuda else "is built without CUDA"
    raise ConfigError(
        f"--device {config.device} cannot be used: torch {torch.__version__} {why}; --device cpu always works"
    )


def _num_pages(config: WorkerConfig, model: ModelConfig) -> int:
    dtype = config.kv_dtype or config.dtype
    one_page = KvLayout.of(model, num_pages=1, block_tokens=config.block_tokens, dtype=dtype).page_nbytes
    kv_nbytes = _kv_nbytes(config, model)
    if kv_nbytes < one_page:
        raise ConfigError(f"{format_nbytes(kv_nbytes)} of KV memory (--kv) hold no page of {format_nbytes(one_page)}")
    return kv_nbytes // one_page


def _kv_nbytes(config: WorkerConfig, model: ModelConfig) -> int:
    """Return the memory for KV pages. Raise NoSpace if a GPU has less free than the worker needs.

    Workers of a GPU that start at the same time do not see each other's need: `moonpool serve` divides the memory
    before it starts them.
    """
    if config.gpu is None:
        return config.kv_nbytes if config.kv_nbytes is not None else HOST_KV_NBYTES
    free_nbytes, _ = torch.cuda.mem_get_info(config.gpu)
    need = config.device_need(model)
    if config.kv_nbytes is None:
        return kv_share(config.device, free_nbytes, 1, need)
    # Only what is certain: a worker that is started again beside others must not fail on an estimate.
    require_kv_fits(config.device, free_nbytes, 1, replace(need, step_nbytes=0), config.kv_nbytes)
    return config.kv_nbytes


def _warm_up(runner: Runner, layout: KvLayout) -> None:
    """Run one small batch, so that the first request does not wait for the first access to the weights."""
    started_s = time.monotonic()
    runner.execute([Chunk("warm-up", 0, tuple(range(8)), (0,), True)], None)
    runner.kv.clear([0])
    _LOG.info(
        "warmed up in %.1f s, %d pages of %d tokens",
        time.monotonic() - started_s,
        layout.num_pages,
        layout.block_tokens,
    )


class _ProgressLog:
    """Logs progress at most once a second, and nothing when the work ends within the first second."""

    def __init__(self, what: str) -> None:
        self._what, self._clock = what, SystemClock()
        self._next_s = self._clock.now_s() + _LOG_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        if self._clock.now_s() >= self._next_s:
            self._next_s = self._clock.now_s() + _LOG_EVERY_S
            _LOG.info("%s: %d of %d tensors", self._what, done, total)


class Compute(Protocol):
    """Runs the chunks and returns when they are computed."""

    def __call__(self, chunks: list[Chunk], /) -> object: ...


@dataclass(frozen=True, slots=True)
class Limits:
    num_pages: int
    block_tokens: int
    max_batch_tokens: int
    max_num_seqs: int
    max_seq_tokens: int


class Calibration:
    """Times prefills or decode steps before the conductor knows this worker: its first predictions use these samples.

    The runs use pages that hold nothing yet, the first `num_pages_used`; the caller clears them afterwards. A run is
    left out if all together would take longer than `budget_s`, at the time per token of the run before.
    """

    def __init__(self, compute: Compute, limits: Limits, clock: Clock, budget_s: float) -> None:
        self._compute, self._limits, self._clock = compute, limits, clock
        self._ends_s = clock.now_s() + budget_s
        self._per_token_s = 0.0
        self.num_pages_used = 0  # the first ones

    def prefills(self) -> Iterator[PrefillSample]:
        limits = self._limits
        for tokens, prefix in _PREFILLS:
            if tokens > min(limits.max_seq_tokens, limits.num_pages * limits.block_tokens):
                return
            seconds = self._measure(self._prompt(tokens, prefix), tokens - prefix)
            if seconds is None:
                return
            yield PrefillSample(tokens, prefix, seconds)

    def decodes(self) -> Iterator[DecodeSample]:
        limits = self._limits
        for num_seqs, tokens in _DECODES:
            pages_each = -(-tokens // limits.block_tokens)
            if num_seqs > limits.max_num_seqs or tokens > limits.max_seq_tokens:
                continue
            if num_seqs * pages_each > limits.num_pages:
                continue
            steps = [
                Chunk(f"calibrate-{i}", tokens - 1, (0,), tuple(range(i * pages_each, (i + 1) * pages_each)), True)
                for i in range(num_seqs)
            ]
            seconds = self._measure([steps], num_seqs)
            if seconds is None:
                return
            yield DecodeSample(num_seqs, num_seqs * tokens, seconds)

    def _prompt(self, tokens: int, prefix: int) -> list[list[Chunk]]:
        """Return the prompt's steps, each of at most one batch, as the engine would compute them."""
        pages = tuple(range(-(-tokens // self._limits.block_tokens)))
        starts = range(prefix, tokens, self._limits.max_batch_tokens)
        ends = [min(start + self._limits.max_batch_tokens, tokens) for start in starts]
        return [
            [Chunk("calibrate", start, (0,) * (end - start), pages, end == tokens)]
            for start, end in zip(starts, ends, strict=True)
        ]

    def _measure(self, steps: Iterable[list[Chunk]], num_tokens: int) -> float | None:
        """Return the seconds that the steps took; None, with nothing run, when the time left is too short."""
        started_s = self._clock.now_s()
        if started_s + self._per_token_s * num_tokens > self._ends_s:
            return None
        for chunks in steps:
            self.num_pages_used = max(self.num_pages_used, *(max(chunk.pages) + 1 for chunk in chunks))
            self._compute(chunks)
        seconds = self._clock.now_s() - started_s
        self._per_token_s = seconds / num_tokens
        return max(seconds, 1e-9)


def choose_threads(configured: int | None, presence: CorePresence) -> int:
    """Return the number of threads to start with, and log it beside the number of cores."""
    threads = configured if configured is not None else presence.num_threads()
    _LOG.info(
        "computes with %d CPU threads; %d workers share %d cores here (--threads sets it)",
        threads,
        presence.num_workers(),
        available_cores(),
    )
    return threads


async def follow_share(
    threads: int,
    presence: CorePresence,
    post: Callable[[Callable[[], None]], None],
    every_s: float = _COUNT_EVERY_S,
) -> None:
    """Keep the engine's number of threads at this worker's share of the cores. Runs until it is cancelled.

    Other workers may start and stop on this machine at any time, so the share is computed again every few seconds.
    `post` runs a function on the engine's thread: torch keeps the number per thread.
    """
    while True:
        await asyncio.sleep(every_s)
        share = presence.num_threads()
        if share != threads:
            _LOG.info("%d workers share the cores now: %d CPU threads", presence.num_workers(), share)
            post(lambda number=share: torch.set_num_threads(number))  # type: ignore[misc]
            threads = share
