"""Least squares with coefficients that are not negative, for the few features of a cost model. Pure.

In plain floats: for systems of four rows a call of numpy costs more than all the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

_SINGULAR = 1e-300


def nonnegative_minimum(gram: Sequence[Sequence[float]], moment: Sequence[float]) -> list[float]:
    """argmin over x >= 0 of x'Gx - 2x'm, exactly: the best feasible solution over all supports (there are few)."""
    count = len(moment)
    best, best_value = [0.0] * count, 0.0
    for size in range(count, 0, -1):
        for support in combinations(range(count), size):
            part = _solve([[gram[i][j] for j in support] for i in support], [moment[i] for i in support])
            if part is None or min(part) < 0:
                continue  # singular: the samples cannot tell these apart, and a smaller support can do as well
            value = -sum([x * moment[i] for x, i in zip(part, support, strict=True)])
            if value < best_value:
                best, best_value = [0.0] * count, value
                for x, i in zip(part, support, strict=True):
                    best[i] = x
        if size == count and best_value < 0:
            return best  # no bound is touched: nothing can be better, and it is the usual case
    return best


def _solve(rows: list[list[float]], right: list[float]) -> list[float] | None:
    """By elimination with pivots; both are used up. None when there is no one solution."""
    count = len(right)
    for at in range(count):
        pivot = max(range(at, count), key=lambda row: abs(rows[row][at]))
        if not abs(rows[pivot][at]) > _SINGULAR:
            return None
        if pivot != at:
            rows[at], rows[pivot] = rows[pivot], rows[at]
            right[at], right[pivot] = right[pivot], right[at]
        top = rows[at]
        for below in range(at + 1, count):
            factor = rows[below][at] / top[at]
            if factor:
                row = rows[below]
                for column in range(at + 1, count):
                    row[column] -= factor * top[column]
                right[below] -= factor * right[at]
    for at in range(count - 1, -1, -1):
        row = rows[at]
        for column in range(at + 1, count):
            right[at] -= row[column] * right[column]
        right[at] /= row[at]
    return right
