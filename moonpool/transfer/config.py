"""How an engine is reached and how it works. Each default is written here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from moonpool.base.config import make_paths_absolute
from moonpool.base.errors import ConfigError
from moonpool.base.security import TlsConfig
from moonpool.transfer.paths.path_load import PlanConfig
from moonpool.transfer.paths.plan import DEFAULT_SLICE_NBYTES
from moonpool.transfer.paths.priority import DEFAULT_PROMOTE_AFTER_S
from moonpool.transfer.transports.tcp.guard import Guard
from moonpool.transfer.transports.tcp.server import IDLE_TIMEOUT_S, MAX_CONNECTIONS

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """How a process is reached by others, and reaches them: settings of every role that serves or moves memory.

    Without a secret whoever reaches the tcp port can read and write the segments served. So it is the loopback
    interface unless told otherwise.
    """

    shm: bool = True  # share memory with processes of this machine
    tcp_host: str | None = "127.0.0.1"  # address to listen on; auto: one address of every good NIC, each a rail
    tcp_hosts: tuple[str, ...] = ()  # further addresses of this machine, one per rail; peers use all of them together
    tcp_port: int = 0  # 0: any that is free
    tcp_advertise_host: str | None = None  # what others should connect to, if not tcp_host
    tcp_max_connections: int = MAX_CONNECTIONS  # of others to the tcp port; one long idle makes room for a new one
    tcp_idle_s: float = IDLE_TIMEOUT_S  # an idle connection is closed after this time; above 120, after which peers do
    lanes: int = 2  # connections per peer and path
    nixl: bool = False  # serve and reach memory by NIXL too (RDMA, NVLink), where both sides have it
    topology_file: str | None = None  # says which NICs serve which memory, in place of what was discovered
    secret_file: str | None = None  # a file with the secret that peers must know too; mode 600
    tls_cert_file: str | None = None  # PEM; with the next two: TLS, both sides show a certificate
    tls_key_file: str | None = None
    tls_ca_file: str | None = None

    def __post_init__(self) -> None:
        make_paths_absolute(self)

    def wires(self) -> dict[str, Any]:
        """These settings alone, to hand on: TransferConfig(run_dir=..., **config.wires())."""
        return {field.name: getattr(self, field.name) for field in fields(WireConfig)}

    @property
    def is_guarded(self) -> bool:
        """Whether callers have to show anything; reads no file."""
        return any((self.secret_file, self.tls_cert_file, self.tls_key_file, self.tls_ca_file))

    def guard(self) -> Guard | None:
        """Who may talk to the tcp port; None: everybody. ConfigError when a file is missing or unfit."""
        files = (self.tls_cert_file, self.tls_key_file, self.tls_ca_file)
        if any(files) and not all(files):
            raise ConfigError("TLS takes all three: tls_cert_file, tls_key_file and tls_ca_file")
        cert, key, ca = files
        return Guard.from_files(self.secret_file, TlsConfig(cert, key, ca) if cert and key and ca else None)


@dataclass(frozen=True, kw_only=True)
class TransferConfig(WireConfig):
    run_dir: str  # holds the shm socket
    timeout_s: float = 10.0  # for what names no other
    num_threads: int = 2  # that move slices to or from one peer at a time
    slice_nbytes: int = DEFAULT_SLICE_NBYTES
    max_queued_slices: int = 65_536  # of each priority
    promote_after_s: float = DEFAULT_PROMOTE_AFTER_S  # from then on lower priorities get a share, see priority.Turns

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.lanes, self.num_threads, self.slice_nbytes, self.max_queued_slices) < 1:
            raise ConfigError("lanes, num_threads, slice_nbytes and max_queued_slices must be at least 1")
        if self.tcp_hosts and self.tcp_host is None:
            raise ConfigError("tcp_hosts are addresses beside tcp_host, which is missing")

    @property
    def plan(self) -> PlanConfig:
        return PlanConfig(
            max_slice_nbytes=self.slice_nbytes, slices_per_path=self.lanes, promote_after_s=self.promote_after_s
        )
