"""Which workers to start and which to drain, so that each role has as many as wanted. Pure.

Workers count in the role that they have now, which is not always the one in their name: `moonpool role` and the elastic
rule change roles. Scaling changes no roles. So the two do not work against each other: scaling decides how many workers
there are, and the rule, as the load moves, which role each of them has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count, islice

from moonpool.base.cluster import WorkerRole


@dataclass(frozen=True, slots=True)
class ScalePlan:
    starts: tuple[tuple[WorkerRole, int], ...]  # role and number of each new worker
    drains: tuple[str, ...]  # names


def plan_scale(
    present: Mapping[str, WorkerRole], wanted: Mapping[WorkerRole, int], taken: Collection[str], prefix: str = ""
) -> ScalePlan:
    """Return what changes `present`, the workers by name with their roles, to the `wanted` numbers. New workers get the
    lowest numbers whose names are not `taken`; the workers with the highest numbers are drained."""
    starts: list[tuple[WorkerRole, int]] = []
    drains: list[str] = []
    for role, number in wanted.items():
        mine = sorted((name for name, each in present.items() if each is role), key=_number, reverse=True)
        free = (n for n in count() if f"{prefix}{role}-{n}" not in taken)
        starts += [(role, n) for n in islice(free, max(0, number - len(mine)))]
        drains += mine[: max(0, len(mine) - number)]
    return ScalePlan(tuple(starts), tuple(drains))


def _number(name: str) -> tuple[int, str]:
    """Return a sort key: the number at the end of a worker's name."""
    digits = name.rpartition("-")[2]
    return (int(digits) if digits.isdigit() else 0), name
