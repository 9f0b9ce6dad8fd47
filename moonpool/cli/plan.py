"""`moonpool plan [TRACE]`: KV sizes and thresholds of a model; with a trace, the cluster and the pool that it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.base.errors import InvalidInput
from moonpool.base.units import parse_nbytes

if TYPE_CHECKING:
    from moonpool.planner.demand import PoolSize
    from moonpool.planner.plan import ClusterPlan
    from moonpool.planner.split import Targets
    from moonpool.sim.fleet import Machine
    from moonpool.traces.columns import Trace


def command(
    trace: Annotated[
        Path | None, typer.Argument(help="trace in Mooncake's format; without one, only the model's KV sizes are shown")
    ] = None,
    model: Annotated[
        str, typer.Option(help="model name, for example llama3-70b, or path of a config.json")
    ] = "llama3-70b",
    gpu: Annotated[str, typer.Option(help="GPU of the nodes: a800, h100, ...")] = "a800",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs per node")] = 8,
    nodes: Annotated[int, typer.Option(min=2, help="number of nodes to split between prefill and decode")] = 16,
    ttft: Annotated[float, typer.Option(help="target for the time to first token, in seconds")] = 30.0,
    tbt: Annotated[float, typer.Option(help="target for the time between tokens, in seconds")] = 0.1,
    goal: Annotated[float, typer.Option(help="fraction of requests that must meet both targets")] = 0.95,
    dram: Annotated[str, typer.Option(help="pool memory of each node")] = "1TB",
    ssd: Annotated[str, typer.Option(help="pool disk space of each node")] = "0",
    price: Annotated[
        Path | None, typer.Option(help="JSON file with gpu_hour, dram_gb_month, ssd_gb_month; default: assumed prices")
    ] = None,
    check: Annotated[
        int, typer.Option(min=0, help="requests to simulate for each of the best splits; 0: do not simulate")
    ] = 300,
    profile: Annotated[Path | None, typer.Option(help="JSON file of measured step times to use")] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens per block in TRACE; default: as stated in the file, or 512")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="random seed of the uncertainty estimate")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    import msgspec

    from moonpool.cli.plan_table import show, show_sizes
    from moonpool.planner.demand import PoolSize
    from moonpool.planner.kv_sizes import kv_sizes
    from moonpool.planner.split import Targets

    targets = Targets(ttft_s=ttft, tbt_s=tbt, goal=goal)
    machine = _machine(model, gpu, gpus, profile, PoolSize(parse_nbytes(dram), parse_nbytes(ssd)))
    if trace is None:
        sizes = kv_sizes(machine)
        print(msgspec.json.encode(sizes).decode()) if json else show_sizes(sizes, machine.cost_source)
        return
    plan = _plan(_read_trace(trace, block_tokens), machine, targets, nodes, price, check, seed)
    print(msgspec.json.encode(plan).decode()) if json else show(plan)


def _machine(model: str, gpu: str, gpus: int, profile: Path | None, memory: PoolSize) -> Machine:
    """No fleet of them: the KV sizes of a model that does not fit into one node are asked for too."""
    from moonpool.sim.fleet import machine_for, read_profile, read_shape
    from moonpool.sim.physics.hardware import node

    spec = replace(node(gpu, gpus), dram_nbytes=memory.dram_nbytes, ssd_nbytes=memory.ssd_nbytes)
    machine = machine_for(read_shape(model), spec)
    if profile is None:
        return machine
    return machine._replace(cost=read_profile(profile), cost_source=f"fitted to the measured steps in {profile.name}")


def _plan(
    trace: Trace, machine: Machine, targets: Targets, nodes: int, price: Path | None, check: int, seed: int
) -> ClusterPlan:
    import numpy as np

    from moonpool.planner.check import cluster_run
    from moonpool.planner.plan import make_plan
    from moonpool.planner.price import Prices, read_prices

    prices = Prices() if price is None else read_prices(_bytes_of(price))
    with _steps_shown(f"plan {trace.name}") as tell:
        return make_plan(
            trace,
            machine,
            targets,
            num_nodes=nodes,
            prices=prices,
            rng=np.random.default_rng(seed),
            run=cluster_run(trace, machine, targets, check) if check else None,
            tell=tell,
        )


def _read_trace(path: Path, block_tokens: int | None) -> Trace:
    from moonpool.cli.progress import bytes_moved
    from moonpool.traces.mooncake_jsonl import read_jsonl

    with bytes_moved(f"read {path}") as moved:
        return read_jsonl(path, block_tokens=block_tokens, progress=moved)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def _steps_shown(what: str) -> Iterator[Callable[[str], None]]:
    """What is being worked on, for people."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield lambda step: status.update(f"{what}: {step}")
