"""Upstream's types of `mooncake.engine`: opcodes, notifications and the numbers that its methods return."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from moonpool.base.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidInput,
    MoonpoolError,
    NoSpace,
    NotFound,
    Unauthorized,
    Unavailable,
)


class TransferOpcode(IntEnum):
    Read = 0
    Write = 1


@dataclass
class TransferNotify:
    """A message for the owner of the memory, sent after the bytes have arrived."""

    name: str = ""
    msg: str = ""


class InnerTransferEngine:
    """What get_engine() returns: upstream's C++ engine, which its store can share. Ours shares nothing: the store of
    Moonpool takes it and uses an engine of its own.
    """


class EngineCode(IntEnum):
    """Those of upstream's codes that can happen here."""

    OK = 0
    INVALID_ARGUMENT = -1  # and every failed transfer
    ADDRESS_NOT_REGISTERED = -3
    ADDRESS_OVERLAPPED = -7
    DNS = -101
    SOCKET = -102
    REJECT_HANDSHAKE = -104
    METADATA = -200
    MEMORY = -302


# The first class that fits decides, so the special ones stand before the general ones.
_CODES: tuple[tuple[type[MoonpoolError], EngineCode], ...] = (
    (Unauthorized, EngineCode.REJECT_HANDSHAKE),
    (InvalidInput, EngineCode.INVALID_ARGUMENT),
    (NotFound, EngineCode.ADDRESS_NOT_REGISTERED),
    (AlreadyExists, EngineCode.ADDRESS_OVERLAPPED),
    (NoSpace, EngineCode.MEMORY),
    (Unavailable, EngineCode.SOCKET),
)
CHECK_DONE, CHECK_PENDING, CHECK_FAILED, CHECK_TIMED_OUT = 1, 0, -1, -2


def engine_code_of(error: MoonpoolError) -> EngineCode:
    """Return the code for an error of a call about memory or about a peer."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), EngineCode.INVALID_ARGUMENT)


def check_code_of(error: MoonpoolError | None) -> int:
    """Return what transfer_check_status() says of a transfer that has ended."""
    if error is None:
        return CHECK_DONE
    return CHECK_TIMED_OUT if isinstance(error, DeadlineExceeded) else CHECK_FAILED
