"""Many whole objects of one look-up, read fast when nothing is wrong.

mapped_copy.py copies objects from mapped memory; small_batch.py reads the small ones, remote_read.py those of other
machines and of disks, and recovery.py once more what failed a check. All reads pass the checks of verified_read.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, Unauthorized, Unavailable
from moonpool.store.client.cuts import scatter
from moonpool.store.client.mapped_copy import PlannedCopy, copy_planned
from moonpool.store.client.read_tools import ReadTools
from moonpool.store.client.recovery import Got, Recovery, Targets, missing, read_whole
from moonpool.store.client.remote_read import DiskRead, RemoteObject, RemoteRead
from moonpool.store.client.small_batch import FoundObject, SmallBatch, split_small
from moonpool.store.client.transfer_window import MIN_PARALLEL_NBYTES, run_parallel
from moonpool.store.client.verified_read import check_header, has_generation, may_be_remembered
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer.transports.base import RemoteSegment

_CANNOT_READ = (Unavailable, NotFound, Unauthorized)  # errors of a whole segment


class BatchRead:
    """Reads what one look-up found. For one thread."""

    def __init__(
        self,
        keys: Sequence[bytes],
        infos: Sequence[ObjectInfo | None],
        targets: Sequence[Targets],
        identity: bytes | None,
        *,
        tools: ReadTools,
        recovery: Recovery | None,
    ) -> None:
        """`recovery` None: the places are remembered. Use read() then."""
        self._keys, self._infos, self._targets = keys, infos, targets
        self._identity = identity
        self._tools, self._recovery = tools, recovery
        self._small = SmallBatch(targets, identity, recovery is None)
        self._got: list[Got | None] = [None] * len(keys)

    def run(self) -> list[Got]:
        """Read the objects and return the outcome of each; NotFound for a miss."""
        self.read()
        self.count()
        if None in self._got:
            return [self._recover(position) if got is None else got for position, got in enumerate(self._got)]
        return cast("list[Got]", self._got)

    def read(self) -> list[Got | None]:
        """Read the objects. Return the outcome of each; None where a check failed."""
        unmapped: deque[tuple[RemoteSegment, list[FoundObject]]] = deque()
        for found in self._by_segment().values():
            place = found[0][2]
            try:
                remote = self._tools.directory.open(place)
                memory = remote.view(0, remote.nbytes)
                if memory is None:
                    unmapped.append((remote, found))
                else:
                    self._read_mapped(memory, found)
            except _CANNOT_READ as error:
                self._add_failure(place, error)
        if unmapped:
            self._read_unmapped(unmapped)
        return self._got

    def _add_failure(self, place: Placement, error: MoonpoolError) -> None:
        if self._recovery is not None:
            self._recovery.failures[place.segment, place.incarnation] = error
        self._tools.directory.unreadable.add(place, error)

    def _read_unmapped(self, segments: deque[tuple[RemoteSegment, list[FoundObject]]]) -> None:
        """Read much data from several segments at the same time: each node has a link of its own, and readers that all
        went from one node to the next would wait for one link while the others idle.
        """

        def work_off() -> None:
            while segments:
                try:
                    remote, found = segments.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    self._read_segment(remote, found)
                except _CANNOT_READ as error:
                    self._add_failure(found[0][2], error)

        num_helpers = len(segments) - 1
        if num_helpers and sum([info.nbytes for _, found in segments for _, info, _ in found]) >= MIN_PARALLEL_NBYTES:
            run_parallel(self._tools.directory.engine, work_off, segments.clear, num_helpers)
        else:
            work_off()

    def _by_segment(self) -> dict[tuple[str, int], list[FoundObject]]:
        """Group the objects that were found by the segment that is best to read from."""
        by_segment: dict[tuple[str, int], list[FoundObject]] = {}
        best_first = self._tools.directory.best_first
        segment, incarnation, found = "", -1, list[FoundObject]()  # of the last object: mostly the next one's, too
        for position, info in enumerate(self._infos):
            if info is None:
                self._got[position] = missing(self._keys[position])
            elif info.replicas:
                replicas = info.replicas
                place = replicas[0] if len(replicas) == 1 else best_first(replicas)[0]
                if place.segment != segment or place.incarnation != incarnation:
                    segment, incarnation = place.segment, place.incarnation
                    found = by_segment.setdefault((segment, incarnation), [])
                found.append((position, info, place))
        return by_segment

    def _read_segment(self, remote: RemoteSegment, found: list[FoundObject]) -> None:
        """Read objects of one segment that is not mapped here."""
        if remote.written_once:
            self._tools.counters.add("disk_reads", len(found))
        elif remote.checks_generation and len(found) > 1:
            found = self._fetch_small(remote, found)
        kind = DiskRead if remote.written_once else RemoteRead
        time_for = self._tools.time_for_disk if remote.written_once else self._tools.time_for
        reader = kind(remote, self._tools.directory.engine, self._identity, time_for)
        for each in reader.run([RemoteObject(*one, self._targets[one[0]], self._recovery is None) for one in found]):
            self._got[each.position] = each.got()
        if reader.failure is not None:
            raise reader.failure

    def _fetch_small(self, remote: RemoteSegment, found: list[FoundObject]) -> list[FoundObject]:
        """Read the small objects of a segment that is not mapped. Return the others."""
        small, others = split_small(found, self._targets)
        try:
            for position, got in self._small.fetch(remote, small, self._tools.time_for):
                self._got[position] = got
        except _CANNOT_READ:
            raise
        except MoonpoolError:  # a ReadSession finds out which object is at fault
            pass
        return others

    def _read_mapped(self, memory: memoryview, found: list[FoundObject]) -> None:
        small, others = split_small(found, self._targets)
        copied = self._small.copy(memory, [place.offset for _, _, place in small], small)
        for (position, _, _), got in zip(small, copied, strict=True):
            self._got[position] = got
        for position, place, got in copy_planned(memory, self._plan(memory, others), self._tools.directory.engine):
            if has_generation(memory, place.offset, place.generation):
                self._got[position] = got

    def _plan(self, memory: memoryview, found: list[FoundObject]) -> list[PlannedCopy]:
        """Check all headers before the first copy: a large copy pushes the code that reads them out of the cache."""
        targets, identity = self._targets, self._identity
        plans: list[PlannedCopy] = []
        for position, info, place in found:
            try:
                header = check_header(memory, place.offset, info, place, identity)
                if self._recovery is None and not may_be_remembered(memory, place.offset, header):
                    continue
                into = targets[position]
                plans.append((position, place, header, None if into is None else scatter(header.sizes, into)))
            except InvalidInput as error:
                self._got[position] = error
            except MoonpoolError:  # a ReadSession finds out what is wrong
                continue
        return plans

    def count(self) -> None:
        """Count hits, misses and bytes."""
        num_misses = self._infos.count(None)
        self._tools.counters.add_reads(len(self._infos) - num_misses, num_misses, num_read(self._got))

    def _recover(self, position: int) -> Got:
        info, targets = self._infos[position], self._targets[position]
        assert info is not None, "only objects that were found can be recovered"
        assert self._recovery is not None, "only objects that were looked up can be recovered"
        try:
            return self._recovery.read(info, lambda session: read_whole(session, targets))
        except MoonpoolError as error:
            return error


def num_read(got: Sequence[Got | None]) -> int:
    """Return the number of bytes that were read."""
    kinds = set(map(type, got))
    if kinds == {int}:  # the fast way for many
        return sum(cast("Sequence[int]", got))
    return sum([each if isinstance(each, int) else len(each) for each in got if isinstance(each, int | bytes)])
