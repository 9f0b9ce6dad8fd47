"""Calls to a node's session registry. The service is called "node"; SegmentInfo.registry_address is its address.

A process that maps a node's memory registers here and keeps the connection open as long as it lives. When the
connection ends, the process is gone, and the node tells the master. Only then the master frees what that process had in
use. Processes that write one object together share a session, which ends with the last of them.
"""

from __future__ import annotations

from typing import ClassVar

from moonpool.base.rpc import Call

SERVICE = "node"


class Register(Call[None]):
    """Register `session` for the process of this connection. May be repeated.

    A GPU may go on for a moment with copies of a process that has died. So with `uses_gpu` the session lasts until the
    kernel reports the process's exit, and a second longer.
    """

    session: int
    uses_gpu: bool = False


class Join(Call[None]):
    """Take part in a session that another process of this machine has begun: it lasts until the last process that takes
    part has left it or ended. StaleGeneration when it has no writers left: it is over.
    """

    session: int


class Leave(Call[None]):
    """The process of this connection no longer reads or writes with this session, and has no copy under way."""

    outlives_caller: ClassVar[bool] = True
    session: int


class EndSessions(Call[None]):
    """The copies of this connection's sessions are over: they end with the connection, even if a GPU was used."""

    outlives_caller: ClassVar[bool] = True
