from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import InvalidInput, NoSpace, ProtocolError, StaleGeneration, Unavailable
from moonpool.transfer.memory.fence import Fence
from moonpool.transfer.memory.location import available_memory_nbytes, host_id
from moonpool.transfer.memory.segment import Segment, fence_offset, file_nbytes


def fd_count() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_allocated_memory_is_zeroed_writable_and_fully_there() -> None:
    with Segment.allocate("a", 100_000, granule_nbytes=4096, incarnation=3) as segment:
        assert (segment.name, segment.nbytes, segment.incarnation) == ("a", 100_000, 3)
        assert (segment.memory.format, segment.memory.readonly) == ("B", False)
        assert bytes(segment.memory) == bytes(100_000)
        assert segment.fd is not None
        assert os.fstat(segment.fd).st_size == file_nbytes(100_000, 4096)
        assert os.fstat(segment.fd).st_blocks * 512 >= 100_000
        with pytest.raises(PermissionError):  # sealed: nobody who maps it can be hit by a shrinking file
            os.ftruncate(segment.fd, 10)


def test_two_mappings_share_data_and_fence() -> None:
    with Segment.allocate("a", 10_000, granule_nbytes=1000, incarnation=1) as owner:
        assert owner.fd is not None
        fd = os.dup(owner.fd)
        with Segment.from_fd("a", fd, 10_000, granule_nbytes=1000, incarnation=1) as peer:
            owner.memory[5:8] = b"abc"
            assert bytes(peer.memory[5:8]) == b"abc"
            assert owner.fence is not None
            assert peer.fence is not None
            peer.fence.admit(999, 2, 7)
            assert [owner.fence.generation_at(at) for at in (0, 1000, 2000)] == [7, 7, 0]
            with pytest.raises(StaleGeneration):
                owner.fence.admit(1500, 1, 6)


def test_memory_smaller_than_promised_is_not_mapped() -> None:
    with Segment.allocate("a", 5000, incarnation=1) as segment:
        assert segment.fd is not None
        with pytest.raises(ProtocolError):
            Segment.from_fd("a", segment.fd, 5001, incarnation=1)


def test_close_leaves_borrowed_views_readable_and_leaks_nothing() -> None:
    before = fd_count()
    segment = Segment.allocate("a", 4096, granule_nbytes=512, incarnation=1)
    view = segment.memory[10:20]
    array = np.frombuffer(segment.memory, dtype=np.uint8)
    segment.memory[10:13] = b"xyz"
    segment.close()
    segment.close()
    assert bytes(view[:3]) == b"xyz"
    assert array[10] == ord("x")
    with pytest.raises(Unavailable):
        _ = segment.memory
    del view, array
    assert fd_count() <= before


def test_over_borrows_a_buffer() -> None:
    buffer = bytearray(100)
    segment = Segment.over("b", buffer, granule_nbytes=30, incarnation=1)
    segment.memory[0] = 9
    assert buffer[0] == 9
    assert segment.fd is None
    assert segment.fence is not None
    segment.fence.stamp(90, 10, 4)
    assert segment.fence.generation_at(99) == 4
    segment.close()
    buffer.extend(b"free again")


def test_more_than_the_machine_has_is_refused_with_both_sizes() -> None:
    before = fd_count()
    with pytest.raises(NoSpace, match=r"wants 1125\.9 TB of memory and only .* are available"):
        Segment.allocate("huge", 1 << 50, incarnation=1)
    assert fd_count() <= before


@pytest.mark.parametrize(
    ("name", "nbytes", "granule"), [("", 1, None), ("n" * 256, 1, None), ("n", 0, None), ("n", 1, 0), ("a\0b", 1, None)]
)
def test_bad_sizes_and_names(name: str, nbytes: int, granule: int | None) -> None:
    before = fd_count()
    with pytest.raises(InvalidInput):
        Segment.allocate(name, nbytes, granule_nbytes=granule, incarnation=1)
    assert fd_count() <= before


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(0, 199), st.integers(0, 200), st.integers(0, 5)), max_size=30),
)
def test_fence_equals_a_model_that_knows_every_byte(granule: int, writes: list[tuple[int, int, int]]) -> None:
    fence = Fence(np.zeros(-(-200 // granule), dtype=np.uint64), granule)
    model = [0] * len(range(0, 200, granule))
    for offset, nbytes, generation in writes:
        nbytes = min(nbytes, 200 - offset)
        touched = sorted({at // granule for at in range(offset, offset + nbytes)})
        if any(model[index] > generation for index in touched):
            with pytest.raises(StaleGeneration):
                fence.admit(offset, nbytes, generation)
        else:
            fence.admit(offset, nbytes, generation)
            fence.confirm(offset, nbytes, generation)
            for index in touched:
                model[index] = generation
        assert [fence.generation_at(index * granule) for index in range(len(model))] == model


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=8), st.data())
def test_a_run_is_admitted_as_its_spans_are(before: list[tuple[int, int]], data: st.DataObject) -> None:
    """All or none: none only where one of them would be refused, or an older one stands before a newer one."""
    stamps = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=6))
    first = data.draw(st.integers(0, 8))
    run, each = Fence(np.zeros(64, np.uint64), 16), Fence(np.zeros(64, np.uint64), 16)
    for granule, generation in before:
        run.stamp(granule * 16, 40, generation)
        each.stamp(granule * 16, 40, generation)
    table = [run.generation_at(at * 16) for at in range(64)]
    cells = np.repeat(np.array([each for each, _ in stamps], np.uint64), [count for _, count in stamps])
    if not run.admit_run(first * 16, cells):
        assert [run.generation_at(at * 16) for at in range(64)] == table
        end = first + sum(count for _, count in stamps)
        assert max(table[first:end]) > min(generation for generation, _ in stamps)
        return
    at = first
    for generation, count in stamps:
        each.admit(at * 16, count * 16, generation)
        at += count
    assert [run.generation_at(at * 16) for at in range(64)] == [each.generation_at(at * 16) for at in range(64)]
    assert run.has_run(first * 16, cells)
    run.stamp(first * 16, 1, 10)
    assert not run.has_run(first * 16, cells)


def test_confirm_sees_a_newer_and_an_older_stamp() -> None:
    fence = Fence(np.zeros(4, dtype=np.uint64), 10)
    fence.admit(0, 40, 5)
    fence.stamp(20, 1, 6)
    with pytest.raises(StaleGeneration):
        fence.confirm(0, 40, 5)
    fence.confirm(0, 20, 5)
    fence.stamp(20, 1, 4)
    with pytest.raises(StaleGeneration):
        fence.confirm(0, 40, 5)


def test_generations_are_unsigned_64_bit() -> None:
    fence = Fence(np.zeros(1, dtype=np.uint64), 10)
    fence.admit(0, 1, 2**64 - 1)
    assert fence.generation_at(0) == 2**64 - 1
    for generation in (-1, 2**64):
        with pytest.raises(InvalidInput):
            fence.admit(0, 1, generation)


def test_the_fence_table_starts_on_a_page_after_the_data() -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    assert [fence_offset(nbytes) for nbytes in (1, page, page + 1)] == [page, page, 2 * page]


def test_host_id_is_the_running_kernels() -> None:
    assert host_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_a_cgroup_limit_below_the_machines_memory_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:    50 kB\n")
    assert available_memory_nbytes(meminfo, tmp_path / "none") == 50 * 1024
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 2000\ninactive_file 500\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_nbytes(meminfo, tmp_path) == 50 * 1024
    (tmp_path / "memory.max").write_text("10000\n")
    assert available_memory_nbytes(meminfo, tmp_path) == 7500
