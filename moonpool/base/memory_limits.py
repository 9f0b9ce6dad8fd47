"""What limits the memory of a process, in words: the address space that `ulimit -v` allows, and errors that mean that
memory, address space or threads have run out. Libraries raise these as MemoryError, OSError, ImportError and
RuntimeError alike; memory_shortage() recognizes them, so that the user reads one line and not a traceback.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator

from moonpool.base.errors import NoSpace
from moonpool.base.units import format_nbytes

LEAST_ADDRESS_NBYTES = 256_000_000
# Texts by which C libraries, the dynamic loader, torch and CUDA say that memory has run out.
_TEXTS = ("cannot allocate memory", "can't allocate memory", "out of memory", "failed to map segment", "unable to map")
_NO_THREAD = "can't start new thread"


def address_space_nbytes() -> int | None:
    """Return how much address space this process and its children may take; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def require_address_space_to_start() -> None:
    """NoSpace when `ulimit -v` allows less than numpy needs to be loaded: its libraries end the process otherwise."""
    limit = address_space_nbytes()
    if limit is not None and limit < LEAST_ADDRESS_NBYTES:
        least = format_nbytes(LEAST_ADDRESS_NBYTES)
        raise NoSpace(
            f"`ulimit -v` allows {format_nbytes(limit)} of address space, every command needs {least}; raise it"
        )


def memory_shortage(error: BaseException) -> str | None:
    """Return what ran out and what to do about it, in one line; None if the error has another cause."""
    found = [each for each in _chain(error) if _is_shortage(each)]
    if not found:
        return None
    text = " ".join(str(found[-1]).split())[:200] or type(found[-1]).__name__  # the first that was raised
    limit = address_space_nbytes()
    if limit is not None:
        return f"not enough memory ({text}): `ulimit -v` allows this process {format_nbytes(limit)}; raise it"
    if _NO_THREAD in text:
        return f"no more threads ({text}): raise `ulimit -u`, or the container's limit of processes"
    return f"not enough memory ({text}): close other programs, or ask for less"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those it was raised from or during."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()
    if isinstance(error, RuntimeError) and _NO_THREAD in text:
        return True
    return isinstance(error, (ImportError, RuntimeError)) and any(each in text for each in _TEXTS)
