"""`moonpool drain` of a worker that leaves faster than the command looks, and beside a conductor that gets the right to
change workers only later: a conductor over a real socket, whose workers come and go by a script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from waiting import HANG_S

from moonpool.base.cluster import CONDUCTOR_SERVICE, WorkerInfo, WorkerLoad, WorkerRole
from moonpool.base.errors import NotFound, Unavailable
from moonpool.base.rpc import Call, RpcPeer, RpcServer
from moonpool.cli.main import build_app
from moonpool.conductor.messages import ConductorStatus, DrainWorker, Status, WorkerStatus


class QuickWorkers:
    """A conductor whose worker leaves at a drain that the script names: the status before it still lists the worker.
    The first `num_refused` calls find it without the right to change workers."""

    def __init__(self, folder: Path, leaves_at_drain: int, num_refused: int = 0) -> None:
        self._leaves_at_drain, self.num_refused = leaves_at_drain, num_refused
        self._info = WorkerInfo(
            name="decode-1", role=WorkerRole.DECODE, address=f"unix:{folder}/ended.sock", incarnation=7, identity=b"",
            model="m", block_tokens=64, num_pages=10, max_num_seqs=8, page_nbytes=1,
        )  # fmt: skip
        self.drains = 0
        self.handlers: dict[type[Call[Any]], Callable[[Any, RpcPeer], Any]] = {
            Status: self._status,
            DrainWorker: self._drain,
        }

    def _status(self, call: Status, peer: object) -> ConductorStatus:
        here = self.drains < self._leaves_at_drain
        workers = (WorkerStatus(info=self._info, load=WorkerLoad(), indexed_blocks=0, assigned=0),) if here else ()
        return ConductorStatus(workers=workers, pool_blocks=0, pool_connected=True, counters={})

    def _drain(self, call: DrainWorker, peer: object) -> None:
        if self.num_refused:
            self.num_refused -= 1
            raise Unavailable("this conductor may not change workers now")
        self.drains += 1
        if self.drains == self._leaves_at_drain:
            raise NotFound(f"no worker {call.worker!r} is registered; there are: decode-0")


@contextmanager
def served(conductor: QuickWorkers, folder: Path) -> Iterator[str]:
    """Yield the conductor's address; it is served by a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = RpcServer(CONDUCTOR_SERVICE, conductor.handlers, name="conductor")
    try:
        yield asyncio.run_coroutine_threadsafe(server.listen(f"unix:{folder}/conductor.sock"), loop).result(HANG_S)
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(HANG_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("leaves_at_drain", [1, 2])
def test_a_worker_that_leaves_between_two_looks_is_drained(tmp_path: Path, leaves_at_drain: int) -> None:
    conductor = QuickWorkers(tmp_path, leaves_at_drain)
    with served(conductor, tmp_path) as address:
        words = ["drain", "decode-1", "--conductor", address, "--master", "127.0.0.1:1"]
        done = CliRunner().invoke(build_app("drain"), words)
    assert done.output == "decode-1 is drained and has ended\n", done.exception
    assert done.exit_code == 0
    assert conductor.drains == leaves_at_drain


def test_a_drain_waits_for_the_right_to_change_workers(tmp_path: Path) -> None:
    """The conductor that had it has just ended."""
    conductor = QuickWorkers(tmp_path, 1, num_refused=3)
    with served(conductor, tmp_path) as address:
        words = ["drain", "decode-1", "--conductor", address, "--master", "127.0.0.1:1"]
        done = CliRunner().invoke(build_app("drain"), words)
    assert done.output == "decode-1 is drained and has ended\n", done.exception
    assert conductor.num_refused == 0
