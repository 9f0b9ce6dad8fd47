"""The configuration of `moonpool serve`, what it runs on this machine (machine.py), and the roles: processes with their
options and their order. Pure."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moonpool.base.address import host_port
from moonpool.base.errors import ConfigError
from moonpool.base.limits import divide_cores
from moonpool.base.process import ProcessConfig
from moonpool.base.run_dirs import CONDUCTOR, MASTER, socket_address
from moonpool.base.units import format_nbytes, parse_nbytes
from moonpool.conductor.admission.forms import AdmissionForm
from moonpool.conductor.placement.policy import DEFAULT_POLICY, PolicyConfig
from moonpool.engine.config import Device, DType, KvDType, ModelConfig, gpu_index
from moonpool.engine.device_memory import DeviceNeed, kv_share, require_kv_fits
from moonpool.engine.model_fetch import DEFAULT_MODEL
from moonpool.launch.machine import (
    FRONTEND,
    FrontendPart,
    MachinePlan,
    NodePart,
    Wiring,
    WorkerPart,
    node_parts,
    numbered,
)
from moonpool.launch.supervisor import ChildSpec
from moonpool.worker.config import HOST_KV_NBYTES, WorkerConfig, step_tokens, weights_dtype

# A worker loads torch and the weights and warms up; on two cores four workers may do so at the same time.
_WORKER_START_S = 300.0
_LEAST_SSD_NBYTES = 64 * 1024**2
MOST_OF_A_KIND = 64  # nodes, and front ends, on one machine; more is a mistake


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The whole service on one machine."""

    model: str = DEFAULT_MODEL  # a name from `moonpool model list`, a Hugging Face folder or a .gguf file
    # generate random weights instead of reading them: to measure a machine; a folder then needs only config.json and a
    # tokenizer
    random_weights: bool = WorkerConfig.random_weights
    prefill: int = 1  # number of prefill workers
    decode: int = 1  # number of decode workers
    nodes: int = 1  # number of nodes that hold the pool; a block is lost only if all nodes that have it die
    frontends: int = 1  # number of front ends; they share --port, and the others serve when one dies
    conductors: int = 1  # number of conductors; front ends go on with another one when theirs dies
    dram: str = "1GB"  # memory of the pool, per node
    # folder for blocks evicted from DRAM; they survive a restart; with --nodes, further nodes use DIR/node-1, ...
    ssd: str | None = None
    ssd_size: str = "10GB"  # disk space of the pool, per node; used with --ssd
    # memory for KV pages, per worker; default: 512MB, on a GPU the worker's share of what is free beside the weights
    kv: str | None = None
    host: str = "127.0.0.1"  # address on which the OpenAI API listens
    port: int = 8000  # port of the OpenAI API; 0: any free port
    block_tokens: int = WorkerConfig.block_tokens  # tokens per KV block
    max_batch_tokens: int | None = None  # tokens a worker computes per step; default: 512, on a GPU 8192
    max_num_seqs: int = WorkerConfig.max_num_seqs  # sequences a worker runs at the same time
    # let workers change between prefill and decode as the load moves; --prefill and --decode say how they start
    elastic: bool = WorkerConfig.elastic
    # prefill workers that compute a long prompt together, each some of the layers; the conductor decides from which
    # length on this is faster, unless --pipeline-min-tokens says it; 1: every prompt is computed by one worker
    pipeline: int = WorkerConfig.pipeline
    # with --pipeline: several workers compute a prompt that has at least this many tokens beside those in a cache;
    # default: the conductor predicts which prompts are faster so
    pipeline_min_tokens: int | None = None
    max_model_len: int | None = None  # longest prompt plus answer in tokens; default: the model's limit
    # type of weights and activations, and of KV if kv_dtype is not given; default: float32, with a GPU bfloat16
    dtype: DType | None = WorkerConfig.dtype
    # type of KV pages; float8_e4m3fn halves them, with a small loss of precision (GPU only); default: as dtype
    kv_dtype: KvDType | None = WorkerConfig.kv_dtype
    # where the model runs: cpu, cuda, or cuda:N; several, for example cuda:0,cuda:1, are given to the workers in turn,
    # prefill workers first
    device: str = WorkerConfig.device
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
    # folder for secrets and the master's journal; default: ~/.local/state/moonpool
    state_dir: str | None = None
    # add a Tour to the live page, to try Moonpool out: it kills workers and fills the pool; it needs the token that the
    # start prints
    tour: bool = False
    # OpenTelemetry collector (OTLP over HTTP) that gets one trace per request, for example http://127.0.0.1:4318; needs
    # moonpool[otel]; default: no traces
    otlp: str | None = None
    log_dir: str | None = None  # folder for one log file per role; default: all roles log to standard error
    log_level: str = ProcessConfig.log_level  # DEBUG, INFO, WARNING or ERROR

    @property
    def node_nbytes(self) -> int:
        """Bytes of memory of one node."""
        return parse_nbytes(self.dram)

    @property
    def pool_nbytes(self) -> int:
        """Bytes of memory of all nodes together."""
        return self.nodes * self.node_nbytes

    @property
    def ssd_nbytes(self) -> int:
        """Bytes of disk space of one node; 0 without a disk."""
        return 0 if self.ssd is None else parse_nbytes(self.ssd_size)

    @property
    def kv_nbytes(self) -> int | None:
        """Bytes of KV pages per worker; None: the default of its device."""
        return None if self.kv is None else parse_nbytes(self.kv)

    @property
    def host_kv_nbytes(self) -> int:
        """Bytes of KV pages of a worker on the CPU."""
        return HOST_KV_NBYTES if self.kv_nbytes is None else self.kv_nbytes

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each worker, prefill workers first. Raises ConfigError for an unknown device."""
        named = [name.strip() for name in self.device.split(",")]
        gpus = [gpu_index(name) for name in named]
        chosen = ["cpu" if gpu is None else f"cuda:{gpu}" for gpu in gpus]
        return tuple(chosen[i % len(chosen)] for i in range(self.num_workers))

    @property
    def weights_dtype(self) -> DType:
        """`dtype`, or its default: the same for all workers, because they hand KV to each other."""
        return weights_dtype(self.dtype, on_gpu=any(device != "cpu" for device in self.devices))

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode

    def check(self) -> None:
        """Raise ConfigError for a bad value, or if a whole service lacks a role. Does not look at the machine."""
        if self.prefill < 1 or self.decode < 1:
            raise ConfigError("there must be at least one prefill and one decode worker", param="prefill")
        if not 1 <= self.pipeline <= self.prefill:
            raise ConfigError(
                f"--pipeline {self.pipeline} needs as many prefill workers, not {self.prefill}", param="pipeline"
            )
        if self.pipeline_min_tokens is not None and self.pipeline == 1:
            raise ConfigError(
                "--pipeline-min-tokens needs --pipeline with at least 2 workers", param="pipeline_min_tokens"
            )
        for name, count in (("nodes", self.nodes), ("frontends", self.frontends), ("conductors", self.conductors)):
            if not 1 <= count <= MOST_OF_A_KIND:
                raise ConfigError(f"--{name} must be 1 to {MOST_OF_A_KIND}, not {count}", param=name)
        self.check_values()

    def check_values(self) -> None:
        """Raise ConfigError for a bad value; a machine of a cluster may lack roles."""
        for name in ("prefill", "decode", "nodes", "frontends", "conductors"):
            if not 0 <= getattr(self, name) <= MOST_OF_A_KIND:
                raise ConfigError(f"{name} must be 0 to {MOST_OF_A_KIND}", param=name)
        if not 0 <= self.port < 65536:
            raise ConfigError(f"{self.port} is not a port", param="port")
        if self.node_nbytes <= 0 or self.kv_nbytes == 0:
            raise ConfigError("--dram and --kv must be above 0", param="dram")
        if self.ssd is not None and self.ssd_nbytes < _LEAST_SSD_NBYTES:
            raise ConfigError(f"--ssd-size must be at least {format_nbytes(_LEAST_SSD_NBYTES)}", param="ssd_size")
        if self.log_level.upper() not in logging.getLevelNamesMapping():
            raise ConfigError(f"{self.log_level!r} is not a log level", param="log_level")
        if self.num_workers and len(self.device.split(",")) > len(self.devices):
            raise ConfigError(f"{self.device} are more devices than the {self.num_workers} workers", param="device")
        if self.threads is not None and self.threads < 1:
            raise ConfigError("--threads must be at least 1", param="threads")
        PolicyConfig(  # raises ConfigError
            name=self.policy,
            ttft_slo_s=self.ttft_slo_s,
            tbt_slo_s=self.tbt_slo_s,
            pipeline_min_tokens=self.pipeline_min_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Role(ChildSpec):
    """One process: `moonpool COMMAND` with `options`."""

    command: str
    options: Mapping[str, object]


def plan_kv(config: ServeConfig, model: ModelConfig, free_nbytes: Mapping[Device, int]) -> dict[Device, int]:
    """Return the bytes of KV pages for each worker of each GPU: the configured ones, or an equal share of the memory
    that is free. Raise NoSpace if the workers of a GPU do not fit."""
    planned = {}
    for device, num_workers in Counter(config.devices).items():
        if gpu_index(device) is None:
            continue
        need = DeviceNeed.of(
            model,
            dtype=config.weights_dtype,
            block_tokens=config.block_tokens,
            max_batch_tokens=step_tokens(config.max_batch_tokens, device),
            max_num_seqs=config.max_num_seqs,
        )
        if config.kv_nbytes is None:
            planned[device] = kv_share(device, free_nbytes[device], num_workers, need)
        else:
            require_kv_fits(device, free_nbytes[device], num_workers, need, config.kv_nbytes)
            planned[device] = config.kv_nbytes
    return planned


def plan_machine(
    config: ServeConfig, *, num_cores: int, gpu_kv_nbytes: Mapping[Device, int] | None = None, prefix: str = ""
) -> MachinePlan:
    """Return what runs on this machine. The workers share `num_cores`; `gpu_kv_nbytes` is what plan_kv() returned.
    `prefix` makes the names of nodes and workers unique in a cluster."""
    threads, devices = divide_cores(num_cores, config.num_workers) if config.num_workers else [], config.devices
    if config.threads is not None:
        threads = [config.threads] * config.num_workers
    kv_nbytes = [(gpu_kv_nbytes or {}).get(device, config.host_kv_nbytes) for device in devices]
    roles = ["prefill"] * config.prefill + ["decode"] * config.decode
    numbers = [*range(config.prefill), *range(config.decode)]
    return MachinePlan(
        nodes=node_parts(
            config.nodes, dram_nbytes=config.node_nbytes, ssd=config.ssd, ssd_nbytes=config.ssd_nbytes, prefix=prefix
        ),
        workers=tuple(map(partial(WorkerPart, prefix), roles, numbers, devices, threads, kv_nbytes)),
        frontends=tuple(map(FrontendPart, numbered(FRONTEND, config.frontends))),
    )


def one_machine(machine: MachinePlan, run_dir: Path, num_conductors: int = 1) -> Wiring:
    """Return the wiring of a service that is on this machine alone: Unix sockets in `run_dir`."""
    conductors = tuple((name, socket_address(run_dir, name)) for name in numbered(CONDUCTOR, num_conductors))
    return Wiring(
        socket_address(run_dir, MASTER),
        ",".join(address for _, address in conductors),
        is_master=True,
        conductors=conductors,
        workers=tuple(worker.name for worker in machine.workers),
        nodes=tuple(node.name for node in machine.nodes),
    )


def plan_roles(
    config: ServeConfig, machine: MachinePlan, run_dir: Path, state_dir: Path, wiring: Wiring | None = None
) -> list[Role]:
    """Return all roles of this machine, each after those it needs; without a `wiring` there is no other machine."""
    wiring = wiring or one_machine(machine, run_dir, config.conductors)
    return [
        *((_master(config, wiring, state_dir),) if wiring.is_master else ()),
        *(_node(config, wiring, run_dir, part) for part in machine.nodes),
        *(_conductor(config, wiring, name, address) for name, address in wiring.conductors),
        *(plan_worker(config, machine, wiring, run_dir, part) for part in machine.workers),
        *(_frontend(config, machine, wiring, run_dir, state_dir, part) for part in machine.frontends),
    ]


def _if_here(wiring: Wiring, *names: str) -> tuple[str, ...]:
    """Return those of the names that wait for a role of this machine: one of another machine may come at any time."""
    return names if wiring.is_master else tuple(name for name in names if name != MASTER)


def _master(config: ServeConfig, wiring: Wiring, state_dir: Path) -> Role:
    options = {
        "listen": wiring.master,
        "data_dir": str(state_dir / MASTER),
        "log_level": config.log_level,
    }
    return Role(MASTER, command="master", options=options)


def _node(config: ServeConfig, wiring: Wiring, run_dir: Path, part: NodePart) -> Role:
    options = {
        "name": part.name,
        "master_address": wiring.master,
        "run_dir": str(run_dir),
        "dram_nbytes": part.dram_nbytes,
        "ssd_dir": part.ssd_dir,
        "ssd_nbytes": part.ssd_nbytes,
        "tcp_host": wiring.host or _node_tcp_host(config),
        "secret_file": config.secret_file,
        "log_level": config.log_level,
    }
    return Role(part.name, command="node", options=options, after=_if_here(wiring, MASTER))


def _node_tcp_host(config: ServeConfig) -> str | None:
    """Return "none" without a secret: the roles of one machine share memory, so the node needs no TCP port, and an
    unguarded port would open the pool to every user of the machine. With a secret, return None: the node's default.
    """
    return "none" if config.secret_file is None else None


def _conductor(config: ServeConfig, wiring: Wiring, name: str, address: str) -> Role:
    options = {
        "name": name,
        "address": address,
        "store_address": wiring.master,
        "policy_name": config.policy,
        "policy_ttft_slo_s": config.ttft_slo_s,
        "policy_tbt_slo_s": config.tbt_slo_s,
        "policy_admission": config.admission,
        "policy_pipeline_min_tokens": config.pipeline_min_tokens,
        "log_level": config.log_level,
    }
    return Role(name, command="conductor", options=options, first_after=_if_here(wiring, MASTER))


def plan_worker(config: ServeConfig, machine: MachinePlan, wiring: Wiring, run_dir: Path, part: WorkerPart) -> Role:
    """Return the process of one worker."""
    name = part.name
    options = {
        "name": name,
        "role": part.role,
        "model": config.model,
        "random_weights": config.random_weights,
        "address": f"tcp:{host_port(wiring.host, 0)}" if wiring.host else socket_address(run_dir, name),
        "conductor_address": wiring.conductor,
        "master_address": wiring.master,
        "run_dir": str(run_dir),
        "kv_nbytes": part.kv_nbytes,
        "block_tokens": config.block_tokens,
        "max_batch_tokens": config.max_batch_tokens,
        "max_num_seqs": config.max_num_seqs,
        "elastic": config.elastic,
        "pipeline": config.pipeline,
        "max_model_len": config.max_model_len,
        "dtype": config.weights_dtype,
        "kv_dtype": config.kv_dtype,
        "device": part.device,
        "threads": part.threads,
        "secret_file": config.secret_file,
        "log_level": config.log_level,
    }
    if wiring.host is not None:
        options["tcp_host"] = wiring.host
    # A restarted worker waits for no role: it serves without the pool, and registers when the conductor is back.
    return Role(
        name,
        command="worker",
        options=options,
        first_after=(*(name for name, _ in wiring.conductors), *(node.name for node in machine.nodes)),
        start_timeout_s=_WORKER_START_S,
    )


def _frontend(
    config: ServeConfig, machine: MachinePlan, wiring: Wiring, run_dir: Path, state_dir: Path, part: FrontendPart
) -> Role:
    workers = tuple(worker.name for worker in machine.workers)
    options: dict[str, object] = {
        "name": part.name,
        "listen": f"tcp:{host_port(config.host, config.port)}",
        "model": config.model,
        "conductor_address": wiring.conductor,
        "master_address": wiring.master,
        "expected_workers": wiring.workers,
        "expected_nodes": wiring.nodes,
        "max_model_len": config.max_model_len,
        "tenants_file": config.tenants_file,
        "otlp": config.otlp,
        "state_dir": str(state_dir),
        "log_level": config.log_level,
    }
    if len(machine.frontends) > 1:
        names = [each.name for each in machine.frontends]
        options["siblings"] = tuple(f"{name}={socket_address(run_dir, name)}" for name in names)
    if config.tour:
        options["tour_dir"] = str(run_dir)
    # A restarted front end does not wait for the conductor: /health reports what is missing.
    conductors = tuple(name for name, _ in wiring.conductors)
    return Role(part.name, command="frontend", options=options, first_after=conductors, uses=workers)
