"""The doctor's report for people: findings first, then the machine, then whether it serves."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from moonpool.base.units import format_nbytes
from moonpool.cli.doctor_checks import DoctorReport
from moonpool.transfer.doctor import Finding
from moonpool.transfer.topology import DevicePlace, Gpu, Matrix, Nic, NumaNode, NvmeDrive, Topology

_COLOURS = {"ok": typer.colors.GREEN, "missing": typer.colors.YELLOW, "broken": typer.colors.RED}
_MAX_NICS_SHOWN = 8


def in_words(report: DoctorReport) -> str:
    """Coloured; typer.echo takes the colours out when it does not write to a terminal."""
    parts = [
        f"moonpool {report.version}",
        *_titled("Checks", _findings(report.checks)),
        *_titled("Transports, fastest first", _findings(report.transports)),
        *_titled("Fetching KV or computing it", _findings(report.crossover)),
        *_machine(report.topology),
        *_titled("NICs for tcp, by memory", _matrix(report.topology.net)),
        *_titled("NICs for RDMA, by memory", _matrix(report.topology.rdma)),
        "",
        *_verdict(report),
    ]
    return "\n".join(parts)


def _titled(title: str, lines: list[str]) -> list[str]:
    """Nothing at all without lines."""
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def _findings(findings: Iterable[Finding]) -> list[str]:
    lines = []
    for finding in findings:
        status = typer.style(f"{finding.status:8}", fg=_COLOURS[finding.status])
        lines.append(f"{status}{finding.name:14}{finding.says}")
        if finding.hint and not finding.ok:
            lines.append(f"{'':22}-> {finding.hint}")
    return lines


def _machine(topology: Topology) -> list[str]:
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
