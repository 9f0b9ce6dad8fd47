"""The start of a worker's engine: model files, weights, KV memory, scheduler and CPU threads.

A step that takes seconds logs its progress, so that a first start, which prepares the weights, does not look hung.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from moonpool.base.clock import SystemClock
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
_SWITCH_S = 0.0002


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


def worker_kind(config: WorkerConfig) -> str:
    """Return what the worker computes with, for cost models: the GPU's name, or the CPU with a fixed number of threads
    if it has one."""
    if config.gpu is not None:
        return torch.cuda.get_device_name(config.gpu)
    return "cpu" if config.threads is None else f"cpu, {config.threads} threads"


def build(config: WorkerConfig, incarnation: int) -> Built:
    """Load the model and allocate its KV memory. Raise ModelError, NoSpace or ConfigError with text for the user."""
    _require_device(config)
    files = resolve(config.model, random_weights=config.random_weights)
    require_weights(files)
    model = read_config(files)
    engine = config.engine(_num_pages(config, model))
    layout = kv_layout(model, engine)
    identity = cache_identity(model, files, config.weights_dtype, config.block_tokens, config.kv_dtype)
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
    if config.gpu is not None:
        switch_threads_often()
    _warm_up(runner, layout, decodes=config.role == "decode" or config.elastic)
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
    dtype = config.kv_dtype or config.weights_dtype
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


def switch_threads_often() -> None:
    """Let Python's threads take turns every 0.2 ms instead of 5 ms: the engine's thread needs the interpreter a few
    times to enqueue a step on a GPU, and would wait so long each time while another thread moves KV.
    """
    sys.setswitchinterval(_SWITCH_S)


def _warm_up(runner: Runner, layout: KvLayout, *, decodes: bool) -> None:
    """Run small steps of each kind (a prompt, a chunk behind it, one token), so that no request waits for the first
    access to the weights or for a kernel to be compiled."""
    started_s = time.monotonic()
    runner.warm_up(decodes=decodes)
    for start, end in ((0, 8), (8, 12), (12, 13)):
        runner.execute([Chunk("warm-up", start, tuple(range(start, end)), (0,), True)], None)
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
