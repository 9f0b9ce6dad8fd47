"""The one error tree. A foreign exception is mapped into it once, where it enters.

    MoonpoolError
      InvalidInput            the caller's fault; changing the call helps
        ConfigError           a setting is wrong or unknown
        UnknownModel          no such model
        PromptTooLong         the prompt does not fit the context
        Unauthorized          no or wrong API key, secret or certificate
      NotFound                no such object, request or peer
      AlreadyExists           the key is taken
      NoSpace                 the pool, the pages or the machine's memory are full
      FewerReplicas           it is stored, on fewer replicas than asked for
      Overloaded              refused now, with a time after which to come back
      Refused                 bytes are there and must not be used
        IdentityMismatch      they belong to another model, dtype or layout
        StaleGeneration       the space was given to another object
        Corrupt               the checksum does not match
      Unavailable             the other side cannot answer
        PeerLost              the connection or the process is gone
          HandleClosed        this side closed the handle itself
          BreakerOpen         the server was found away; calls are refused until it answers probes
          Unreachable         its machine does not answer: that one or this one is off or cut off
          DamagedFrame        the connection carried bytes whose checksum does not match, and was closed
        DeadlineExceeded      it did not answer in time
          PeerSilent          it sent nothing for so long that it counts as away
          TooLate             it did not begin the call, because the caller's time was over
        Cancelled             the caller gave up
        Stalled               a worker's engine does not go on, for now or for good; the call may succeed elsewhere
        NotSettled            it is being done: ask again until readers cannot find the old value any more
      ProtocolError           the other side breaks the protocol or speaks another version
      ModelError              the model file is missing, truncated or not supported
      FatalRequest            workers crash on this request; it is not retried
      Internal                a bug; the message says where

Every class has a `code`; code and message cross the wire and come back as the same class.
"""

from __future__ import annotations

from typing import ClassVar


class MoonpoolError(Exception):
    """Base of all errors raised on purpose. `str(error)` is a sentence fit for a user."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500


class InvalidInput(MoonpoolError):
    code = "invalid_input"
    http_status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConfigError(InvalidInput):
    code = "config"


class UnknownModel(InvalidInput):
    code = "model_not_found"
    http_status = 404


class PromptTooLong(InvalidInput):
    code = "context_length_exceeded"


class Unauthorized(InvalidInput):
    code = "invalid_api_key"
    http_status = 401


class NotFound(MoonpoolError):
    code = "not_found"
    http_status = 404


class AlreadyExists(MoonpoolError):
    code = "already_exists"
    http_status = 409


class NoSpace(MoonpoolError):
    code = "no_space"
    http_status = 503


class FewerReplicas(MoonpoolError):
    code = "fewer_replicas"


class Overloaded(MoonpoolError):
    code = "overloaded"
    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Refused(MoonpoolError):
    code = "refused"


class IdentityMismatch(Refused):
    code = "identity_mismatch"


class StaleGeneration(Refused):
    code = "stale_generation"


class Corrupt(Refused):
    code = "corrupt"


class Unavailable(MoonpoolError):
    code = "unavailable"
    http_status = 503


class PeerLost(Unavailable):
    code = "peer_lost"


class HandleClosed(PeerLost):
    code = "handle_closed"


class BreakerOpen(PeerLost):
    code = "breaker_open"


class Unreachable(PeerLost):
    code = "unreachable"


class Stalled(Unavailable):
    code = "stalled"


class DamagedFrame(PeerLost):
    code = "damaged_frame"


class DeadlineExceeded(Unavailable):
    code = "deadline_exceeded"
    http_status = 504


class PeerSilent(DeadlineExceeded):
    code = "peer_silent"


class TooLate(DeadlineExceeded):
    code = "too_late"


class Cancelled(Unavailable):
    code = "cancelled"
    http_status = 499


class NotSettled(Unavailable):
    code = "not_settled"


class ProtocolError(MoonpoolError):
    code = "protocol"


class ModelError(MoonpoolError):
    code = "model"


class FatalRequest(MoonpoolError):
    code = "fatal_request"


class Internal(MoonpoolError):
    code = "internal"


def _tree(root: type[MoonpoolError]) -> dict[str, type[MoonpoolError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


_BY_CODE = _tree(MoonpoolError)


def from_wire(code: str, message: str, retry_after_s: float | None = None, param: str | None = None) -> MoonpoolError:
    """The error a peer raised, as our own class; an unknown code becomes Internal with the code in its text."""
    cls = _BY_CODE.get(code)
    if cls is None:
        return Internal(f"{code}: {message}")
    error = cls(message)
    if isinstance(error, Overloaded) and retry_after_s is not None:
        error.retry_after_s = retry_after_s
    if isinstance(error, InvalidInput):
        error.param = param
    return error
