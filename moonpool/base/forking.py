"""Processes that begin as a fork of one that has imported what they need, and are children of another one.

A template process imports modules once; a start then takes milliseconds instead of the seconds that the imports take,
and all such processes share the memory of what was imported. The one that asks for a process adopts it: it waits for
it and learns its exit code as if it had started it itself. The template must have no thread when it forks.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_PR_SET_CHILD_SUBREAPER = 36
# As an argument of a template's command line it keeps the space into which show_command_line() writes.
SPACE_FOR_COMMAND_LINE = " " * 4096


_num_adopting = 0  # how many threads are inside adopting(): the setting is the whole process's
_adopting_lock = threading.Lock()


@contextmanager
def adopting() -> Iterator[None]:
    """Meanwhile a process below this one whose parent ends becomes a child of this one. Several threads may do this at
    once."""
    _count_adopting(1)
    try:
        yield
    finally:
        _count_adopting(-1)


def _count_adopting(change: int) -> None:
    global _num_adopting
    libc = ctypes.CDLL(None, use_errno=True)
    with _adopting_lock:
        wanted = _num_adopting + change
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(wanted > 0), 0, 0, 0):
            raise OSError(ctypes.get_errno(), "cannot adopt processes")
        _num_adopting = wanted


def fork_to_adopt() -> int | None:
    """Fork a process for the next ancestor that is adopting(). Return its number; in the new process return None. Raise
    OSError if there can be none."""
    gc.freeze()  # a collection would write to all objects, and their memory would no longer be shared
    told, tell = os.pipe()
    between = os.fork()  # ends at once, so that its child is adopted
    if between == 0:
        try:
            pid = os.fork()
        except OSError as error:
            os.write(tell, b"-%d" % (error.errno or 0))
            os._exit(1)
        if pid == 0:
            os.close(told)
            os.close(tell)
            return None
        os.write(tell, b"%d" % pid)
        os._exit(0)
    os.close(tell)
    with open(told, "rb") as said:
        number = int(said.read() or b"-0")
    os.waitpid(between, 0)
    if number <= 0:
        raise OSError(-number, os.strerror(-number))
    return number


def show_command_line(words: Sequence[str]) -> None:
    """Let `ps` and /proc show these words for this process, as far as they fit in the place of its arguments."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end; both 0 where they are hidden
    if start < end:
        text = b"\0".join(map(os.fsencode, words))[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))
