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

    name: str  # unique in the pool, the same after a restart
    master_address: str  # whom it gives its memory to
    dram_nbytes: int  # memory for the pool, taken at start
    run_dir: str  # where processes of this machine find its sockets
    ssd_dir: str | None = None  # a folder for what is cold; it is found again after a restart
    ssd_nbytes: int = 0  # how much of the disk it may take; goes with ssd_dir
    ssd_file_nbytes: int | None = None  # size of one log file; default: 256 MiB, or a sixteenth of a small disk
    ssd_rest_s: float = (
        30.0  # seconds before an emptied log file is reused; must exceed the lease time: late readers may use it
    )
    numa_node: int | None = None  # takes the memory there, as far as that node has some
    copy_threads: int = 2  # objects copied here at once
    start_timeout_s: float = 10.0  # for the master to answer, and for an earlier node of this name to be forgotten
    retry_s: float = 0.2  # between attempts to reach a lost master
    fence_check_s: float = 5.0  # how often stamps of the memory are compared with what the master has granted

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
        return f"unix:{self.run_dir}/{self.name}.desk"

    def ssd_log(self) -> SsdConfig:
        """ConfigError when the sizes make no log."""
        file_nbytes = self.ssd_file_nbytes
        if file_nbytes is None:
            file_nbytes = min(SsdConfig.file_nbytes, self.ssd_nbytes // _SMALL_DISK_FILES)
            file_nbytes = max(1, file_nbytes // _FILE_STEP_NBYTES) * _FILE_STEP_NBYTES
        return SsdConfig(max_nbytes=self.ssd_nbytes, file_nbytes=file_nbytes)
