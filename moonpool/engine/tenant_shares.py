"""How tenants share the places of a batch and the pages: who is next, and who gives way to whom. Pure.

A tenant's share of something is what its sequences have of it, divided by its weight. The tenant with the smallest
share is served first. A sequence gives way only to one of a tenant that would still have no larger share than the
tenant that loses it: so the largest difference of two shares falls each time, and two tenants never take turns in
taking a place from each other. With one tenant no sequence gives way to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq

from moonpool.engine.sequence import Sequence


def _one(_: Sequence) -> int:
    return 1


def num_pages(sequence: Sequence) -> int:
    return len(sequence.pages)


def shares(sequences: Iterable[Sequence], amount: Callable[[Sequence], int] = _one) -> dict[str, float]:
    """Return each tenant's share: of places in the batch, or of what `amount` counts."""
    found: dict[str, float] = {}
    for each in sequences:
        found[each.tenant] = found.get(each.tenant, 0.0) + amount(each) / each.weight
    return found


def next_to_start(waiting: Seq[Sequence], running: Iterable[Sequence]) -> Sequence:
    """Return the sequence that gets the next place: the first of the tenant that has the smallest share of places.
    `waiting` is in order of arrival."""
    if len({each.tenant for each in waiting}) == 1:
        return waiting[0]
    taken = shares(running)
    return min(waiting, key=lambda each: (taken.get(each.tenant, 0.0), each.arrival))


def to_stand_down(sequence: Sequence, running: Seq[Sequence]) -> Sequence | None:
    """Return the sequence that gives its place to this one; None: no tenant has enough more places."""
    taken = shares(running)
    wanted = taken.get(sequence.tenant, 0.0) + 1 / sequence.weight
    able = [each for each in running if each.num_uncomputed_tokens == 1 and not each.num_alone_steps]
    return _from_largest(able, taken, wanted, _one)


def to_preempt(running: Seq[Sequence]) -> Sequence:
    """Return the sequence that loses its pages when a running one needs some: the latest of the tenant with the largest
    share of pages. It is never the earliest of all, unless that one is alone; so the earliest always advances."""
    taken = shares(running, num_pages)
    return max(running[1:] or running, key=lambda each: (taken[each.tenant], each.arrival))


def to_make_way(
    candidates: Seq[Sequence], taken: Mapping[str, float], tenant: str, wanted: float, lacking: int
) -> list[Sequence]:
    """Return the sequences that lose their pages so that `lacking` more are free for a tenant, whose share of pages is
    `wanted` then; empty if it is not to have them. `taken` are the shares of all."""
    left, found, able = dict(taken), list[Sequence](), list(candidates)
    while lacking > 0:
        chosen = _from_largest([each for each in able if each.tenant != tenant], left, wanted, num_pages)
        if chosen is None:
            return []
        able.remove(chosen)
        found.append(chosen)
        left[chosen.tenant] -= len(chosen.pages) / chosen.weight
        lacking -= len(chosen.pages)
    return found


def _from_largest(
    able: Iterable[Sequence], taken: Mapping[str, float], wanted: float, amount: Callable[[Sequence], int]
) -> Sequence | None:
    """Return the latest sequence of the tenant with the largest share, if that share is no smaller than `wanted`
    without it."""
    latest = max(able, key=lambda each: (taken[each.tenant], each.arrival), default=None)
    if latest is None or taken[latest.tenant] - amount(latest) / latest.weight < wanted:
        return None
    return latest
