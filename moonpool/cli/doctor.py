"""`moonpool doctor`: what works on this machine, what is missing, and how to get it.

Exit code 0 if `moonpool serve` with its defaults would work here, otherwise 1, with the reasons. The checks are the
launcher's own, so that the two cannot disagree. Imports no torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer

from moonpool import __version__
from moonpool.base.errors import MoonpoolError
from moonpool.base.run_dirs import base_dir, live_run_dirs
from moonpool.base.units import format_nbytes
from moonpool.cli.doctor_crossover import check_crossover
from moonpool.cli.doctor_services import check_services
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
from moonpool.transfer.topology import DevicePlace, Gpu, Matrix, Nic, NumaNode, NvmeDrive, Topology, read_topology

# For prepared weights, logs and the master's journal, beside the model's files.
_DISK_RESERVE_NBYTES = 512 * 1024**2
_MIN_PYTHON = (3, 11)
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(\[[^]]*\])?\s*(?:>=\s*([0-9.]+))?")
_EXTRA = re.compile(r"extra\s*==\s*[\"']([^\"']+)")
_INSTALL_HINT = "pip install 'moonpool[all]'"
_NEEDED_EXTRAS = (None, "engine", "server")
_COLOURS = {"ok": typer.colors.GREEN, "missing": typer.colors.YELLOW, "broken": typer.colors.RED}
_MAX_NICS_SHOWN = 8


def command(
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    topology: Annotated[
        Path | None,
        typer.Option("--topology", help="JSON file that assigns NICs to memory (docs/transfer.md)"),
    ] = None,
) -> None:
    report = examine_machine(read_topology(topology))
    typer.echo(msgspec.json.encode(report).decode() if json else format_report(report))
    if not report.ok:
        raise typer.Exit(1)


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """`ok`: `moonpool serve` would work; otherwise `reasons` are the failed checks."""

    ok: bool
    reasons: list[str]
    version: str
    checks: list[Finding]
    transports: list[Finding]
    services: list[Finding]  # that run here, with their nodes
    crossover: list[Finding]  # whether KV is worth fetching
    topology: Topology


def examine_machine(topology: Topology) -> DoctorReport:
    """Run every check once; return the report."""
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
        services=check_services(),
        crossover=check_crossover(has_gpu=bool(topology.hardware.gpus)),
        topology=topology,
    )


def check_python(version: tuple[int, ...]) -> Finding:
    says = f"Python {platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    if version >= _MIN_PYTHON:
        return Finding(name="python", status="ok", says=says, needed=True)
    return Finding(name="python", status="missing", says=says, hint="Moonpool needs Python 3.11 or newer", needed=True)


def check_port(host: str, port: int, is_serving: bool) -> Finding:
    """Check that the port is free. A taken port is fine if a Moonpool service runs here: it probably holds the port."""
    problem = _problem(lambda: choose_port(host, port))
    if problem is None:
        return Finding(name="port", status="ok", says=f"{host}:{port} is free", needed=True)
    if is_serving:
        return Finding(name="port", status="ok", says=f"{host}:{port} is taken, and Moonpool runs here", needed=True)
    return Finding(name="port", status="broken", says=problem, hint="moonpool serve --port 0", needed=True)


def check_memory(config: ServeConfig) -> Finding:
    """Check that there is enough memory for `moonpool serve` with its defaults."""
    pages_nbytes = config.num_workers * config.host_kv_nbytes
    problem = _problem(lambda: require_memory(config.pool_nbytes, pages_nbytes))
    if problem is not None:
        hint = "close other programs, or serve with a smaller --dram and --kv"
        return Finding(name="memory", status="missing", says=problem, hint=hint, needed=True)
    need = format_nbytes(config.pool_nbytes + pages_nbytes + RESERVE_NBYTES)
    says = f"{format_nbytes(available_nbytes())} available, {need} needed"
    return Finding(name="memory", status="ok", says=says, needed=True)


def check_cache(model: str) -> Finding:
    """Check that the default model is in the cache, or that it would fit."""
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
    says, hint = (
        f"{model} is not fetched; {room}",
        f"moonpool model fetch {model} (or just moonpool serve)",
    )
    return Finding(name="model", status="missing", says=says, hint=hint)


def check_state_dir(folder: Path) -> Finding:
    """Check that the state folder can be written. Creates nothing."""
    where, hint = existing_ancestor(folder), "set MOONPOOL_STATE to a folder of your own"
    if not where.is_dir():
        return Finding(name="state", status="broken", says=f"{where} is no folder", hint=hint, needed=True)
    if not os.access(where, os.W_OK | os.X_OK):
        return Finding(name="state", status="broken", says=f"{where} cannot be written to", hint=hint, needed=True)
    says = f"kept in {folder}, {format_nbytes(shutil.disk_usage(where).free)} free"
    return Finding(name="state", status="ok", says=says, needed=True)


def existing_ancestor(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists."""
    return next(place for place in (path, *path.absolute().parents) if os.path.exists(place))


def _problem(check: Callable[[], object]) -> str | None:
    """Return the error message of one of the launcher's checks; None if it passes."""
    try:
        check()
    except MoonpoolError as error:
        return str(error)
    return None


class Requirement(NamedTuple):
    name: str
    minimum: str | None
    extra: str | None


def parse_requirement(text: str) -> Requirement | None:
    """Parse `name>=1.2; extra == "x"`, the only form in our pyproject.toml; return None for anything else."""
    match = _REQUIREMENT.match(text)
    if match is None or match[2] is not None:  # name[extra]: our own extras, which are also listed one by one
        return None
    extra = _EXTRA.search(text)
    return Requirement(match[1], match[3], extra[1] if extra else None)


def is_at_least(version: str, minimum: str) -> bool:
    """Compare release numbers: 2.13.0+cpu is at least 2.4."""
    return _numbers(version) >= _numbers(minimum)


def package_finding(requirements: Iterable[Requirement], installed: Callable[[str], str | None]) -> Finding:
    """Return one finding: all versions if all packages are installed, otherwise those that are missing or too old."""
    wanted = [requirement for requirement in requirements if requirement.extra in _NEEDED_EXTRAS]
    versions = {requirement.name: installed(requirement.name) for requirement in wanted}
    wrong = [
        problem for requirement in wanted if (problem := _version_problem(requirement, versions[requirement.name]))
    ]
    if wrong:
        return Finding(name="packages", status="missing", says="; ".join(wrong), hint=_INSTALL_HINT, needed=True)
    says = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return Finding(name="packages", status="ok", says=says, needed=True)


def check_packages() -> Finding:
    try:
        texts = importlib.metadata.requires("moonpool") or []
    except importlib.metadata.PackageNotFoundError:
        says = "Moonpool runs from a folder and is not installed, so its requirements are unknown"
        return Finding(name="packages", status="missing", says=says, hint="pip install -e '.[all]'")
    parsed = (parse_requirement(text) for text in texts)
    return package_finding([requirement for requirement in parsed if requirement is not None], _installed_version)


def _version_problem(requirement: Requirement, version: str | None) -> str | None:
    if version is None:
        return f"{requirement.name} is not installed"
    if requirement.minimum is not None and not is_at_least(version, requirement.minimum):
        return f"{requirement.name} is {version} and must be {requirement.minimum} or newer"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[0-9.]*[0-9]", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def format_report(report: DoctorReport) -> str:
    """Return the report as coloured text; typer.echo removes the colours if it does not write to a terminal."""
    parts = [
        f"moonpool {report.version}",
        *_titled("Checks", _findings(report.checks)),
        *_titled("Transports, fastest first", _findings(report.transports)),
        *_titled("Services that run here", _findings(report.services)),
        *_titled("Fetching KV or computing it", _findings(report.crossover)),
        *_format_machine(report.topology),
        *_titled("NICs for tcp, by memory", _matrix(report.topology.net)),
        *_titled("NICs for RDMA, by memory", _matrix(report.topology.rdma)),
        "",
        *_verdict(report),
    ]
    return "\n".join(parts)


def _titled(title: str, lines: list[str]) -> list[str]:
    """Return the indented lines under their title; nothing if there are no lines."""
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def _findings(findings: Iterable[Finding]) -> list[str]:
    lines = []
    for finding in findings:
        status = typer.style(f"{finding.status:8}", fg=_COLOURS[finding.status])
        lines.append(f"{status}{finding.name:14}{finding.says}")
        if finding.hint and not finding.ok:
            lines.append(f"{'':22}-> {finding.hint}")
    return lines


def _format_machine(topology: Topology) -> list[str]:
    hardware = topology.hardware
    return [
        *_titled("NUMA nodes", [_node(node) for node in hardware.nodes]),
        *_titled("NICs", [_nic(nic) for nic in hardware.nics]),
        *_titled("GPUs", [_gpu(gpu) for gpu in hardware.gpus]),
        *_titled("NVMe drives", [_drive(drive) for drive in hardware.drives]),
    ]


def _node(node: NumaNode) -> str:
    memory = f", {format_nbytes(node.memory_nbytes)}" if node.memory_nbytes is not None else ""
    return f"cpu:{node.node:<8}{len(node.cpus)} CPUs{memory}"


def _nic(nic: Nic) -> str:
    kind = nic.link_layer or ("RDMA" if nic.kind == "rdma" else None)
    speed = f"{nic.speed_gbit_s:g} Gbit/s" if nic.speed_gbit_s is not None else None
    virtual = "virtual" if nic.virtual else None
    facts = ("up" if nic.up else "down", kind, speed, virtual, *nic.addresses, *_place(nic.place))
    return f"{nic.name:12}{', '.join(fact for fact in facts if fact)}"


def _gpu(gpu: Gpu) -> str:
    return f"cuda:{gpu.index:<7}{', '.join(fact for fact in (gpu.name, gpu.uuid, *_place(gpu.place)) if fact)}"


def _drive(drive: NvmeDrive) -> str:
    size = format_nbytes(drive.nbytes) if drive.nbytes is not None else None
    return (
        f"{drive.name:12}{', '.join(fact for fact in (drive.model, size, drive.state, *_place(drive.place)) if fact)}"
    )


def _place(place: DevicePlace) -> tuple[str | None, str | None]:
    return place.pci_address, f"node {place.numa_node}" if place.numa_node is not None and place.pci else None


def _matrix(matrix: Matrix) -> list[str]:
    lines = []
    for location, choice in matrix.items():
        if choice.preferred:
            then = f", then {_some(choice.secondary)}" if choice.secondary else ""
            lines.append(f"{location:12}{_some(choice.preferred)}{then}")
    return lines


def _some(names: tuple[str, ...]) -> str:
    left_out = len(names) - _MAX_NICS_SHOWN
    return ", ".join(names[:_MAX_NICS_SHOWN]) + (f" and {left_out} more" if left_out > 0 else "")


def _verdict(report: DoctorReport) -> list[str]:
    if report.ok:
        return ["`moonpool serve` works on this machine."]
    return ["`moonpool serve` does not work here:", *(f"  {reason}" for reason in report.reasons)]
