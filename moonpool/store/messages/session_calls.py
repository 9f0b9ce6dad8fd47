"""What a node's desk is asked. The service is called "node"; its address stands in SegmentInfo.desk.

A process that maps a node's memory says so here and keeps the connection open as long as it lives. When the connection
ends, the process is gone, and the node tells the master: whatever that process held in place is free then, and not
before.
"""

from __future__ import annotations

from moonpool.base.rpc import Call

SERVICE = "node"


class Register(Call[None]):
    """The process behind this connection holds memory of this node under `session`. May be said again."""

    session: int
