"""`moonpool plan [TRACE]`: KV sizes and thresholds of a model; with a trace, the cluster and the pool that it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moonpool.base.errors import InvalidInput
from moonpool.base.units import parse_nbytes
from moonpool.cli import cluster_options as cluster
from moonpool.planner import GOAL
from moonpool.sim import GPU, MODEL, NUM_GPUS, NUM_NODES

if TYPE_CHECKING:
    from moonpool.planner.demand import PoolSize
    from moonpool.planner.kv_sizes import KvSizes
    from moonpool.planner.plan import ClusterPlan
    from moonpool.planner.price import PoolCost
    from moonpool.planner.split import Targets
    from moonpool.sim.fleet import Machine
    from moonpool.traces.columns import Trace

_GB = 1e9
_TB = 1e12
_BAR = 24


def command(
    context: typer.Context,
    trace: Annotated[
        Path | None, typer.Argument(help="trace in Mooncake's format; without one, only the model's KV sizes are shown")
    ] = None,
    model: cluster.ModelOption = MODEL,
    gpu: cluster.GpuOption = GPU,
    gpus: cluster.GpusOption = NUM_GPUS,
    nodes: cluster.NodesOption = NUM_NODES,
    ttft: cluster.TtftOption = cluster.TTFT_S,
    tbt: cluster.TbtOption = cluster.TBT_S,
    goal: Annotated[float, typer.Option(help="fraction of requests that must meet both targets")] = GOAL,
    dram: cluster.DramOption = cluster.DRAM,
    ssd: cluster.SsdOption = cluster.SSD,
    price: Annotated[
        Path | None, typer.Option(help="JSON file with gpu_hour, dram_gb_month, ssd_gb_month; default: assumed prices")
    ] = None,
    check: Annotated[
        int, typer.Option(min=0, help="requests to simulate for each of the best splits; 0: do not simulate")
    ] = 300,
    profile: cluster.ProfileOption = None,
    block_tokens: cluster.BlockTokensOption = None,
    seed: Annotated[int, typer.Option(min=0, help="random seed of the uncertainty estimate")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    import msgspec

    from moonpool.cli.made_by import made_by
    from moonpool.cli.trace import read_trace
    from moonpool.planner.demand import PoolSize
    from moonpool.planner.kv_sizes import kv_sizes
    from moonpool.planner.split import Targets

    targets = Targets(ttft_s=ttft, tbt_s=tbt, goal=goal)
    machine = _machine(model, gpu, gpus, profile, PoolSize(parse_nbytes(dram), parse_nbytes(ssd)))
    origin = made_by(context, seed, left_out=("json",))
    if trace is None:
        sizes = kv_sizes(machine)
        if json:
            print(msgspec.json.encode(sizes).decode())
        else:
            show_sizes(sizes, machine.cost_source)
            _show_origin(origin)
        return
    plan = _plan(read_trace(trace, block_tokens), machine, targets, nodes, price, check, seed)
    print(msgspec.json.encode(plan).decode()) if json else show_plan(plan, origin)


def _machine(model: str, gpu: str, gpus: int, profile: Path | None, memory: PoolSize) -> Machine:
    """Return one machine, not a fleet: KV sizes are also shown for models that do not fit into one node."""
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

    prices = Prices() if price is None else read_prices(_read_file(price))
    with _steps_shown(f"plan {trace.name}") as show_step:
        return make_plan(
            trace,
            machine,
            targets,
            num_nodes=nodes,
            prices=prices,
            rng=np.random.default_rng(seed),
            run=cluster_run(trace, machine, targets, check) if check else None,
            on_step=show_step,
        )


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def _steps_shown(what: str) -> Iterator[Callable[[str], None]]:
    """Show the present step, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield lambda step: status.update(f"{what}: {step}")


def show_plan(plan: ClusterPlan, origin: Mapping[str, str]) -> None:
    """Print the plan and how to make it again (`origin`); plain text if standard output is not a terminal."""
    console = Console(highlight=False)
    console.print(plan.headline(), "", sep="\n", style="bold", markup=False)
    _print_lines(console, _answer(plan))
    _print_table(console, _curve(plan, console))
    _print_lines(console, _tier_lines(plan))
    _print_table(console, _splits(plan))
    console.print()
    if plan.checked:
        _print_table(console, _checked(plan))
        console.print()
    if plan.pool is not None:
        _print_table(console, _prices(plan))
        _print_lines(console, _price_lines(plan))
    show_sizes(plan.sizes, None)
    _print_lines(console, ["how sure", *(f"- {line}" for line in _sure_lines(plan)), ""])
    _print_lines(console, ["assumed", *(f"- {line}" for line in plan.assumptions), ""])
    _show_origin(origin)


def _show_origin(origin: Mapping[str, str]) -> None:
    console = Console(highlight=False)
    for name, value in origin.items():
        console.print(f"{name}: {value}", style="dim", markup=False, soft_wrap=True)


def show_sizes(sizes: KvSizes, cost_source: str | None) -> None:
    console = Console(highlight=False)
    per_token = (
        f"{sizes.kv_nbytes_per_token / 1000:g} kB of KV per token, {sizes.tokens_per_tb / 1e6:.2f} M tokens per TB"
    )
    title = f"{sizes.model} on {sizes.num_gpus} x {sizes.gpu}: {per_token}"
    table = _table(title, "tokens", "KV GB", "prefill s", "eq. 2 GB/s", "own ops GB/s", "by cost GB/s")
    for row in sizes.thresholds:
        paper = "-" if row.paper_nbytes_s is None else f"{row.paper_nbytes_s / _GB:.2f}"
        own, cost = f"{row.peak_nbytes_s / _GB:.2f}", f"{row.cost_nbytes_s / _GB:.2f}"
        table.add_row(f"{row.num_tokens:,}", f"{row.kv_nbytes / _GB:.2f}", f"{row.prefill_s:.2f}", paper, own, cost)
    _print_table(console, table)
    lines = [
        f"Above these rates fetching a prompt's KV beats computing it; the node's network reaches"
        f" {sizes.network_nbytes_s / _GB:.0f} GB/s.",
        "eq. 2: the paper's, at the GPUs' peak; own ops: with this model's own operations; by cost: as fast as it"
        " really computes.",
    ]
    _print_lines(console, [*lines, *([f"Times: {cost_source}."] if cost_source else []), ""])


def _answer(plan: ClusterPlan) -> Iterable[str]:
    targets, best = plan.targets, plan.best
    yield (
        f"{plan.trace}: {plan.num_requests} requests in {plan.duration_s:.0f} s; {targets.goal:.0%} shall have their"
        f" first token within {targets.ttft_s:g} s and no more than {targets.tbt_s * 1000:g} ms between tokens"
    )
    yield ""
    yield (
        f"best split of {plan.num_nodes}: {best.num_prefill} prefill + {best.num_decode} decode, good for"
        f" {best.margin:.2f} times this load"
    )
    if plan.fewest is not None:
        fewest = plan.fewest
        total = fewest.num_prefill + fewest.num_decode
        yield f"fewest nodes: {total} ({fewest.num_prefill} prefill + {fewest.num_decode} decode){_node_range(plan)}"
    else:
        yield f"fewest nodes: none are enough. {plan.impossible}"
    if plan.pool is not None:
        yield f"cheapest pool: {_pool_text(plan.pool.best)}"
    yield ""


def _node_range(plan: ClusterPlan) -> str:
    found = plan.certainty.num_nodes
    return "" if found is None else f"; {found.low:.0f} to {found.high:.0f} for other traffic of this kind"


def _curve(plan: ClusterPlan, console: Console) -> Table:
    table = _table(
        "what a pool of each size finds",
        "pool TB",
        "M tokens",
        "hit",
        "nodes saved",
        "nodes per TB more",
        "",
        bars=True,
    )
    full = "█" if console.encoding.lower().startswith("utf") else "#"
    for point in plan.curve:
        table.add_row(
            f"{point.nbytes / _TB:g}",
            f"{point.tokens / 1e6:.2f}",
            f"{point.hit_share:.1%}",
            f"{point.saved_gpu_s_per_s:.2f}",
            f"{point.saved_per_tb:.3f}",
            Text(full * round(point.hit_share * _BAR)),
        )
    return table


def _tier_lines(plan: ClusterPlan) -> Iterable[str]:
    tiers = plan.tiers
    dram = f"DRAM of {tiers.dram_nbytes / _TB:g} TB finds {tiers.dram_share:.1%}"
    ssd = f", SSD of {tiers.ssd_nbytes / _TB:g} TB adds {tiers.ssd_share:.1%}" if tiers.ssd_nbytes else ""
    yield f"{dram}{ssd}; no pool finds more than {tiers.most_that_can_hit:.1%}."
    yield ""


def _splits(plan: ClusterPlan) -> Table:
    low, high = plan.equally_good
    title = (
        f"nodes by role, and the load they carry as a multiple of this one ({low} to {high} prefill nodes do as well as"
        " the best at this load, within 0.5 points)"
    )
    table = _table(
        title,
        *("prefill", "decode", "load x", "in time", "TTFT s", "p90 s", "TBT ms", "p90 ms", "busy"),
        end=True,
    )
    for row in plan.around:
        table.add_row(
            str(row.num_prefill),
            str(row.num_decode),
            f"{row.margin:.2f}",
            f"{row.effective_share:.1%}",
            f"{row.ttft_s_mean:.2f}",
            f"{row.ttft_s_p90:.2f}",
            f"{row.tbt_s_mean * 1000:.1f}",
            f"{row.tbt_s_p90 * 1000:.1f}",
            f"{row.prefill_busy:.0%}",
            "best" if row == plan.best else "",
        )
    return table


def _checked(plan: ClusterPlan) -> Table:
    title = f"the same in the simulator, the busiest {plan.checked[0].num_requests} requests"
    by_models = ("models: in time", "TTFT s", "TBT ms")
    table = _table(title, "prefill", "decode", "in time", "TTFT s", "TBT ms", "hit", *by_models)
    for row in plan.checked:
        table.add_row(
            str(row.num_prefill),
            str(row.num_decode),
            f"{row.effective_share:.1%}",
            f"{row.ttft_s_mean:.2f}",
            f"{row.tbt_s_mean * 1000:.1f}",
            f"{row.hit_share:.1%}",
            f"{row.by_models.effective_share:.1%}",
            f"{row.by_models.ttft_s_mean:.2f}",
            f"{row.by_models.tbt_s_mean * 1000:.1f}",
        )
    return table


def _prices(plan: ClusterPlan) -> Table:
    prices = plan.prices
    title = (
        f"cost per month, in the currency of the prices ({prices.source}: GPU hour {prices.gpu_hour:g}, GB of DRAM a"
        f" month {prices.dram_gb_month:g}, of SSD {prices.ssd_gb_month:g})"
    )
    table = _table(title, "DRAM TB", "SSD TB", "hit", "nodes", "cost of GPUs", "of memory", "total", end=True)
    assert plan.pool is not None
    for row in plan.pool.by_dram:
        table.add_row(
            f"{row.dram_nbytes / _TB:g}",
            f"{row.ssd_nbytes / _TB:g}",
            f"{row.hit_share:.1%}",
            f"{row.nodes:.2f}",
            f"{row.gpus:,.0f}",
            f"{row.memory:,.0f}",
            f"{row.total:,.0f}",
            "cheapest" if row == plan.pool.best else "",
        )
    return table


def _price_lines(plan: ClusterPlan) -> Iterable[str]:
    pool = plan.pool
    assert pool is not None
    low, high = pool.flat_dram_nbytes
    saved = 1 - pool.best.total / pool.without_pool.total
    yield (
        f"{saved:.0%} less than without a pool; {low / _TB:g} to {high / _TB:g} TB of DRAM cost within 5 % of the"
        " cheapest."
    )
    if pool.at_the_edge:
        yield "The largest size looked at is the cheapest: a larger one may be cheaper still."
    if pool.if_disks_lasted.total < pool.best.total:
        yield (
            f"If disks could be written without end, {_pool_text(pool.if_disks_lasted)}; it would write them"
            f" {pool.if_disks_lasted.ssd_writes_per_day:.0f} times over a day, where {plan.prices.ssd_writes_per_day:g}"
            " is allowed."
        )
    yield ""


def _pool_text(cost: PoolCost) -> str:
    ssd = f" and {cost.ssd_nbytes / _TB:g} TB of SSD" if cost.ssd_nbytes else ""
    return f"{cost.dram_nbytes / _TB:g} TB of DRAM{ssd}, {cost.total:,.0f} a month with its GPUs"


def _sure_lines(plan: ClusterPlan) -> Iterable[str]:
    sure = plan.certainty
    yield (
        f"{sure.num_draws} draws of {sure.num_slices} slices of {sure.slice_s:.0f} s: hit rate"
        f" {sure.hit_share.low:.1%} to {sure.hit_share.high:.1%} (10th to 90th percentile)."
    )
    if sure.num_nodes is not None:
        yield f"Nodes needed: {sure.num_nodes.low:.0f} to {sure.num_nodes.high:.0f}."
    yield from sure.doubts


def _table(title: str, *columns: str, bars: bool = False, end: bool = False) -> Table:
    """Return a table with numbers aligned right; a last column of bars or words is aligned left."""
    table = Table(title=title, box=None, pad_edge=False)
    for number, column in enumerate(columns):
        is_picture = bars and number == len(columns) - 1
        table.add_column(column, justify="left" if is_picture else "right", no_wrap=True)
    if end:
        table.add_column("")
    return table


def _print_table(console: Console, table: Table) -> None:
    """Print the title on its own line: inside the table it would be wrapped at the table's width."""
    console.print(table.title, markup=False)
    table.title = None
    console.print(table)


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False)
