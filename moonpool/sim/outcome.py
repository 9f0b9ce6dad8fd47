"""The outcome of replaying a trace on one system: plain numbers for `--json`, the table and the report."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput
from moonpool.sim.fleet import Fleet
from moonpool.sim.physics.roofline import kv_capacity_tokens
from moonpool.sim.systems import Goals, System
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.recorder import Columns, WorldRecorder
from moonpool.sim.world.results import Results
from moonpool.traces.columns import Trace

_QUANTILES = 101
_DIGITS = 9  # significant digits that are kept: further digits of sums may differ between machines


class LinkUse(msgspec.Struct, frozen=True):
    """All links of a kind together, over the whole run. Shares are of their capacity."""

    nbytes: float
    mean_share: float
    peak_share: float  # in the fullest bucket of `links_over_time`


class LinksOverTime(msgspec.Struct, frozen=True):
    """Bytes per second over all links of a kind, from time 0; the last bucket may be partial."""

    bucket_s: float
    nbytes_per_s: Columns


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The names in `numbers` carry units; GPU seconds are of all GPUs of a node together."""

    system: str
    about: str
    trace: str
    load: float
    ttft_target_s: float
    tbt_target_s: float
    machine: dict[str, str | int | float]
    numbers: dict[str, float]
    refusals: dict[str, int]  # by reason, the most frequent first
    links: dict[str, LinkUse]
    quantiles: dict[str, list[float]]  # ttft_s and tbt_s of done requests, at 0, 1, ... 100 %
    over_time: Columns
    links_over_time: LinksOverTime


def replay(
    system: System,
    trace: Trace,
    fleet: Fleet,
    goals: Goals,
    *,
    load: float = 1.0,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Run the trace through the system. `load` is only reported: the trace is scaled already.

    The first token of a request without output is computed, too. Raise InvalidInput for an empty trace, or for a
    request that fits into no node.
    """
    _refuse_unfit(trace, fleet)
    world = system.make(trace.replace(num_output=np.maximum(trace.num_output, 1)), fleet, goals)
    recorder = WorldRecorder(world)
    results = Results.of(world.run(progress))
    numbers = _numbers(results, fleet, goals)
    numbers["num_role_changes"] = world.roles.num_changes if isinstance(world, SimCluster) else 0
    bucket_s, rates = recorder.links()
    return Outcome(
        system=system.name,
        about=system.summary,
        trace=trace.name,
        load=load,
        ttft_target_s=goals.ttft_s,
        tbt_target_s=goals.tbt_s,
        machine=fleet.facts(),
        numbers={name: _rounded(value) for name, value in numbers.items()},
        refusals=dict(sorted(results.refusals.items(), key=lambda each: (-each[1], each[0]))),
        links=_link_use(bucket_s, rates, fleet, world.clock.now_s),
        quantiles={"ttft_s": _quantiles(results, results.ttft_s), "tbt_s": _quantiles(results, results.tbt_s)},
        over_time={name: [_rounded(value) for value in values] for name, values in recorder.columns().items()},
        links_over_time=LinksOverTime(
            bucket_s, {kind: [_rounded(each) for each in values] for kind, values in rates.items()}
        ),
    )


def encode(outcome: Outcome) -> str:
    """Return one line of JSON. The same replay gives the same bytes."""
    return msgspec.json.encode(outcome).decode()


def _refuse_unfit(trace: Trace, fleet: Fleet) -> None:
    if not len(trace):
        raise InvalidInput("no requests are left of the trace; choose a larger part")
    longest = int((trace.num_input + trace.num_output).max())
    room = kv_capacity_tokens(fleet.shape, fleet.node) // trace.block_tokens * trace.block_tokens
    if longest + 1 > room:
        raise InvalidInput(f"a request of {longest} tokens does not fit into a node's GPUs, which hold {room} of KV")


def _numbers(results: Results, fleet: Fleet, goals: Goals) -> dict[str, float]:
    summary = results.summary()
    done = results.is_done
    num_input = results.num_input[done]
    reused = np.sum([tokens[done] for tokens in results.hit_tokens.values()], axis=0)
    cost = fleet.cost.prefill
    loads_s = cost.per_prefix_s * np.minimum(reused, num_input - 1)
    saved_s = cost.prefills_s(num_input, np.zeros_like(num_input)) - (cost.prefills_s(num_input, reused) - loads_s)
    return {
        "effective_share": results.effective_share(goals.ttft_s, goals.tbt_s),
        "goodput_per_s": results.goodput(goals.ttft_s, goals.tbt_s),
        **summary,
        "num_unfinished": summary["num_requests"] - summary["num_done"] - summary["num_refused"] - summary["num_lost"],
        "prefill_gpu_s": float(results.compute_s[done].sum()),
        "saved_gpu_s": float(saved_s.sum()),
        "last_end_s": float(results.end_s[done].max()) if done.any() else 0.0,
    }


def _link_use(bucket_s: float, rates: Columns, fleet: Fleet, until_s: float) -> dict[str, LinkUse]:
    capacities = {name.rpartition("/")[2]: each for name, each in fleet.node.link_capacities("").items()}
    found = {}
    for kind, values in rates.items():
        nbytes, most = sum(values) * bucket_s, capacities[kind] * fleet.num_nodes
        mean = nbytes / until_s / most if most and until_s else 0.0
        peak = max(values) / most if most else 0.0
        found[kind] = LinkUse(_rounded(nbytes), _rounded(mean), _rounded(peak))
    return found


def _quantiles(results: Results, column: NDArray[np.float64]) -> list[float]:
    values = column[results.is_done]
    if not len(values):
        return []
    return [_rounded(each) for each in np.quantile(values, np.linspace(0, 1, _QUANTILES)).tolist()]


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
