"""`moonpool replay`: replay a trace on one or several simulated systems and compare them, one column per system."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moonpool.base.errors import InvalidInput
from moonpool.base.units import format_nbytes, parse_nbytes
from moonpool.cli import cluster_options as cluster
from moonpool.cli.made_by import made_by
from moonpool.cli.progress import virtual_time
from moonpool.cli.trace import parse_span, read_trace, refuse_existing
from moonpool.conductor.admission.forms import AdmissionForm
from moonpool.sim import GPU, MODEL, NUM_GPUS, NUM_NODES
from moonpool.sim.fleet import Fleet, make_fleet
from moonpool.sim.outcome import Outcome, encode, replay
from moonpool.sim.report.labels import conclusion, format_value, headline, label, system_numbers
from moonpool.sim.report.page import LINK_NAMES
from moonpool.sim.systems import (
    BASELINE,
    FEATURES,
    FULL,
    SYSTEMS,
    Goals,
    System,
    system,
    with_conductors,
    with_failures,
    with_pipelines,
    with_roles,
    with_shared_prompts,
    without,
)
from moonpool.sim.world.config import Failure, RoleChange, parse_failure, parse_role_change
from moonpool.sim.world.results import HIT_PLACES
from moonpool.traces.changes import scale_load, slice_time
from moonpool.traces.columns import Trace

_ALL = "all"
_OUTPUT_OPTIONS = ("json", "report", "force")
_SYSTEMS_HELP = f"default: {FULL} and {BASELINE}; {_ALL}, or one of " + "; ".join(
    f"{each.name}: {each.summary}" for each in SYSTEMS.values()
)
_WIDE = 400  # columns if the output is a file: nothing is wrapped
_COLORS = ("blue", "yellow", "green", "magenta", "red", "cyan")  # of the systems, as far as a terminal has them
_NAME_WIDTH, _CELL_WIDTH, _GAP = 34, 10, 2
_LINKS = ("nic_out", "h2d", "d2h", "ssd_read", "ssd_write")
_PLACE_NAMES = {"local": "the GPUs' own pages", "dram": "own memory", "remote": "others' memory", "ssd": "disks"}
Cell: TypeAlias = Callable[[Outcome], str]
SystemsOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--system", help=f"system to simulate; may be repeated; {_SYSTEMS_HELP}")
]
WithoutOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--without", help=f"also {FULL} without this feature: {', '.join(FEATURES)}; may be repeated"),
]
AdmissionOption: TypeAlias = Annotated[
    AdmissionForm, typer.Option(help="which decode load counts when a request arrives (docs/conductor.md)")
]
FailOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--fail",
        help="NODE@SECOND+DURATION: NODE (p0, p1, ... prefill; d0, d1, ... decode) crashes at SECOND and comes back"
        " empty after DURATION seconds (without +DURATION: never); with :slow=FACTOR or :frozen appended, only its"
        " network is slow or stops; may be repeated",
    ),
]

PipelineOption: TypeAlias = Annotated[
    int, typer.Option(min=1, help="prefill workers that compute a long prompt together, as `serve --pipeline`")
]
ConductorsOption: TypeAlias = Annotated[
    int, typer.Option(min=1, help="conductors that route an equal part of the requests each, as `serve --conductors`")
]
ElasticOption: TypeAlias = Annotated[
    bool, typer.Option("--elastic", help="nodes change their roles as the load moves, as with `serve --elastic`")
]
RoleChangeOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--role",
        help="NODE@SECOND:prefill or NODE@SECOND:decode: NODE takes that role at SECOND and ends what it has begun in"
        " its old role; may be repeated",
    ),
]


def command(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="TRACE", help="trace in Mooncake's format; may be gzipped (.gz)")],
    systems: SystemsOption = None,
    features_off: WithoutOption = None,
    load: Annotated[float, typer.Option(help="multiply the trace's request rate by this factor")] = 1.0,
    slice: Annotated[str | None, typer.Option(help="seconds BEGIN:END of the trace; either may be omitted")] = None,
    ttft: cluster.TtftOption = cluster.TTFT_S,
    tbt: cluster.TbtOption = cluster.TBT_S,
    admission: AdmissionOption = AdmissionForm.PREDICTED,
    model: cluster.ModelOption = MODEL,
    gpu: cluster.GpuOption = GPU,
    gpus: cluster.GpusOption = NUM_GPUS,
    nodes: cluster.NodesOption = NUM_NODES,
    prefill: Annotated[int | None, typer.Option(help="number of prefill nodes; default: half of the nodes")] = None,
    pipeline_nodes: Annotated[int, typer.Option(min=1, help="prefill nodes per worker, as a pipeline")] = 1,
    pipeline: PipelineOption = 1,
    conductors: ConductorsOption = 1,
    elastic: ElasticOption = False,
    roles: RoleChangeOption = None,
    fails: FailOption = None,
    dram: cluster.DramOption = cluster.DRAM,
    ssd: cluster.SsdOption = cluster.SSD,
    profile: cluster.ProfileOption = None,
    block_tokens: cluster.BlockTokensOption = None,
    seed: Annotated[int, typer.Option(min=0, help="random seed; the same seed gives the same results")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object per system, one per line")] = False,
    report: Annotated[Path | None, typer.Option(help="HTML report to write; it needs no network to open")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the report if it exists")] = False,
) -> None:
    """Replay a trace of requests on simulated machines and compare the systems."""
    _refuse_unwritable(report, force)
    failures = tuple(parse_failure(each) for each in fails or [])
    moves = tuple(parse_role_change(each) for each in roles or [])
    chosen = _systems(
        systems, features_off or [], _Asked(pipeline_nodes, pipeline, conductors, failures, elastic, moves)
    )
    goals = Goals(_target(ttft, "--ttft"), _target(tbt, "--tbt"), seed, admission)
    fleet = make_fleet(
        model=model,
        gpu=gpu,
        num_gpus=gpus,
        num_nodes=nodes,
        num_prefill=prefill,
        dram_nbytes=parse_nbytes(dram),
        ssd_nbytes=parse_nbytes(ssd),
        profile=profile,
    )
    trace = _read(file, block_tokens, slice, load)
    _refuse_late(failures, trace)
    outcomes = [_run(each, trace, fleet, goals, load) for each in chosen]
    origin = made_by(context, seed, left_out=_OUTPUT_OPTIONS)
    _print(outcomes, json, origin)
    if report is not None:
        _write_report(outcomes, report, origin)


def _refuse_unwritable(report: Path | None, force: bool) -> None:
    """Raise before the work, not after it."""
    if report is None:
        return
    refuse_existing(report, force)
    if not report.absolute().parent.is_dir():
        raise InvalidInput(f"cannot write {report}: there is no such folder")


def _chosen(names: list[str], features_off: list[str]) -> list[System]:
    """Return the systems in the order given; a name given twice counts once."""
    if _ALL in names:
        names = list(SYSTEMS)
    found = [system(name) for name in names]
    return list({each.name: each for each in [*found, *(without(each) for each in features_off)]}.values())


class _Asked(NamedTuple):
    """What the baseline cannot have."""

    pipeline_nodes: int
    pipeline: int
    conductors: int
    failures: tuple[Failure, ...]
    elastic: bool
    moves: tuple[RoleChange, ...]

    @property
    def anything(self) -> bool:
        several = max(self.pipeline_nodes, self.pipeline, self.conductors) > 1
        return bool(self.failures or self.elastic or self.moves or several)


def _systems(names: list[str] | None, features_off: list[str], asked: _Asked) -> list[System]:
    """Return the systems to compare, with what was asked for; by default without the baseline if it cannot have it."""
    names = names or ([FULL] if features_off or asked.anything else [FULL, BASELINE])
    return [_with(each, asked) for each in _chosen(names, features_off)]


def _with(chosen: System, asked: _Asked) -> System:
    chosen = with_roles(chosen, asked.elastic, asked.moves) if asked.elastic or asked.moves else chosen
    chosen = with_pipelines(chosen, asked.pipeline_nodes) if asked.pipeline_nodes > 1 else chosen
    chosen = with_shared_prompts(chosen, asked.pipeline) if asked.pipeline > 1 else chosen
    chosen = with_conductors(chosen, asked.conductors) if asked.conductors > 1 else chosen
    return with_failures(chosen, asked.failures) if asked.failures else chosen


def _refuse_late(failures: tuple[Failure, ...], trace: Trace) -> None:
    for failure in failures:
        if len(trace) and failure.at_s > trace.arrival_s[-1]:
            raise InvalidInput(f"--fail {failure} comes too late: the last request is at {trace.arrival_s[-1]:g} s")


def _target(seconds: float, option: str) -> float:
    if not 0 < seconds < math.inf:
        raise InvalidInput(f"{option} must be a number of seconds above 0, not {seconds:g}")
    return seconds


def _read(file: Path, block_tokens: int | None, part: str | None, load: float) -> Trace:
    trace = read_trace(file, block_tokens)
    if part is not None:
        begin_s, end_s = parse_span(part, "--slice", float)
        trace = slice_time(trace, begin_s or 0.0, math.inf if end_s is None else end_s)
    return scale_load(trace, load)


def _run(each: System, trace: Trace, fleet: Fleet, goals: Goals, load: float) -> Outcome:
    with virtual_time(each.name, float(trace.arrival_s[-1]) if len(trace) else 0.0) as progress:
        return replay(each, trace, fleet, goals, load=load, progress=progress)


def _print(outcomes: list[Outcome], as_json: bool, origin: Mapping[str, str]) -> None:
    if as_json:
        for each in outcomes:
            print(encode(each))
        return
    show_table(outcomes, origin)


def _write_report(outcomes: list[Outcome], path: Path, origin: Mapping[str, str]) -> None:
    from moonpool.sim.report.page import page

    try:
        path.write_text(page(outcomes, origin), encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from error
    print(f"wrote {path}", file=sys.stderr)


def show_table(outcomes: Sequence[Outcome], origin: Mapping[str, str]) -> None:
    """Print the answer, the outcomes, one column per system, and how to make them again (`origin`).

    Plain text if standard output is not a terminal.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    console.print(headline(outcomes), "", sep="\n", style="bold", markup=False)
    first = outcomes[0]
    for name, value in first.machine.items():
        console.print(f"{label(name)}: {format_value(name, value)}", markup=False)
    console.print()
    colors = dict(zip((each.system for each in outcomes), system_numbers(outcomes), strict=True))
    for group in _groups(outcomes, console.width):
        console.print(_table(group, colors))
        console.print()
    for each in outcomes:
        for reason, count in each.refusals.items():
            console.print(f"{each.system} refused {count}: {reason}", markup=False)
    console.print("", conclusion(outcomes), "", sep="\n", markup=False)
    for name, value in origin.items():
        console.print(f"{name}: {value}", style="dim", markup=False, soft_wrap=True)


def _groups(outcomes: Sequence[Outcome], width: int) -> Iterator[Sequence[Outcome]]:
    """Yield as many systems at a time as fit side by side."""
    widths = [max(len(each.system), _CELL_WIDTH) + _GAP for each in outcomes]
    begin = 0
    while begin < len(outcomes):
        end, left = begin, width - _NAME_WIDTH
        while end < len(outcomes) and (end == begin or widths[end] <= left):
            left -= widths[end]
            end += 1
        yield outcomes[begin:end]
        begin = end


def _table(outcomes: Sequence[Outcome], colors: Mapping[str, int]) -> Table:
    first = outcomes[0]
    title = f"{first.trace}, load x {first.load:g}"
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for each in outcomes:
        style = f"bold {_COLORS[colors[each.system] % len(_COLORS)]}"
        table.add_column(escape(each.system), justify="right", overflow="fold", header_style=style)
    for name, cell in _rows(first):
        table.add_row(name, *(escape(cell(each)) for each in outcomes))
    return table


def _rows(first: Outcome) -> Iterator[tuple[str, Cell]]:
    targets = f"TTFT {first.ttft_target_s:g} s, TBT {first.tbt_target_s * 1e3:g} ms"
    yield f"done within {targets}", _share("effective_share")
    yield "goodput, requests/s", _number("goodput_per_s", ".3f")
    yield "requests done", _number("num_done", ".0f")
    yield "requests refused", _number("num_refused", ".0f")
    yield "requests lost with workers", _number("num_lost", ".0f")
    yield "requests tried again", _number("num_retries", ".0f")
    yield "changes of nodes' roles", _number("num_role_changes", ".0f")
    yield "requests never done", _number("num_unfinished", ".0f")
    for name in ("mean", "p50", "p90", "p99"):
        yield f"TTFT {name}, s", _number(f"ttft_s_{name}", ".2f")
    for name in ("mean", "p50", "p90", "p99"):
        yield f"TBT {name}, ms", _number(f"tbt_s_{name}", ".1f", 1e3)
    yield "prompt tokens reused", _share("hit_share")
    for place in HIT_PLACES:
        yield f"  from {_PLACE_NAMES[place]}", _share(f"hit_share_{place}")
    yield "prefill time of a node's GPUs, s", _number("prefill_gpu_s", ".0f")
    yield "prefill time saved by reuse, s", _number("saved_gpu_s", ".0f")
    for kind in _LINKS:
        yield f"{LINK_NAMES[kind]}: moved", _moved(kind)
        yield "  mean and peak use of capacity", _use(kind)


def _number(name: str, form: str, times: float = 1.0) -> Cell:
    return lambda outcome: format(outcome.numbers[name] * times, form)


def _share(name: str) -> Cell:
    return lambda outcome: f"{outcome.numbers[name]:.1%}"


def _moved(kind: str) -> Cell:
    return lambda outcome: format_nbytes(int(outcome.links[kind].nbytes)) if kind in outcome.links else "-"


def _use(kind: str) -> Cell:
    def cell(outcome: Outcome) -> str:
        use = outcome.links.get(kind)
        return "-" if use is None else f"{use.mean_share:.1%}, {use.peak_share:.1%}"

    return cell
