"""The kernel's words for a lost or silent peer, in ours. One place for all transports with sockets."""

from __future__ import annotations

from types import TracebackType

from moonpool.base.errors import DeadlineExceeded, PeerLost


class PeerErrors:
    """`with PeerErrors(peer):` around whatever talks to it. The peer is named in the message by its str().

    A class: the generator kind would keep the frames of a failure, and with them mappings, until the next collection.
    """

    __slots__ = ("_peer", "_timeout_s")

    def __init__(self, peer: object, timeout_s: float | None = None) -> None:
        self._peer = peer
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TimeoutError):
            when = "in time" if self._timeout_s is None else f"within {self._timeout_s:g} s"
            raise DeadlineExceeded(f"{self._peer} did not answer {when}") from error
        if isinstance(error, OSError):
            raise PeerLost(f"{self._peer} is out of reach: {error.strerror or error}") from error
