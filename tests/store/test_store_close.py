"""close() tells the master what ends with the store, and waits for no master that is away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from store_pool import LocalPool, ProcessPool
from waiting import HANG_S, wait_until

from moonpool.base.clock import Deadline
from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.store.client.put_request import PutRequest
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

# What close() must not wait for is far longer than what this file takes for hanging.
PATIENT: dict[str, Any] = {"retry_s": 600.0, "rpc_timeout_s": 600.0, "connect_timeout_s": 600.0}


def view_and_close(store: Store) -> None:
    with store.view(b"k") as view:
        assert not view.is_copy


def put_twice(store: Store) -> None:
    """The master grants space ahead then."""
    for number in range(3):
        assert store.put(b"%d-%d" % (id(store), number), b"v")
    assert store.piece_puts.tools.calls.ahead.held_nbytes > 0


def read_twice(store: Store) -> None:
    """The second read asks nobody, and is to be reported."""
    assert [store.get(b"k") for _ in range(2)] == [b"value"] * 2


def begin_put(store: Store) -> None:
    [begun] = store.piece_puts.begin([PutRequest(b"never ended", (10,))])
    assert not isinstance(begun, MoonpoolError)


def pin(store: Store) -> None:
    assert store.pin(b"k")


def read_events(store: Store) -> None:
    store.events().next_batch(HANG_S)


def ask_and_wait(store: Store) -> threading.Thread:
    """A thread waits for the master."""

    def ask() -> None:
        with pytest.raises(Unavailable):
            store.stats()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


USES: dict[str, Callable[[Store], Any]] = {
    "views": view_and_close,
    "an open view": lambda store: store.view(b"k"),
    "held space": put_twice,
    "reads to report": read_twice,
    "a put that was begun": begin_put,
    "pins": pin,
    "a feed": read_events,
    "nothing": lambda store: None,
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def not_closed_soon(stores: dict[str, Store]) -> list[str]:
    """Close the stores. Return the names of those that wait for the master."""
    closing = {name: threading.Thread(target=store.close, daemon=True) for name, store in stores.items()}
    for thread in closing.values():
        thread.start()
    deadline = Deadline(HANG_S / 2)
    for thread in closing.values():
        thread.join(deadline.remaining_s())
    return [name for name, thread in closing.items() if thread.is_alive()]


@pytest.mark.parametrize("is_known", [True, False], ids=["known to be away", "not asked since"])
@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_close_does_not_wait_for_a_master_that_is_away(
    tmp_path: Path, stack: ExitStack, fault: str, is_known: bool
) -> None:
    pool = ProcessPool(tmp_path, stack)
    master = pool.start_master(lease_s=600.0)  # what is read stays remembered
    pool.start_node()
    assert pool.client().put(b"k", b"value")
    engine = stack.enter_context(TransferEngine(TransferConfig(run_dir=str(tmp_path), tcp_host=None)))
    # Not closed by the stack: a store that hangs would hang there again.
    stores = {use: Store(pool.address, engine=engine, config=ClientConfig(**PATIENT, silence_s=1.0)) for use in USES}
    kept = [make(stores[use]) for use, make in USES.items()]
    if fault == "killed":
        master.kill()
    else:
        os.kill(master.process.pid, signal.SIGSTOP)
    threads = [ask_and_wait(store) for store in stores.values()] if is_known else []
    if is_known:
        for store in stores.values():
            wait_until(lambda store=store: store.counters()["master_outages"], "the outage is noticed")  # type: ignore[misc]
    assert not_closed_soon(stores) == []
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    del kept


def test_a_master_that_is_there_is_told(tmp_path: Path) -> None:
    """Before the connection ends, which would say the same of pins only."""
    pool = LocalPool(tmp_path)
    try:
        assert pool.client().put(b"k", b"value")
        store = pool.client()
        told: list[str] = []
        call_noting_repeats, call_once = store.master.call_noting_repeats, store.master.call_once

        def note(send: Callable[..., Any]) -> Callable[..., Any]:
            def call(call: Any, *more: Any) -> Any:
                told.append(type(call).__name__)
                return send(call, *more)

            return call

        store.master.call_noting_repeats = note(call_noting_repeats)  # type: ignore[method-assign]
        store.master.call_once = note(call_once)  # type: ignore[method-assign]
        view_and_close(store)
        put_twice(store)

        def asks_nobody() -> bool:
            num_told = len(told)
            assert store.get(b"k") == b"value"
            return len(told) == num_told

        wait_until(asks_nobody, "a read is to be reported; on a slow host what it needs may be forgotten by then")
        store.close()
        assert {"PutRevoke", "RenewLeases", "Unpin"} <= set(told), "a slow host may let it say some of this earlier"
        assert pool.on_loop(lambda: pool.master.state.stats().counters["ahead_bytes"]) == 0
    finally:
        pool.close()
