"""How fast the simulator is: an hour of Kimi's conversations on 16 nodes, and a thousand nodes.

    python benchmarks/simulator.py [--json] [--nodes 1000 --requests 1000000]

The whole system each time: conductor, pool, schedulers and links, half of the nodes prefilling. The claims are the
baselines: 4 s of one core for the conversation trace (generated where it is not at hand), and 15 minutes and 8 GB for a
million requests of that character on a thousand nodes; the second only with --requests. Reading the trace from its file
takes at most 1 s of a core.
"""

from __future__ import annotations

import gc
import resource
import tempfile
import time
from pathlib import Path

from _conversation import RATE_PER_S, conversation, origin

from moonpool.bench.report import BenchReport, bench_parser
from moonpool.sim.physics.hardware import node
from moonpool.sim.physics.model_shape import preset
from moonpool.sim.physics.paper_fit import paper_cost
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.config import ClusterConfig
from moonpool.sim.world.results import Results
from moonpool.traces import Trace, read_jsonl, write_jsonl
from moonpool.traces.generate import generate

RATE_PER_NODE = RATE_PER_S / 16  # as in the conversation trace
CLAIMED_S, CLAIMED_BIG_S, CLAIMED_BIG_GB = 4.0, 900.0, 8.0
CLAIMED_READ_S = 1.0


def simulate(trace: Trace, num_nodes: int) -> tuple[float, Results]:
    """Seconds of the processor, the cluster's making included, and what came out."""
    gc.collect()
    began_s = time.process_time()
    config = ClusterConfig(
        shape=preset("llama3-70b"),
        node=node("a800"),
        cost=paper_cost(),
        num_prefill=num_nodes // 2,
        num_decode=num_nodes - num_nodes // 2,
    )
    results = Results.of(SimCluster(config, trace).run())
    return time.process_time() - began_s, results


def reading_s(trace: Trace) -> float:
    """Seconds of the processor to read the trace from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write_jsonl(trace, path)
        began_s = time.process_time()
        assert read_jsonl(path) == trace
        return time.process_time() - began_s


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=1000, help="of the large run")
    parser.add_argument("--requests", type=int, default=0, help="of the large run; 0: none")
    arguments = parser.parse_args()
    report = BenchReport.from_options("simulator", arguments)
    trace = conversation()
    note = f"{origin()}, {len(trace)} requests"
    report.add("its file is read", reading_s(trace), "s", CLAIMED_READ_S, note=note)
    seconds, results = simulate(trace, 16)
    note = f"{origin()}, {len(trace)} requests, {1e6 * seconds / len(trace):.0f} us each"
    report.add("an hour on 16 nodes", seconds, "s", CLAIMED_S, note=note)
    if not arguments.requests:
        return
    num_nodes, share = arguments.nodes, arguments.requests / 1e6
    big = generate("chat", num_requests=arguments.requests, rate_per_s=num_nodes * RATE_PER_NODE, seed=1)
    seconds, results = simulate(big, num_nodes)
    summary = results.summary()
    note = f"{1e6 * seconds / len(big):.0f} us each; done {summary['num_done']:g}, hits {summary['hit_share']:.3f}"
    case = f"{arguments.requests} requests, {num_nodes} nodes"
    report.add(case, seconds, "s", CLAIMED_BIG_S * share, note=note)
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    report.add(f"{case}, memory", peak_gb, "GB", CLAIMED_BIG_GB, note="peak of the process")


if __name__ == "__main__":
    main()
