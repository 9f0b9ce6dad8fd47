"""The checks of `moonpool doctor` about moving bytes: each one tries the real operation and reports a sentence.

A check never raises: a refusal of the system is its finding. All checks together take a fraction of a second, a few
seconds where there is a GPU to set up.
"""

from __future__ import annotations

import mmap
import os
import resource
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.base.units import format_nbytes
from moonpool.transfer.disk.alignment import find_alignment
from moonpool.transfer.topology import Hardware
from moonpool.transfer.transports.cuda.driver import driver
from moonpool.transfer.transports.cuda.probe import probe_ipc
from moonpool.transfer.transports.nixl import agent as nixl_agent

# Sockets to every worker and client, mapped segments and files: a lower limit is reached under load.
MIN_OPEN_FILES = 1024
_TIMEOUT_S = 1.0
_PROBE = b"moonpool"
_LONG_SOCKET_NAME = "s" * 32  # as long as the longest socket name of a service
_CUDA_TIMEOUT_S = 20.0  # two processes set up the GPU

Status = Literal["ok", "missing", "broken"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`missing`: can be installed or enabled (see the hint); `broken`: is there and does not work. `moonpool serve`
    does not run on this machine unless all `needed` findings are ok.
    """

    name: str
    status: Status
    says: str
    hint: str | None = None
    needed: bool = False

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def check_memfd() -> Finding:
    """Check that the kernel gives shared memory that can be passed on and sealed."""
    try:
        fd = os.memfd_create("moonpool-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        hint = "needs Linux 3.17 or newer, and a container that allows memfd_create"
        return _broken("memfd", f"the kernel gives no shared memory: {error.strerror}", hint)
    try:
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as memory:
            memory[: len(_PROBE)] = _PROBE
    except OSError as error:
        return _broken("memfd", f"shared memory cannot be allocated: {error.strerror}", "free some memory")
    finally:
        os.close(fd)
    return Finding(name="memfd", status="ok", says="shared memory can be made and mapped", needed=True)


def check_descriptor_passing(folder: Path) -> Finding:
    """Check that Unix sockets work in `folder` and carry descriptors: processes share memory that way."""
    name, hint = "unix sockets", "set XDG_RUNTIME_DIR or TMPDIR to a short path on a local disk"
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="mp-doctor-") as own:
            passed = _pass_descriptor(os.path.join(own, _LONG_SOCKET_NAME))
    except OSError as error:
        return _broken(name, f"sockets in {folder} do not work: {error.strerror or error}", hint)
    if not passed:
        return _broken(name, f"sockets in {folder} lose the descriptors sent over them", hint)
    return Finding(name=name, status="ok", says=f"sockets in {folder} carry descriptors", needed=True)


def check_loopback_tcp() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            received = _exchange(listener)
    except OSError as error:
        hint = "bring the loopback interface up: ip link set lo up"
        return _broken("loopback tcp", f"127.0.0.1 cannot be reached: {error.strerror or error}", hint)
    if received != _PROBE:
        return _broken("loopback tcp", "127.0.0.1 swallows what is sent to it", "look at the firewall's rules")
    return Finding(name="loopback tcp", status="ok", says="127.0.0.1 can be reached", needed=True)


def check_direct_io(name: str, folder: Path) -> Finding:
    """Check that files in `folder` can be written past the page cache. Not needed: without it files go through it."""
    hint = "choose a folder on a local disk (ext4, xfs) for the fast way"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".mp-doctor-") as file:
            block_nbytes = _write_direct(file.name)
    except OSError as error:
        says = f"{folder} takes no direct reads and writes: {error.strerror or error}"
        return Finding(name=name, status="missing", says=says, hint=hint)
    if block_nbytes is None:
        return Finding(name=name, status="missing", says=f"{folder} is no disk: it lives in the page cache", hint=hint)
    says = f"{folder} takes direct reads and writes, in units of {block_nbytes} bytes"
    return Finding(name=name, status="ok", says=says)


def check_open_files(soft: int, hard: int) -> Finding:
    """Check the limits that resource.getrlimit() returns."""
    name, says = "open files", f"{_limit(soft)} at once, {_limit(hard)} if asked for"
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return Finding(name=name, status="ok", says=says)
    return Finding(name=name, status="missing", says=says, hint=f"ulimit -n {MIN_OPEN_FILES} or more")


def check_locked_memory(soft: int, hardware: Hardware) -> Finding:
    """Check the limit of locked memory. Only RDMA needs it, for what it registers; /dev/shm is not used."""
    name = "locked memory"
    if soft == resource.RLIM_INFINITY:
        return Finding(name=name, status="ok", says="as much as wanted may be pinned")
    says = f"{format_nbytes(soft)} may be pinned"
    if not any(nic.kind == "rdma" for nic in hardware.nics):
        return Finding(name=name, status="ok", says=f"{says}; only RDMA would need more, and there is none here")
    hint = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
    return Finding(name=name, status="missing", says=f"{says}, too little for RDMA", hint=hint)


def transport_findings(checks: Mapping[str, Finding], hardware: Hardware) -> list[Finding]:
    """Return one finding per transport, fastest first. `checks` are the findings above, by name."""
    return [
        Finding(name="memory", status="ok", says="inside one process, always there"),
        _shm(checks["memfd"], checks["unix sockets"]),
        _cuda(hardware),
        _nixl(hardware),
        _tcp(checks["loopback tcp"], hardware),
        _file(),
    ]


def _shm(*needs: Finding) -> Finding:
    wrong = next((need for need in needs if not need.ok), None)
    if wrong is not None:
        return Finding(name="shm", status="broken", says=wrong.says, hint=wrong.hint)
    return Finding(name="shm", status="ok", says="between processes of this machine, without a copy")


def _tcp(loopback: Finding, hardware: Hardware) -> Finding:
    if not loopback.ok:
        return Finding(name="tcp", status="broken", says=loopback.says, hint=loopback.hint)
    usable = [nic.name for nic in hardware.nics if nic.kind == "net" and nic.up and nic.addresses and not nic.loopback]
    if not usable:
        return Finding(name="tcp", status="ok", says="within this machine; no interface leads to another one")
    return Finding(name="tcp", status="ok", says=f"to other machines, over {', '.join(usable)}")


def _file() -> Finding:
    return Finding(name="file", status="ok", says="files and devices of this machine by path: NVMe, NVMe-oF, DAX")


def _nixl(hardware: Hardware) -> Finding:
    rdma = [nic.name for nic in hardware.nics if nic.kind == "rdma" and nic.up]
    devices = f"RDMA: {', '.join(rdma)}" if rdma else "no RDMA device is active here, and tcp is faster without one"
    package = nixl_agent.installed_package()
    if package is None:
        hint = "pip install 'moonpool[nixl]' (it needs no CUDA)"
        return Finding(name="nixl", status="missing", says=f"the package is not installed; {devices}", hint=hint)
    try:
        backends = nixl_agent.available_backends()
    except MoonpoolError as error:
        return Finding(name="nixl", status="broken", says=str(error), hint="pip install --force-reinstall nixl-cu12")
    if nixl_agent.BACKEND not in backends:
        says = f"{package} has no plug-in for {nixl_agent.BACKEND}, only for {', '.join(backends) or 'nothing'}"
        return Finding(name="nixl", status="broken", says=says, hint="unset NIXL_PLUGIN_DIR, or reinstall nixl-cu12")
    return Finding(name="nixl", status="ok", says=f"{package} with {nixl_agent.BACKEND}; {devices}")


def _cuda(hardware: Hardware) -> Finding:
    if not hardware.gpus:
        return Finding(name="cuda", status="missing", says="there is no NVIDIA GPU here; nothing else needs one")
    try:
        cuda = driver()
    except Unavailable as error:
        return Finding(name="cuda", status="missing", says=f"{len(hardware.gpus)} GPUs, but {error}")
    found = f"{', '.join(f'{device} ({device.name})' for device in cuda.devices)}, driver for CUDA {cuda.version}"
    try:
        probe_ipc(cuda.devices[0], _CUDA_TIMEOUT_S)
    except MoonpoolError as error:
        hint = "give the processes one IPC and PID namespace (docker run --ipc=host --pid=host), or use tcp"
        says = f"{found}; memory cannot pass between processes: {error}"
        return Finding(name="cuda", status="broken", says=says, hint=hint)
    return Finding(name="cuda", status="ok", says=f"GPU memory between processes of this machine: {found}")


def _broken(name: str, says: str, hint: str) -> Finding:
    return Finding(name=name, status="broken", says=says, hint=hint, needed=True)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def _pass_descriptor(path: str) -> bool:
    """Send a descriptor through a socket at `path`; return whether it arrived."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as sender:
        listener.bind(path)
        listener.listen()
        sender.settimeout(_TIMEOUT_S)
        sender.connect(path)
        receiver, _ = listener.accept()
        with receiver, open(os.devnull, "rb") as sent:
            receiver.settimeout(_TIMEOUT_S)
            socket.send_fds(sender, [_PROBE], [sent.fileno()])
            _, fds, _, _ = socket.recv_fds(receiver, len(_PROBE), 1)
    for fd in fds:
        os.close(fd)
    return len(fds) == 1


def _exchange(listener: socket.socket) -> bytes:
    """Send a probe to `listener` and return what arrives."""
    listener.settimeout(_TIMEOUT_S)
    with socket.create_connection(listener.getsockname(), timeout=_TIMEOUT_S) as sender:
        receiver, _ = listener.accept()
        with receiver:
            receiver.settimeout(_TIMEOUT_S)
            sender.sendall(_PROBE)
            return receiver.recv(len(_PROBE), socket.MSG_WAITALL)


def _write_direct(path: str) -> int | None:
    """Write one block past the page cache and return its size; None where there is only the cache."""
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        alignment = find_alignment(fd)
        if not alignment.direct:
            return None
        with mmap.mmap(-1, alignment.block_nbytes) as block:  # whole pages, so its memory is aligned
            os.pwrite(fd, block, 0)
        return alignment.block_nbytes
    finally:
        os.close(fd)
