"""Puts an engine together: model files, weights, KV memory, scheduler. The slow part of a worker's start.

Each step over two seconds says what it does, so that a first start (which prepares the weights) does not look hung.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from moonpool.base.clock import SystemClock
from moonpool.base.errors import ConfigError
from moonpool.base.identity import CacheIdentity
from moonpool.engine.blocks import PageManager
from moonpool.engine.config import ModelConfig
from moonpool.engine.kv_link.device_pieces import DevicePieces
from moonpool.engine.kv_link.pieces import HostPieces, PieceMemory
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.kv_tensor import KvMemory
from moonpool.engine.model_files import ModelFiles, read_config, resolve
from moonpool.engine.model_identity import cache_identity
from moonpool.engine.models.llama import LlamaModel
from moonpool.engine.runner import Runner
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.engine.sequence import Chunk
from moonpool.engine.weights import load_weights
from moonpool.engine.worker.config import WorkerConfig
from moonpool.transfer.segment import Segment

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
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    files = resolve(config.model)
    model = read_config(files)
    layout = _layout(config, model)
    identity = cache_identity(model, files, config.dtype, config.block_tokens)
    weights = load_weights(
        files, model, dtype=config.dtype, device=config.device, progress=_Teller(f"preparing {files.name}")
    )
    segment = Segment.allocate(
        f"{config.name}/kv", layout.total_nbytes, granule_nbytes=layout.page_nbytes, incarnation=incarnation
    )
    on_host = config.device == "cpu"
    kv = KvMemory(layout, device=config.device, buffer=segment.memory if on_host else None)
    runner = Runner(LlamaModel(model, weights), kv)
    _warm_up(runner, layout)
    pages = PageManager(layout.num_pages, layout.block_tokens)
    limits = SchedulerConfig(
        max_batch_tokens=config.max_batch_tokens,
        max_num_seqs=config.max_num_seqs,
        max_seq_tokens=min(
            config.max_model_len or model.max_position, model.max_position, layout.num_pages * layout.block_tokens
        ),
        eos_token_ids=frozenset(model.eos_ids),
    )
    pieces = HostPieces(segment.memory, layout) if on_host else DevicePieces(segment.memory, kv)
    return Built(files, identity, layout, segment, pieces, runner, Scheduler(limits, pages))


def _layout(config: WorkerConfig, model: ModelConfig) -> KvLayout:
    one = KvLayout.of(model, num_pages=1, block_tokens=config.block_tokens, dtype=config.dtype)
    num_pages = config.kv_nbytes // one.page_nbytes
    if num_pages < 1:
        raise ConfigError(f"kv_nbytes {config.kv_nbytes} is less than one page of {one.page_nbytes} bytes")
    return KvLayout.of(model, num_pages=num_pages, block_tokens=config.block_tokens, dtype=config.dtype)


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
