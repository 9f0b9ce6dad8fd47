"""The settings of a Store. Its master's address and its credential files may come from the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from moonpool.base.errors import ConfigError
from moonpool.base.rpc.breaker import BreakerLimits
from moonpool.base.run_dirs import MASTER, live_run_dirs, socket_address

MASTER_VARIABLE = "MOONPOOL_MASTER"
CREDENTIAL_VARIABLES = {
    "secret_file": "MOONPOOL_SECRET_FILE",
    "tls_cert_file": "MOONPOOL_TLS_CERT_FILE",
    "tls_key_file": "MOONPOOL_TLS_KEY_FILE",
    "tls_ca_file": "MOONPOOL_TLS_CA_FILE",
}


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    name: str = ""  # of this client in the master's log
    connect_timeout_s: float = 2.0  # to reach the master
    rpc_timeout_s: float = 10.0  # of one call to the master
    # a master that sends nothing for this long during a call counts as away: all calls fail at once until it answers
    silence_s: float = BreakerLimits.silence_s
    retry_s: float = 0.0  # how long calls retry while the master cannot be reached; 0: they fail at once
    transfer_timeout_s: float = 10.0  # of one transfer, per replica: the longest that reads and writes take
    # of one read of a node's memory, with 1 s more for each 8 MiB: then the next replica is read, or it is a miss
    read_timeout_s: float = 1.5
    renew_after_s: float = 10.0  # seconds between renewals of unfinished puts; a third of the master's put_discard_s
    ahead_nbytes: int = 16 * 1024 * 1024  # space held for single puts to come, each one call then; 0: they ask first
    uses_gpu: bool = False  # a GPU of this process reads and writes nodes' memory (TransferEngine.use_gpu())
    max_view_nbytes: int = 1 << 30  # mapped by views at the same time; above it views are copies
    max_verified_views: int = 65_536  # objects whose checksum is remembered as verified


def find_master(advice: str = f"give its master's address, or set {MASTER_VARIABLE}") -> str:
    """Return MOONPOOL_MASTER, else the master of the one service that runs on this machine.

    ConfigError, with the advice, when there is none or more than one.
    """
    address = os.environ.get(MASTER_VARIABLE)
    if address:
        return address
    running = live_run_dirs()
    if len(running) != 1:
        found = "no service runs" if not running else f"{len(running)} services run"
        masters = ", ".join(socket_address(each, MASTER) for each in running)
        raise ConfigError(f"{found} on this machine; {advice}" + (f": {masters}" if masters else ""))
    return socket_address(running[0], MASTER)


def credentials(**given: str | None) -> dict[str, Any]:
    """Return the files for TransferConfig, each as given, else from its environment variable."""
    return {
        setting: given.get(setting) or os.environ.get(variable) or None
        for setting, variable in CREDENTIAL_VARIABLES.items()
    }
