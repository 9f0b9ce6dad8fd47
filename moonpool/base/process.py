"""How a role runs as a process: logging, event loop, signals, lifeline, readiness, and a bounded shutdown.

A role tells its parent one JSON line on an inherited descriptor (`--ready-fd`): {"ready": address} once it serves,
or {"error": message} when it cannot. SIGTERM and SIGINT close it gracefully; a close that takes longer than
CLOSE_TIMEOUT_S is cut short. Exit codes: 0 stopped as asked, 1 it could not start or lacked memory (a reason was
given), 3 a child of a launcher was drained and must not be started again, 4 a socket of a launcher's child was removed,
5 a worker's engine hung (worker/watchdog.py), 70 a bug. A role that was started by hand, without such a descriptor,
logs one line when it is ready.

Sockets: a process whose Unix socket was removed, or replaced by another one, can be reached by no new client. It says
so within LOOK_S. A child of a launcher then ends, and is started again with a new socket, as soon as the folder for
that is there: the launcher makes its run directory again.

Lifeline: children end when the process that started them is gone, even after `kill -9`. The parent keeps the write end
of a pipe that no other process gets; every child inherits the read end, and a small thread of the child waits on it.
When the parent ends, the kernel closes the write end and the thread wakes: it sends SIGTERM to its own process (before
a handler is installed this ends the process at once) and ends the process by force after a short grace, even if the
event loop is stuck.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Protocol, runtime_checkable

import msgspec
import uvloop

from moonpool import __version__
from moonpool.base.address import own_sockets_lost
from moonpool.base.errors import ConfigError, Internal, MoonpoolError, Unavailable
from moonpool.base.limits import memory_shortage
from moonpool.base.log import setup_logging

LIFELINE_FD = "MOONPOOL_LIFELINE_FD"
GRACE_S = 1.0
EXIT_ORPHANED = 75
CLOSE_TIMEOUT_S = 3.0
DRAIN_S = 30.0  # after SIGTERM, for a role that was started by hand; what Kubernetes waits by default
EXIT_FAILED = 1
EXIT_DRAINED = 3
EXIT_UNREACHABLE = 4
EXIT_HANGS = 5
LOOK_S = 1.0  # between looks for the files of this process's sockets
EXIT_BUG = 70
_MAX_REASON = 2000  # characters
# Objects made since the last collection before there is another one, of about 1 ms; of these before one of older
# objects; those before one of all. Connections leave cycles behind, some of them after long use.
_COLLECT_AFTER = (10_000, 10, 3)
_LOG = logging.getLogger(__name__)


class Lifeline:
    """The parent's end. Give `fd` to children (`pass_fds`) and `environment` to their environment."""

    def __init__(self) -> None:
        # os.pipe makes both ends close-on-exec: only pass_fds lets the read end through, nothing the write end.
        self.fd, self._write_fd = os.pipe()
        self._closed = False

    @property
    def environment(self) -> Mapping[str, str]:
        return {LIFELINE_FD: str(self.fd)}

    def close(self) -> None:
        """Close the pipe. Children that still run end as if the parent had ended. Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self._write_fd)
            os.close(self.fd)

    def __enter__(self) -> Lifeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def watch_inherited(grace_s: float = GRACE_S) -> bool:
    """Watch the lifeline; call this first in a child. Return False when the parent passed none. ConfigError when the
    variable names no open descriptor.

    The variable is removed from the environment and the descriptor closes on exec: both are for this process only.
    """
    text = os.environ.pop(LIFELINE_FD, None)
    if text is None:
        return False
    try:
        fd = int(text)
        os.set_inheritable(fd, False)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{LIFELINE_FD}={text!r} is not an open descriptor") from error
    threading.Thread(target=_end_with_parent, args=(fd, grace_s), name="lifeline", daemon=True).start()
    return True


def _end_with_parent(fd: int, grace_s: float) -> None:
    while os.read(fd, 1):
        pass  # no process writes to the pipe; its end is the signal
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(EXIT_ORPHANED)


class Service(Protocol):
    """What every role offers. `close` is idempotent and may follow a `start` that failed half-way."""

    async def start(self) -> str | None:
        """Start, and return the address at which the service listens, if there is one."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Watched(Protocol):
    """A service that can fail while it runs."""

    async def wait(self) -> None:
        """Return after close(). Raise the error that ended the service otherwise."""
        ...


@runtime_checkable
class Drained(Protocol):
    """A service that can end what it has begun and take nothing new meanwhile."""

    async def drain(self) -> None:
        """Return when nothing is left to do. May be cancelled."""
        ...


@runtime_checkable
class Leaving(Protocol):
    """A service that can be told by a call to end for good."""

    async def left(self) -> None:
        """Return when the service was told to leave and has nothing left to do: its process ends then."""
        ...


@dataclass(frozen=True)
class ProcessConfig:
    """What every role's process takes besides its own configuration."""

    log_level: str = "INFO"  # DEBUG, INFO, WARNING or ERROR
    # inherited file descriptor to which readiness is reported
    ready_fd: int | None = field(default=None, metadata={"hidden": True})
    # most seconds that a worker goes on after SIGTERM to end its requests, without taking new ones; another signal ends
    # it at once; default: 30, and 0 for a child of `moonpool serve`
    drain_s: float | None = None

    @property
    def drain_timeout_s(self) -> float:
        if self.drain_s is not None:
            return self.drain_s
        return DRAIN_S if self.ready_fd is None else 0.0


class ReadyReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one line on the ready descriptor; exactly one field is set."""

    ready: str | None = None
    error: str | None = None


def run_role(role: str, make: Callable[[], Service], config: ProcessConfig, what: str | None = None) -> NoReturn:
    """Run the service that `make` returns until it is told to stop, and end the process.

    `role` is the process's name in the log; `what` says in the line at the start what it is.
    """
    code = _run(role, make, config, what or role)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed. Freeing a heap with a model, object by object, would take seconds for nothing.
    os._exit(code)


def _run(role: str, make: Callable[[], Service], config: ProcessConfig, what: str) -> int:
    try:
        setup_logging(role, config.log_level)
        ready = _ReadyPipe(config.ready_fd)
    except (ValueError, MoonpoolError) as error:
        print(f"moonpool {role}: {error}", file=sys.stderr)
        return EXIT_FAILED
    try:
        has_left = uvloop.run(_serve(make, ready, what, config))
    except _SocketLost as error:
        print(f"moonpool {role}: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    except Exception as error:  # noqa: BLE001 - a bug too must reach the process that waits for this one
        reason = str(error) if isinstance(error, MoonpoolError) else memory_shortage(error)
        if reason is None:
            _LOG.exception("a bug ended this process")
            ready.send(ReadyReport(error=f"a bug: {type(error).__name__}: {error}"[:_MAX_REASON]))
            return EXIT_BUG
        if not ready.send(ReadyReport(error=reason[:_MAX_REASON])):
            print(f"moonpool {role}: {reason}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_DRAINED if has_left and config.ready_fd is not None else 0


class _SocketLost(Unavailable):
    """A socket of this process was removed or replaced, and its launcher can start it again with a new one."""


class _StopSignals:
    """`stop` is set by the first SIGTERM or SIGINT, `at_once` by SIGINT or by any second one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.stop, self.at_once = asyncio.Event(), asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)

    def _on_signal(self, signum: signal.Signals) -> None:
        if signum == signal.SIGINT or self.stop.is_set():
            self.at_once.set()
        self.stop.set()


async def _serve(make: Callable[[], Service], ready: _ReadyPipe, what: str, config: ProcessConfig) -> bool:
    """Run the service until it is told to stop, by a signal or by a call. Return whether a call told it to leave."""
    # May import for seconds; until the handlers below are set, a signal ends the process at once.
    service, has_left = make(), False
    loop = asyncio.get_running_loop()
    signals = _StopSignals(loop)
    stopping = loop.create_task(signals.stop.wait())
    try:
        address = await _started(service, stopping)
        if not stopping.done():
            _calm_collector()
            if not ready.send(ReadyReport(ready=address or "")):
                at = f" at {address}" if address else ""
                _LOG.info("moonpool %s: %s serves%s (process %d)", __version__, what, at, os.getpid())
            reached = loop.create_task(_until_unreachable(is_child=config.ready_fd is not None))
            has_left = await _run_until(service, stopping, reached)
            if isinstance(service, Drained) and config.drain_timeout_s > 0 and not has_left:
                await _drain(service, signals.at_once, config.drain_timeout_s)
    finally:
        stopping.cancel()
        _end_by_force_after(CLOSE_TIMEOUT_S)
        await service.close()
    return has_left


def _calm_collector() -> None:
    """Let the garbage collector take less of the time of requests: what a role has loaded stays and need not be
    visited, and most of what requests leave behind has no cycles."""
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


async def _started(service: Service, stopping: asyncio.Task[bool]) -> str | None:
    """Start the service and return its address. Return None when the process is told to stop before that."""
    starting = asyncio.ensure_future(service.start())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        return starting.result()
    starting.cancel()
    await asyncio.wait((starting,), timeout=CLOSE_TIMEOUT_S)
    return None


async def _until_unreachable(*, is_child: bool) -> NoReturn:
    """Say when a socket of this process was removed. Raise _SocketLost then if a launcher starts this process again."""
    said: list[str] = []
    while True:
        await asyncio.sleep(LOOK_S)
        lost = own_sockets_lost()
        for path in lost:
            if path not in said:
                _LOG.error("the socket %s was removed or replaced: no new client can reach this process there", path)
        said = lost
        if lost and is_child and all(map(_has_folder, lost)):
            raise _SocketLost(f"its socket {lost[0]} was removed or replaced; it ends, to be started with a new one")


def _has_folder(path: str) -> bool:
    return os.path.isdir(os.path.dirname(path))


async def _run_until(service: Service, stopping: asyncio.Task[bool], reached: asyncio.Task[NoReturn]) -> bool:
    """Wait until told to stop, or until the service has left; return whether it has. Raise the error that ended the
    service, or `reached`, if that comes first."""
    waiting = asyncio.ensure_future(service.wait()) if isinstance(service, Watched) else None
    leaving = asyncio.ensure_future(service.left()) if isinstance(service, Leaving) else None
    others: list[asyncio.Future[Any]] = [task for task in (waiting, leaving, reached) if task is not None]
    await asyncio.wait([stopping, *others], return_when=asyncio.FIRST_COMPLETED)
    try:
        if stopping.done():
            return False
        if waiting is not None and waiting.done():
            waiting.result()
            raise Internal("the service ended by itself")
        if reached.done():
            reached.result()
        return True
    finally:
        for task in others:
            task.cancel()


async def _drain(service: Drained, at_once: asyncio.Event, timeout_s: float) -> None:
    """Let the service end what it has begun, until the time is up or a signal says to stop at once."""
    if at_once.is_set():
        return
    _LOG.info("ending what was begun, for at most %g s; another signal ends it at once", timeout_s)
    draining, stopping = asyncio.ensure_future(service.drain()), asyncio.ensure_future(at_once.wait())
    await asyncio.wait((draining, stopping), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if draining.done():
        draining.result()
    elif not at_once.is_set():
        _LOG.warning("requests are left after %g s (--drain-s)", timeout_s)
    draining.cancel()
    stopping.cancel()
    await asyncio.gather(draining, stopping, return_exceptions=True)


def _end_by_force_after(timeout_s: float) -> None:
    """End the process after `timeout_s`, even if close() hangs or a thread never ends: others wait for its memory."""

    def end() -> None:
        _LOG.warning("closing took more than %g s; ending anyway", timeout_s)
        os._exit(EXIT_BUG)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()


class _ReadyPipe:
    """The child's end of the ready pipe, if there is one. Sends a single report."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            try:
                os.set_inheritable(fd, False)
            except OSError as error:
                raise ConfigError(f"--ready-fd {fd} is not an open descriptor") from error

    def send(self, report: ReadyReport) -> bool:
        """Send the report. Return False when there is no pipe or the parent has closed it."""
        if self._fd is None:
            return False
        fd, self._fd = self._fd, None
        try:
            os.write(fd, msgspec.json.encode(report) + b"\n")  # a pipe takes this much without blocking
        except BrokenPipeError:
            return False
        finally:
            os.close(fd)
        return True
