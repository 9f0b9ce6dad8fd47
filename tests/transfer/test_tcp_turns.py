"""Many requests of one caller on one lane: neighbours go together, batches come in turn, refusals keep their place."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import NotFound, PeerLost, StaleGeneration
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.tcp.pipeline import merge_neighbours
from moonpool.transfer.transports.tcp.transport import TcpRemote, TcpTransport

NBYTES = 40 << 20
GRANULE_NBYTES = 4096
TIMEOUT_S = 30.0
MIB = 1 << 20


class Owner:
    """A fenced segment full of noise, and a caller's handle to it."""

    def __init__(self) -> None:
        self.segment = Segment.allocate("seg", NBYTES, granule_nbytes=GRANULE_NBYTES, incarnation=1)
        self.segment.memory[:] = random.Random(0).randbytes(NBYTES)
        self.transport = TcpTransport("127.0.0.1")
        endpoint = self.transport.serve(self.segment)
        self.caller = TcpTransport(None)
        self.remote: TcpRemote = self.caller.open(
            SegmentDescriptor(name="seg", nbytes=NBYTES, incarnation=1, host="h", endpoints=(endpoint,)),
            endpoint,
            timeout_s=TIMEOUT_S,
        )

    def close(self) -> None:
        self.caller.close()
        self.transport.close()
        self.segment.close()


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.close()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=40))
def test_merged_orders_say_the_same(steps: list[tuple[int, int]]) -> None:
    """Each step leaves a gap, or none, before the next item."""
    items, at = [], 0
    for gap, nbytes in steps:
        items.append((at + gap, memoryview(bytearray(nbytes))))
        at += gap + nbytes
    orders = merge_neighbours(items)
    said = []
    for order in orders:
        assert order.nbytes == sum(view.nbytes for view in order.views)
        at = order.offset
        for view in order.views:
            said.append((at, id(view)))
            at += view.nbytes
    assert said == [(offset, id(view)) for offset, view in items]
    assert len(orders) <= 1 + sum(gap > 0 for gap, _ in steps)


def batches_of(sizes: list[list[int]], seed: int) -> list[list[tuple[int, bytearray]]]:
    chance = random.Random(seed)
    return [[(chance.randrange(NBYTES - size), bytearray(size)) for size in some] for some in sizes]


sizes_ = st.lists(st.lists(st.sampled_from([0, 1, 64, 5000, 70_000, 3 * MIB]), max_size=5), max_size=12)


@settings(max_examples=30, deadline=None)
@given(sizes_, st.integers(0, 99))
def test_batches_come_in_turn(owner: Owner, sizes: list[list[int]], seed: int) -> None:
    batches = batches_of(sizes, seed)
    arrived = []
    for number in owner.remote.read_in_turn(batches, timeout_s=TIMEOUT_S):
        arrived.append(number)
        assert all(bytes(room) == owner.segment.memory[at : at + len(room)] for at, room in batches[number])
    assert arrived == list(range(len(batches)))


def test_more_small_requests_than_may_be_under_way(owner: Owner) -> None:
    batches = batches_of([[64] * 300, [4096] * 200, [], [64] * 500], 1)
    assert list(owner.remote.read_in_turn(batches, timeout_s=TIMEOUT_S)) == [0, 1, 2, 3]
    assert all(bytes(room) == owner.segment.memory[at : at + len(room)] for some in batches for at, room in some)


def test_the_next_batch_is_asked_for_before_the_first_is_used(owner: Owner) -> None:
    taken = []

    def batches() -> Iterator[list[tuple[int, bytearray]]]:
        for number in range(6):
            taken.append(number)
            yield [(number * 3 * MIB, bytearray(3 * MIB))]

    with contextlib.closing(owner.remote.read_in_turn(batches(), timeout_s=TIMEOUT_S)) as arrivals:
        assert next(arrivals) == 0
        assert len(taken) > 1
        assert list(arrivals) == [1, 2, 3, 4, 5]


def test_who_stops_listening_leaves_the_others_a_clean_lane(owner: Owner) -> None:
    for _ in range(3):
        batches = batches_of([[3 * MIB]] * 6, 2)
        with contextlib.closing(owner.remote.read_in_turn(batches, timeout_s=TIMEOUT_S)) as arrivals:
            assert next(arrivals) == 0
        room = bytearray(100)
        owner.remote.read_into(77, [room], timeout_s=TIMEOUT_S)
        assert bytes(room) == owner.segment.memory[77:177]


def test_a_withdrawn_segment_ends_the_turns() -> None:
    made = Owner()
    try:
        with contextlib.closing(
            made.remote.read_in_turn(iter(batches_of([[3 * MIB]] * 40, 3)), timeout_s=TIMEOUT_S)
        ) as arrivals:
            assert next(arrivals) == 0
            made.transport.unserve("seg")
            with pytest.raises(NotFound):
                list(arrivals)
    finally:
        made.close()


def test_a_lost_owner_ends_the_turns() -> None:
    made = Owner()
    try:
        with contextlib.closing(
            made.remote.read_in_turn(iter(batches_of([[3 * MIB]] * 40, 3)), timeout_s=TIMEOUT_S)
        ) as arrivals:
            assert next(arrivals) == 0
            closing = threading.Thread(target=made.transport.close)
            closing.start()
            with pytest.raises(PeerLost):
                list(arrivals)
            closing.join()
    finally:
        made.close()


def test_each_write_has_its_own_generation_and_its_own_outcome() -> None:
    made = Owner()
    try:
        made.remote.write_from(2 * MIB, [b"newer"], generation=9, timeout_s=TIMEOUT_S)
        data = [random.Random(number).randbytes(MIB) for number in range(4)]
        items = [(number * MIB, [data[number][:100], data[number][100:]], number + 1) for number in range(4)]
        outcomes = made.remote.write_each(items, timeout_s=TIMEOUT_S)
        assert [type(each) for each in outcomes] == [type(None), type(None), StaleGeneration, type(None)]
        assert [bytes(made.segment.memory[at : at + MIB]) == data[at // MIB] for at in range(0, 4 * MIB, MIB)] == [
            True,
            True,
            False,
            True,
        ]
        assert made.segment.fence is not None
        assert [made.segment.fence.generation_at(number * MIB) for number in range(4)] == [1, 2, 9, 4]
        many = [(number * GRANULE_NBYTES, [bytes([number % 251]) * 10], 20 + number) for number in range(300)]
        assert made.remote.write_each(many, timeout_s=TIMEOUT_S) == [None] * 300
        assert all(made.segment.memory[at] == part[0][0] for at, part, _ in many)
        assert made.remote.write_each([], timeout_s=TIMEOUT_S) == []
    finally:
        made.close()
