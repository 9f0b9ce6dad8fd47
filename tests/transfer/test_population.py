"""All pages of a segment are mapped in, in steps, on a thread that ends with the segment; only speed depends on it."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import pytest
from waiting import HANG_S

from moonpool.transfer.memory import population
from moonpool.transfer.memory.population import PagePopulation, advise_huge_pages, wants_advice
from moonpool.transfer.memory.segment import Segment

MIB = 1 << 20


def mapped_nbytes(segment: Segment) -> int:
    """How much of the segment this process has mapped in, by the kernel's own account."""
    name = f"/memfd:moonpool-{segment.name}"
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if name in line)
    rss = next(line for line in lines[at:] if line.startswith("Rss:"))
    return int(rss.split()[1]) * 1024


def test_every_page_is_mapped_in_and_nothing_is_written() -> None:
    with Segment.allocate("population-test", 8 * MIB, granule_nbytes=4096, incarnation=1) as segment:
        segment.memory[5 * MIB : 5 * MIB + 3] = b"abc"
        made = segment.populate()
        assert segment.populate() is made
        assert made.wait(HANG_S)
        assert made.done_nbytes == made.nbytes == 8 * MIB
        assert mapped_nbytes(segment) >= 8 * MIB
        assert bytes(segment.memory[5 * MIB : 5 * MIB + 4]) == b"abc\0"


def test_new_memory_is_mapped_in_like_the_old() -> None:
    with Segment.allocate("population-renewed", 2 * MIB, incarnation=1) as segment:
        first = segment.populate()
        segment.renew()
        assert first.is_over
        again = segment.population
        assert again is not None
        assert again is not first
        assert again.wait(HANG_S)
        assert again.done_nbytes == 2 * MIB


def test_closing_a_segment_ends_the_thread_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()
    num_steps = 0

    def slow(memory: memoryview) -> bool:
        nonlocal num_steps
        num_steps += 1
        began.set()
        return go_on.wait(HANG_S)

    monkeypatch.setattr(population, "populate", slow)
    monkeypatch.setattr(population, "_STEP_NBYTES", MIB)
    segment = Segment.allocate("population-closed", 8 * MIB, incarnation=1)
    made = segment.populate()
    assert began.wait(HANG_S)
    assert not made.wait(0.0)
    closing = threading.Thread(target=segment.close)
    closing.start()
    while not made._closed:
        pass
    go_on.set()
    closing.join()
    assert made.is_over
    assert num_steps == 1


def test_a_kernel_without_the_call_is_asked_once() -> None:
    memory = memoryview(mmap.mmap(-1, MIB, prot=mmap.PROT_READ))  # refused: it cannot be written
    writable = memoryview(mmap.mmap(-1, MIB))
    assert population.populate(writable)
    made = PagePopulation(memory, "read-only")
    assert made.wait(HANG_S)
    assert made.done_nbytes == 0


def test_huge_pages_are_asked_for_where_the_kernel_takes_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert wants_advice("always within_size [advise] never deny force\n")
    assert not wants_advice("always within_size advise [never] deny force\n")
    setting = tmp_path / "shmem_enabled"
    monkeypatch.setattr(population, "_HUGE_SHARED_MEMORY", setting)
    fd = os.memfd_create("population-advised")
    try:
        os.ftruncate(fd, 4 * MIB)
        advise_huge_pages(fd, 4 * MIB)  # no such setting: nothing is taken
        setting.write_text("always within_size advise [never] deny force\n")
        advise_huge_pages(fd, 4 * MIB)
        assert os.fstat(fd).st_blocks == 0
        setting.write_text("always within_size [advise] never deny force\n")
        advise_huge_pages(fd, 4 * MIB)
        assert os.fstat(fd).st_blocks * 512 == 4 * MIB
    finally:
        os.close(fd)
