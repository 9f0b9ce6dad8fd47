"""`moonpool stat`: usage of the pool per tier and segment, its hit rate, its running tasks (copies, moves, drains), the
workers that use it, the state of its journal, and counters since the master started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer

from moonpool.base.errors import Unavailable
from moonpool.base.metrics import MetricFamily
from moonpool.base.units import format_nbytes
from moonpool.cli.pool import (
    ConductorOption,
    MasterOption,
    ask_conductor,
    conductor_address,
    master_address,
    named_conductor,
    pool,
)
from moonpool.conductor.messages import Status, WorkerStatus
from moonpool.store.messages import SegmentStats, StoreStats, TaskInfo, Tier

_JOURNAL = "moonpool_journal_"
# Counters that have lines of their own.
_TOLD = ("hits", "misses", "hot_objects", "hot_bytes", "hot_replicas", "hot_dropped", "hot_reads", "hot_saved_bytes")


def command(
    json: Annotated[bool, typer.Option("--json", help="print one JSON object, with exact numbers")] = False,
    master: MasterOption = None,
    conductor: ConductorOption = None,
) -> None:
    address = master_address(master)
    with pool(address) as store:
        stats, tasks, journal = store.stats(), store.tasks.running(), _journal(store.metrics())
    workers = _workers(conductor_address(conductor, address), is_named=named_conductor(conductor) is not None)
    if json:
        fields: dict[str, Any] = {**msgspec.to_builtins(stats), "tiers": _tiers(stats), "journal": journal}
        fields |= {"tasks": tasks, "hit_rate": hit_rate(stats.counters), "workers": workers}
        print(msgspec.json.encode(fields).decode())
    else:
        print("\n".join(_as_lines(stats, tasks, journal, workers)))


def hit_rate(counters: Mapping[str, int]) -> float | None:
    """Return the part of all look-ups that found their object; None when there were none."""
    hits, misses = counters.get("hits", 0), counters.get("misses", 0)
    return hits / (hits + misses) if hits + misses else None


def _workers(address: str | None, *, is_named: bool) -> Sequence[WorkerStatus] | None:
    """Return the conductor's workers; None if there is no conductor. Raise if it was named and does not reply."""
    if address is None:
        return None
    try:
        return ask_conductor(address, Status()).workers
    except Unavailable:
        if is_named:
            raise
        return None  # it is starting or stopping; the pool works without it


def _tiers(stats: StoreStats) -> dict[str, dict[str, int]]:
    """Return the sums over the segments of each tier that has segments."""
    by_tier = {tier.name.lower(): [each for each in stats.segments if each.tier & tier] for tier in Tier if tier.name}
    return {name: _sum(segments) for name, segments in by_tier.items() if segments}


def _sum(segments: list[SegmentStats]) -> dict[str, int]:
    return {
        "num_objects": sum(each.num_objects for each in segments),
        "used_nbytes": sum(each.used_nbytes for each in segments),
        "capacity_nbytes": sum(each.capacity_nbytes for each in segments),
    }


def _journal(families: Iterable[MetricFamily]) -> dict[str, int] | None:
    """Return durable, bytes and unsynced_bytes; None if the master writes no journal."""
    found = {family.name: family for family in families if family.name.startswith(_JOURNAL)}
    return {name.removeprefix(_JOURNAL): int(family.samples[0].value) for name, family in found.items()} or None


def _as_lines(
    stats: StoreStats,
    tasks: Iterable[TaskInfo],
    journal: dict[str, int] | None,
    workers: Sequence[WorkerStatus] | None,
) -> list[str]:
    lines = [f"{stats.num_objects:,} objects", _hits_line(stats.counters)]
    for name, tier in _tiers(stats).items():
        lines.append(f"{name.upper()}: {tier['num_objects']:,} replicas, {_room(**tier)}")
    for each in stats.segments:
        room = _room(used_nbytes=each.used_nbytes, capacity_nbytes=each.capacity_nbytes)
        lines.append(f"  {each.name}  {each.status}, {each.num_objects:,} replicas, {room}")
    for task in tasks:
        moved = f"{task.num_done:,} of {task.num_total:,} objects, {format_nbytes(task.nbytes_moved)}"
        lines.append(f"task {task.task_id}: {task.kind} {task.segment}, {task.state}, {moved}")
    lines += _hot_lines(stats)
    lines += _worker_lines(workers)
    lines.append(_journal_line(journal, stats.journal_error))
    events = {name: count for name, count in sorted(stats.counters.items()) if count and name not in _TOLD}
    if events:
        lines.append("since the master started: " + ", ".join(f"{n:,} {_plain(name)}" for name, n in events.items()))
    return lines


def _hits_line(counters: Mapping[str, int]) -> str:
    rate, hits = hit_rate(counters), counters.get("hits", 0)
    if rate is None:
        return "hit rate: no look-ups yet"
    return f"hit rate: {rate:.1%} ({hits:,} of {hits + counters.get('misses', 0):,} look-ups found their object)"


def _hot_lines(stats: StoreStats) -> list[str]:
    """Return what the extra replicas of hot keys take, and what they saved; nothing if there were none."""
    counters = stats.counters
    if not counters.get("hot_replicas") and not counters.get("hot_objects"):
        return []
    taken, saved = format_nbytes(counters["hot_bytes"]), format_nbytes(counters["hot_saved_bytes"])
    part = f" ({counters['hot_bytes'] / stats.capacity_nbytes:.1%} of memory)" if stats.capacity_nbytes else ""
    return [
        f"hot keys: {counters['hot_objects']:,} objects have extra replicas, {taken}{part}",
        f"  since the master started: {counters['hot_replicas']:,} made, {counters['hot_dropped']:,} dropped; "
        f"{counters['hot_reads']:,} reads took about {saved} from them",
    ]


def _worker_lines(workers: Sequence[WorkerStatus] | None) -> list[str]:
    if workers is None:
        return []
    many = "1 worker" if len(workers) == 1 else f"{len(workers)} workers"
    lines = [many if workers else "no worker is registered"]
    for each in workers:
        info, load = each.info, each.load
        pages = f"{load.free_pages:,} of {info.num_pages:,} KV pages free"
        role = info.role if info.fixed else f"{info.role} (elastic)"
        lines.append(f"  {info.name}  {role}, {load.num_running} running, {load.num_waiting} waiting, {pages}")
    return lines


def _plain(counter: str) -> str:
    return counter.replace("_", " ")


def _room(*, used_nbytes: int, capacity_nbytes: int, **_: int) -> str:
    part = f" ({used_nbytes / capacity_nbytes:.0%})" if capacity_nbytes else ""
    return f"{format_nbytes(used_nbytes)} of {format_nbytes(capacity_nbytes)}{part}"


def _journal_line(journal: dict[str, int] | None, error: str | None) -> str:
    if journal is None:
        return "journal: none; a restarted master does not know the objects in memory"
    health = "ok" if journal.get("durable") else "NOT DURABLE, a restarted master may miss objects"
    health += f" ({error})" if error else ""
    size, unsynced = format_nbytes(journal.get("bytes", 0)), format_nbytes(journal.get("unsynced_bytes", 0))
    return f"journal: {health}; {size} to replay, {unsynced} not yet on disk"
