"""An owner's agent, as seen from the agent of this process, and the transfers under way between the two."""

from __future__ import annotations

import contextlib
import threading
from typing import Annotated, Literal

import msgspec

from moonpool.base.errors import PeerLost, ProtocolError
from moonpool.transfer.transports.nixl.agent import Agent, Memory, NixlOp, Transfer
from moonpool.transfer.transports.nixl.staging import Slot, StagedChunk

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class NixlAddress(msgspec.Struct, frozen=True, array_like=True):
    """What an owner answers to Attach: how to reach a segment, and where in its memory the segment lies."""

    metadata: bytes
    address: _Count
    nbytes: _Count
    device: _Count
    kind: Literal["DRAM", "VRAM"]
    fenced: bool


def decode_address(packed: bytes) -> NixlAddress:
    try:
        return msgspec.msgpack.decode(packed, type=NixlAddress)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the owner's nixl address makes no sense: {error}") from error


class NixlPeer:
    """Thread-safe. Let go of by retire(); NIXL forgets it when the last transfer with it has ended."""

    def __init__(self, agent: Agent, address: NixlAddress) -> None:
        self.address = address
        self._agent = agent
        self._name = agent.add_peer(address.metadata)
        self._lock = threading.Lock()
        self._num_flights = 0
        self._retired = False

    def start(self, op: NixlOp, slot: Slot, chunk: StagedChunk) -> SlotTransfer:
        """Moves the slot's first bytes to the chunk's spans, or the other way round. The slot is the flight's now."""
        local, remote, at = [], [], slot.address
        for offset, nbytes in chunk.spans:
            local.append(Memory(at, nbytes))
            remote.append(Memory(self.address.address + offset, nbytes, self.address.device, self.address.kind))
            at += nbytes
        with self._lock:
            if self._retired:
                raise PeerLost("the connection to the owner's agent was given up")
            self._num_flights += 1
        try:
            transfer = self._agent.start(op, local, remote, self._name)
        except BaseException:
            self.flight_ended()
            raise
        return SlotTransfer(self, transfer, slot)

    def retire(self) -> None:
        """Idempotent."""
        with self._lock:
            gone, self._retired = self._retired, True
            last = not gone and not self._num_flights
        if last:
            self._forget()

    def flight_ended(self) -> None:
        """Once for each start()."""
        with self._lock:
            self._num_flights -= 1
            last = self._retired and not self._num_flights
        if last:
            self._forget()

    def _forget(self) -> None:
        with contextlib.suppress(PeerLost):  # the agent, and all its peers with it, may be gone already
            self._agent.remove_peer(self._name)


class SlotTransfer:
    """A transfer and the slot it uses. For one thread at a time."""

    def __init__(self, peer: NixlPeer, transfer: Transfer, slot: Slot) -> None:
        self.peer = peer
        self.slot = slot
        self._transfer: Transfer | None = transfer

    def landed(self) -> bool:
        """Whether it has ended and the slot is free; PeerLost when it failed, and then the slot is free too."""
        if self._transfer is None:
            return True
        try:
            if not self._transfer.ended():
                return False
        except PeerLost:
            self.drop()
            raise
        self.drop()
        return True

    def drop(self) -> None:
        """Lets go of it; before it has landed only right before its agent is closed."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.release()
            self.peer.flight_ended()
