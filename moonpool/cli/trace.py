"""`moonpool trace describe | generate | change`: show statistics of a trace, generate one, or make one from others."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from moonpool.base.errors import AlreadyExists, InvalidInput
from moonpool.cli.cluster_options import BlockTokensOption
from moonpool.cli.progress import bytes_moved
from moonpool.traces.columns import Trace
from moonpool.traces.distributions import Arrivals
from moonpool.traces.generate import KINDS, generate, generate_like
from moonpool.traces.mooncake_jsonl import read_jsonl, write_jsonl
from moonpool.traces.picture import draw
from moonpool.traces.statistics import LENGTH_PERCENTILES, Lengths, TraceStatistics

command = typer.Typer(no_args_is_help=True)

_Number = TypeVar("_Number", int, float)
_LIKE = "like"
_KINDS_HELP = "; ".join(f"{name}: {kind.summary}" for name, kind in KINDS.items())
FileArgument: TypeAlias = Annotated[
    Path, typer.Argument(help="trace in Mooncake's format: one JSON object per line; may be gzipped (.gz)")
]
OutputOption: TypeAlias = Annotated[
    Path, typer.Option("-o", "--output", help="file to write; gzipped if it ends in .gz")
]
ForceOption: TypeAlias = Annotated[bool, typer.Option("--force", help="replace the output file if it exists")]
CvOption: TypeAlias = Annotated[
    float | None,
    typer.Option(help="variation of the gaps between arrivals: 0 even, 1 Poisson, above 1 bursty"),
]
StepOption: TypeAlias = Annotated[
    float | None, typer.Option(help="round arrivals down to multiples of this many seconds")
]
SeedOption: TypeAlias = Annotated[int, typer.Option(min=0, help="random seed; the same seed gives the same trace")]
_MAX_WIDTH = 100


@command.command("describe", help="Show statistics and a picture of a trace.")
def _describe(
    file: FileArgument,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object, without the picture")] = False,
    block_tokens: BlockTokensOption = None,
) -> None:
    import msgspec

    from moonpool.traces.statistics import describe

    trace = read_trace(file, block_tokens)
    statistics = describe(trace)
    if json:
        print(msgspec.json.encode(statistics).decode())
    else:
        _show(trace, statistics)


@command.command(
    "generate", help=f"Generate a trace. KIND is one of {_KINDS_HELP}; {_LIKE}: fitted to the trace given with --like."
)
def _generate(
    kind: Annotated[str, typer.Argument(help=", ".join([*KINDS, _LIKE]))],
    output: OutputOption,
    requests: Annotated[int | None, typer.Option(min=1, help="number of requests; default: the kind's")] = None,
    rate: Annotated[float | None, typer.Option(help="requests per second; default: the kind's")] = None,
    seed: SeedOption = 0,
    cv: CvOption = None,
    step: StepOption = None,
    like: Annotated[Path | None, typer.Option(help="with the kind `like`: the trace to imitate")] = None,
    force: ForceOption = False,
) -> None:
    refuse_existing(output, force)
    if (kind == _LIKE) != (like is not None):
        raise InvalidInput(f"--like FILE is required with the kind {_LIKE!r}, and allowed with no other kind")
    arrivals = _arrivals(cv, step)
    if like is not None:
        original = read_trace(like, None)
        trace = generate_like(original, num_requests=requests, rate_per_s=rate, seed=seed, arrivals=arrivals)
    else:
        trace = generate(kind, num_requests=requests, rate_per_s=rate, seed=seed, arrivals=arrivals)
    _write(trace, output, force)


@command.command(
    "change", help="Make a new trace from others. The changes are applied in the order in which they are listed here."
)
def _change(
    file: FileArgument,
    output: OutputOption,
    merge: Annotated[list[Path] | None, typer.Option(help="merge this trace in by arrival; may be repeated")] = None,
    share_blocks: Annotated[
        bool, typer.Option("--share-blocks", help="with --merge: equal block ids of different files are the same block")
    ] = False,
    slice: Annotated[str | None, typer.Option(help="keep seconds BEGIN:END; either may be omitted")] = None,
    requests: Annotated[str | None, typer.Option(help="keep requests BEGIN:END; either may be omitted")] = None,
    scale: Annotated[float | None, typer.Option(help="multiply the request rate by this factor")] = None,
    rate: Annotated[float | None, typer.Option(help="draw new arrival times, at this many requests per second")] = None,
    cv: CvOption = None,
    step: StepOption = None,
    seed: SeedOption = 0,
    cut_blocks: Annotated[int | None, typer.Option(help="split blocks into smaller ones of this many tokens")] = None,
    relabel: Annotated[bool, typer.Option("--relabel", help="renumber blocks by first appearance")] = False,
    tenant: Annotated[int | None, typer.Option(help="set the tenant of all requests")] = None,
    priority: Annotated[int | None, typer.Option(help="set the priority of all requests")] = None,
    block_tokens: BlockTokensOption = None,
    force: ForceOption = False,
) -> None:
    import numpy as np

    from moonpool.traces import changes

    refuse_existing(output, force)
    if rate is None and (cv is not None or step is not None):
        raise InvalidInput("--cv and --step shape the new arrivals of --rate; add --rate")
    trace = read_trace(file, block_tokens)
    if merge:
        trace = changes.merge([trace, *(read_trace(other, block_tokens) for other in merge)], share_blocks=share_blocks)
    if slice is not None:
        begin_s, end_s = parse_span(slice, "--slice", float)
        trace = changes.slice_time(trace, begin_s or 0.0, math.inf if end_s is None else end_s)
    if requests is not None:
        begin, end = parse_span(requests, "--requests", int)
        trace = changes.slice_count(trace, begin or 0, end)
    if scale is not None:
        trace = changes.scale_load(trace, scale)
    if rate is not None:
        arrivals = _arrivals(cv, step) or Arrivals()
        trace = changes.change_rate(trace, rate, arrivals, np.random.default_rng(seed))
    if cut_blocks is not None:
        trace = changes.rescale_blocks(trace, cut_blocks)
    if relabel:
        trace = changes.relabel(trace)
    _write(changes.label(trace, tenant=tenant, priority=priority), output, force)


def read_trace(file: Path, block_tokens: int | None) -> Trace:
    """Read the file; show progress on a terminal."""
    with bytes_moved(f"read {file}") as show:
        return read_jsonl(file, block_tokens=block_tokens, progress=show)


def _write(trace: Trace, output: Path, force: bool) -> None:
    if not len(trace):
        raise InvalidInput("no request is left in the trace; choose a larger part")
    write_jsonl(trace, output, replace=force)
    print(f"wrote {len(trace)} requests in {trace.duration_s:.0f} s to {output}", file=sys.stderr)


def refuse_existing(output: Path, force: bool) -> None:
    """Raise AlreadyExists if the file exists, before the work and not after it."""
    if output.exists() and not force:
        raise AlreadyExists(f"{output} exists already; choose another name, or replace it with --force")


def _arrivals(cv: float | None, step_s: float | None) -> Arrivals | None:
    if cv is None and step_s is None:
        return None
    return Arrivals(cv=1.0 if cv is None else cv, step_s=step_s)


def parse_span(text: str, option: str, parse: Callable[[str], _Number]) -> tuple[_Number | None, _Number | None]:
    """Return the two numbers of BEGIN:END; None for an omitted one."""
    begin, colon, end = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return (parse(begin) if begin else None, parse(end) if end else None)
    except ValueError:
        raise InvalidInput(f"{option} takes BEGIN:END, for example 0:600, not {text!r}") from None


def _show(trace: Trace, statistics: TraceStatistics) -> None:
    """Print the statistics and the picture; plain text if standard output is not a terminal."""
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
