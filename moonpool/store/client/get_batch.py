"""Reading many whole objects at once, each checked as read_session.py does it.

The good case is fast: objects in this machine's memory are copied here (side_by_side.py), each checksum taken while its
bytes are warm; others arrive as far_read.py says. Whatever is not as expected is read again by a ReadSession, which
reports it, tries the other replicas and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from moonpool.base.checksum import crc32c_of_array
from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, Unauthorized, Unavailable
from moonpool.base.object_header import HeaderFields
from moonpool.store.client.cuts import scatter
from moonpool.store.client.disk_read import DiskRead
from moonpool.store.client.far_read import FarObject, FarRead
from moonpool.store.client.read_session import ReadTools
from moonpool.store.client.recovery import Recovery, Targets, missing, read_whole
from moonpool.store.client.side_by_side import is_large, side_by_side
from moonpool.store.client.transfer_window import TransferThreads
from moonpool.store.client.verified_read import CopyAndSum, are_right, check_header, has_generation, sum_arrived
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer.transports.base import RemoteSegment

Got: TypeAlias = int | bytes | MoonpoolError  # how many bytes, or the bytes themselves, or why not

SMALL_NBYTES = 16 * 1024  # copied sooner by a slice than by an array
_BYTE = np.uint8
_bytes_of = np.frombuffer


class BatchRead:
    """One round of reading what one look-up found. For one thread."""

    def __init__(
        self,
        keys: Sequence[bytes],
        infos: Sequence[ObjectInfo | None],
        targets: Sequence[Targets],
        identity: bytes | None,
        *,
        crew: TransferThreads,
        tools: ReadTools,
        recovery: Recovery,
    ) -> None:
        self._keys, self._infos, self._targets = keys, infos, targets
        self._identity = identity
        self._crew, self._tools, self._recovery = crew, tools, recovery
        self._got: list[Got | None] = [None] * len(keys)

    def run(self) -> list[Got]:
        """What became of each key: NotFound for a miss."""
        for found in self._by_segment().values():
            place = found[0][2]
            try:
                self._read_segment(self._tools.directory.open(place), found)
            except (Unavailable, NotFound, Unauthorized) as error:
                self._recovery.failures[place.segment, place.incarnation] = error
                self._tools.directory.unreadable.note(place, error)
        self._count()
        return [self._recover(position) if got is None else got for position, got in enumerate(self._got)]

    def _by_segment(self) -> dict[tuple[str, int], list[_Found]]:
        """What was found, by the segment that is best to read from."""
        by_segment: dict[tuple[str, int], list[_Found]] = {}
        best_first = self._tools.directory.best_first
        for position, info in enumerate(self._infos):
            if info is None:
                self._got[position] = missing(self._keys[position])
            elif info.replicas:
                replicas = info.replicas
                place = replicas[0] if len(replicas) == 1 else best_first(replicas)[0]
                by_segment.setdefault((place.segment, place.incarnation), []).append((position, info, place))
        return by_segment

    def _read_segment(self, remote: RemoteSegment, found: list[_Found]) -> None:
        memory = remote.view(0, remote.nbytes)
        if memory is not None:
            self._read_mapped(memory, found)
            return
        way = DiskRead if remote.written_once else FarRead
        far = way(remote, self._crew, self._identity, self._tools.timeout_s)
        for each in far.run([FarObject(*one, self._targets[one[0]]) for one in found]):
            self._got[each.position] = each.got()
        if far.failure is not None:
            raise far.failure

    def _read_mapped(self, memory: memoryview, found: list[_Found]) -> None:
        for position, place, got in self._copy_all(memory, self._plan(memory, found)):
            if got is not None and has_generation(memory, place.offset, place.generation):
                self._got[position] = got

    def _copy_all(self, memory: memoryview, plans: list[_Plan]) -> list[_Copied]:
        # New bytes are made under Python's lock, so two threads would be in each other's way.
        nbytes = sum([sum(header.sizes) for _, _, header, pieces in plans if pieces is not None])
        copy_and_sum = _copier(memory)
        if not is_large(nbytes, len(plans)):
            return [(at, place, _copy(memory, copy_and_sum, place, header, into)) for at, place, header, into in plans]
        copied: list[_Copied] = []

        def copy(plan: _Plan) -> None:
            position, place, header, pieces = plan
            copied.append((position, place, _copy(memory, copy_and_sum, place, header, pieces)))

        side_by_side(self._crew, plans, nbytes, copy)
        return copied

    def _plan(self, memory: memoryview, found: list[_Found]) -> list[_Plan]:
        """All headers first: after a large copy the processor has forgotten the code that reads them."""
        targets, identity = self._targets, self._identity
        plans: list[_Plan] = []
        for position, info, place in found:
            try:
                header = check_header(memory, place.offset, info, place, identity)
                into = targets[position]
                plans.append((position, place, header, None if into is None else scatter(header.sizes, into)))
            except InvalidInput as error:
                self._got[position] = error
            except MoonpoolError:  # a ReadSession finds out what is wrong
                continue
        return plans

    def _count(self) -> None:
        nbytes = 0
        for got in self._got:
            if isinstance(got, int):
                nbytes += got
            elif isinstance(got, bytes):
                nbytes += len(got)
        num_misses = self._infos.count(None)
        self._tools.counters.add_reads(len(self._infos) - num_misses, num_misses, nbytes)

    def _recover(self, position: int) -> Got:
        info, targets = self._infos[position], self._targets[position]
        assert info is not None, "what was not found is no riddle"
        try:
            return self._recovery.read(info, lambda session: read_whole(session, targets))
        except MoonpoolError as error:
            return error


_Found: TypeAlias = tuple[int, ObjectInfo, Placement]  # position, what it is, the replica to read
# position, the replica, its header, and the memory for each of its pieces (None: new bytes)
_Plan: TypeAlias = tuple[int, Placement, HeaderFields, list[list[memoryview]] | None]
_Copied: TypeAlias = tuple[int, Placement, int | bytes | None]  # position, the replica, what was read of it


def _copier(memory: memoryview) -> CopyAndSum[memoryview]:
    """From mapped memory; each checksum is taken while the bytes are warm."""
    array = _bytes_of(memory, _BYTE)

    def copy_and_sum(at: int, view: memoryview, found: int) -> int:
        copied, end = _bytes_of(view, _BYTE), at + view.nbytes
        if end - at <= SMALL_NBYTES:
            view[:] = memory[at:end]
        else:
            copied[...] = array[at:end]
        return crc32c_of_array(copied, found)

    return copy_and_sum


def _copy(
    memory: memoryview,
    copy_and_sum: CopyAndSum[memoryview],
    place: Placement,
    header: HeaderFields,
    pieces: list[list[memoryview]] | None,
) -> int | bytes | None:
    """The object, copied and checked; None when a checksum does not match."""
    start = place.offset + header.nbytes
    if pieces is None:
        data = bytes(memory[start : start + sum(header.sizes)])
        return data if are_right(header, scatter(header.sizes, [memoryview(data)]), sum_arrived) else None
    return sum(header.sizes) if are_right(header, pieces, copy_and_sum, start) else None
