"""The table of `moonpool replay`: one column per system."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moonpool.base.units import format_nbytes
from moonpool.sim.outcome import Outcome
from moonpool.sim.report.labels import conclusion, label, shown
from moonpool.sim.report.page import LINK_NAMES
from moonpool.sim.world.results import HIT_PLACES

_WIDE = 400  # columns of a file: nothing is wrapped
_NAME_WIDTH, _CELL_WIDTH, _GAP = 34, 10, 2
_LINKS = ("nic_out", "h2d", "d2h", "ssd_read", "ssd_write")
_PLACE_NAMES = {"local": "the GPUs' own pages", "dram": "own memory", "remote": "others' memory", "ssd": "disks"}
Cell = Callable[[Outcome], str]


def show(outcomes: Sequence[Outcome]) -> None:
    """On standard output; plain where that is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    first = outcomes[0]
    for name, value in first.machine.items():
        console.print(f"{label(name)}: {shown(name, value)}", markup=False)
    console.print()
    for group in _groups(outcomes, console.width):
        console.print(_table(group))
        console.print()
    for each in outcomes:
        for reason, count in each.refusals.items():
            console.print(f"{each.system} refused {count}: {reason}", markup=False)
    console.print("", conclusion(outcomes), sep="\n", markup=False)


def _groups(outcomes: Sequence[Outcome], width: int) -> Iterator[Sequence[Outcome]]:
    """As many systems as fit beside each other."""
    widths = [max(len(each.system), _CELL_WIDTH) + _GAP for each in outcomes]
    begin = 0
    while begin < len(outcomes):
        end, left = begin, width - _NAME_WIDTH
        while end < len(outcomes) and (end == begin or widths[end] <= left):
            left -= widths[end]
            end += 1
        yield outcomes[begin:end]
        begin = end


def _table(outcomes: Sequence[Outcome]) -> Table:
    first = outcomes[0]
    title = f"{first.trace}, load x {first.load:g}"
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for each in outcomes:
        table.add_column(escape(each.system), justify="right", overflow="fold")
    for name, cell in _rows(first):
        table.add_row(name, *(escape(cell(each)) for each in outcomes))
    return table


def _rows(first: Outcome) -> Iterator[tuple[str, Cell]]:
    targets = f"TTFT {first.ttft_target_s:g} s, TBT {first.tbt_target_s * 1e3:g} ms"
    yield f"done within {targets}", _share("effective_share")
    yield "goodput, requests/s", _number("goodput_per_s", ".3f")
    yield "requests done", _number("num_done", ".0f")
    yield "refused", _number("num_refused", ".0f")
    yield "lost with workers", _number("num_lost", ".0f")
    yield "tried again", _number("num_retries", ".0f")
    yield "never done", _number("num_unfinished", ".0f")
    for name in ("mean", "p50", "p90", "p99"):
        yield f"TTFT {name}, s", _number(f"ttft_s_{name}", ".2f")
    for name in ("mean", "p50", "p90", "p99"):
        yield f"TBT {name}, ms", _number(f"tbt_s_{name}", ".1f", 1e3)
    yield "prompt tokens reused", _share("hit_share")
    for place in HIT_PLACES:
        yield f"  from {_PLACE_NAMES[place]}", _share(f"hit_share_{place}")
    yield "prefill GPU seconds", _number("prefill_gpu_s", ".0f")
    yield "GPU seconds saved by reuse", _number("saved_gpu_s", ".0f")
    for kind in _LINKS:
        yield f"{LINK_NAMES[kind]}: moved", _moved(kind)
        yield "  mean and peak use", _use(kind)


def _number(name: str, form: str, times: float = 1.0) -> Cell:
    return lambda outcome: format(outcome.numbers[name] * times, form)


def _share(name: str) -> Cell:
    return lambda outcome: f"{outcome.numbers[name]:.1%}"


def _moved(kind: str) -> Cell:
    return lambda outcome: format_nbytes(int(outcome.links[kind].nbytes)) if kind in outcome.links else "-"


def _use(kind: str) -> Cell:
    def cell(outcome: Outcome) -> str:
        use = outcome.links.get(kind)
        return "-" if use is None else f"{use.mean_share:.1%} {use.peak_share:.1%}"

    return cell
