"""The whole examination behind `moonpool doctor`: the machine, its transports, and what `moonpool serve` needs.

Uses the launcher's own checks, so that the two cannot disagree. Imports no torch.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from moonpool import __version__
from moonpool.base.errors import MoonpoolError
from moonpool.base.run_dirs import base_dir, live_run_dirs
from moonpool.base.units import format_nbytes
from moonpool.cli.doctor_crossover import check_crossover
from moonpool.cli.doctor_packages import check_packages
from moonpool.engine.cache_folder import cache_folder
from moonpool.engine.model_fetch import NAMED_MODELS, fetched_path
from moonpool.launch.checks import RESERVE_NBYTES, available_nbytes, choose_port, require_memory
from moonpool.launch.plan import ServeConfig
from moonpool.launch.serve import default_state_dir
from moonpool.transfer.doctor import (
    Finding,
    check_descriptor_passing,
    check_direct_io,
    check_locked_memory,
    check_loopback_tcp,
    check_memfd,
    check_open_files,
    transport_findings,
)
from moonpool.transfer.topology import Topology

# Beside the model's files: prepared weights, logs, the master's journal.
_DISK_RESERVE_NBYTES = 512 * 1024**2
_MIN_PYTHON = (3, 11)


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """`ok`: `moonpool serve` would work. `reasons` says why not."""

    ok: bool
    reasons: list[str]
    version: str
    checks: list[Finding]
    transports: list[Finding]
    crossover: list[Finding]  # whether KV is worth fetching
    topology: Topology


def examine_machine(topology: Topology) -> DoctorReport:
    """Runs every check once."""
    config, state_dir = ServeConfig(), default_state_dir()
    checks = [
        check_python(sys.version_info[:2]),
        check_packages(),
        check_memfd(),
        check_descriptor_passing(base_dir()),
        check_loopback_tcp(),
        check_port(config.host, config.port, bool(live_run_dirs())),
        check_memory(config),
        check_cache(config.model),
        check_state_dir(state_dir),
        check_direct_io("direct files", existing_ancestor(state_dir)),
        check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], topology.hardware),
    ]
    reasons = [f"{check.name}: {check.says}" for check in checks if check.needed and not check.ok]
    return DoctorReport(
        ok=not reasons,
        reasons=reasons,
        version=__version__,
        checks=checks,
        transports=transport_findings({check.name: check for check in checks}, topology.hardware),
        crossover=check_crossover(),
        topology=topology,
    )


def check_python(version: tuple[int, ...]) -> Finding:
    says = f"Python {platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    if version >= _MIN_PYTHON:
        return Finding(name="python", status="ok", says=says, needed=True)
    return Finding(name="python", status="missing", says=says, hint="Moonpool needs Python 3.11 or newer", needed=True)


def check_port(host: str, port: int, is_serving: bool) -> Finding:
    """A taken port is fine while a service of ours runs here: it is likely the one that took it."""
    problem = _problem(lambda: choose_port(host, port))
    if problem is None:
        return Finding(name="port", status="ok", says=f"{host}:{port} is free", needed=True)
    if is_serving:
        return Finding(name="port", status="ok", says=f"{host}:{port} is taken, and Moonpool runs here", needed=True)
    return Finding(name="port", status="broken", says=problem, hint="moonpool serve --port 0 takes any", needed=True)


def check_memory(config: ServeConfig) -> Finding:
    """What `moonpool serve` takes by default against what there is."""
    pages_nbytes = config.num_workers * config.kv_nbytes
    problem = _problem(lambda: require_memory(config.pool_nbytes, pages_nbytes))
    if problem is not None:
        hint = "close other programs, or serve with a smaller --dram and --kv"
        return Finding(name="memory", status="missing", says=problem, hint=hint, needed=True)
    need = format_nbytes(config.pool_nbytes + pages_nbytes + RESERVE_NBYTES)
    says = f"{format_nbytes(available_nbytes())} available, {need} needed"
    return Finding(name="memory", status="ok", says=says, needed=True)


def check_cache(model: str) -> Finding:
    """Whether the default model is there, or could be put there."""
    try:
        path = fetched_path(model)
    except MoonpoolError as error:
        return Finding(name="model", status="broken", says=str(error), hint="set MOONPOOL_CACHE", needed=True)
    if path.exists():
        return Finding(name="model", status="ok", says=f"{model} is at {path}", needed=True)
    files = NAMED_MODELS[model]
    need = files.wheel_nbytes + files.member_nbytes + _DISK_RESERVE_NBYTES
    free = shutil.disk_usage(cache_folder()).free
    room = f"{format_nbytes(free)} free in {cache_folder()}"
    if free < need:
        says = f"{model} is not fetched, and {format_nbytes(need)} are needed: {room}"
        return Finding(name="model", status="missing", says=says, hint="set MOONPOOL_CACHE", needed=True)
    says, hint = f"{model} is not fetched; {room}", f"moonpool model fetch {model} (moonpool serve does it by itself)"
    return Finding(name="model", status="missing", says=says, hint=hint)


def check_state_dir(folder: Path) -> Finding:
    """Whether the secrets and the pool's epoch can be kept. Makes nothing."""
    where, hint = existing_ancestor(folder), "set MOONPOOL_STATE to a folder of your own"
    if not where.is_dir():
        return Finding(name="state", status="broken", says=f"{where} is no folder", hint=hint, needed=True)
    if not os.access(where, os.W_OK | os.X_OK):
        return Finding(name="state", status="broken", says=f"{where} cannot be written to", hint=hint, needed=True)
    says = f"kept in {folder}, {format_nbytes(shutil.disk_usage(where).free)} free"
    return Finding(name="state", status="ok", says=says, needed=True)


def existing_ancestor(path: Path) -> Path:
    """The path itself, or the nearest one above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if os.path.exists(place))


def _problem(check: Callable[[], object]) -> str | None:
    """What one of the launcher's checks complains about."""
    try:
        check()
    except MoonpoolError as error:
        return str(error)
    return None
