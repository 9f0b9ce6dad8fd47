"""Files that get their name when all of them is written, so that nobody ever finds half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from moonpool.base.errors import InvalidInput, MoonpoolError, NoSpace


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open for writing. Takes the place of an older file at the end; an error leaves that one and nothing else.

    InvalidInput when it cannot be written there, NoSpace when the disk is full. What is there and is no file (a pipe, a
    device) is written to as it is.
    """
    path = path.resolve()  # through links: what they lead to is replaced, not they
    unnamed = path.parent / f".{path.name[:200]}.{secrets.token_hex(4)}"
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        with unnamed.open("xb") as file:
            try:
                yield file
                file.flush()
                unnamed.replace(path)
            except BaseException:
                unnamed.unlink()
                raise
    except OSError as error:
        raise _mapped(path, error) from error


def _mapped(path: Path, error: OSError) -> MoonpoolError:
    kind = NoSpace if error.errno in (errno.ENOSPC, errno.EDQUOT) else InvalidInput
    return kind(f"cannot write {path}: {error.strerror or os.strerror(error.errno or 0)}")
