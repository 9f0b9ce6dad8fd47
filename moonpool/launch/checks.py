"""Checks before anything is started. Each raises one clear MoonpoolError or returns quickly."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from moonpool.base.errors import ConfigError, ModelError, MoonpoolError, NoSpace
from moonpool.base.limits import CGROUPS, PROC, address_space_nbytes, control_groups, read_text
from moonpool.base.units import format_nbytes
from moonpool.engine.config import Device, gpu_index
from moonpool.engine.gguf_file import GgufFile
from moonpool.engine.model_files import ModelFiles, read_config, require_weights
from moonpool.transfer.transports.cuda.driver import driver

# Memory of the processes themselves (interpreter, torch, weights), beside the pool and the pages.
RESERVE_NBYTES = 512 * 1024**2
# Address space of the largest role, beside the pool and its pages; most of it is never touched.
ROLE_ADDRESS_NBYTES = 3_500_000_000
_ASK_GPU_S = 60.0  # a machine with many GPUs may take long to start its driver


def choose_port(host: str, port: int) -> int:
    """Return `port`, or a free one for 0. Raise ConfigError if the front end cannot listen on it."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, OverflowError) as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error}", param="host") from error
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                message = f"port {port} of {host} is taken by another program; choose another port with --port"
                raise ConfigError(message, param="port") from error
            raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}", param="host") from error
        return int(probe.getsockname()[1])


def require_memory(pool_nbytes: int, pages_nbytes: int) -> None:
    """Raise NoSpace if the machine, or its container, has less memory available."""
    need, have = pool_nbytes + pages_nbytes + RESERVE_NBYTES, available_nbytes()
    if need > have:
        raise NoSpace(
            f"not enough memory: the pool needs {format_nbytes(pool_nbytes)} (--dram per node) and the workers' pages "
            f"{format_nbytes(pages_nbytes)} (--kv per worker), but only {format_nbytes(have)} are available"
        )


def require_address_space(pool_nbytes: int, kv_nbytes: int) -> None:
    """Raise NoSpace if `ulimit -v` is too low for the largest role: a worker maps the pool and its own pages."""
    need, limit = ROLE_ADDRESS_NBYTES + pool_nbytes + kv_nbytes, address_space_nbytes()
    if limit is not None and need > limit:
        raise NoSpace(
            f"`ulimit -v` allows {format_nbytes(limit)} of address space per process and {format_nbytes(need)} are "
            "needed; raise it with `ulimit -v unlimited`, or limit memory by a container instead"
        )


def require_device(device: Device) -> None:
    """Raise ConfigError if this machine cannot use the device."""
    gpu = gpu_index(device)
    if gpu is None:
        return
    try:
        driver().device(gpu)
    except MoonpoolError as error:
        raise ConfigError(f"--device {device} cannot be used: {error}; --device cpu always works") from error


def free_device_nbytes(devices: Iterable[Device]) -> dict[Device, int]:
    """Return how much memory is free on each GPU among the devices. Raise ConfigError if that cannot be found out.

    A process of its own asks: asking takes memory of the GPU for as long as the process lives.
    """
    gpus = {device: index for device in devices if (index := gpu_index(device)) is not None}
    if not gpus:
        return {}
    command = [sys.executable, "-m", __name__, *map(str, gpus.values())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_GPU_S, check=True)
        return dict(zip(gpus, map(int, done.stdout.split()), strict=True))
    except (subprocess.SubprocessError, ValueError) as error:
        reason = getattr(error, "stderr", None) or error
        raise ConfigError(f"the free memory of {', '.join(gpus)} cannot be read: {reason}") from error


def require_whole_model(files: ModelFiles) -> None:
    """Raise ModelError for an unknown kind of model, missing weights or a truncated weight file. Reads headers only."""
    read_config(files)
    require_weights(files)
    if files.random_weights:
        return
    if files.kind == "gguf":
        GgufFile.open(files.root).require_whole()
        return
    from safetensors import SafetensorError, safe_open  # here: only a Hugging Face folder needs it

    for path in files.weights:
        try:
            with safe_open(path, framework="np"):
                pass  # opening compares the header's sizes with the file's
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is truncated or not a safetensors file: {error}") from error


def available_nbytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return how much could be allocated now without swapping, by the kernel's estimate."""
    return min([_machine_nbytes(proc), *_cgroup_rooms(proc, cgroups)])


def _machine_nbytes(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is available")


def _cgroup_rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the memory left in every control group (version 1 and 2) of this process."""
    for folder, version in control_groups("memory", proc, cgroups):
        yield from _room(folder, *(_V1_FILES if version == 1 else _V2_FILES))


_V2_FILES = ("memory.max", "memory.current")
_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _room(folder: Path, limit_file: str, usage_file: str) -> Iterator[int]:
    limit, usage = read_text(folder / limit_file).strip(), read_text(folder / usage_file).strip()
    if limit.isdigit() and usage.isdigit():
        yield max(0, int(limit) - int(usage) + _reclaimable_nbytes(folder))


def _reclaimable_nbytes(folder: Path) -> int:
    """Return the cached file pages, which count as used but are freed when needed."""
    for line in read_text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0


if __name__ == "__main__":  # free_device_nbytes()
    print(*(driver().device(int(gpu)).free_nbytes() for gpu in sys.argv[1:]))
