"""`moonpool replay`: a trace through one or several simulated systems, beside each other."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from moonpool.base.errors import AlreadyExists, InvalidInput
from moonpool.base.units import parse_nbytes
from moonpool.cli.progress import bytes_moved, virtual_time
from moonpool.conductor.admission.forms import AdmissionForm
from moonpool.sim.fleet import Fleet, make_fleet
from moonpool.sim.outcome import Outcome, encode, replay
from moonpool.sim.systems import (
    BASELINE,
    FEATURES,
    FULL,
    SYSTEMS,
    Goals,
    System,
    system,
    with_failures,
    with_pipelines,
    without,
)
from moonpool.sim.world.config import Failure, parse_failure
from moonpool.traces.changes import scale_load, slice_time
from moonpool.traces.columns import Trace
from moonpool.traces.mooncake_jsonl import read_jsonl

_ALL = "all"
_OUTPUT_OPTIONS = ("json", "report", "force")
_SYSTEMS_HELP = f"default: {FULL} and {BASELINE}; {_ALL}, or one of " + "; ".join(
    f"{each.name}: {each.summary}" for each in SYSTEMS.values()
)


def command(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="TRACE", help="trace in Mooncake's format; may be gzipped (.gz)")],
    systems: Annotated[
        list[str] | None,
        typer.Option("--system", help=f"system to simulate; may be repeated; {_SYSTEMS_HELP}"),
    ] = None,
    features_off: Annotated[
        list[str] | None,
        typer.Option("--without", help=f"also {FULL} without this feature: {', '.join(FEATURES)}; may be repeated"),
    ] = None,
    load: Annotated[float, typer.Option(help="multiply the trace's request rate by this factor")] = 1.0,
    slice: Annotated[str | None, typer.Option(help="seconds BEGIN:END of the trace; either may be omitted")] = None,
    ttft: Annotated[float, typer.Option(help="target for the time to first token, in seconds")] = 30.0,
    tbt: Annotated[float, typer.Option(help="target for the time between tokens, in seconds")] = 0.1,
    admission: Annotated[
        AdmissionForm, typer.Option(help="which decode load counts when a request arrives (docs/conductor.md)")
    ] = AdmissionForm.PREDICTED,
    model: Annotated[str, typer.Option(help="model name, or path of a config.json")] = "llama3-70b",
    gpu: Annotated[str, typer.Option(help="GPU of the nodes: a800, h100, ...")] = "a800",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs per node; they run one model instance together")] = 8,
    nodes: Annotated[int, typer.Option(min=2, help="number of nodes")] = 16,
    prefill: Annotated[int | None, typer.Option(help="number of prefill nodes; default: half of the nodes")] = None,
    pipeline_nodes: Annotated[int, typer.Option(min=1, help="prefill nodes per worker, as a pipeline")] = 1,
    fails: Annotated[
        list[str] | None,
        typer.Option(
            "--fail",
            help="NODE@SECOND+DURATION: NODE (p0, p1, ... prefill; d0, d1, ... decode) crashes at SECOND and comes back"
            " empty after DURATION seconds (without +DURATION: never); with :slow=FACTOR or :frozen appended, only its"
            " network is slow or stops; may be repeated",
        ),
    ] = None,
    dram: Annotated[str, typer.Option(help="pool memory of each node")] = "1TB",
    ssd: Annotated[str, typer.Option(help="pool disk space of each node")] = "0",
    profile: Annotated[Path | None, typer.Option(help="JSON file of measured step times to use")] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens per block in TRACE; default: as stated in the file, or 512")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="random seed; the same seed gives the same results")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object per system, one per line")] = False,
    report: Annotated[Path | None, typer.Option(help="HTML report to write; it needs no network to open")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the report if it exists")] = False,
) -> None:
    """Replay a trace of requests on simulated machines and compare the systems."""
    if report is not None:
        _refuse_unwritable(report, force)
    failures = tuple(parse_failure(each) for each in fails or [])
    names = systems or _default_systems(features_off or [], pipeline_nodes, failures)
    chosen = [_with(each, pipeline_nodes, failures) for each in _chosen(names, features_off or [])]
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
    _tell(outcomes, json)
    if report is not None:
        _write_report(outcomes, report, _as_typed(context))


def _refuse_unwritable(report: Path, force: bool) -> None:
    """Before the work, not after it."""
    if report.exists() and not force:
        raise AlreadyExists(f"{report} exists already; choose another name, or replace it with --force")
    if not report.absolute().parent.is_dir():
        raise InvalidInput(f"cannot write {report}: there is no such folder")


def _chosen(names: list[str], features_off: list[str]) -> list[System]:
    """In the order given; a name given twice counts once."""
    if _ALL in names:
        names = list(SYSTEMS)
    found = [system(name) for name in names]
    return list({each.name: each for each in [*found, *(without(each) for each in features_off)]}.values())


def _default_systems(features_off: list[str], pipeline_nodes: int, failures: tuple[Failure, ...]) -> list[str]:
    """Return the full system, and what it is compared with unless the user compares it with something else, or asks
    for what that one cannot have."""
    alone = features_off or pipeline_nodes > 1 or failures
    return [FULL] if alone else [FULL, BASELINE]


def _with(chosen: System, pipeline_nodes: int, failures: tuple[Failure, ...]) -> System:
    chosen = with_pipelines(chosen, pipeline_nodes) if pipeline_nodes > 1 else chosen
    return with_failures(chosen, failures) if failures else chosen


def _refuse_late(failures: tuple[Failure, ...], trace: Trace) -> None:
    for failure in failures:
        if len(trace) and failure.at_s > trace.arrival_s[-1]:
            raise InvalidInput(f"--fail {failure} comes too late: the last request is at {trace.arrival_s[-1]:g} s")


def _target(seconds: float, option: str) -> float:
    if not 0 < seconds < math.inf:
        raise InvalidInput(f"{option} must be a number of seconds above 0, not {seconds:g}")
    return seconds


def _read(file: Path, block_tokens: int | None, part: str | None, load: float) -> Trace:
    with bytes_moved(f"read {file}") as show:
        trace = read_jsonl(file, block_tokens=block_tokens, progress=show)
    if part is not None:
        trace = slice_time(trace, *_span(part))
    return scale_load(trace, load)


def _span(text: str) -> tuple[float, float]:
    begin, colon, end = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return float(begin or 0), float(end or "inf")
    except ValueError:
        raise InvalidInput(f"--slice takes BEGIN:END, for example 0:600, not {text!r}") from None


def _run(each: System, trace: Trace, fleet: Fleet, goals: Goals, load: float) -> Outcome:
    with virtual_time(each.name, float(trace.arrival_s[-1]) if len(trace) else 0.0) as progress:
        return replay(each, trace, fleet, goals, load=load, progress=progress)


def _tell(outcomes: list[Outcome], as_json: bool) -> None:
    if as_json:
        for each in outcomes:
            print(encode(each))
        return
    from moonpool.cli.replay_table import show

    show(outcomes)


def _as_typed(context: typer.Context) -> str:
    """Return the command line that makes these outcomes: what differs from the defaults and is not about the output."""
    words = ["moonpool", "replay"]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in _OUTPUT_OPTIONS or value in (None, parameter.default):
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [str(each)] if parameter.param_type_name == "argument" else [parameter.opts[0], str(each)]
    return shlex.join(words)


def _write_report(outcomes: list[Outcome], path: Path, command_line: str) -> None:
    from moonpool.sim.report.page import page

    try:
        path.write_text(page(outcomes, command_line), encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from error
    print(f"wrote {path}", file=sys.stderr)
