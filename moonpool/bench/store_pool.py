"""The processes that `moonpool bench store` measures: a master, perhaps a node, and two clients.

Master and node are the usual commands. Clients are this module run as a program; they get their work as lines of JSON.
All end with the block that started them, and by their lifeline if the benchmark is killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from moonpool.base.errors import Unavailable
from moonpool.base.own_folder import OwnFolder
from moonpool.base.process import Lifeline, ReadyReport, watch_inherited
from moonpool.bench.store_calls import CallWork, PingWork
from moonpool.bench.store_objects import ObjectWork
from moonpool.bench.store_redis import RedisWork
from moonpool.launch.child import to_arguments

_STOP_TIMEOUT_S = 10.0
_STDERR = 2
NUM_CLIENTS = 2


class BenchReply(msgspec.Struct):
    """A client's reply: a result or an error."""

    result: Any = None
    error: str | None = None


class BenchClient:
    """A client process. It does one thing at a time: `begin` starts it, `end` waits for it; `do` is both."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def do(self, what: str, **arguments: Any) -> Any:
        self.begin(what, **arguments)
        return self.end()

    def begin(self, what: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode([what, arguments]) + b"\n")
        self._process.stdin.flush()

    def end(self) -> Any:
        """Return the result. Raise Unavailable if the work failed or the process is gone."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"a client of the benchmark ended with {self._process.wait()}")
        reply = msgspec.json.decode(line, type=BenchReply)
        if reply.error is not None:
            raise Unavailable(f"a client of the benchmark failed: {reply.error}")
        return reply.result


class BenchPool:
    """The running processes. `folder` is their private folder."""

    def __init__(self, folder: Path, master_pid: int, clients: Sequence[BenchClient]) -> None:
        self.folder = folder
        self.master_pid = master_pid
        self.clients = clients

    @property
    def data_dir(self) -> Path:
        """The master's data folder."""
        return _data_dir(self.folder)

    def run_on_all(self, what: str, each: Sequence[Mapping[str, Any]] | None = None, **arguments: Any) -> float:
        """Run the work on two clients in parallel; return the sum of their rates. `each`: arguments per client."""
        both = self.clients[:NUM_CLIENTS]
        for number, client in enumerate(both):
            client.begin(what, **arguments, **(each[number] if each else {}))
        return sum([float(client.end()) for client in both])


@contextlib.contextmanager
def start_pool(
    *,
    master: Mapping[str, object] | None = None,
    node: Mapping[str, object] | None = None,
    num_clients: int = NUM_CLIENTS,
    apart: bool = False,
) -> Iterator[BenchPool]:
    """Start a pool with these settings, without a node if `node` is None. With `apart` the master gets its own
    processor, if there are two.
    """
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(OwnFolder("mp.bench-"))
        lifeline = stack.enter_context(Lifeline())
        address = f"unix:{home}/master"
        settings = {"data_dir": str(_data_dir(home)), "listen": address, **(master or {})}
        master_pid = stack.enter_context(_role("master", settings, lifeline))
        if node is not None:
            here = {"name": "bench", "master_address": address, "run_dir": str(home), **node}
            stack.enter_context(_role("node", here, lifeline))
        clients = [stack.enter_context(_client(address, home, lifeline)) for _ in range(num_clients)]
        if apart:
            _set_apart(master_pid, [client.pid for client in clients])
        yield BenchPool(home, master_pid, clients)


@contextlib.contextmanager
def _role(command: str, settings: Mapping[str, object], lifeline: Lifeline) -> Iterator[int]:
    """Start a role; yield its process id when it is ready. Raise Unavailable, with its reason, if it does not start."""
    read_fd, write_fd = os.pipe()
    options = {**settings, "log_level": "WARNING", "ready_fd": write_fd}
    argv = [sys.executable, "-m", "moonpool", command, *to_arguments(options)]
    with open(read_fd, "rb") as ready:
        with _process(argv, lifeline, (write_fd,), close=write_fd) as process:
            report = msgspec.json.decode(ready.readline() or b"{}", type=ReadyReport)
            if report.ready is None:
                raise Unavailable(f"the {command} did not start: {report.error or 'it ended without a report'}")
            yield process.pid


@contextlib.contextmanager
def _client(address: str, run_dir: Path, lifeline: Lifeline) -> Iterator[BenchClient]:
    argv = [sys.executable, "-m", "moonpool.bench.store_pool", address, str(run_dir)]
    with _process(argv, lifeline, (), talks=True) as process:
        yield BenchClient(process)


@contextlib.contextmanager
def _process(
    argv: Sequence[str], lifeline: Lifeline, fds: tuple[int, ...], *, talks: bool = False, close: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else _STDERR,  # standard output is for figures
            pass_fds=(*fds, lifeline.fd),
            env={**os.environ, **lifeline.environment},
            start_new_session=True,  # Ctrl-C reaches the benchmark alone, which stops them in order
        )
    finally:
        if close is not None:
            os.close(close)
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _set_apart(master_pid: int, others: Sequence[int]) -> None:
    """Give the master its own processor, so that it is not measured how long it waits for one. Moves all threads."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        return
    for pid, chosen in ((master_pid, {cpus[0]}), *((pid, set(cpus[1:])) for pid in others)):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), chosen)


def _data_dir(home: Path) -> Path:
    return home / "data"


def _run_client(address: str, run_dir: str) -> None:
    """Run a client process: do what each line of standard input says, [what, {arguments}], and reply with a
    BenchReply as JSON."""
    watch_inherited()
    with contextlib.ExitStack() as stack:
        kinds = (ObjectWork(address, run_dir, stack), CallWork(address, stack), PingWork(address, stack), RedisWork())
        work: dict[str, Callable[..., Any]] = {}
        for kind in kinds:
            work |= kind.work()
        for line in sys.stdin.buffer:
            what, arguments = msgspec.json.decode(line)
            sys.stdout.buffer.write(msgspec.json.encode(_attempt(work[what], arguments)) + b"\n")
            sys.stdout.buffer.flush()


def _attempt(work: Callable[..., Any], arguments: dict[str, Any]) -> BenchReply:
    try:
        return BenchReply(result=work(**arguments))
    except Exception as error:  # noqa: BLE001 - the benchmark waits for a reply, whatever went wrong
        return BenchReply(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    _run_client(sys.argv[1], sys.argv[2])
