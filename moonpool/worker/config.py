"""What a worker is told at start. No torch, so that a launcher can fill it in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moonpool.engine.config import Device, DType, EngineConfig
from moonpool.transfer.config import TransferConfig, WireConfig


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(WireConfig):
    """Each default is written here and nowhere else."""

    name: str  # unique in the cluster; a restarted worker keeps it
    role: Literal["prefill", "decode"]
    model: str  # a name known to `moonpool model`, a Hugging Face folder or a .gguf file
    address: str  # where to serve, unix:/path or tcp:host:port
    conductor_address: str  # who sends it requests
    master_address: str  # of the pool
    run_dir: str  # for Unix sockets; private to this user
    kv_nbytes: int = 400_000_000  # KV memory of this worker
    block_tokens: int = EngineConfig.block_tokens
    max_batch_tokens: int = EngineConfig.max_batch_tokens  # computed per step
    max_num_seqs: int = EngineConfig.max_num_seqs  # in the batch at once
    max_model_len: int | None = EngineConfig.max_model_len  # None: what the model allows
    dtype: DType = EngineConfig.dtype
    device: Device = EngineConfig.device
    threads: int | None = EngineConfig.threads  # for computing; default: a part of the cores, which workers here share
    numa_node: int | None = None  # for the KV memory; with a GPU the default is the node it is attached to
    tcp_host: str | None = None  # serve KV memory by tcp too, for workers on other machines; auto: by all good NICs
    report_interval_s: float = 0.05
    calibrate_s: float = 1.0  # at most, for measuring before the conductor is told of this worker; 0: none
    pull_timeout_s: float = 10.0
    pull_grace_s: float = 1.0  # a pull that takes longer, and twice as long as computing would, is given up
    pool_timeout_s: float = 2.0  # for one answer of the pool
    pool_rest_s: float = 10.0  # how long a pool that did not answer is left alone

    def engine(self, num_pages: int) -> EngineConfig:
        """The engine's share of this configuration."""
        return EngineConfig(
            num_pages=num_pages,
            block_tokens=self.block_tokens,
            max_batch_tokens=self.max_batch_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
        )

    def transfer(self) -> TransferConfig:
        """The transfer engine's share of it."""
        return TransferConfig(run_dir=self.run_dir, **self.wires())
