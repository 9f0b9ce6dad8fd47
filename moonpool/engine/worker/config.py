"""What a worker is told at start. No torch, so that a launcher can fill it in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moonpool.engine.config import Device, DType


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Each default is written here and nowhere else."""

    name: str  # unique in the cluster; a restarted worker keeps it
    role: Literal["prefill", "decode"]
    model: str  # a name known to `moonpool model`, a Hugging Face folder or a .gguf file
    address: str  # where to serve, unix:/path or tcp:host:port
    conductor_address: str
    master_address: str
    run_dir: str  # for Unix sockets; private to this user
    kv_nbytes: int = 400_000_000  # KV memory of this worker
    block_tokens: int = 64
    max_batch_tokens: int = 512
    max_num_seqs: int = 32
    max_model_len: int | None = None  # None: what the model allows
    dtype: DType = "float32"
    device: Device = "cpu"
    threads: int | None = None
    tcp_host: str | None = None  # serve KV memory over TCP too, for workers on other machines
    report_interval_s: float = 0.05
    pull_timeout_s: float = 10.0
