"""Registers this client at the nodes of its machine, before it reads or writes their memory in place.

Each client has a session number. A PutStart or Lookup with that number makes the master keep the space from reuse until
the client releases it, or the node sees the client's connection end. So a process that is stopped in the middle of a
copy, for any time, still owns the space when it goes on, and a process that dies blocks nothing.
"""

from __future__ import annotations

import contextlib
import secrets
import threading

from moonpool.base.errors import MoonpoolError, PeerLost
from moonpool.base.rpc import BlockingClient, Call
from moonpool.store.client.directory import SegmentDirectory
from moonpool.store.messages import Placement, SegmentInfo, session_calls
from moonpool.transfer.transports.base import RemoteSegment
from moonpool.transfer.transports.mapped import MappedRemote

_Registry = tuple[str, int]  # its address, the incarnation of its segment
_MIN_SESSION = 2**32 + 1
_MAX_SESSION = 2**63


class SessionClient:
    """Registers at the first call of session(), and again after nodes of this machine have changed. Thread-safe.

    `number` is the session number, registered or not.
    """

    def __init__(self, directory: SegmentDirectory, *, name: str, timeout_s: float, uses_gpu: bool = False) -> None:
        self.number = _new_number()
        self._uses_gpu = uses_gpu
        self._directory = directory
        self._name, self._timeout_s = name, timeout_s
        self._lock = threading.Lock()
        self._seen: tuple[SegmentInfo, ...] | None = None
        self._clients: dict[str, BlockingClient] = {}
        self._registered: frozenset[_Registry] = frozenset()
        self._shared: dict[int, frozenset[_Registry]] = {}  # sessions that this client shares with other processes
        self._writable: tuple[RemoteSegment, int, frozenset[_Registry]] | None = None  # as open_for_writing() found

    def session(self) -> int:
        """Return this client's session number, registering with the local nodes first. Return 0 if this machine has no
        node.
        """
        if self._directory.local is not self._seen:
            self._directory.local_segment()  # asks the master if the segments are not known yet
            self._register_everywhere()
        return self.number if self._registered else 0

    def renew(self, session: int) -> None:
        """Use another number from now on, unless `session` is no longer the current one. The nodes keep the old one
        until this client closes.
        """
        with self._lock:
            if self.number == session:
                self.number = _new_number()
                self._registered, self._seen = frozenset(), None

    def is_registered_at(self, info: SegmentInfo) -> bool:
        """Return whether this client is registered at the segment's node, which notices the end of this process."""
        return _registry(info) in self._registered

    def share(self) -> int:
        """Begin a session for puts that several processes write; return its number, 0 if this machine has no node. End
        it with leave().
        """
        number = _new_number() if self.session() else 0
        if number:
            self._enter(number, session_calls.Register(session=number, uses_gpu=self._uses_gpu))
        return number

    def join(self, number: int) -> None:
        """Take part in a session that another process began, at the nodes of this machine at which it is known. End it
        with leave().
        """
        self.session()
        self._enter(number, session_calls.Join(session=number))

    def leave(self, number: int) -> None:
        """End this process's part of a shared session. Idempotent."""
        with self._lock:
            for address, _ in self._shared.pop(number, ()):
                with contextlib.suppress(MoonpoolError):  # the connection is lost then, which says the same
                    self._call(address, session_calls.Leave(session=number))

    def _enter(self, number: int, call: session_calls.Register | session_calls.Join) -> None:
        entered = set()
        with self._lock:
            for info in self._directory.local:
                with contextlib.suppress(MoonpoolError):  # nothing is written there then
                    if self.is_registered_at(info) and info.registry_address is not None:
                        self._call(info.registry_address, call)
                        entered.add(_registry(info))
        self._shared[number] = frozenset(entered)

    def open_for_writing(self, placement: Placement, session: int) -> RemoteSegment:
        """Return the handle for writing, for a put begun with `session`. Raise as SegmentDirectory.open, and PeerLost
        where the memory is mapped and its node would not notice the end of this process.
        """
        remote = self._directory.open(placement)
        now = remote, session, self._registered
        if now != self._writable or self._shared:  # otherwise nothing has changed since the last put
            self._check_writable(placement, remote, session)
            self._writable = remote, session, self._registered
        return remote

    def _check_writable(self, placement: Placement, remote: RemoteSegment, session: int) -> None:
        info = self._directory.info(placement)
        shared = self._shared.get(session)
        if shared is not None and _registry(info) not in shared and isinstance(remote, MappedRemote):
            raise PeerLost(f"the node of segment {placement.segment!r} does not know who writes there together")
        if (
            info.registry_address is None
            or not isinstance(remote, MappedRemote)
            or (session and self.is_registered_at(info))
        ):
            return
        if session and self.session() and self.is_registered_at(info):  # a node that was started since
            return
        raise PeerLost(f"the node of segment {placement.segment!r} does not know of this process")

    def close(self) -> None:
        """Idempotent. The nodes see the session end. No copy of a GPU may be under way."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
            self._registered = frozenset()
        for client in clients:
            if self._uses_gpu:
                with contextlib.suppress(MoonpoolError):  # then it ends with the process
                    client.call(session_calls.EndSessions(), timeout_s=self._timeout_s)
            client.close()

    def _register_everywhere(self) -> None:
        with self._lock:
            local = self._directory.local
            current = {_registry(info) for info in local}
            self._registered = self._registered & current
            missing = [info for info in local if info.registry_address is not None and not self.is_registered_at(info)]
            reached = [self._register(info) for info in missing]
            self._seen = local if all(reached) else None  # None: the next session() tries again

    def _register(self, info: SegmentInfo) -> bool:
        """Register at the segment's node. Return False when it cannot be reached. Memory that is not mapped here needs
        no registration.
        """
        assert info.registry_address is not None
        try:
            if isinstance(self._directory.open_segment(info), MappedRemote):
                call = session_calls.Register(session=self.number, uses_gpu=self._uses_gpu)
                self._call(info.registry_address, call)
                self._registered = self._registered | {_registry(info)}
        except MoonpoolError:
            return False
        return True

    def _call(self, address: str, call: Call[None]) -> None:
        client = self._clients.get(address)
        if client is None:
            # A node that was stopped for a while must not find this connection closed when it goes on: it would report
            # all sessions of this process as ended, while their views are open and their puts are being written.
            client = self._clients[address] = BlockingClient(
                address, session_calls.SERVICE, name=self._name, keeps_connection=True
            )
        try:
            client.call(call, timeout_s=self._timeout_s)
        except PeerLost:  # the node was restarted since the last call
            client.call(call, timeout_s=self._timeout_s)


def _registry(info: SegmentInfo) -> _Registry:
    return info.registry_address or "", info.descriptor.incarnation


def _new_number() -> int:
    return _MIN_SESSION + secrets.randbelow(_MAX_SESSION - _MIN_SESSION)
