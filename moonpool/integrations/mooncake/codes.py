"""The numbers Mooncake's API answers with, and which of them stands for which of our errors."""

from __future__ import annotations

from enum import IntEnum

from moonpool.base.errors import (
    AlreadyExists,
    BreakerOpen,
    Corrupt,
    DeadlineExceeded,
    FewerReplicas,
    InvalidInput,
    MoonpoolError,
    NoSpace,
    NotFound,
    Overloaded,
    ProtocolError,
    Refused,
    StaleGeneration,
    Unauthorized,
    Unavailable,
)


class ErrorCode(IntEnum):
    """Those of upstream's codes that can happen here."""

    OK = 0
    INTERNAL_ERROR = -1
    NO_AVAILABLE_HANDLE = -200
    INVALID_PARAMS = -600
    ILLEGAL_CLIENT = -601
    INVALID_READ = -701
    REPLICA_IS_NOT_READY = -703  # of a put: stored, on fewer replicas than asked for
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    OBJECT_HAS_LEASE = -706
    LEASE_EXPIRED = -707
    TRANSFER_FAIL = -800
    CHECKSUM_MISMATCH = -801
    RPC_FAIL = -900
    RPC_TIMEOUT = -901
    NOT_SUPPORTED = -1012
    FILE_NOT_FOUND = -1100
    TASK_NOT_FOUND = -1400


# The first class that fits decides, so the special ones stand before the general ones.
_CODES: tuple[tuple[type[MoonpoolError], ErrorCode], ...] = (
    (Unauthorized, ErrorCode.ILLEGAL_CLIENT),
    (InvalidInput, ErrorCode.INVALID_PARAMS),
    (NotFound, ErrorCode.OBJECT_NOT_FOUND),
    (AlreadyExists, ErrorCode.OBJECT_ALREADY_EXISTS),
    (NoSpace, ErrorCode.NO_AVAILABLE_HANDLE),
    (FewerReplicas, ErrorCode.REPLICA_IS_NOT_READY),
    (Overloaded, ErrorCode.NO_AVAILABLE_HANDLE),  # callers take it for "try again later"
    (Corrupt, ErrorCode.CHECKSUM_MISMATCH),
    (StaleGeneration, ErrorCode.LEASE_EXPIRED),
    (Refused, ErrorCode.INVALID_READ),
    (DeadlineExceeded, ErrorCode.RPC_TIMEOUT),
    (Unavailable, ErrorCode.RPC_FAIL),
    (ProtocolError, ErrorCode.RPC_FAIL),
)


def code_of(error: MoonpoolError) -> ErrorCode:
    """Return the code for an error of a call to the master."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ErrorCode.INTERNAL_ERROR)


def transfer_code_of(error: MoonpoolError) -> ErrorCode:
    """Return the code for an error of a transfer: an unreachable node is a failed transfer, not a failed master."""
    is_transfer = isinstance(error, Unavailable) and not isinstance(error, BreakerOpen)
    return ErrorCode.TRANSFER_FAIL if is_transfer else code_of(error)
