"""Typed calls between processes: one protocol without I/O, a blocking and an asyncio driver.

    class Exist(Call[list[bool]]):           # a request names the type of its answer
        keys: list[bytes]

    server = RpcServer("store", {Exist: lambda call, peer: [...]})
    client = BlockingClient("unix:/run/master.sock", "store")
    client.call(Exist(keys=[...]))           # -> list[bool]

No pickle, no code from the peer; sizes and types are checked before use. Every call has a deadline, and both ends of
an AsyncClient's connection notice within seconds when the other process is frozen or gone.
"""

from moonpool.base.rpc.aio_client import AsyncClient
from moonpool.base.rpc.aio_server import RpcPeer, RpcServer
from moonpool.base.rpc.blocking import BlockingClient
from moonpool.base.rpc.protocol import Call, Hello, StreamCall
from moonpool.base.rpc.silence import SilenceLimits

__all__ = ["AsyncClient", "BlockingClient", "Call", "Hello", "RpcPeer", "RpcServer", "SilenceLimits", "StreamCall"]
