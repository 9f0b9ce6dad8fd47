"""What the allocator's docstring promises, held against a model (a byte per granule) and under churn."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.master.state import allocator as allocator_module
from moonpool.master.state.allocator import OffsetAllocator
from moonpool.store.messages import GRANULE_NBYTES, num_granules

G = GRANULE_NBYTES
Span = tuple[int, int]
# Free ranges of a segment this large have keys beyond eight bytes.
HUGE_GRANULES = 1 << 33


class Model:
    """A byte per granule, 1 when taken; the segment may have a taken part before the granules looked at."""

    def __init__(self, capacity: int, base: int) -> None:
        self.taken = bytearray(capacity)
        self.base = base
        self.held: list[Span] = []
        before = np.array([base * G] if base else [], np.int64)
        self.allocator = OffsetAllocator.rebuilt((base + capacity) * G, np.zeros(len(before), np.int64), before)

    def holes(self) -> list[Span]:
        """(start, length) of every free range, in granules."""
        runs = self.taken.replace(b"\1", b" ").split(b" ")
        starts = np.cumsum([0, *(len(run) + 1 for run in runs)]).tolist()
        return [(start, len(run)) for start, run in zip(starts, runs, strict=False) if run]

    def best_fit(self, nbytes: int) -> int | None:
        fits = [(length, start) for start, length in self.holes() if length >= num_granules(nbytes)]
        return (min(fits)[1] + self.base) * G if fits else None

    def take(self, offset: int, nbytes: int) -> None:
        start, granules = offset // G - self.base, num_granules(nbytes)
        assert offset % G == 0
        assert self.taken[start : start + granules] == bytes(granules), "only free space is handed out, all inside"
        self.taken[start : start + granules] = b"\1" * granules
        self.held.append((offset, nbytes))

    def drop(self, choices: list[int]) -> list[Span]:
        """Forgets some of the objects."""
        gone = [self.held.pop(choice % len(self.held)) for choice in choices[: len(self.held)]]
        for offset, nbytes in gone:
            start, granules = offset // G - self.base, num_granules(nbytes)
            self.taken[start : start + granules] = bytes(granules)
        return gone

    def check(self) -> None:
        self.allocator.check_integrity()
        ranges = [((start + self.base) * G, length * G) for start, length in self.holes()]
        assert self.allocator.free_ranges() == ranges, "free is what the model has free, merged"
        assert self.allocator.free_nbytes == sum(nbytes for _, nbytes in ranges)
        assert self.allocator.largest_free_nbytes() == max((nbytes for _, nbytes in ranges), default=0)

    def check_failure(self, nbytes: int) -> None:
        """The stated bound, when an allocation failed."""
        granules = num_granules(nbytes)
        num_objects = len(self.held) + (self.base > 0)
        assert all(length < granules for _, length in self.holes())
        assert self.allocator.free_nbytes // G <= (num_objects + 1) * (granules - 1)


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Iterator[None]:
    """So that a few ranges make chunks that split, empty and merge across their edges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocator_module, "CHUNK_VALUES", 8)
        yield


sizes = st.one_of(st.integers(1, 3 * G), st.integers(1, 40 * G))
steps = st.one_of(
    sizes,
    st.lists(sizes, max_size=12),
    st.tuples(sizes, st.integers(0, 30)).map(lambda pair: [pair[0]] * pair[1]),
    st.tuples(st.booleans(), st.lists(st.integers(0, 1 << 20), min_size=1, max_size=12)),
)


@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(1, 300), base=st.sampled_from([0, 7, HUGE_GRANULES]), history=st.lists(steps, max_size=40))
def test_any_history(capacity: int, base: int, history: list[int | list[int] | tuple[bool, list[int]]]) -> None:
    model = Model(capacity, base)
    for step in history:
        if isinstance(step, int):
            allocate(model, step)
        elif isinstance(step, list):
            allocate_batch(model, step)
        else:
            free(model, *step)
        model.check()
    check_rebuilt(model)
    free(model, False, [0] * len(model.held))
    assert model.allocator.free_ranges() == [(base * G, capacity * G)]


def allocate(model: Model, nbytes: int) -> None:
    expected = model.best_fit(nbytes)
    assert model.allocator.allocate(nbytes) == expected, "the best fit, of equal ones the lowest"
    if expected is None:
        model.check_failure(nbytes)
    else:
        model.take(expected, nbytes)


def allocate_batch(model: Model, batch: list[int]) -> None:
    whole = model.best_fit(sum(map(num_granules, batch)) * G) if batch else None
    offsets = model.allocator.allocate_many(batch)
    assert len(offsets) == len(batch)
    for offset, nbytes in zip(offsets, batch, strict=True):
        if offset is not None:
            model.take(offset, nbytes)
        assert whole is None or offset == whole, "a batch that one range holds lies there, in order"
        whole = None if whole is None else whole + num_granules(nbytes) * G
    if None in offsets:
        model.check_failure(max(nbytes for offset, nbytes in zip(offsets, batch, strict=True) if offset is None))


def free(model: Model, in_order: bool, choices: list[int]) -> None:
    spans = model.drop(choices)
    for offset, nbytes in sorted(spans) if in_order else spans:
        model.allocator.free(offset, nbytes)


def check_rebuilt(model: Model) -> None:
    """It holds the same and goes on the same, whatever the history was."""
    held = [*model.held, *([(0, model.base * G)] if model.base else [])]
    offsets, nbytes = ([span[at] for span in held] for at in (0, 1))
    capacity_nbytes = model.allocator.capacity_nbytes
    twin = OffsetAllocator.rebuilt(capacity_nbytes, np.array(offsets, np.int64), np.array(nbytes, np.int64))
    twin.check_integrity()
    assert twin.free_ranges() == model.allocator.free_ranges()
    batch = [2 * G, 5 * G, 1, G, 3 * G]
    expected = model.allocator.allocate_many(batch)
    assert twin.allocate_many(batch) == expected
    for offset, size in zip(expected, batch, strict=True):
        if offset is not None:
            model.take(offset, size)


class Churn:
    """A cache: objects come, and what was chosen at random goes when the segment is full or nothing fits."""

    def __init__(self, num_granules: int, size_of: Callable[[random.Random], int], fill: float) -> None:
        self.allocator = OffsetAllocator(num_granules * G)
        self._size_of = size_of
        self._limit_nbytes = fill * num_granules * G
        self._random = random.Random(4)
        self._held: list[Span] = []
        self.num_failed = 0

    def evict(self) -> None:
        at = self._random.randrange(len(self._held))
        self._held[at], self._held[-1] = self._held[-1], self._held[at]
        self.allocator.free(*self._held.pop())

    def put(self, num_objects: int) -> None:
        """A batch of objects, one by one where that failed, with evictions until each has a place."""
        batch = [self._size_of(self._random) * G for _ in range(num_objects)]
        while self.allocator.used_nbytes + sum(batch) > self._limit_nbytes:
            self.evict()
        for offset, nbytes in zip(self.allocator.allocate_many(batch), batch, strict=True):
            while offset is None:
                self.num_failed += 1
                self.check_bound(nbytes, len(self._held) + num_objects)
                self.evict()
                offset = self.allocator.allocate(nbytes)
            self._held.append((offset, nbytes))

    def check_bound(self, nbytes: int, num_objects: int) -> None:
        if self.allocator.largest_free_nbytes() < nbytes:
            assert self.allocator.free_nbytes <= (num_objects + 1) * (nbytes - G)
            assert len(self.allocator.free_ranges()) <= num_objects + 1

    def run(self, num_batches: int, num_objects: int) -> float:
        """How full it was on average in the second half."""
        fills = []
        for step in range(num_batches):
            self.put(num_objects)
            if step >= num_batches // 2:
                fills.append(self.allocator.used_nbytes / self.allocator.capacity_nbytes)
        self.allocator.check_integrity()
        return sum(fills) / len(fills)


def four_kib_to_four_mib(chance: random.Random) -> int:
    """As many objects in each doubling."""
    return int(2 ** chance.uniform(0, 10))


@pytest.mark.parametrize(
    ("capacity", "num_objects", "least", "each"),
    [
        (1 << 18, 1, 0.86, 32),
        (1 << 18, 20, 0.8, 32),
        *((1 << 20, num_objects, 0.89, 64) for num_objects in (1, 50)),
        *(pytest.param(1 << 20, num_objects, 0.89, 32, marks=pytest.mark.soak) for num_objects in (1, 50)),
    ],
)
def test_mixed_sizes_leave_few_holes(capacity: int, num_objects: int, least: float, each: int) -> None:
    """Asked to be nine tenths full. A segment of 1 GiB is small for objects of 4 MiB, one of 4 GiB no more. As many
    objects come as there are `each` granules: of 147 granules on average, they fill the segment several times."""
    count = capacity // each
    churn = Churn(capacity, four_kib_to_four_mib, 0.9)
    filled = churn.run(count // num_objects, num_objects)
    tries = churn.num_failed / count
    print(f"{capacity} granules, {num_objects} a batch: {filled:.3f} full, {tries:.3f} failed tries an object")
    assert filled > least


@pytest.mark.parametrize("granules", [1, 80, 1024])
def test_one_size_wastes_nothing(granules: int) -> None:
    capacity = 200 * granules + granules - 1
    churn = Churn(capacity, lambda _: granules, 1.0)
    churn.run(200, 10)
    assert churn.num_failed == 0, "what fits by count fits by place"
    assert all(offset % (granules * G) == 0 for offset, _ in churn.allocator.free_ranges())


@pytest.mark.soak
def test_no_call_waits_with_two_million_free_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator_module, "CHUNK_VALUES", 512)
    count = 2_000_000
    allocator = OffsetAllocator.rebuilt(4 * count * G, np.arange(count) * 4 * G, np.full(count, 3 * G))
    assert len(allocator.free_ranges()) == count
    worst_s = 0.0
    gc.disable()
    try:
        for step in range(100_000):
            began_s = time.thread_time()
            allocator.free((step * 79_193 % count * 4 + 1) * G, G)
            worst_s = max(worst_s, time.thread_time() - began_s)
            began_s = time.thread_time()
            if step % 2:
                allocator.allocate(G)
            worst_s = max(worst_s, time.thread_time() - began_s)
    finally:
        gc.enable()
    print(f"worst call {worst_s * 1e6:.0f} us with {len(allocator.free_ranges())} free ranges")
    assert worst_s < 0.005
