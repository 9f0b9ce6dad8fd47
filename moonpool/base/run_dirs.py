"""Finds the services that run on this machine. Each service keeps its Unix sockets in its own run directory,
which its launcher owns for as long as it lives (own_folder.py).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from moonpool.base.errors import ConfigError
from moonpool.base.own_folder import is_owned, own_folders

PREFIX = "moonpool-"
MASTER = "master"  # the role's name, and so its socket's
CONDUCTOR = "conductor"
LAUNCHER = "launcher"
_URL = "url"  # a file with the address of the service's HTTP front end
_TOUR_TOKEN = "tour_token"  # a file with what callers of the tour must know
_STATE_DIR = "state_dir"  # a file with the path of the folder for its secrets


def numbered_name(name: str, number: int) -> str:
    """Return the name of one of several roles of a kind: the first has the plain name."""
    return name if number == 0 else f"{name}-{number}"


def base_dir() -> Path:
    """Return the parent of run directories: the user's runtime directory, else the directory for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path(tempfile.gettempdir())


def socket_address(run_dir: Path, name: str) -> str:
    """Return the address of the role of that name; it stays the same after a restart."""
    return f"unix:{run_dir / name}.sock"


def write_url(run_dir: Path, url: str) -> None:
    """Let programs of this user on this machine find the front end of the service."""
    (run_dir / _URL).write_text(url)


def live_urls() -> list[str]:
    """Return the front ends of the services of this user that run here and are ready."""
    return [url for run_dir in live_run_dirs() if (url := read_url(run_dir)) is not None]


def read_url(run_dir: Path) -> str | None:
    """Return the front end of the service; None while it is starting or stopping."""
    try:
        return (run_dir / _URL).read_text().strip()
    except FileNotFoundError:
        return None


def write_state_dir(run_dir: Path, state_dir: Path) -> None:
    """Let programs of this user on this machine find the secrets of the service."""
    (run_dir / _STATE_DIR).write_text(str(state_dir))


def read_state_dir(run_dir: Path) -> str | None:
    """Return the state folder of the service; None while it is starting or stopping."""
    try:
        return (run_dir / _STATE_DIR).read_text()
    except FileNotFoundError:
        return None


def write_tour_token(run_dir: Path, token: str) -> None:
    """Let the front ends of this service know the token of its tour; the run directory is private."""
    (run_dir / _TOUR_TOKEN).write_text(token)


def read_tour_token(run_dir: Path) -> str:
    """Return the token of the tour. Raise ConfigError if the service has none."""
    try:
        return (run_dir / _TOUR_TOKEN).read_text()
    except OSError as error:
        raise ConfigError(f"{run_dir} has no tour: start the service with --tour", param="tour_dir") from error


def conductor_beside(master_address: str) -> str | None:
    """Return the conductor's address in the run directory of that master, of several those of all of them, separated by
    commas; None if that master has no run directory."""
    path = Path(master_address.removeprefix("unix:"))
    if master_address != socket_address(path.parent, MASTER):
        return None
    return conductors_in(path.parent) or None


def conductors_in(run_dir: Path) -> str:
    """Return the addresses of the conductors in the run directory, separated by commas."""
    found = [
        run_dir / f"{numbered_name(CONDUCTOR, number)}.sock" for number in range(len(list(run_dir.glob("*.sock"))))
    ]
    return ",".join(f"unix:{path}" for path in found if path.exists())


def live_run_dirs(base: Path | None = None) -> list[Path]:
    """Return the run directories of this user whose launcher is alive."""
    return [path for path in own_folders(base or base_dir(), PREFIX) if is_owned(path)]
