"""The configuration of `moonpool serve`, and the roles it starts, with their options and their order. Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moonpool.base.address import host_port
from moonpool.base.errors import ConfigError
from moonpool.base.limits import divide_cores
from moonpool.base.process import ProcessConfig
from moonpool.base.run_dirs import CONDUCTOR, MASTER, socket_address
from moonpool.base.units import format_nbytes, parse_nbytes
from moonpool.conductor.admission.forms import AdmissionForm
from moonpool.conductor.placement.policy import DEFAULT_POLICY, PolicyConfig
from moonpool.engine.config import Device, DType
from moonpool.engine.model_fetch import DEFAULT_MODEL
from moonpool.launch.supervisor import ChildSpec
from moonpool.worker.config import WorkerConfig

NODE, FRONTEND = "node", "frontend"
# A worker loads torch and the weights and warms up; on two cores four workers may do so at the same time.
_WORKER_START_S = 300.0
_LEAST_SSD_NBYTES = 64 * 1024**2


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The whole service on one machine."""

    model: str = DEFAULT_MODEL  # a name from `moonpool model list`, a Hugging Face folder or a .gguf file
    prefill: int = 1  # number of prefill workers
    decode: int = 1  # number of decode workers
    dram: str = "1GB"  # memory of the pool
    ssd: str | None = None  # folder for blocks evicted from DRAM; they survive a restart
    ssd_size: str = "10GB"  # disk space of the pool; used with --ssd
    kv: str = "512MB"  # memory for KV pages, per worker
    host: str = "127.0.0.1"  # address on which the OpenAI API listens
    port: int = 8000  # 0: any free port
    block_tokens: int = WorkerConfig.block_tokens  # tokens per KV block
    max_batch_tokens: int = WorkerConfig.max_batch_tokens  # tokens a worker computes per step
    max_num_seqs: int = WorkerConfig.max_num_seqs  # sequences a worker runs at the same time
    max_model_len: int | None = None  # longest prompt plus answer in tokens; default: the model's limit
    dtype: DType = WorkerConfig.dtype  # type of weights, activations and KV
    device: Device = WorkerConfig.device  # where the model runs
    threads: int | None = None  # CPU threads per worker; default: the machine's cores divided by the number of workers
    policy: str = DEFAULT_POLICY  # how workers are chosen: random, round-robin, least-loaded, local, paper or cost
    # target for the time to first token; a request predicted to miss it is queued or refused; default: no target
    ttft_slo_s: float | None = None
    # target for the time between tokens; a request predicted to miss it is queued or refused; default: no target
    tbt_slo_s: float | None = None
    admission: AdmissionForm = AdmissionForm.PREDICTED  # with --tbt-slo-s: which decode load counts on arrival
    # JSON {"tenants": [{"name": ..., "api_keys": [...]}]}; default: one tenant, no API key needed
    tenants_file: str | None = None
    # file (mode 600) with a secret; the node then also listens on TCP, for peers with the same secret
    secret_file: str | None = None
    # folder for secrets and the master's journal; default: $MOONPOOL_STATE or ~/.local/state/moonpool
    state_dir: str | None = None
    log_dir: str | None = None  # folder for one log file per role; default: all roles log to standard error
    log_level: str = ProcessConfig.log_level  # DEBUG, INFO, WARNING or ERROR

    @property
    def pool_nbytes(self) -> int:
        return parse_nbytes(self.dram)

    @property
    def ssd_nbytes(self) -> int:
        return 0 if self.ssd is None else parse_nbytes(self.ssd_size)

    @property
    def kv_nbytes(self) -> int:
        return parse_nbytes(self.kv)

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode

    def check(self) -> None:
        """Raise ConfigError for a bad value. Does not look at the machine."""
        if self.prefill < 1 or self.decode < 1:
            raise ConfigError("there must be at least one prefill and one decode worker", param="prefill")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"{self.port} is not a port", param="port")
        if self.pool_nbytes <= 0 or self.kv_nbytes <= 0:
            raise ConfigError("--dram and --kv must be above 0", param="dram")
        if self.ssd is not None and self.ssd_nbytes < _LEAST_SSD_NBYTES:
            raise ConfigError(f"--ssd-size must be at least {format_nbytes(_LEAST_SSD_NBYTES)}", param="ssd_size")
        if self.log_level.upper() not in logging.getLevelNamesMapping():
            raise ConfigError(f"{self.log_level!r} is not a log level", param="log_level")
        if self.threads is not None and self.threads < 1:
            raise ConfigError("--threads must be at least 1", param="threads")
        PolicyConfig(name=self.policy, ttft_slo_s=self.ttft_slo_s, tbt_slo_s=self.tbt_slo_s)  # raises ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Role(ChildSpec):
    """One process: `moonpool COMMAND` with `options`."""

    command: str
    options: Mapping[str, object]


def plan_roles(config: ServeConfig, run_dir: Path, state_dir: Path, *, num_cores: int) -> list[Role]:
    """Return all roles, each after those it needs. The workers share `num_cores`."""
    threads = divide_cores(num_cores, config.num_workers)
    workers = [_worker(config, run_dir, "prefill", i, threads[i]) for i in range(config.prefill)]
    workers += [_worker(config, run_dir, "decode", i, threads[config.prefill + i]) for i in range(config.decode)]
    names = tuple(worker.name for worker in workers)
    pool = [_master(config, run_dir, state_dir), _node(config, run_dir), _conductor(config, run_dir)]
    return [*pool, *workers, _frontend(config, run_dir, state_dir, names)]


def _master(config: ServeConfig, run_dir: Path, state_dir: Path) -> Role:
    options = {
        "listen": socket_address(run_dir, MASTER),
        "data_dir": str(state_dir / MASTER),
        "log_level": config.log_level,
    }
    return Role(MASTER, command="master", options=options)


def _node(config: ServeConfig, run_dir: Path) -> Role:
    options = {
        "name": NODE,
        "master_address": socket_address(run_dir, MASTER),
        "run_dir": str(run_dir),
        "dram_nbytes": config.pool_nbytes,
        "ssd_dir": config.ssd,
        "ssd_nbytes": config.ssd_nbytes,
        "tcp_host": _node_tcp_host(config),
        "secret_file": config.secret_file,
        "log_level": config.log_level,
    }
    return Role(NODE, command="node", options=options, after=(MASTER,))


def _node_tcp_host(config: ServeConfig) -> str | None:
    """Return "none" without a secret: the roles of one machine share memory, so the node needs no TCP port, and an
    unguarded port would open the pool to every user of the machine. With a secret, return None: the node's default.
    """
    return "none" if config.secret_file is None else None


def _conductor(config: ServeConfig, run_dir: Path) -> Role:
    options = {
        "address": socket_address(run_dir, CONDUCTOR),
        "store_address": socket_address(run_dir, MASTER),
        "policy_name": config.policy,
        "policy_ttft_slo_s": config.ttft_slo_s,
        "policy_tbt_slo_s": config.tbt_slo_s,
        "policy_admission": config.admission,
        "log_level": config.log_level,
    }
    return Role(CONDUCTOR, command="conductor", options=options, first_after=(MASTER,))


def _worker(config: ServeConfig, run_dir: Path, role: str, index: int, threads: int) -> Role:
    name = f"{role}-{index}"
    options = {
        "name": name,
        "role": role,
        "model": config.model,
        "address": socket_address(run_dir, name),
        "conductor_address": socket_address(run_dir, CONDUCTOR),
        "master_address": socket_address(run_dir, MASTER),
        "run_dir": str(run_dir),
        "kv_nbytes": config.kv_nbytes,
        "block_tokens": config.block_tokens,
        "max_batch_tokens": config.max_batch_tokens,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "dtype": config.dtype,
        "device": config.device,
        "threads": config.threads or threads,
        "secret_file": config.secret_file,
        "log_level": config.log_level,
    }
    # A restarted worker waits for no role: it serves without the pool, and registers when the conductor is back.
    return Role(
        name,
        command="worker",
        options=options,
        first_after=(CONDUCTOR, NODE),
        start_timeout_s=_WORKER_START_S,
    )


def _frontend(config: ServeConfig, run_dir: Path, state_dir: Path, workers: tuple[str, ...]) -> Role:
    options = {
        "listen": f"tcp:{host_port(config.host, config.port)}",
        "model": config.model,
        "conductor_address": socket_address(run_dir, CONDUCTOR),
        "master_address": socket_address(run_dir, MASTER),
        "expected_workers": workers,
        "max_model_len": config.max_model_len,
        "tenants_file": config.tenants_file,
        "state_dir": str(state_dir),
        "log_level": config.log_level,
    }
    # A restarted front end does not wait for the conductor: /health reports what is missing.
    return Role(FRONTEND, command="frontend", options=options, first_after=(CONDUCTOR,), uses=workers)
