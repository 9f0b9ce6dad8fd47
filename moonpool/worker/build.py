"""Puts an engine together: model files, weights, KV memory, scheduler. The slow part of a worker's start.

Each step over two seconds says what it does, so that a first start (which prepares the weights) does not look hung.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from moonpool.base.clock import SystemClock
from moonpool.base.errors import ConfigError
from moonpool.base.keys import CacheIdentity
from moonpool.base.units import format_nbytes
from moonpool.engine.config import ModelConfig
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.load import kv_layout, load_runner, make_scheduler
from moonpool.engine.model_files import ModelFiles, read_config, resolve
from moonpool.engine.model_identity import cache_identity
from moonpool.engine.runner import Runner
from moonpool.engine.scheduler import Scheduler
from moonpool.engine.sequence import Chunk
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.topology import Hardware, read_topology
from moonpool.worker.config import WorkerConfig
from moonpool.worker.kv_link.device_pieces import DevicePieces
from moonpool.worker.kv_link.pieces import HostPieces, PieceMemory

_LOG = logging.getLogger(__name__)
_TELL_EVERY_S = 1.0


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
    """Raises ModelError, NoSpace or ConfigError with a sentence for the user."""
    _require_device(config)
    files = resolve(config.model)
    model = read_config(files)
    engine = config.engine(_num_pages(config, model))
    layout = kv_layout(model, engine)
    identity = cache_identity(model, files, config.dtype, config.block_tokens)
    segment = Segment.allocate(
        f"{config.name}/kv",
        layout.total_nbytes,
        granule_nbytes=layout.page_nbytes,
        incarnation=incarnation,
        numa_node=_numa_node(config),
    )
    on_host = config.device == "cpu"
    buffer = segment.memory if on_host else None
    runner = load_runner(files, model, engine, buffer=buffer, progress=_Teller(f"preparing {files.name}"))
    _warm_up(runner, layout)
    pieces = HostPieces(segment.memory, layout) if on_host else DevicePieces(segment.memory, runner.kv)
    return Built(files, identity, layout, segment, pieces, runner, make_scheduler(model, engine))


def gpu_numa_node(hardware: Hardware, uuid: str) -> int | None:
    """The node of that GPU; where UUIDs are not known (no NVML), that of all GPUs if they share one, else None."""
    own = [gpu for gpu in hardware.gpus if gpu.uuid is not None and gpu.uuid.removeprefix("GPU-") == uuid]
    nodes = {gpu.place.numa_node for gpu in own or hardware.gpus}
    return nodes.pop() if len(nodes) == 1 else None


def _numa_node(config: WorkerConfig) -> int | None:
    """Where the KV memory should lie: as configured, else beside the GPU that it is copied to and from."""
    if config.numa_node is not None or config.device == "cpu":
        return config.numa_node
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    topology_file = Path(config.topology_file) if config.topology_file is not None else None
    return gpu_numa_node(read_topology(topology_file).hardware, uuid)


def _require_device(config: WorkerConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        why = "sees no GPU (try nvidia-smi)" if torch.version.cuda else "is built without CUDA"
        raise ConfigError(f"--device cuda cannot be used: torch {torch.__version__} {why}; --device cpu always works")


def _num_pages(config: WorkerConfig, model: ModelConfig) -> int:
    one_page = KvLayout.of(model, num_pages=1, block_tokens=config.block_tokens, dtype=config.dtype).page_nbytes
    if config.kv_nbytes < one_page:
        raise ConfigError(
            f"{format_nbytes(config.kv_nbytes)} of KV memory (--kv) hold no page of {format_nbytes(one_page)}"
        )
    return config.kv_nbytes // one_page


def _warm_up(runner: Runner, layout: KvLayout) -> None:
    """One small pass, so that the first request does not pay for first touches of the weights."""
    started_s = time.monotonic()
    runner.execute([Chunk("warm-up", 0, tuple(range(8)), (0,), True)], None)
    runner.kv.clear([0])
    _LOG.info(
        "warmed up in %.1f s, %d pages of %d tokens",
        time.monotonic() - started_s,
        layout.num_pages,
        layout.block_tokens,
    )


class _Teller:
    """Logs progress at most once a second, and nothing when it is over before the first."""

    def __init__(self, what: str) -> None:
        self._what, self._clock = what, SystemClock()
        self._next_s = self._clock.now_s() + _TELL_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        if self._clock.now_s() >= self._next_s:
            self._next_s = self._clock.now_s() + _TELL_EVERY_S
            _LOG.info("%s: %d of %d tensors", self._what, done, total)
