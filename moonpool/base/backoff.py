"""Exponential pauses between the attempts of a retry loop. Pure: the caller does the waiting."""

from __future__ import annotations

from moonpool.base.errors import ConfigError

_MAX_DOUBLINGS = 30  # keeps 2.0 ** n finite, however long an outage lasts


def backoff_s(num_pauses: int, first_s: float, longest_s: float) -> float:
    """Return the pause that follows `num_pauses` earlier ones: `first_s`, doubled each time, at most `longest_s`."""
    return min(first_s * 2.0 ** min(num_pauses, _MAX_DOUBLINGS), longest_s)


class Backoff:
    """Counts the pauses of one retry loop. Call reset() after an attempt that succeeded.

    With `immediate` the first retry follows without a pause.
    """

    __slots__ = ("_first_s", "_immediate", "_longest_s", "_num_pauses")

    def __init__(self, first_s: float, longest_s: float, *, immediate: bool = False) -> None:
        if not 0 < first_s <= longest_s:
            raise ConfigError(f"the first pause must be above 0 and at most {longest_s:g} s, not {first_s:g} s")
        self._first_s, self._longest_s, self._immediate = first_s, longest_s, immediate
        self.reset()

    def next_s(self) -> float:
        """Return how long to pause before the next attempt."""
        self._num_pauses += 1
        return 0.0 if self._num_pauses == 0 else backoff_s(self._num_pauses - 1, self._first_s, self._longest_s)

    def reset(self) -> None:
        """Begin again with the first pause."""
        self._num_pauses = -1 if self._immediate else 0
