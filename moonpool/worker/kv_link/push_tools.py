"""What all pushes of a worker share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.transfer import TransferEngine
from moonpool.worker.kv_link.decode_peers import DecodePeers
from moonpool.worker.kv_link.pieces import PieceMemory
from moonpool.worker.kv_link.pool import PoolWriter
from moonpool.worker.kv_link.push import Push
from moonpool.worker.kv_link.send_queue import SendQueue
from moonpool.worker.messages import Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class PushTools:
    """Makes the pushes of a worker."""

    queue: SendQueue
    memory: PieceMemory
    pool: PoolWriter
    peers: DecodePeers
    transfer: TransferEngine

    def push(self, ticket: Ticket, keys: Sequence[bytes], layers: range | None = None) -> Push:
        """Return the Push of one request, of some layers or of all."""
        return Push(
            ticket,
            keys,
            queue=self.queue,
            memory=self.memory,
            pool=self.pool,
            peers=self.peers,
            transfer=self.transfer,
            layers=layers,
        )
