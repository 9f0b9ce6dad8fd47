"""`moonpool trace describe | generate | change`: a trace's statistics, traces made from nothing or from others."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import typer

from moonpool.base.errors import AlreadyExists, InvalidInput
from moonpool.cli.progress import bytes_moved
from moonpool.traces.columns import Trace
from moonpool.traces.distributions import Arrivals
from moonpool.traces.generate import KINDS, generate, generate_like
from moonpool.traces.mooncake_jsonl import read_jsonl, write_jsonl

command = typer.Typer(no_args_is_help=True)

_Number = TypeVar("_Number", int, float)
_LIKE = "like"
_KINDS_HELP = "; ".join(f"{name}: {kind.summary}" for name, kind in KINDS.items())
FileArgument: TypeAlias = Annotated[
    Path, typer.Argument(help="in Mooncake's format, one JSON object per line; .gz is fine")
]
OutputOption: TypeAlias = Annotated[Path, typer.Option("-o", "--output", help="where to write; .gz compresses")]
ForceOption: TypeAlias = Annotated[bool, typer.Option("--force", help="replace a file that is there")]
BlockOption: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="tokens per block in FILE; default: what it says, else 512")
]
CvOption: TypeAlias = Annotated[
    float | None, typer.Option(help="variation of the gaps between arrivals: 0 even, 1 Poisson, more is bursty")
]
StepOption: TypeAlias = Annotated[float | None, typer.Option(help="tell arrivals in steps of so many seconds")]
SeedOption: TypeAlias = Annotated[int, typer.Option(min=0, help="same seed, same trace")]


@command.command("describe", help="Show a trace's statistics, and a picture of it.")
def _describe(
    file: FileArgument,
    json: Annotated[bool, typer.Option("--json", help="for programs: one JSON object, no picture")] = False,
    block_tokens: BlockOption = None,
) -> None:
    import msgspec

    from moonpool.cli.trace_table import show
    from moonpool.traces.statistics import describe

    trace = _read(file, block_tokens)
    statistics = describe(trace)
    if json:
        print(msgspec.json.encode(statistics).decode())
    else:
        show(trace, statistics)


@command.command(
    "generate", help=f"Make a trace. KIND is one of {_KINDS_HELP}; {_LIKE}: fitted to the trace --like names."
)
def _generate(
    kind: Annotated[str, typer.Argument(help=", ".join([*KINDS, _LIKE]))],
    output: OutputOption,
    requests: Annotated[int | None, typer.Option(min=1, help="how many; default: the kind's own")] = None,
    rate: Annotated[float | None, typer.Option(help="requests per second; default: the kind's own")] = None,
    seed: SeedOption = 0,
    cv: CvOption = None,
    step: StepOption = None,
    like: Annotated[Path | None, typer.Option(help="the trace that a trace of kind `like` is fitted to")] = None,
    force: ForceOption = False,
) -> None:
    _refuse_existing(output, force)
    if (kind == _LIKE) != (like is not None):
        raise InvalidInput(f"the kind {_LIKE!r} needs --like FILE, and no other kind takes it")
    arrivals = _arrivals(cv, step)
    if like is not None:
        original = _read(like, None)
        trace = generate_like(original, num_requests=requests, rate_per_s=rate, seed=seed, arrivals=arrivals)
    else:
        trace = generate(kind, num_requests=requests, rate_per_s=rate, seed=seed, arrivals=arrivals)
    _write(trace, output, force)


@command.command(
    "change", help="Make a trace from others. Changes are made in the order in which they are listed here."
)
def _change(
    file: FileArgument,
    output: OutputOption,
    merge: Annotated[list[Path] | None, typer.Option(help="mix this one in, by arrival; may be repeated")] = None,
    share_blocks: Annotated[
        bool, typer.Option("--share-blocks", help="equal ids in merged files are one block")
    ] = False,
    slice: Annotated[str | None, typer.Option(help="seconds BEGIN:END of it; either may be left out")] = None,
    requests: Annotated[str | None, typer.Option(help="requests BEGIN:END of it; either may be left out")] = None,
    scale: Annotated[float | None, typer.Option(help="so many times the load: the same requests in less time")] = None,
    rate: Annotated[float | None, typer.Option(help="new arrivals at so many requests per second")] = None,
    cv: CvOption = None,
    step: StepOption = None,
    seed: SeedOption = 0,
    cut_blocks: Annotated[int | None, typer.Option(help="cut blocks into smaller ones of so many tokens")] = None,
    relabel: Annotated[bool, typer.Option("--relabel", help="number blocks by first appearance")] = False,
    tenant: Annotated[int | None, typer.Option(help="all requests are this tenant's")] = None,
    priority: Annotated[int | None, typer.Option(help="all requests have this priority")] = None,
    block_tokens: BlockOption = None,
    force: ForceOption = False,
) -> None:
    import numpy as np

    from moonpool.traces import changes

    _refuse_existing(output, force)
    if rate is None and (cv is not None or step is not None):
        raise InvalidInput("--cv and --step shape the new arrivals of --rate; say that too")
    trace = _read(file, block_tokens)
    if merge:
        trace = changes.merge([trace, *(_read(other, block_tokens) for other in merge)], share_blocks=share_blocks)
    if slice is not None:
        begin_s, end_s = _span(slice, "--slice", float)
        trace = changes.slice_time(trace, begin_s or 0.0, math.inf if end_s is None else end_s)
    if requests is not None:
        begin, end = _span(requests, "--requests", int)
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


def _read(file: Path, block_tokens: int | None) -> Trace:
    with bytes_moved(f"read {file}") as show:
        return read_jsonl(file, block_tokens=block_tokens, progress=show)


def _write(trace: Trace, output: Path, force: bool) -> None:
    if not len(trace):
        raise InvalidInput("nothing is left of the trace; choose a larger part")
    write_jsonl(trace, output, replace=force)
    print(f"wrote {len(trace)} requests in {trace.duration_s:.0f} s to {output}", file=sys.stderr)


def _refuse_existing(output: Path, force: bool) -> None:
    """Before the work, not after it."""
    if output.exists() and not force:
        raise AlreadyExists(f"{output} is there already; choose another name, or replace it with --force")


def _arrivals(cv: float | None, step_s: float | None) -> Arrivals | None:
    if cv is None and step_s is None:
        return None
    return Arrivals(cv=1.0 if cv is None else cv, step_s=step_s)


def _span(text: str, option: str, parse: Callable[[str], _Number]) -> tuple[_Number | None, _Number | None]:
    begin, colon, end = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return (parse(begin) if begin else None, parse(end) if end else None)
    except ValueError:
        raise InvalidInput(f"{option} takes BEGIN:END, for example 0:600, not {text!r}") from None
