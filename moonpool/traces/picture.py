"""Text charts of a trace: lengths, arrivals over time, and hit rate by cache size.

Every function yields lines of at most `width` columns, also for a trace of one request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from moonpool.traces.columns import Floats, Ints, Trace
from moonpool.traces.statistics import TraceStatistics

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = " ▁▂▃▄▅▆▇█"
_MIN_BAR = 10


def draw(trace: Trace, statistics: TraceStatistics, width: int = 80) -> Iterator[str]:
    """Yield all charts, each under its title."""
    yield "input tokens"
    yield from histogram(trace.num_input, width)
    yield ""
    yield "output tokens"
    yield from histogram(trace.num_output, width)
    yield ""
    yield "requests over time"
    yield from over_time(trace.arrival_s, width)
    yield ""
    yield "input tokens that an LRU cache hits, by its size in tokens"
    yield from hit_bars(statistics, width)


def histogram(tokens: Ints, width: int) -> Iterator[str]:
    """Yield one bar per power of two."""
    powers = np.floor(np.log2(np.maximum(tokens, 1))).astype(np.int64)
    counts = np.bincount(powers)
    labels = [f"{2**power:>7}+" for power in range(len(counts))]
    first = int(np.flatnonzero(counts)[0])
    yield from _bars(labels[first:], counts[first:] / len(tokens), width)


def over_time(arrival_s: Floats, width: int) -> Iterator[str]:
    """Yield one column per equal part of the time; the highest fills the line."""
    begin_s, end_s = float(arrival_s[0]), float(arrival_s[-1])
    num_columns = max(_MIN_BAR, width - 2)
    counts, edges = np.histogram(arrival_s, bins=num_columns, range=(begin_s, max(end_s, begin_s + 1e-3)))
    highest = int(counts.max())
    heights = -(-counts * (len(_LEVELS) - 1) // highest)
    yield "".join(_LEVELS[height] for height in heights)
    per_s = highest / float(edges[1] - edges[0])
    yield f"{begin_s:.0f} s to {end_s:.0f} s; the highest column is {per_s:.3g} requests/s"


def hit_bars(statistics: TraceStatistics, width: int) -> Iterator[str]:
    """Yield one bar per cache size, and one for an unlimited cache."""
    labels = [f"{_short(tokens):>7} " for tokens in statistics.lru_hit_tokens]
    shares = [*statistics.lru_hit_tokens.values(), statistics.hit_tokens]
    yield from _bars([*labels, "no limit"], np.array(shares), width, full=1.0)


def _bars(labels: Sequence[str], shares: Floats, width: int, full: float | None = None) -> Iterator[str]:
    """`full` is the share that fills the line; None: the largest share."""
    room = max(_MIN_BAR, width - max(map(len, labels)) - 9)
    whole = full or float(shares.max()) or 1.0
    for label, share in zip(labels, shares.tolist(), strict=True):
        eighths = round(share / whole * room * 8)
        bar = _EIGHTHS[8] * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
        yield f"{label} {share:6.1%} {bar}".rstrip()


def _short(number: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return str(number)
