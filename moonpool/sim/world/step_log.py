"""How far apart tokens came: one entry per run of equal decode steps of a worker, whoever was in the batch."""

from __future__ import annotations

_LONGEST_PART = 10  # one in so many gaps counts: the longest


class StepLog:
    """Entries are never changed; a request remembers where its own begin."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._gaps_s: list[float] = []

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, num_steps: int, seconds: float) -> None:
        """So many steps that took so long together."""
        self._counts.append(num_steps)
        self._gaps_s.append(seconds / num_steps)

    def gaps(self, first_entry: int, first_gap_s: float | None = None) -> list[tuple[float, int]]:
        """Seconds and how many since then; `first_gap_s` came before them."""
        gaps = list(zip(self._gaps_s[first_entry:], self._counts[first_entry:], strict=True))
        if first_gap_s is not None:
            gaps.append((first_gap_s, 1))
        return gaps

    def long_gaps_s(self, first_entry: int, first_gap_s: float | None = None) -> float:
        return mean_of_longest_s(self.gaps(first_entry, first_gap_s))


def mean_of_longest_s(gaps: list[tuple[float, int]]) -> float:
    """The mean of the longest tenth of the gaps, at least one."""
    gaps.sort(reverse=True)
    wanted = left = max(1, sum([count for _, count in gaps]) // _LONGEST_PART)
    total_s = 0.0
    for gap_s, count in gaps:
        taken = min(count, left)
        total_s += taken * gap_s
        left -= taken
        if not left:
            break
    return total_s / wanted
