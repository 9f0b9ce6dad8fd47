"""Pages are mapped in once, around what is written, and only speed depends on it."""

from __future__ import annotations

import mmap
import threading
import weakref

from waiting import HANG_S

from moonpool.transfer.transports.mapped import Prefault

CHUNK = 256 * 1024


class Recorder(mmap.mmap):
    """Anonymous memory that remembers what it was advised."""

    advised: list[tuple[int, int]]

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        self.advised.append((start, length))
        super().madvise(option, start, length)


def memory(nbytes: int) -> memoryview:
    mapped = Recorder(-1, nbytes)
    mapped.advised = []
    return memoryview(mapped)


def advised(view: memoryview) -> list[tuple[int, int]]:
    assert isinstance(view.obj, Recorder)
    return view.obj.advised


def helper_of(prefault: Prefault) -> threading.Thread | None:
    return prefault._helper


def test_each_chunk_is_mapped_in_once_with_its_neighbours() -> None:
    view = memory(5 * CHUNK + 4096)
    prefault = Prefault(view)
    prefault.before_write(view, CHUNK + 5, 10)
    prefault.before_write(view, CHUNK, CHUNK)
    assert advised(view) == [(CHUNK, CHUNK)]
    prefault.before_write(view, 0, 3 * CHUNK)  # what lies between is asked for again rather than in two calls
    assert advised(view)[1:] == [(0, 3 * CHUNK)]
    prefault.before_write(view, 5 * CHUNK, 4096)
    assert advised(view)[2:] == [(5 * CHUNK, 4096)]
    prefault.before_write(view, 0, 3 * CHUNK)
    assert len(advised(view)) == 3


def test_memory_that_is_no_mapping_is_left_alone() -> None:
    content = bytes(range(256)) * 32
    view = memoryview(bytearray(content))
    Prefault(view).before_write(view, 0, 8192)
    assert bytes(view) == content


def test_a_kernel_without_the_call_is_asked_once() -> None:
    class Old(Recorder):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            self.advised.append((start, length))
            raise OSError(22, "unknown advice")

    mapped = Old(-1, 4 * CHUNK)
    mapped.advised = []
    view = memoryview(mapped)
    prefault = Prefault(view)
    prefault.before_write(view, 0, 10)
    prefault.before_write(view, 2 * CHUNK, 10)
    assert mapped.advised == [(0, CHUNK)]


def test_what_follows_is_mapped_in_while_the_writer_goes_on() -> None:
    view = memory(64 * CHUNK)
    prefault = Prefault(view)
    prefault.before_write(view, 0, 3 * CHUNK)
    assert helper_of(prefault) is None, "little was written"
    for at in range(3, 60):
        prefault.before_write(view, at * CHUNK, CHUNK)
        helper = helper_of(prefault)
        if helper is not None:
            helper.join(HANG_S)
    assert len(advised(view)) == 2, "the writer mapped in the first chunks only"
    assert prefault._done.count(1) == 64


def test_the_thread_does_not_keep_the_mapping() -> None:
    view = memory(64 * CHUNK)
    prefault = Prefault(view)
    gone = weakref.ref(view.obj)
    prefault.before_write(view, 0, 8 * CHUNK)
    helper = helper_of(prefault)
    assert helper is not None
    del view
    helper.join(HANG_S)
    assert gone() is None
