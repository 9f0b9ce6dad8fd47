"""`moonpool stat`: what the pool holds per tier and per segment, which tasks run (copies, moves, drains), how its
journal is, and what it has been doing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import typer

from moonpool.base.metrics import MetricFamily
from moonpool.base.units import format_nbytes
from moonpool.cli.pool import MasterOption, pool
from moonpool.store.messages import SegmentStats, StoreStats, TaskInfo, Tier

_JOURNAL = "moonpool_journal_"


def command(
    json: Annotated[bool, typer.Option("--json", help="for programs: one JSON object")] = False,
    master: MasterOption = None,
) -> None:
    with pool(master) as store:
        stats, tasks, journal = store.stats(), store.tasks.running(), _journal(store.metrics())
    if json:
        fields: dict[str, Any] = {**msgspec.to_builtins(stats), "tiers": _tiers(stats), "journal": journal}
        fields["tasks"] = tasks
        print(msgspec.json.encode(fields).decode())
    else:
        print("\n".join(_in_words(stats, tasks, journal)))


def _tiers(stats: StoreStats) -> dict[str, dict[str, int]]:
    """Sums of the segments of each tier that there is."""
    by_tier = {tier.name.lower(): [each for each in stats.segments if each.tier & tier] for tier in Tier if tier.name}
    return {name: _sum(segments) for name, segments in by_tier.items() if segments}


def _sum(segments: list[SegmentStats]) -> dict[str, int]:
    return {
        "num_objects": sum(each.num_objects for each in segments),
        "used_nbytes": sum(each.used_nbytes for each in segments),
        "capacity_nbytes": sum(each.capacity_nbytes for each in segments),
    }


def _journal(families: Iterable[MetricFamily]) -> dict[str, int] | None:
    """durable, bytes, unsynced_bytes; None when the master keeps no journal."""
    found = {family.name: family for family in families if family.name.startswith(_JOURNAL)}
    return {name.removeprefix(_JOURNAL): int(family.samples[0].value) for name, family in found.items()} or None


def _in_words(stats: StoreStats, tasks: Iterable[TaskInfo], journal: dict[str, int] | None) -> list[str]:
    lines = [f"{stats.num_objects} objects"]
    for name, tier in _tiers(stats).items():
        lines.append(f"{name.upper()}: {tier['num_objects']} replicas, {_room(**tier)}")
    for each in stats.segments:
        room = _room(used_nbytes=each.used_nbytes, capacity_nbytes=each.capacity_nbytes)
        lines.append(f"  {each.name}  {each.status}, {each.num_objects} replicas, {room}")
    for task in tasks:
        moved = f"{task.num_done} of {task.num_total} objects, {format_nbytes(task.nbytes_moved)}"
        lines.append(f"task {task.task_id}: {task.kind} {task.segment}, {task.state}, {moved}")
    lines.append(_journal_in_words(journal))
    return lines + [f"  {name} = {count}" for name, count in sorted(stats.counters.items())]


def _room(*, used_nbytes: int, capacity_nbytes: int, **_: int) -> str:
    return f"{format_nbytes(used_nbytes)} of {format_nbytes(capacity_nbytes)}"


def _journal_in_words(journal: dict[str, int] | None) -> str:
    if journal is None:
        return "journal: none; a restart of the master forgets what is in memory"
    health = "ok" if journal.get("durable") else "NOT DURABLE, a restart may forget something"
    size, unsynced = format_nbytes(journal.get("bytes", 0)), format_nbytes(journal.get("unsynced_bytes", 0))
    return f"journal: {health}; {size} to replay, {unsynced} not yet on disk"
