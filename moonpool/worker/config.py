"""A worker's configuration. Imports no torch, so that a launcher can use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moonpool.base.rpc.breaker import BreakerLimits
from moonpool.engine.config import Device, DType, EngineConfig, KvDType, ModelConfig, gpu_index
from moonpool.engine.device_memory import DeviceNeed
from moonpool.transfer.config import TransferConfig, WireConfig
from moonpool.worker.watchdog import TaskLimits

HOST_KV_NBYTES = 512_000_000  # KV pages of a worker on the CPU, by default
GPU_BATCH_TOKENS = 8192  # tokens computed per step on a GPU, by default: with fewer, launching kernels takes longer
GPU_DTYPE: DType = "bfloat16"  # by default: what models are trained in
GPU_CALIBRATE_S = 4.0  # by default: prompts of 32k tokens take seconds


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(WireConfig):
    """All defaults of a worker are defined here."""

    name: str  # unique in the cluster; must stay the same across restarts
    role: Literal["prefill", "decode"]  # what this worker computes at first; `moonpool role` changes it
    elastic: bool = False  # let the conductor change the role as the load moves
    pipeline: int = 1  # compute long prompts together with other prefill workers, this many in all; 1: alone
    model: str  # a name from `moonpool model list`, a Hugging Face folder or a .gguf file
    # generate random weights instead of reading them: to measure a machine; a folder then needs only config.json and a
    # tokenizer
    random_weights: bool = False
    address: str  # address to serve, unix:/path or tcp:host:port
    conductor_address: str  # address of the conductor, which sends requests here; of several, separated by commas
    master_address: str  # address of the pool's master
    run_dir: str  # folder for Unix sockets; must be private to this user
    # memory for KV pages; default: 512 MB, on a GPU what is free beside the weights
    kv_nbytes: int | None = None
    block_tokens: int = EngineConfig.block_tokens  # tokens per KV block; the same for all workers of a cluster
    max_batch_tokens: int | None = None  # tokens computed per step; default: 512, on a GPU 8192
    max_num_seqs: int = EngineConfig.max_num_seqs  # sequences in the batch at the same time
    # longest prompt plus answer in tokens; default: the model's limit
    max_model_len: int | None = EngineConfig.max_model_len
    # type of weights and activations, and of KV if kv_dtype is not given; default: float32, on a GPU bfloat16
    dtype: DType | None = None
    # type of KV pages; float8_e4m3fn halves them, with a small loss of precision (GPU only); default: as dtype
    kv_dtype: KvDType | None = EngineConfig.kv_dtype
    device: Device = EngineConfig.device  # where the model runs: cpu, cuda, or cuda:N for GPU number N
    threads: int | None = EngineConfig.threads  # CPU threads that compute; default: this worker's share of the cores
    numa_node: int | None = None  # NUMA node for the KV memory; no effect with a GPU
    # also serve the KV memory over TCP on this address, for workers on other machines; auto: on every usable NIC
    tcp_host: str | None = None
    # seconds between two load reports to a conductor, at least: it asks for longer intervals if it has many workers
    report_interval_s: float = 0.05
    # most seconds to spend on measuring the compute speed before registering; 0: do not measure; default: 1, on a GPU 4
    calibrate_s: float | None = None
    # seconds after which a pull of KV from the pool is abandoned and the prefix is computed
    pull_timeout_s: float = 10.0
    # abandon a pull that takes longer than this and longer than twice the time computing would take
    pull_grace_s: float = 1.0
    # a pool's master that sends nothing for this long during a call counts as away: its blocks are computed meanwhile
    pool_silence_s: float = BreakerLimits.silence_s
    pool_timeout_s: float = 2.0  # seconds to wait for one reply of the pool's master
    pool_rest_s: float = 10.0  # seconds without the pool after it did not reply
    # end this process when a step has gone on for this many seconds without progress, and five times longer than
    # expected; after half of that the conductor sends requests elsewhere
    step_limit_s: float = 6.0
    # the same for the first step, and for one that captures a CUDA graph
    prepare_limit_s: float = 120.0

    @property
    def gpu(self) -> int | None:
        """The number of its GPU; None on the CPU. Raises ConfigError for an unknown device."""
        return gpu_index(self.device)

    @property
    def weights_dtype(self) -> DType:
        """`dtype`, or its default for the device."""
        return weights_dtype(self.dtype, on_gpu=self.gpu is not None)

    @property
    def step_tokens(self) -> int:
        """`max_batch_tokens`, or its default for the device."""
        return step_tokens(self.max_batch_tokens, self.device)

    @property
    def calibration_s(self) -> float:
        """`calibrate_s`, or its default for the device."""
        return self.calibrate_s if self.calibrate_s is not None else 1.0 if self.gpu is None else GPU_CALIBRATE_S

    def device_need(self, model: ModelConfig) -> DeviceNeed:
        """Return what the worker takes of its GPU beside KV pages."""
        return DeviceNeed.of(
            model,
            dtype=self.weights_dtype,
            block_tokens=self.block_tokens,
            max_batch_tokens=self.step_tokens,
            max_num_seqs=self.max_num_seqs,
        )

    def engine(self, num_pages: int) -> EngineConfig:
        """Return the engine's part of this configuration."""
        return EngineConfig(
            num_pages=num_pages,
            block_tokens=self.block_tokens,
            max_batch_tokens=self.step_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            dtype=self.weights_dtype,
            kv_dtype=self.kv_dtype,
            device=self.device,
            threads=self.threads,
        )

    def task_limits(self) -> TaskLimits:
        """Return the watchdog's part of this configuration. Raise ConfigError for a limit of 0."""
        return TaskLimits(self.step_limit_s, self.prepare_limit_s)

    def transfer(self) -> TransferConfig:
        """Return the transfer engine's part of this configuration."""
        return TransferConfig(run_dir=self.run_dir, **self.wires())


def weights_dtype(dtype: DType | None, *, on_gpu: bool) -> DType:
    """Return the type in which a worker on such a device computes."""
    return dtype if dtype is not None else GPU_DTYPE if on_gpu else EngineConfig.dtype


def step_tokens(max_batch_tokens: int | None, device: Device) -> int:
    """Return the number of tokens that a worker on that device computes per step."""
    if max_batch_tokens is not None:
        return max_batch_tokens
    return EngineConfig.max_batch_tokens if gpu_index(device) is None else GPU_BATCH_TOKENS
