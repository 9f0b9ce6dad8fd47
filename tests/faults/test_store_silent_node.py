"""A node of another machine that is stopped: reads of little data give it up soon, however long transfers may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from store_fleet import Fleet, open_fleet
from store_nursery import Nursery, open_nursery
from waiting import HANG_S, wait_until

from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.store import Store

VALUE = b"value" * 1000
# Without a time of its own a read would take all of a transfer's: the two are told apart on any machine.
LIMITS: dict[str, Any] = {"shm": False, "transfer_timeout_s": 600.0, "read_timeout_s": 0.3}
LATEST_S = HANG_S / 2


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with open_nursery() as made:
        yield made


@pytest.fixture
def fleet(nursery: Nursery) -> Iterator[Fleet]:
    with open_fleet(nursery) as made:
        yield made


@contextmanager
def soon() -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < LATEST_S


def get(store: Store) -> bytes | None:
    return store.get("k")


def get_batch(store: Store) -> bytes | None:
    got = store.get_each(["k", "other"])[0]
    if isinstance(got, MoonpoolError):
        raise got
    return got


def get_range(store: Store) -> bytes | None:
    into = bytearray(len(VALUE))
    return None if store.get_range("k", 0, into) is None else bytes(into)


READS = pytest.mark.parametrize("read", [get, get_batch, get_range])


@READS
@pytest.mark.parametrize("is_open", [True, False], ids=["known", "new"])
def test_the_only_node_is_given_up_and_found_again(
    fleet: Fleet, read: Callable[[Store], bytes | None], is_open: bool
) -> None:
    node = fleet.start_node("n0")
    reader, writer = fleet.client(**LIMITS), fleet.client()
    assert writer.put("k", VALUE)
    assert writer.put("other", VALUE)
    if is_open:
        assert read(reader) == VALUE
    node.stop()
    for _ in range(2):
        with soon(), pytest.raises(Unavailable):
            read(reader)
    assert not reader.exist("k"), "it is a miss meanwhile"
    node.resume()
    wait_until(lambda: reader.exist("k"), "the node answers again")
    assert read(reader) == VALUE


@READS
def test_the_other_replica_is_read(fleet: Fleet, read: Callable[[Store], bytes | None]) -> None:
    nodes = {name: fleet.start_node(name) for name in ("n0", "n1")}
    reader, writer = fleet.client(**LIMITS), fleet.client()
    for key in ("k", "other"):
        assert writer.put(key, VALUE, num_replicas=2)
    assert read(reader) == VALUE
    for name in nodes:
        nodes[name].stop()
        with soon():
            assert read(reader) == VALUE
        nodes[name].resume()
        wait_until(lambda: not reader.directory.unreadable.listed, "the node answers again")
