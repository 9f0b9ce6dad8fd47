"""Processes that stop themselves (SIGSTOP) at the worst moment of a read or a put, and say how it ended.

They say "asking" before, so that the test can wait for the stop. After SIGCONT their clock says that they were stopped
for longer than any promise lasts, and they say "right" (the bytes are those of the key's first version), "miss",
"wrong ..." or "refused CODE".
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from store_time import pass_here, passing_time
from store_values import value_of, version_in

from moonpool.base.errors import MoonpoolError
from moonpool.store import Store
from moonpool.store.client import ClientConfig, Put
from moonpool.store.client.put_request import DEFAULT_OPTIONS
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.buffers import copy_bytes
from moonpool.transfer.transports import mapped, sockets
from moonpool.transfer.transports.tcp import single

FIRST_VERSION = 1
_STOPPED_S = 100_000.0
_LARGE_NBYTES = 8192  # what is smaller is a header


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    pass_here(_STOPPED_S)


@contextmanager
def _client(address: str, run_dir: str, shm: bool) -> Iterator[Store]:
    limits = ClientConfig(rpc_timeout_s=60.0, retry_s=60.0, transfer_timeout_s=60.0, read_timeout_s=60.0)
    with (
        passing_time(),
        TransferEngine(TransferConfig(run_dir=run_dir, shm=shm, tcp_host=None)) as engine,
        Store(address, engine=engine, config=limits) as client,
    ):
        yield client


def _stop_before(where: str) -> None:
    """`where` is module:name or module:class.name; its next call first stops this process."""
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    real = getattr(owner, name)

    def stop_once(*args: Any, **more: Any) -> Any:
        setattr(owner, name, real)
        _stop()
        return real(*args, **more)

    setattr(owner, name, stop_once)


def _say_outcome(act: Callable[[], str]) -> None:
    try:
        print(act())
    except MoonpoolError as error:
        print(f"refused {error.code}")
    except AssertionError as error:
        print(f"wrong {error}")


def _judged(data: bytes | memoryview | None, number: int) -> str:
    if data is None:
        return "miss"
    assert version_in(data, number) == FIRST_VERSION
    return "right"


def copy_late(address: str, run_dir: str, key: str, number: int, shm: bool, where: str) -> None:
    """Stops within a get."""
    with _client(address, run_dir, shm) as client:
        client.stats()  # connected, so that the stop is where it should be
        _stop_before(where)
        print("asking")
        _say_outcome(lambda: _judged(client.get(key.encode()), number))


def view_late(address: str, run_dir: str, key: str, number: int) -> None:
    """Stops with a view in its hands, looks at it again, and gives it back at the next line it hears."""
    with _client(address, run_dir, True) as client:
        (view,) = client.view_many([key.encode()])
        assert not isinstance(view, MoonpoolError), view
        assert not view.is_copy
        print("asking")
        _stop()
        _say_outcome(partial(_judged, view.pieces[0], number))
        sys.stdin.readline()
        view.close()
        print("closed")
        sys.stdin.readline()


def put_late(address: str, run_dir: str, key: str, number: int, nbytes: int, shm: bool) -> None:
    """Stops when half of its bytes are in place, or on their way."""
    if shm:
        mapped.copy_bytes = _copy_in_halves  # type: ignore[attr-defined]
    else:
        single.send_views = _send_in_halves  # type: ignore[attr-defined]
    with _client(address, run_dir, shm) as client:
        client.stats()
        print("asking")
        put = Put(key.encode(), [value_of(number, FIRST_VERSION, nbytes)], options=DEFAULT_OPTIONS)
        _say_outcome(lambda: _put(client, put))
        sys.stdin.readline()


def _put(client: Store, put: Put) -> str:
    (error,) = client.put_objects([put])
    if error is not None:
        raise error
    return "right"


def _copy_in_halves(target: memoryview, source: memoryview) -> None:
    half = source.nbytes // 2 if source.nbytes > _LARGE_NBYTES else 0
    copy_bytes(target[:half], source[:half])
    if half:
        _stop()
    copy_bytes(target[half:], source[half:])


def _send_in_halves(sock: Any, views: list[memoryview], nbytes: int, deadline: Any) -> None:
    whole = b"".join(views)
    half = len(whole) // 2 if len(whole) > _LARGE_NBYTES else 0
    if half:
        sockets.send_all(sock, [whole[:half]], deadline)
        _stop()
    sockets.send_all(sock, [whole[half:]], deadline)
