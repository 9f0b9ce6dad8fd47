"""The simulator against live workers whose roles change, as fidelity.py does it for roles that stay.

    python benchmarks/fidelity_roles.py [--json] [--repeat 3] [--phases 4] [--phase-s 60]

Four workers with a floor on the time of their steps (_paced_worker.py) begin as 2P2D and change their roles by the
elastic rule, under the load of _live_swing.py, which swings between long prompts and long answers. The profile is
measured before, on one prefill and one decode worker of the same pace (_live_profile.py). The simulated cluster gets
the same requests, targets and rule. Every round has a service of its own, so that it begins with the same roles. The
claim: p50 and p90 of TTFT and TBT of answered requests within 10 % of the live ones (medians of the rounds), TTFT of
long and of short prompts each: the median of both together lies in the gap between them, where one refused request
more or less moves it by half a second. The numbers of refused requests and of role changes are printed beside them.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _live_load import Quiet, save_model
from _live_profile import Calibration
from _live_swing import SHAPE, TBT_S, TTFT_S, SwingRequest, SwingRun, paced_service, requests, send_load
from fidelity import MAX_OTHERS, Reporter, cluster_config, percentiles, to_trace

from moonpool.bench.report import BenchReport, bench_parser
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.frontend.workers import Connections
from moonpool.launch.plan import ServeConfig
from moonpool.sim.fleet import Profile
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.job import DONE, REFUSED

RATE_PER_S = 2.0  # three workers of one role are enough for it


def measure_profile(model: Path) -> Profile:
    """Of one prefill and one decode worker."""
    with paced_service(model, 1, 1, elastic=False) as service:

        async def measure() -> Profile:
            connections = Connections(service.conductor_address)
            try:
                return await Calibration(service.url, connections, service.config.block_tokens, seed=0).measure()
            finally:
                await connections.close()

        return asyncio.run(measure())


def play_round(model: Path, load: Sequence[SwingRequest]) -> tuple[SwingRun, ServeConfig, float]:
    """Return what came out, the configuration, and how many cores others used meanwhile."""
    with paced_service(model, 2, 2, elastic=True) as service:
        quiet = Quiet(service)
        run = send_load(service, load)
        return run, service.config, quiet.others()


def simulate(config: ServeConfig, profile: Profile, load: Sequence[SwingRequest]) -> SimCluster:
    policy = PolicyConfig(name=config.policy, ttft_slo_s=TTFT_S, tbt_slo_s=TBT_S)
    simulated = cluster_config(config, profile, SHAPE, elastic=True, policy=policy)
    world = SimCluster(simulated, to_trace(load, config.block_tokens))
    world.run()
    return world


def report(rounds: Sequence[SwingRun], load: Sequence[SwingRequest], world: SimCluster, reporter: Reporter) -> None:
    done = [job.outcome == DONE for job in world.jobs]
    num_refused = sum(job.outcome == REFUSED for job in world.jobs)
    assert sum(done) + num_refused == len(world.jobs), "live, every request was answered or refused"
    reporter.say(f"{len(world.jobs)} requests, {len(rounds)} rounds; times in ms")
    reporter.compare_all(
        times_of(
            load, [(job.ttft_s, job.mean_gap_s) if ok else None for job, ok in zip(world.jobs, done, strict=True)]
        ),
        [times_of(load, [each and (each.ttft_s, each.mean_gap_s) for each in run.answers]) for run in rounds],
    )
    reporter.counted("refused requests", num_refused, [run.answers.count(None) for run in rounds], "requests")
    reporter.counted("role changes", world.roles.num_changes, [run.num_changes for run in rounds], "")


def times_of(
    load: Sequence[SwingRequest], times_s: Sequence[tuple[float | None, float | None] | None]
) -> dict[str, float]:
    """Percentiles of TTFT, by the length of the prompts, and of TBT; `times_s` is None for refused requests."""
    columns: dict[str, list[float]] = {"TTFT of long prompts": [], "TTFT of short prompts": [], "TBT": []}
    for request, times in zip(load, times_s, strict=True):
        if times is not None:
            ttft_s, gap_s = times
            columns[f"TTFT of {'short' if request.phase % 2 else 'long'} prompts"].append(ttft_s or 0.0)
            columns["TBT"].append(gap_s or 0.0)
    return percentiles(columns)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="live rounds")
    parser.add_argument("--phases", type=int, default=4, help="of the load that swings")
    parser.add_argument("--phase-s", type=float, default=60.0, help="seconds of each phase")
    parser.add_argument("--rate", type=float, default=RATE_PER_S, help="of requests, per second")
    parser.add_argument("--seed", type=int, default=1, help="of the requests' lengths and times")
    options = parser.parse_args()
    reporter = Reporter(BenchReport.from_options("fidelity_roles", options))
    load = requests(options.phases, options.phase_s, options.seed, options.rate)
    rounds = []
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        model = Path(folder) / "model"
        save_model(model, SHAPE)
        profile = measure_profile(model)
        for number in range(1, options.repeat + 1):
            run, config, others = play_round(model, load)
            rounds.append(run)
            noisy = (
                f", more than the {MAX_OTHERS:g} at which this machine counts as quiet" if others > MAX_OTHERS else ""
            )
            print(
                f"round {number}/{options.repeat}: others used {others:.2f} cores{noisy}", file=sys.stderr, flush=True
            )
    report(rounds, load, simulate(config, profile, load), reporter)


if __name__ == "__main__":
    main()
