"""The master's address and the credential files of this process, as given or from the environment."""

from __future__ import annotations

import os
from typing import Any

from moonpool.base.errors import ConfigError
from moonpool.base.run_dirs import MASTER, live_run_dirs, socket_address

MASTER_VARIABLE = "MOONPOOL_MASTER"
CREDENTIAL_VARIABLES = {
    "secret_file": "MOONPOOL_SECRET_FILE",
    "tls_cert_file": "MOONPOOL_TLS_CERT_FILE",
    "tls_key_file": "MOONPOOL_TLS_KEY_FILE",
    "tls_ca_file": "MOONPOOL_TLS_CA_FILE",
}


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
