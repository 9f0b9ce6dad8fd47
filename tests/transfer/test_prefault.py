"""Pages are mapped in once, around what is written, and only speed depends on it."""

from __future__ import annotations

import mmap
import weakref

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
    view = memoryview(bytearray(8192))
    Prefault(view).before_write(view, 0, 8192)


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
    assert prefault._helper is None, "little was written"
    for at in range(3, 60):
        prefault.before_write(view, at * CHUNK, CHUNK)
        if prefault._helper is not None:
            prefault._helper.join(60.0)
    assert len(advised(view)) == 2, "the writer mapped in the first chunks only"
    assert prefault._done.count(1) == 64


def test_the_thread_does_not_keep_the_mapping() -> None:
    view = memory(64 * CHUNK)
    prefault = Prefault(view)
    gone = weakref.ref(view.obj)
    prefault.before_write(view, 0, 8 * CHUNK)
    helper = prefault._helper
    assert helper is not None
    del view
    helper.join(60.0)
    assert gone() is None
