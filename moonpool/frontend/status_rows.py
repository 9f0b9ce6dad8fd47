"""The rows of GET /v1/status: workers and nodes, from what the conductor, the workers and the master answered. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moonpool.base.address import parse_address
from moonpool.base.cluster import WorkerRole
from moonpool.conductor.messages import WorkerStatus
from moonpool.frontend.status_reply import NodeRow, SegmentRow, WorkerRow
from moonpool.store.messages import SegmentInfo, SegmentStats, StoreStats, Tier
from moonpool.worker.messages import WorkerStats

THIS_MACHINE = "this machine"
FORGET_S = 600.0  # a worker that the launcher does not expect is shown as gone for this long
_LOOPBACK = ("127.", "::1", "localhost")


def machine_of(addresses: Sequence[str]) -> str:
    """Return the host that serves at these addresses; THIS_MACHINE if they are of use on one machine only."""
    for text in addresses:
        if text.startswith("tcp:"):
            host = parse_address(text).host
            if not host.startswith(_LOOPBACK):
                return host
    return THIS_MACHINE


class ByteRates:
    """Turns counts of bytes, read now and then, into bytes per second."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], tuple[float, tuple[int, ...]]] = {}
        self._rates: dict[tuple[str, int], tuple[float, ...]] = {}

    def update(self, now_s: float, stats: Mapping[str, WorkerStats]) -> None:
        """Take what the workers have counted up to now. Workers that are not among them are forgotten."""
        last, self._last = self._last, {}
        rates, self._rates = self._rates, {}
        for name, one in stats.items():
            key = (name, one.incarnation)
            counts = (one.pool_read_nbytes, one.pool_written_nbytes, one.handoff_nbytes)
            before_s, before = last.get(key, (now_s, counts))
            passed_s = now_s - before_s
            if passed_s > 0:
                self._rates[key] = tuple(
                    round(max(0, new - old) / passed_s, 1) for new, old in zip(counts, before, strict=True)
                )
            else:
                self._rates[key] = rates.get(key, (0.0, 0.0, 0.0))
            self._last[key] = (now_s, counts)

    def of(self, stats: WorkerStats) -> tuple[float, ...]:
        """Return the rates of pool reads, pool writes and hand-offs."""
        return self._rates.get((stats.name, stats.incarnation), (0.0, 0.0, 0.0))


def worker_row(worker: WorkerStatus, stats: WorkerStats | None, rates: ByteRates) -> WorkerRow:
    """Return the row of a registered worker. Without its own answer (`stats`), its last report counts."""
    info, load = worker.info, worker.load
    free = load.free_pages if stats is None else stats.free_pages
    cached = 0 if stats is None else min(stats.cached_pages, free)
    reserved = 0 if stats is None else stats.reserved_pages
    read, written, handed = (0.0, 0.0, 0.0) if stats is None else rates.of(stats)
    return WorkerRow(
        name=info.name,
        role=info.role.value,
        machine=machine_of([info.address]),
        is_up=True,
        is_late=worker.is_late,
        is_elastic=not info.fixed,
        num_running=load.num_running if stats is None else stats.num_running,
        num_waiting=load.num_waiting if stats is None else stats.num_waiting,
        waiting_tokens=load.waiting_tokens,
        max_num_seqs=info.max_num_seqs,
        num_pages=info.num_pages,
        used_pages=max(0, info.num_pages - free - reserved),
        reserved_pages=reserved,
        cached_pages=cached,
        pool_read_nbytes_s=read,
        pool_written_nbytes_s=written,
        handoff_nbytes_s=handed,
    )


class WorkerRows:
    """Remembers workers that were there, so that one that is gone is still shown."""

    def __init__(self, expected: Sequence[str]) -> None:
        self._expected = tuple(expected)
        self._seen: dict[str, tuple[float, WorkerRow]] = {}

    def update(self, rows: Sequence[WorkerRow], left: Sequence[str], now_s: float) -> list[WorkerRow]:
        """Return the rows, and one for each worker that is missing: it is expected, or was there a while ago and has
        not left for good."""
        self._seen |= {row.name: (now_s, row) for row in rows}
        for name, (seen_s, _) in list(self._seen.items()):
            if name in left or (now_s - seen_s > FORGET_S and name not in self._expected):
                del self._seen[name]
        present = {row.name for row in rows}
        gone = {name: _gone(row) for name, (_, row) in self._seen.items() if name not in present}
        for name in self._expected:
            if name not in present and name not in left:
                gone.setdefault(name, WorkerRow(name=name, role=_role_in(name), machine=THIS_MACHINE, is_up=False))
        return sorted([*rows, *gone.values()], key=lambda row: (row.role != WorkerRole.PREFILL.value, row.name))


def _gone(row: WorkerRow) -> WorkerRow:
    """Return the row of a worker whose process, and with it everything that it held, is gone."""
    return WorkerRow(
        name=row.name,
        role=row.role,
        machine=row.machine,
        is_up=False,
        is_elastic=row.is_elastic,
        max_num_seqs=row.max_num_seqs,
        num_pages=row.num_pages,
    )


def _role_in(name: str) -> str:
    """Return the role of a worker that was never seen: launchers put it into the name."""
    return next((role.value for role in WorkerRole if role.value in name), "")


def node_rows(stats: StoreStats | None, infos: Sequence[SegmentInfo], expected: Sequence[str]) -> list[NodeRow]:
    """Return a row per node: those that have mounted memory or disk, and those that are expected."""
    machines = {info.node: machine_of(info.descriptor.endpoints) for info in infos}
    by_node: dict[str, list[SegmentStats]] = {name: [] for name in expected}
    for segment in () if stats is None else stats.segments:
        by_node.setdefault(segment.node, []).append(segment)
    rows = []
    for name, segments in sorted(by_node.items()):
        is_up = any(segment.status != "away" for segment in segments)
        tiers = [] if stats is None else [_segment_row(segment, stats) for segment in segments]
        rows.append(NodeRow(name=name, machine=machines.get(name, THIS_MACHINE), is_up=is_up, segments=tiers))
    return rows


def _segment_row(segment: SegmentStats, stats: StoreStats) -> SegmentRow:
    is_dram = bool(segment.tier & Tier.DRAM)
    return SegmentRow(
        tier="dram" if is_dram else "ssd",
        status=segment.status,
        capacity_nbytes=segment.capacity_nbytes,
        used_nbytes=segment.used_nbytes,
        num_objects=segment.num_objects,
        high_watermark=stats.high_watermark if is_dram else stats.ssd_high_watermark,
    )
