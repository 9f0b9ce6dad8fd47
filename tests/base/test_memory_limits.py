"""Errors that mean that memory has run out become one line; others do not."""

from __future__ import annotations

import errno
import resource

import pytest

from moonpool.base.limits import address_space_nbytes, memory_shortage


def raised_during(inner: BaseException, outer: BaseException) -> BaseException:
    outer.__context__ = inner
    return outer


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        raised_during(MemoryError(), RuntimeError("shutdown failed")),
    ],
)
def test_memory_that_ran_out(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    says = memory_shortage(error)
    assert says is not None
    assert says.startswith("not enough memory (")
    assert "\n" not in says
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2_000_000_000, 2_000_000_000))
    assert "`ulimit -v` allows this process 2 GB; raise it" in str(memory_shortage(error))


def test_threads_that_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "ulimit -u" in str(memory_shortage(RuntimeError("can't start new thread")))


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("a bug"), OSError(errno.EIO, "I/O error")])
def test_other_errors_are_left_alone(error: BaseException) -> None:
    assert memory_shortage(error) is None


def test_no_limit_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert address_space_nbytes() is None
