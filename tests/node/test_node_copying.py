"""COPY: an object gets into a node's memory whole, checked and with its new generation, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from node_world import MIB, allocate, body_of, header_at, object_of, open_ssd, order, place, store

from moonpool.base.errors import Corrupt, DeadlineExceeded, InvalidInput, MoonpoolError, NotFound, StaleGeneration
from moonpool.node.copying import Copier, OwnMemory, Readable
from moonpool.node.offloading import LogThread
from moonpool.store.messages import Order, OrderKind, Placement
from moonpool.transfer.memory.buffers import Buffer
from moonpool.transfer.memory.segment import Segment

SIZES = (5000, 70_000)
TARGET = 4 * MIB
GENERATION, NEW_GENERATION = 7, 20


@pytest.fixture
def memory() -> Iterator[Segment]:
    with allocate() as made:
        yield made


@pytest.fixture
def other() -> Iterator[Segment]:
    """Another node's memory."""
    with allocate("n1.dram", incarnation=9) as made:
        yield made


class Damaging(OwnMemory):
    """Changes the source once it has been read."""

    def __init__(self, segment: Segment, new: bytes) -> None:
        super().__init__(segment)
        self._source, self._new = segment, new

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        super().read_into(offset, buffers, timeout_s=timeout_s)
        self._source.memory[: len(self._new)] = self._new


def copy_order(source: Segment, target: Segment, nbytes: int, *, target_offset: int = TARGET) -> Order:
    return order(
        OrderKind.COPY,
        b"key",
        nbytes,
        place(source, 0, GENERATION),
        place(target, target_offset, NEW_GENERATION),
    )


def test_copies_with_the_targets_generation(memory: Segment, other: Segment) -> None:
    nbytes = store(other, 0, b"key", GENERATION, SIZES)
    Copier(memory, lambda _: OwnMemory(other)).copy(copy_order(other, memory, nbytes))
    header = header_at(memory, TARGET)
    header.check(b"key", NEW_GENERATION, None)
    assert header.pieces == header_at(other, 0).pieces
    assert memory.memory[TARGET + header.nbytes : TARGET + nbytes] == body_of(b"key", sum(SIZES))
    assert memory.fence is not None
    memory.fence.confirm(TARGET, nbytes, NEW_GENERATION)
    assert header_at(other, 0).generation == GENERATION


def test_a_header_of_several_blocks(memory: Segment, other: Segment) -> None:
    sizes = (1000,) * 900
    nbytes = store(other, 0, b"key", GENERATION, sizes)
    Copier(memory, lambda _: OwnMemory(other)).copy(copy_order(other, memory, nbytes))
    assert bytes(memory.memory[TARGET : TARGET + nbytes]) == object_of(b"key", NEW_GENERATION, sizes)


def test_from_the_disk(memory: Segment, tmp_path: Path) -> None:
    nbytes = store(memory, 0, b"key", GENERATION, SIZES)
    ssd = open_ssd(tmp_path)
    try:
        offload = order(OrderKind.OFFLOAD, b"key", nbytes, place(memory, 0, GENERATION))
        (result,) = LogThread(memory, lambda: ssd).execute([offload])
        assert result.offset is not None
        memory.memory[:nbytes] = bytes(nbytes)
        source = Placement(ssd.segment.name, result.offset, ssd.segment.incarnation, GENERATION)
        back = order(OrderKind.COPY, b"key", nbytes, source, place(memory, TARGET, NEW_GENERATION))
        assert Copier(memory, lambda _: ssd.segment).execute([back])[0].refusal is None
        assert bytes(memory.memory[TARGET : TARGET + nbytes]) == object_of(b"key", NEW_GENERATION, SIZES)
    finally:
        ssd.close()


@pytest.mark.parametrize("at", [4, 26, 70, 4096, 4096 + 5000, 4096 + sum(SIZES) - 1])
def test_a_flipped_bit_anywhere_is_corrupt(memory: Segment, other: Segment, at: int) -> None:
    nbytes = store(other, 0, b"key", GENERATION, SIZES)
    other.memory[at] ^= 4
    (result,) = Copier(memory, lambda _: OwnMemory(other)).execute([copy_order(other, memory, nbytes)])
    assert result.refusal is not None
    assert result.refusal.code == Corrupt.code
    assert not holds_object(memory)


def test_a_source_that_was_reused_before(memory: Segment, other: Segment) -> None:
    nbytes = store(other, 0, b"key", GENERATION, SIZES)
    store(other, 0, b"another", GENERATION + 1, SIZES)
    with pytest.raises(StaleGeneration):
        Copier(memory, lambda _: OwnMemory(other)).copy(copy_order(other, memory, nbytes))
    assert not holds_object(memory)


def test_a_source_that_is_reused_meanwhile(memory: Segment, other: Segment) -> None:
    nbytes = store(other, 0, b"key", GENERATION, SIZES)
    source = Damaging(other, object_of(b"another", GENERATION + 1, SIZES))
    with pytest.raises(StaleGeneration):
        Copier(memory, lambda _: source).copy(copy_order(other, memory, nbytes))
    assert not holds_object(memory)


def test_a_source_that_is_being_overwritten_is_late_and_not_corrupt(memory: Segment, other: Segment) -> None:
    nbytes = store(other, 0, b"key", GENERATION, SIZES)
    other.memory[5000] ^= 1  # the new owner's first byte, its header follows
    source = Damaging(other, object_of(b"another", GENERATION + 1, SIZES))
    with pytest.raises(StaleGeneration):
        Copier(memory, lambda _: source).copy(copy_order(other, memory, nbytes))


def test_a_target_that_belongs_to_a_newer_generation_stays_untouched(memory: Segment, other: Segment) -> None:
    nbytes = store(other, 0, b"key", GENERATION, SIZES)
    store(memory, TARGET, b"newer", NEW_GENERATION + 1, SIZES)
    with pytest.raises(StaleGeneration):
        Copier(memory, lambda _: OwnMemory(other)).copy(copy_order(other, memory, nbytes))
    header_at(memory, TARGET).check(b"newer", NEW_GENERATION + 1, None)


def test_a_target_of_another_incarnation(memory: Segment, other: Segment) -> None:
    nbytes = store(other, 0, b"key", GENERATION, SIZES)
    wanted = copy_order(other, memory, nbytes)
    memory.incarnation += 1
    with pytest.raises(NotFound):
        Copier(memory, lambda _: OwnMemory(other)).copy(wanted)


def test_a_target_outside_the_memory(memory: Segment, other: Segment) -> None:
    nbytes = store(other, 0, b"key", GENERATION, SIZES)
    with pytest.raises(InvalidInput):
        Copier(memory, lambda _: OwnMemory(other)).copy(
            copy_order(other, memory, nbytes, target_offset=memory.nbytes - 4096)
        )


def test_a_source_out_of_reach_is_no_word_about_this_node(memory: Segment, other: Segment) -> None:
    """The master takes peer_lost and deadline_exceeded for a node that may still be writing."""

    def lost(placement: Placement) -> Readable:
        raise DeadlineExceeded("it did not answer")

    (result,) = Copier(memory, lost).execute([copy_order(other, memory, 80_000)])
    assert result.refusal is not None
    assert result.refusal.code == "unavailable"


def holds_object(memory: Segment) -> bool:
    """Whether a reader who was promised the target would find anything."""
    try:
        header_at(memory, TARGET).check(b"key", NEW_GENERATION, None)
    except MoonpoolError:
        return False
    return True
