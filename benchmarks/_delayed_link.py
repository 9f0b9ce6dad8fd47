"""Machines on one kernel, joined by links with a rate and a delay. Needs root, and TUN in the kernel.

    with LinkLab(2) as lab:
        lab.connect(0, 1, rate_mbit=1000, delay_ms=1.0)
        process = subprocess.Popen(lab.inside(0, sys.executable, ...))
        lab.address(1, link=0)                             # "10.79.0.2"

Each machine is a network namespace. A link is a pair of TUN devices, one in each namespace: `tc` shapes both to the
rate, and a process of this file carries packets from one to the other and holds each for the delay. (netem would delay
them in the kernel, but not every kernel has it.) Packets are large (MTU), as with the segmentation offload of a NIC, so
one process in Python keeps up with a few Gbit/s.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_TAP, _IFF_NO_PI = 0x0001, 0x0002, 0x1000  # IP packets; Ethernet frames; nothing before them
TUNNEL_MTU = 65_000
_FRAME_NBYTES = TUNNEL_MTU + 64  # with an Ethernet header
_BURST = 16  # packets taken from one side before the other is looked at
_numbers = itertools.count()


def missing() -> str | None:
    """Return why this machine cannot have such a lab; None if it can."""
    if os.geteuid() != 0:
        return "a delayed link needs root (network namespaces)"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"a delayed link needs {tool}: apt-get install -y iproute2"
    try:
        with LinkLab(2) as lab:
            lab.connect(0, 1, rate_mbit=1000, delay_ms=1.0)
    except subprocess.CalledProcessError as error:
        return f"a delayed link: {' '.join(error.cmd)}: {error.stderr.strip()}"
    except OSError as error:
        return f"a delayed link: {error}"
    return None


class LinkLab:
    """The namespaces' names contain this process's id; everything is removed on exit."""

    def __init__(self, num_machines: int) -> None:
        self.namespaces = [f"mpl{os.getpid()}x{next(_numbers)}" for _ in range(num_machines)]
        self._undo = contextlib.ExitStack()
        self._links = itertools.count()
        self._ends: list[tuple[int, int]] = []  # per link, the two machines

    def __enter__(self) -> LinkLab:
        _sweep()
        with contextlib.ExitStack() as undo:
            for name in self.namespaces:
                _run("ip", "netns", "add", name)
                undo.callback(_run, "ip", "netns", "del", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def connect(self, first: int, second: int, *, rate_mbit: int, delay_ms: float) -> int:
        """Join two machines; return the link's number. The delay is that of one way."""
        link = next(self._links)
        self._ends.append((first, second))
        fds = []
        for machine in (first, second):
            name = f"mp{os.getpid() % 100_000}l{link}m{machine}"
            fds.append(open_tunnel(name))
            self._undo.callback(os.close, fds[-1])
            # The device stays attached to the descriptor when it moves to another namespace.
            _run("ip", "link", "set", name, "netns", self.namespaces[machine], "name", f"link{link}")
            self._configure(machine, link, rate_mbit)
        start_relay(self._undo, fds, delay_ms)
        return link

    def address(self, machine: int, link: int) -> str:
        return f"10.79.{link}.{1 + self._ends[link].index(machine)}"

    def inside(self, machine: int, *command: str) -> list[str]:
        """Return the command that runs `command` on that machine."""
        return ["ip", "netns", "exec", self.namespaces[machine], *command]

    def _configure(self, machine: int, link: int, rate_mbit: int) -> None:
        namespace, device = self.namespaces[machine], f"link{link}"
        _run("ip", "-n", namespace, "addr", "add", f"{self.address(machine, link)}/24", "dev", device)
        _run("ip", "-n", namespace, "link", "set", device, "mtu", str(TUNNEL_MTU), "up")
        shape = ("tbf", "rate", f"{rate_mbit}mbit", "burst", "256kb", "latency", "50ms")
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)


def open_tunnel(name: str, *, is_tap: bool = False) -> int:
    """Make a TUN device, or a TAP device if packets go through a bridge; return the descriptor that it lives with."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        kind = (_IFF_TAP if is_tap else _IFF_TUN) | _IFF_NO_PI
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), kind))
    except OSError:
        os.close(fd)
        raise
    return fd


def start_relay(undo: contextlib.ExitStack, fds: Sequence[int], delay_ms: float) -> None:
    """Start a process that carries packets between two tunnels and holds each for the delay; `undo` ends it."""
    command = [sys.executable, __file__, *map(str, fds), str(delay_ms / 1000)]
    undo.callback(_end, subprocess.Popen(command, pass_fds=fds, stdin=subprocess.PIPE))


def relay(first_fd: int, second_fd: int, delay_s: float) -> None:
    """Carry packets both ways until standard input ends."""
    for fd in (first_fd, second_fd):
        os.set_blocking(fd, False)
    sides = ((first_fd, second_fd, deque[tuple[float, bytes]]()), (second_fd, first_fd, deque[tuple[float, bytes]]()))
    stdin = sys.stdin.fileno()
    while True:
        due_s = min((held[0][0] for _, _, held in sides if held), default=None)
        wait_s = None if due_s is None else max(due_s - time.monotonic(), 0.0)
        readable, _, _ = select.select([first_fd, second_fd, stdin], [], [], wait_s)
        if stdin in readable:
            return
        for source, target, held in sides:
            if source in readable:
                _take_packets(source, held, delay_s)
            while held and held[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):  # a device that is full or gone drops the packet
                    os.write(target, held.popleft()[1])


def _take_packets(source: int, held: deque[tuple[float, bytes]], delay_s: float) -> None:
    for _ in range(_BURST):
        try:
            packet = os.read(source, _FRAME_NBYTES)
        except OSError:
            return
        held.append((time.monotonic() + delay_s, packet))


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(10)
    finally:
        process.kill()
        process.wait()


def _sweep() -> None:
    """Remove the namespaces of labs whose process was killed."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for name, pid in re.findall(r"^(mpl(\d+)x\d+)\b", listed, re.M):
        if not Path("/proc", pid).exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)  # another may be quicker


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    relay(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
