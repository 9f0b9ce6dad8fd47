"""Says at the nodes' desks that this process holds memory in place, before it does.

Each client is one session, a number of its own. With it in a PutStart or a Lookup the master keeps the space from being
reused until the client lets go or the desk sees its connection end. So a process that is stopped in the middle of a
copy, for however long, finds the space still its own, and one that dies blocks nothing.
"""

from __future__ import annotations

import secrets
import threading

from moonpool.base.errors import MoonpoolError, PeerLost
from moonpool.base.rpc import BlockingClient
from moonpool.store.client.directory import SegmentDirectory
from moonpool.store.messages import Placement, SegmentInfo
from moonpool.store.messages import session_calls as desk
from moonpool.transfer.transports.base import RemoteSegment
from moonpool.transfer.transports.mapped import MappedRemote

_LEAST_SESSION = 2**32 + 1
_END_OF_SESSIONS = 2**63


class SessionClient:
    """Registers when first asked for the session, and again when nodes of this machine have changed.

    `number` is the session's, whether anybody knows it or not.
    """

    def __init__(self, directory: SegmentDirectory, *, name: str, timeout_s: float) -> None:
        self.number = _new_number()
        self._directory = directory
        self._name, self._timeout_s = name, timeout_s
        self._lock = threading.Lock()
        self._seen: tuple[SegmentInfo, ...] | None = None
        self._lines: dict[str, BlockingClient] = {}
        self._registered: frozenset[tuple[str, int]] = frozenset()  # desk and incarnation

    def session(self) -> int:
        """This client's, once a desk of this machine knows it; 0 when there is none that has to."""
        if self._directory.local is not self._seen:
            self._directory.local_segment()  # asks the master if nobody has yet
            self._register_everywhere()
        return self.number if self._registered else 0

    def renew(self, session: int) -> None:
        """Another one from now on, unless that has happened. The desks know the earlier one until this client ends."""
        with self._lock:
            if self.number == session:
                self.number = _new_number()
                self._registered, self._seen = frozenset(), None

    def holds(self, info: SegmentInfo) -> bool:
        """Whether the node would notice the end of this process."""
        return (info.desk or "", info.descriptor.incarnation) in self._registered

    def open_for_writing(self, placement: Placement, session: int) -> RemoteSegment:
        """The handle to write by, for a put begun with `session`. Raises as SegmentDirectory.open, and PeerLost where
        nobody would notice that this process has stopped writing in place.
        """
        info = self._directory.info(placement)
        remote = self._directory.open_segment(info)
        if info.desk is None or not isinstance(remote, MappedRemote) or (session and self.holds(info)):
            return remote
        if session and self.session() and self.holds(info):  # a node that was started since we last looked
            return remote
        raise PeerLost(f"the node of segment {placement.segment!r} does not know of this process")

    def close(self) -> None:
        """Idempotent. The desks see the session end."""
        with self._lock:
            lines, self._lines = list(self._lines.values()), {}
            self._registered = frozenset()
        for line in lines:
            line.close()

    def _register_everywhere(self) -> None:
        with self._lock:
            local = self._directory.local
            current = {(info.desk or "", info.descriptor.incarnation) for info in local}
            self._registered = self._registered & current
            missing = [info for info in local if info.desk is not None and not self.holds(info)]
            reached = [self._register(info) for info in missing]
            self._seen = local if all(reached) else None  # None: those that failed are tried again next time

    def _register(self, info: SegmentInfo) -> bool:
        """False when the memory or its desk cannot be reached; memory that is not mapped here needs no desk."""
        assert info.desk is not None
        try:
            if isinstance(self._directory.open_segment(info), MappedRemote):
                self._call(info.desk)
                self._registered = self._registered | {(info.desk, info.descriptor.incarnation)}
        except MoonpoolError:
            return False
        return True

    def _call(self, address: str) -> None:
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = BlockingClient(address, desk.SERVICE, name=self._name)
        call = desk.Register(session=self.number)
        try:
            line.call(call, timeout_s=self._timeout_s)
        except PeerLost:  # the node has been started again since
            line.call(call, timeout_s=self._timeout_s)


def _new_number() -> int:
    return _LEAST_SESSION + secrets.randbelow(_END_OF_SESSIONS - _LEAST_SESSION)
