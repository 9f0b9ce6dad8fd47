"""How long each file of tests took, beside the run before. No I/O.

A file that becomes slower is named, and that is all: no verdict follows the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

SLOWER_RATIO = 1.2
SLOWER_S = 1.0  # less is the host's
NUM_SLOWEST = 10


@dataclass(frozen=True)
class FileTime:
    seconds: float  # of its tests, with their set-up and their end
    num_tests: int


def measured(seconds: Mapping[str, float], num_tests: Mapping[str, int]) -> dict[str, FileTime]:
    return {file: FileTime(round(seconds[file], 3), num_tests[file]) for file in sorted(seconds)}


def from_json(content: Mapping[str, Any]) -> dict[str, FileTime]:
    return {file: FileTime(**times) for file, times in content.items()}


def to_json(times: Mapping[str, FileTime]) -> dict[str, Any]:
    return {file: asdict(time) for file, time in times.items()}


def slowest(now: Mapping[str, FileTime]) -> Iterable[str]:
    by_time = sorted(now.items(), key=lambda item: -item[1].seconds)
    return [f"{time.seconds:8.1f} s  {file}" for file, time in by_time[:NUM_SLOWEST]]


def slower(before: Mapping[str, FileTime], now: Mapping[str, FileTime]) -> Iterable[str]:
    """A line for each file that became slower by a fifth, and by a second."""
    for file, time in sorted(now.items()):
        old = before.get(file)
        if old and time.seconds > SLOWER_RATIO * old.seconds and time.seconds > old.seconds + SLOWER_S:
            yield (
                f"slower: {file}: {time.seconds:.1f} s for {time.num_tests} tests, "
                f"before {old.seconds:.1f} s for {old.num_tests}"
            )
