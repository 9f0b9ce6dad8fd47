"""What a node offers, and where. Each default is written here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.base.errors import ConfigError
from moonpool.node.ssd import SsdConfig
from moonpool.store.messages import GRANULE_NBYTES
from moonpool.transfer.config import WireConfig

_SMALL_DISK_FILES = 16
_FILE_STEP_NBYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class NodeConfig(WireConfig):
    """The name is unique in the pool and stays the same across restarts."""

    name: str  # unique in the pool; must stay the same across restarts
    master_address: str  # address of the pool's master
    dram_nbytes: int  # memory given to the pool, allocated at start
    run_dir: str  # folder for Unix sockets, through which processes on this machine map the memory
    ssd_dir: str | None = None  # folder for objects evicted from DRAM; they survive a restart
    ssd_nbytes: int = 0  # disk space to use; required with --ssd
    # size of one log file; default: 256 MiB, or 1/16 of --ssd-size if that is smaller
    ssd_file_nbytes: int | None = None
    # seconds before an emptied log file is reused; must exceed the master's --lease-s, because late readers may still
    # use it
    ssd_rest_s: float = 30.0
    numa_node: int | None = None  # allocate the memory on this NUMA node, as far as it has room
    copy_threads: int = 2  # threads that copy objects
    # seconds to wait at start for the master, and for an earlier node of this name to expire
    start_timeout_s: float = 10.0
    retry_s: float = 0.2  # seconds between attempts to reach a lost master
    # seconds between checks that the memory's fence stamps match what the master has granted
    fence_check_s: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dram_nbytes < GRANULE_NBYTES:
            raise ConfigError(f"a node offers at least {GRANULE_NBYTES} bytes of memory (--dram)", param="dram_nbytes")
        if (self.ssd_dir is None) != (self.ssd_nbytes == 0):
            raise ConfigError("--ssd (ssd_dir) and --ssd-size (ssd_nbytes) go together", param="ssd_dir")
        if self.copy_threads < 1:
            raise ConfigError("copy_threads must be at least 1", param="copy_threads")
        if self.ssd_dir is not None:
            self.ssd_log()

    @property
    def registry_address(self) -> str:
        """The address of the session registry: processes that map this node's memory register there."""
        return f"unix:{self.run_dir}/{self.name}.sess"

    def ssd_log(self) -> SsdConfig:
        """ConfigError when the sizes make no log."""
        file_nbytes = self.ssd_file_nbytes
        if file_nbytes is None:
            file_nbytes = min(SsdConfig.file_nbytes, self.ssd_nbytes // _SMALL_DISK_FILES)
            file_nbytes = max(1, file_nbytes // _FILE_STEP_NBYTES) * _FILE_STEP_NBYTES
        return SsdConfig(max_nbytes=self.ssd_nbytes, file_nbytes=file_nbytes)
