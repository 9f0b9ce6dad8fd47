"""The table of `moonpool trace describe`, and the picture below it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from moonpool.traces.columns import Trace
from moonpool.traces.picture import draw
from moonpool.traces.statistics import LENGTH_PERCENTILES, Lengths, TraceStatistics

_MAX_WIDTH = 100


def show(trace: Trace, statistics: TraceStatistics) -> None:
    """On standard output; plain where that is no terminal."""
    console = Console(highlight=False)
    table = Table(title=statistics.name, title_justify="left", show_header=False, box=None, pad_edge=False)
    for name, value in _rows(statistics):
        table.add_row(name, value)
    console.print(table)
    console.print()
    for line in draw(trace, statistics, min(console.width, _MAX_WIDTH)):
        shown = line if console.encoding.lower().startswith("utf") else _plain(line)
        console.print(shown, markup=False, no_wrap=True, overflow="crop")


def _plain(line: str) -> str:
    return "".join(letter if letter.isascii() else "#" for letter in line)


def _rows(found: TraceStatistics) -> Iterator[tuple[str, str]]:
    yield "requests", f"{found.num_requests} in {found.duration_s:.0f} s: {found.rate_per_s:.2f} per second"
    steps = f"{found.num_distinct_arrivals} distinct times, variance / mean per 3 s {found.dispersion:.2f}"
    yield "arrivals", f"{steps} (Poisson: 1)"
    heads = "/".join("max" if percent == 100 else f"p{percent}" for percent in LENGTH_PERCENTILES)
    yield "input tokens", f"mean {found.num_input.mean:.0f}; {heads} {_percentiles(found.num_input)}"
    yield "output tokens", f"mean {found.num_output.mean:.0f}; {heads} {_percentiles(found.num_output)}"
    blocks = f"{found.num_blocks} of {found.block_tokens} tokens, {found.num_unique_blocks} unique"
    yield "blocks", f"{blocks}, {found.used_once:.0%} of these used once"
    hits = f"{found.hit_tokens:.1%} of tokens, {found.hit_blocks:.1%} of blocks"
    yield "most that can hit", f"{hits}, {found.hit_mean_per_request:.1%} of a request on average"
    yield "requests that hit", f"0 blocks {found.no_hit:.0%}, 1 block {found.one_hit:.0%}, more {found.more_hits:.0%}"
    gaps = ", ".join(f"p{percent} {gap_s:.0f} s" for percent, gap_s in found.reuse_gap_s.items())
    yield "until used again", gaps or "nothing is used again"


def _percentiles(lengths: Lengths) -> str:
    return "/".join(f"{value:.0f}" for value in lengths.percentiles.values())
