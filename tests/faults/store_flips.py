"""Flipping bits: in a node's memory, in its log files, and in what passes between a client and a node over tcp."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import socket
import threading
from pathlib import Path

from moonpool.base.object_header import ObjectHeader, unpack
from moonpool.store.messages import Placement
from moonpool.transfer.transports.file.folder import FILE_BITS, file_name

_HEADER_NBYTES = 64 * 1024  # more than any header of these tests has
_FIXED_NBYTES, _PIECE_NBYTES, _CRC_NBYTES = 66, 12, 4  # docs/formats.md, section 4


class NodeMemory:
    """The memory that a node serves, from outside."""

    def __init__(self, pid: int, segment: str) -> None:
        files = (entry for entry in Path(f"/proc/{pid}/fd").iterdir())
        opened = os.open(next(each for each in files if _is_memory(each, segment)), os.O_RDWR)
        self._map = mmap.mmap(opened, os.fstat(opened).st_size)
        os.close(opened)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._map[offset : offset + nbytes]

    def flip(self, at: int, bit: int) -> None:
        self._map[at] ^= 1 << bit

    def close(self) -> None:
        self._map.close()


def _is_memory(entry: Path, segment: str) -> bool:
    return os.readlink(entry).startswith(f"/memfd:moonpool-{segment}")


class NodeDisk:
    """The log files of a node; addresses as in placements."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, offset: int, nbytes: int) -> bytes:
        with self._open(offset) as file:
            return os.pread(file.fileno(), nbytes, offset & (1 << FILE_BITS) - 1)

    def flip(self, at: int, bit: int) -> None:
        with self._open(at) as file:
            in_file = at & (1 << FILE_BITS) - 1
            (byte,) = os.pread(file.fileno(), 1, in_file)
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), in_file)

    def _open(self, offset: int):  # type: ignore[no-untyped-def]
        return open(self._folder / file_name(offset >> FILE_BITS), "r+b", buffering=0)


def flip_in_object(where: NodeMemory | NodeDisk, place: Placement, rng: random.Random) -> bool:
    """Flips a bit that counts of the object there; False when it is not there any more. Half of them in headers."""
    header = header_at(where, place)
    if header is None:
        return False
    used_nbytes = _FIXED_NBYTES + len(header.key) + _PIECE_NBYTES * len(header.pieces) + _CRC_NBYTES
    pieces_nbytes = sum(piece.nbytes for piece in header.pieces)
    in_header = rng.random() < 0.5
    at = rng.randrange(used_nbytes) if in_header else header.nbytes + rng.randrange(pieces_nbytes)
    where.flip(place.offset + at, rng.randrange(8))
    return True


def header_at(where: NodeMemory | NodeDisk, place: Placement) -> ObjectHeader | None:
    try:
        header = unpack(where.read(place.offset, _HEADER_NBYTES))
    except Exception:  # noqa: BLE001 - a file that is gone, another object's bytes: it is not there
        return None
    return header if header.generation == place.generation else None


class FlippingProxy:
    """Stands before a node's tcp port, at the same port of another loopback address, and flips a bit when told to."""

    def __init__(self, host: str, port: int, target_host: str, seed: int) -> None:
        self._target = (target_host, port)
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._armed: str | None = None
        self.num_flips = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((host, port))
        self._start(self._accept)

    def arm(self, direction: str) -> None:
        """The next bytes "there" or "back" get a wrong bit."""
        with self._lock:
            self._armed = direction

    def disarm(self) -> bool:
        """True when it has not flipped yet."""
        with self._lock:
            was, self._armed = self._armed, None
            return was is not None

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)
        for sock in (self._listener, *self._sockets):
            sock.close()

    def _start(self, target, *args) -> None:  # type: ignore[no-untyped-def]
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                owner = socket.create_connection(self._target)
                for sock in (caller, owner):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [caller, owner]
                self._start(self._relay, caller, owner, "there")
                self._start(self._relay, owner, caller, "back")

    def _relay(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(self._spoil(bytearray(data), direction))
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _spoil(self, data: bytearray, direction: str) -> bytearray:
        with self._lock:
            if self._armed == direction:
                self._armed = None
                self.num_flips += 1
                first = min(len(data), 80)  # where a frame's head is, often
                at = self._rng.randrange(first if self._rng.random() < 0.5 else len(data))
                data[at] ^= 1 << self._rng.randrange(8)
        return data
