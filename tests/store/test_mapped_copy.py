"""Copies from mapped memory by one thread and by two: every object whose bytes are right arrives, and no other."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.checksum import crc32c
from moonpool.base.object_header import pack_header, read_fields
from moonpool.store.client import mapped_copy
from moonpool.store.client.cuts import scatter
from moonpool.store.client.mapped_copy import PlannedCopy, copy_planned
from moonpool.store.messages import Placement
from moonpool.transfer import TransferConfig, TransferEngine

KIB = 1024


@pytest.fixture(scope="module")
def engine() -> Iterator[TransferEngine]:
    with tempfile.TemporaryDirectory() as folder, TransferEngine(TransferConfig(run_dir=folder, tcp_host=None)) as made:
        yield made


class Laid:
    """Objects of these piece sizes, one behind the other in one memory."""

    def __init__(self, all_sizes: list[list[int]], into_memory: list[bool]) -> None:
        chance = np.random.default_rng(7)
        parts: list[bytes] = []
        self.values: list[bytes] = []
        self.targets: list[memoryview | None] = []
        starts: list[int] = []
        for number, sizes in enumerate(all_sizes):
            value = chance.bytes(sum(sizes))
            ends = np.cumsum([0, *sizes])
            sums = [crc32c(value[start:end]) for start, end in itertools.pairwise(ends)]
            starts.append(sum(map(len, parts)))
            parts += [pack_header(b"key-%d" % number, 1, sizes, sums), value]
            self.values.append(value)
            self.targets.append(memoryview(bytearray(len(value))) if into_memory[number] else None)
        self.memory = memoryview(bytearray(b"".join(parts)))
        self.plans: list[PlannedCopy] = []
        for number, (start, target) in enumerate(zip(starts, self.targets, strict=True)):
            header = read_fields(self.memory, start)
            pieces = None if target is None else scatter(header.sizes, [target])
            place = Placement(segment="s", incarnation=1, offset=start, generation=1)
            self.plans.append((number, place, header, pieces))

    def damage(self, number: int, share: float) -> None:
        """Change one byte of an object that has bytes."""
        _, place, header, _ = self.plans[number]
        self.memory[place.offset + header.nbytes + int(share * (len(self.values[number]) - 1))] ^= 1


def check(laid: Laid, engine: TransferEngine, damaged: set[int]) -> None:
    copied = copy_planned(laid.memory, laid.plans, engine)
    assert [number for number, _, _ in copied] == [
        number for number in range(len(laid.values)) if number not in damaged
    ]
    for number, _, got in copied:
        target, value = laid.targets[number], laid.values[number]
        assert (got, bytes(target)) == (len(value), value) if target is not None else got == value


@given(
    all_sizes=st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=9), min_size=1, max_size=6),
    data=st.data(),
)
def test_any_objects(engine: TransferEngine, all_sizes: list[list[int]], data: st.DataObject) -> None:
    into_memory = data.draw(st.lists(st.booleans(), min_size=len(all_sizes), max_size=len(all_sizes)))
    damaged = data.draw(st.sets(st.integers(0, len(all_sizes) - 1)))
    laid = Laid(all_sizes, into_memory)
    for number in damaged:
        laid.damage(number, data.draw(st.floats(0, 1)))
    check(laid, engine, damaged)


@pytest.mark.parametrize("share", [None, 0.0, 0.5, 1.0])
def test_two_threads_share_one_object(engine: TransferEngine, share: float | None) -> None:
    laid = Laid([[1024 * KIB] * 5 + [300 * KIB], [90 * KIB] * 40], [True, True])
    runs = [run for number, plan in enumerate(laid.plans) for run in mapped_copy._runs(number, plan)]
    assert [len(header.sizes) for _, header, _, _ in runs] == [1] * 6 + [12, 12, 12, 4]
    if share is not None:
        laid.damage(0, share)
    check(laid, engine, set() if share is None else {0})
