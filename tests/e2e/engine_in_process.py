"""The engine without workers: one process, one thread, a named model."""

from __future__ import annotations

from moonpool.engine.blocks import PageManager
from moonpool.engine.engine import Engine
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.kv_tensor import KvMemory
from moonpool.engine.model_files import read_config, resolve
from moonpool.engine.models.llama import LlamaModel
from moonpool.engine.runner import Runner
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.engine.weights import load_weights


def small_engine(model: str, *, num_pages: int, block_tokens: int = 64) -> Engine:
    files = resolve(model)
    config = read_config(files)
    layout = KvLayout.of(config, num_pages=num_pages, block_tokens=block_tokens, dtype="float32")
    runner = Runner(LlamaModel(config, load_weights(files, config)), KvMemory(layout))
    limits = SchedulerConfig(
        max_batch_tokens=512, max_num_seqs=16, max_seq_tokens=4096, eos_token_ids=frozenset(config.eos_ids)
    )
    return Engine(Scheduler(limits, PageManager(num_pages, block_tokens)), runner)
