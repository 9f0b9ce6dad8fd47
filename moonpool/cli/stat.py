"""`moonpool stat`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from moonpool.base.units import format_nbytes
from moonpool.cli.pool import MasterOption, pool
from moonpool.store.messages import StoreStats


def command(
    json: Annotated[bool, typer.Option("--json", help="for programs: one JSON object")] = False,
    master: MasterOption = None,
) -> None:
    with pool(master) as client:
        stats = client.stats()
    print(msgspec.json.encode(stats).decode() if json else _in_words(stats))


def _in_words(stats: StoreStats) -> str:
    used, capacity = format_nbytes(stats.used_nbytes), format_nbytes(stats.capacity_nbytes)
    lines = [f"{stats.num_objects} objects, {used} of {capacity}"]
    for segment in stats.segments:
        used, capacity = format_nbytes(segment.used_nbytes), format_nbytes(segment.capacity_nbytes)
        lines.append(f"  {segment.name}  {segment.num_objects} objects, {used} of {capacity}")
    lines += [f"  {name} = {count}" for name, count in sorted(stats.counters.items())]
    return "\n".join(lines)
