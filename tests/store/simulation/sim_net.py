"""The simulated network: connections that deliver in order, late, or not at all, and end when a process does.

Between hosts a partition stalls every connection until it heals; a severed connection loses what was under way from
some message on, in each direction, and either end learns of it by itself. A process that is killed says goodbye (its
kernel does); a host that loses power says nothing, and who writes to it again hears of it once it is back.
"""

from __future__ import annotations

import asyncio
import socket as real_socket
import struct
from collections.abc import Callable
from typing import Any, Protocol

from .sim_loop import SimEvent
from .sim_scheduler import Process, Scheduler

_RESEND_S = 0.5
_KEEPALIVE_S = 30.0  # until the kernel finds out that a silent host is gone
_TIMEVAL = struct.Struct("@ll")


class End(Protocol):
    """What a side of a connection does with what arrives."""

    def arrived(self, data: Any) -> None: ...

    def ended(self) -> None: ...


class Side:
    """One end of a connection, and what is on its way to it."""

    __slots__ = ("end", "is_closed", "last_s", "link", "on_way", "other", "process")

    def __init__(self, link: Link, process: Process) -> None:
        self.link, self.process = link, process
        self.other: Side
        self.end: End | None = None
        self.is_closed = False  # nothing is delivered here any more
        self.on_way: list[Any] = []  # items of the scheduler, in order
        self.last_s = 0.0

    def send(self, data: Any) -> None:
        """To the other side."""
        if not self.is_closed:
            self.link.network.carry(self.other, self.other.deliver, data)

    def close(self) -> None:
        """This side is done; the other learns of it."""
        if not self.is_closed:
            self.is_closed = True
            self.link.network.carry(self.other, self.other.end_here)

    def deliver(self, data: Any) -> None:
        self.on_way.pop(0)
        if not self.is_closed and self.end is not None:
            self.end.arrived(data)

    def end_here(self) -> None:
        self.on_way.pop(0)
        self.end_now()

    def end_now(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.link.network.forget(self.link)
            if self.end is not None:
                self.end.ended()


class Link:
    """A connection between two processes."""

    def __init__(self, network: Network, client: Process, server: Process, is_local: bool) -> None:
        self.network, self.is_local = network, is_local
        self.client, self.server = Side(self, client), Side(self, server)
        self.client.other, self.server.other = self.server, self.client
        self.is_lost = False  # one of its hosts lost power

    def sides(self) -> tuple[Side, Side]:
        return self.client, self.server


class Network:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.partitions: set[tuple[str, str]] = set()  # pairs of hosts, ordered
        self.dark: set[str] = set()  # hosts without power
        self.spike = 0.0  # how often a message takes long
        self.slow: dict[Process, float] = {}  # how much longer each message of its connections to other hosts takes
        self.num_messages = 0
        self.links: dict[Link, None] = {}
        self._listeners: dict[str, tuple[Process, Callable[[], Any]]] = {}
        self._stalled: list[tuple[Side, Callable[..., None], tuple[Any, ...]]] = []

    # carrying

    def carry(self, to: Side, deliver: Callable[..., None], *args: Any) -> None:
        link = to.link
        self.num_messages += 1
        if link.is_lost:
            self._bounce(to.other)
            return
        if self._is_cut(link) or (self._stalled and any(each[0] is to for each in self._stalled)):
            self._stalled.append((to, deliver, args))
            return
        delay_s = self.delay_s(link.is_local)
        if self.slow and not link.is_local:
            delay_s += self.slow.get(link.client.process, 0.0)
        when_s = max(self.scheduler.now_s + delay_s, to.last_s)
        to.last_s = when_s
        to.on_way.append(self.scheduler.call_at(when_s, to.process, deliver, *args))

    def delay_s(self, is_local: bool) -> float:
        rng = self.scheduler.rng
        if is_local:
            return 0.00002 + rng.random() * 0.0001
        if self.spike and rng.random() < self.spike:
            return rng.random() * 3.0
        return 0.0002 + rng.random() * rng.random() * 0.01

    def _is_cut(self, link: Link) -> bool:
        return not link.is_local and self.is_partitioned(link.client.process.host, link.server.process.host)

    def is_partitioned(self, a: str, b: str) -> bool:
        return bool(self.partitions) and (min(a, b), max(a, b)) in self.partitions

    def partition(self, a: str, b: str) -> None:
        self.partitions.add((min(a, b), max(a, b)))

    def heal(self, a: str, b: str) -> None:
        self.partitions.discard((min(a, b), max(a, b)))
        stalled, self._stalled = self._stalled, []
        for to, deliver, args in stalled:
            self.carry(to, deliver, *args)

    def heal_all(self) -> None:
        for a, b in sorted(self.partitions):
            self.heal(a, b)

    def sever(self, link: Link) -> None:
        """From some message on nothing arrives, and both ends hear that it is over."""
        for side in link.sides():
            kept = self.scheduler.rng.randint(0, len(side.on_way))
            for item in side.on_way[kept:]:
                item.cancelled = True
            del side.on_way[kept:]
            side.on_way.append(
                self.scheduler.call_at(
                    max(side.last_s, self.scheduler.now_s + self.delay_s(link.is_local)), side.process, side.end_here
                )
            )
        self._stalled = [each for each in self._stalled if each[0].link is not link]

    def forget(self, link: Link) -> None:
        if all(side.is_closed for side in link.sides()):
            self.links.pop(link, None)

    def _bounce(self, side: Side) -> None:
        """What is sent to a host that lost power is sent again and again; once the host is back, it says no."""
        if side.other.process.host in self.dark:
            self.scheduler.call_later(_RESEND_S, side.process, self._bounce, side)
        else:
            self.scheduler.call_later(self.delay_s(False), side.process, side.end_now)

    # making connections

    def listen(self, address: str, process: Process, accept: Callable[[], Any]) -> None:
        self._listeners[address] = (process, accept)
        process.on_death.append(lambda: self.stop_listening(address, process))

    def stop_listening(self, address: str, process: Process) -> None:
        if self._listeners.get(address, (None,))[0] is process:
            del self._listeners[address]

    def adopt(self, process: Process) -> None:
        """Its connections end with it."""
        process.on_death.append(lambda: self._hang_up(process))

    def _hang_up(self, process: Process) -> None:
        for link in list(self.links):
            for side in link.sides():
                if side.process is process and not side.is_closed:
                    side.close()
                    self.forget(link)

    def lose_power(self, process: Process) -> None:
        """Before it is killed: nobody says goodbye."""
        self.dark.add(process.host)
        for link in list(self.links):
            for side in link.sides():
                if side.process is process:
                    side.is_closed = True
                    link.is_lost = not link.is_local
                    if link.is_local:
                        side.other.end_now()
                    else:
                        self.scheduler.call_later(_KEEPALIVE_S, side.other.process, side.other.end_now)

    def reach(self, client: Process, address: str) -> Link | OSError | None:
        """A connection as the client asks for it; None when nothing answers, an error when it is refused."""
        is_local = address.startswith("unix:")
        found = self._listeners.get(address)
        if found is None:
            return ConnectionRefusedError(111, "Connection refused")
        server, accept = found
        if not is_local and self.is_partitioned(client.host, server.host):
            return None
        link = Link(self, client, server, is_local)
        self.links[link] = None
        self.carry(link.server, self._accept, link.server, accept)
        return link

    def _accept(self, side: Side, accept: Callable[[], Any]) -> None:
        side.on_way.pop(0)
        if not side.is_closed:
            attach(side, accept())

    async def connect_async(self, process: Process, address: str, factory: Callable[[], Any]) -> None:
        link = self.reach(process, address)
        await asyncio.sleep(self.delay_s(address.startswith("unix:")))
        if isinstance(link, OSError):
            raise link
        if link is None:
            await asyncio.get_running_loop().create_future()  # until the caller's patience ends
        assert isinstance(link, Link)
        attach(link.client, factory())


def attach(side: Side, protocol: Any) -> None:
    """An asyncio protocol at this end."""
    transport = SimTransport(side, protocol)
    side.end = transport
    protocol.connection_made(transport)
    if side.is_closed:
        transport.ended()


class SimTransport:
    """Of asyncio.Transport what the RPC classes use."""

    def __init__(self, side: Side, protocol: Any) -> None:
        self._side, self._protocol = side, protocol
        self._is_closing = False

    def write(self, data: bytes) -> None:
        if not self._is_closing:
            self._side.send(bytes(data))

    def get_extra_info(self, _: str) -> None:
        """There is no socket to show; lose_power() does what its keepalive does."""

    def is_closing(self) -> bool:
        return self._is_closing

    def set_write_buffer_limits(self, high: int) -> None:
        """Whatever is written is on its way at once."""

    def get_write_buffer_size(self) -> int:
        return 0

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None:
        """Messages are small here: what arrives is taken."""

    resume_reading = pause_reading

    def abort(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._side.close()
            self._side.link.network.forget(self._side.link)
            self._lost_soon()

    close = abort

    def _lost_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def arrived(self, data: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(data)

    def ended(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._protocol.connection_lost(None)


class SimSocket:
    """Of a blocking socket what BlockingClient uses."""

    def __init__(self, network: Network, family: int = real_socket.AF_UNIX, kind: int = 0) -> None:
        self._network = network
        self._scheduler = network.scheduler
        self._side: Side | None = None
        self._timeout_s: float | None = None
        self._connect_timeout_s: float | None = None  # of SO_SNDTIMEO
        self._data = bytearray()
        self._changed = SimEvent(network.scheduler)
        self._is_over = False

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def setsockopt(self, _: int, name: int, value: Any) -> None:
        if name in (real_socket.SO_RCVTIMEO, real_socket.SO_SNDTIMEO):
            seconds, microseconds = _TIMEVAL.unpack(value)
            if name == real_socket.SO_RCVTIMEO:
                self._timeout_s = seconds + microseconds / 1e6
            else:
                self._connect_timeout_s = seconds + microseconds / 1e6

    def connect(self, path: str) -> None:
        self.reach(f"unix:{path}")

    def reach(self, address: str) -> None:
        process = self._scheduler.current
        timeout_s = self._timeout_s if self._connect_timeout_s is None else self._connect_timeout_s
        assert process is not None
        assert timeout_s is not None
        link = self._network.reach(process, address)
        if link is None:
            self._scheduler.sleep(timeout_s)
            raise TimeoutError("timed out")
        self._scheduler.sleep(self._network.delay_s(address.startswith("unix:")))
        if isinstance(link, OSError):
            raise link
        self._side = link.client
        self._side.end = self

    def send(self, data: bytes | memoryview) -> int:
        self.sendall(bytes(data))
        return len(data)

    def sendall(self, data: bytes) -> None:
        if self._side is None or self._side.is_closed:
            raise BrokenPipeError(32, "Broken pipe")
        self._side.send(bytes(data))

    def recv_into(self, view: memoryview) -> int:
        until_s = None if self._timeout_s is None else self._scheduler.now_s + self._timeout_s
        while not self._data and not self._is_over:
            if self._side is None or (self._side.is_closed and not self._side.on_way):
                break
            if until_s is not None and self._scheduler.now_s >= until_s:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            self._changed.clear()
            self._changed.wait(None if until_s is None else until_s - self._scheduler.now_s)
        count = min(len(view), len(self._data))
        view[:count] = self._data[:count]
        del self._data[:count]
        return count

    def shutdown(self, _: int) -> None:
        self.close()

    def close(self) -> None:
        self._is_over = True
        self._changed.set()
        if self._side is not None:
            self._side.close()
            self._network.forget(self._side.link)

    def arrived(self, data: bytes) -> None:
        self._data += data
        self._changed.set()

    def ended(self) -> None:
        self._is_over = True
        self._changed.set()


class SimSocketModule:
    """Stands for `socket` in base/rpc/blocking.py."""

    AF_UNIX, SOCK_STREAM, SHUT_RDWR = real_socket.AF_UNIX, real_socket.SOCK_STREAM, real_socket.SHUT_RDWR
    IPPROTO_TCP, TCP_NODELAY, SOL_SOCKET = real_socket.IPPROTO_TCP, real_socket.TCP_NODELAY, real_socket.SOL_SOCKET
    SO_RCVTIMEO, SO_SNDTIMEO = real_socket.SO_RCVTIMEO, real_socket.SO_SNDTIMEO

    def __init__(self, network: Callable[[], Network]) -> None:
        self._network = network

    def socket(self, family: int, kind: int) -> SimSocket:
        return SimSocket(self._network(), family, kind)

    def create_connection(self, address: tuple[str, int], timeout_s: float) -> SimSocket:
        made = SimSocket(self._network())
        made.settimeout(timeout_s)
        made.reach(f"tcp:{address[0]}:{address[1]}")
        return made
