"""Loads a model and makes an engine for use in a program, without workers, pool or front end.

    engine = load_engine("smollm2", EngineConfig(num_pages=64))
    engine.generate([tokens], SamplingParams(max_tokens=16))

A worker uses the same parts (worker/build.py), with KV memory that other processes can reach.
"""

from __future__ import annotations

import torch

from moonpool.engine.blocks import PageManager
from moonpool.engine.config import EngineConfig, ModelConfig
from moonpool.engine.engine import Engine
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.kv_tensor import KvMemory
from moonpool.engine.llama import LlamaModel
from moonpool.engine.model_files import ModelFiles, read_config, resolve
from moonpool.engine.runner import BatchLimits, Runner
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.engine.weights import Progress, load_weights


def load_engine(model: str, config: EngineConfig, *, random_weights: bool = False) -> Engine:
    """Return an engine. `model` is a fetched name, a Hugging Face folder (with `random_weights` it needs no weights) or
    a .gguf file. Raise ModelError, NoSpace or ConfigError."""
    files = resolve(model, random_weights=random_weights)
    shape = read_config(files)
    runner = load_runner(files, shape, config)
    return Engine(make_scheduler(shape, config), runner)


def load_runner(
    files: ModelFiles,
    model: ModelConfig,
    config: EngineConfig,
    *,
    buffer: memoryview | None = None,
    progress: Progress | None = None,
) -> Runner:
    """Load the weights and allocate KV memory, or use `buffer` for it (CPU only)."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    weights = load_weights(files, model, dtype=config.dtype, device=config.device, progress=progress)
    kv = KvMemory(kv_layout(model, config), device=config.device, buffer=buffer)
    limits = BatchLimits(config.max_num_seqs, max_seq_tokens(model, config), config.max_batch_tokens)
    return Runner(LlamaModel(model, weights), kv, limits)


def make_scheduler(model: ModelConfig, config: EngineConfig) -> Scheduler:
    """Return a scheduler whose sequences never exceed the model, the configuration or the pages, so none gets stuck."""
    limits = SchedulerConfig(
        max_batch_tokens=config.max_batch_tokens,
        max_num_seqs=config.max_num_seqs,
        max_seq_tokens=max_seq_tokens(model, config),
        eos_token_ids=frozenset(model.eos_ids),
    )
    return Scheduler(limits, PageManager(config.num_pages, config.block_tokens))


def max_seq_tokens(model: ModelConfig, config: EngineConfig) -> int:
    """Return the most tokens that a sequence may have, prompt and output together."""
    return min(config.max_model_len or model.max_position, model.max_position, config.num_pages * config.block_tokens)


def kv_layout(model: ModelConfig, config: EngineConfig) -> KvLayout:
    dtype = config.kv_dtype or config.dtype
    return KvLayout.of(model, num_pages=config.num_pages, block_tokens=config.block_tokens, dtype=dtype)
