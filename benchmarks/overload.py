"""More requests than the cluster can serve: who is rejected, what is wasted, how much good comes out. In the simulator.

    python benchmarks/overload.py [--json] [--quick] [--case rejection|goodput|table ...]

rejection   arXiv's experiment: 8 prefill and 8 decode nodes, a trace at twice its speed; rejected requests for the
            forms of admission (none, early, paper, predicted). Published: 4,183 / 3,771 / 3,589 of 23,000.
goodput     requests a second within both targets against the offered rate, of the best one of the same form
table       rejected over loads and TBT targets

Assumptions. The trace is the conversation trace (arXiv's own is not at hand), or a generated one of its character. The
paper does not say which targets it used here: TTFT 30 s and TBT 0.1 s are those of its other experiments. Batches cost
what the paper's engine makes of them (paper_fit.mooncake_cost). Those that do not fit now may wait, as with us by
default; the paper has no such room, and its rows are also given without.

Why a wasted prefill costs refusals at all: it takes the time of a prefill worker from requests that could have been
decoded, and those are then refused for their TTFT, or come too late to a place that fell free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from _conversation import conversation, origin
from _paper_published import REJECTED
from _paper_rows import Row

from moonpool.bench.report import BenchReport, bench_parser
from moonpool.conductor.admission.forms import AdmissionForm
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.sim.physics.hardware import node
from moonpool.sim.physics.model_shape import preset
from moonpool.sim.physics.paper_fit import mooncake_cost
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.config import ClusterConfig
from moonpool.sim.world.results import Results
from moonpool.traces import scale_load

NUM_PUBLISHED = 23_000
FORMS = tuple(AdmissionForm)
LOADS = (1.0, 1.25, 1.5, 2.0, 2.5)  # of the trace's own rate; the best one lies among them
_WHY = "their targets and what a batch of decodes costs are not published; what compares is the order"


@dataclass(frozen=True)
class Setup:
    """A cluster and its targets; `num_requests` of the trace, from its beginning."""

    tbt_s: float = 0.1
    ttft_s: float = 30.0
    num_prefill: int = 8
    num_decode: int = 8
    num_requests: int = 12_031
    may_wait: bool = True

    @property
    def name(self) -> str:
        room = "" if self.may_wait else ", nobody waits"
        targets = f"TTFT {self.ttft_s:g} s, TBT {1e3 * self.tbt_s:g} ms"
        return f"{self.num_prefill}P{self.num_decode}D, {targets}{room}"


@cache
def outcome(setup: Setup, form: AdmissionForm, load: float) -> Results:
    policy = PolicyConfig(
        name="cost",
        ttft_slo_s=setup.ttft_s,
        tbt_slo_s=setup.tbt_s,
        admission=form,
        queue_capacity=None if setup.may_wait else 0,
    )
    config = ClusterConfig(
        shape=preset("llama3-70b"),
        node=node("a800"),
        cost=mooncake_cost(),
        num_prefill=setup.num_prefill,
        num_decode=setup.num_decode,
        policy=policy,
    )
    return Results.of(SimCluster(config, scale_load(conversation(setup.num_requests), load)).run())


def num_rejected(results: Results) -> int:
    return sum(results.refusals.values())


def num_wasted(results: Results) -> int:
    return int(results.is_wasted.sum())


def goodput(setup: Setup, form: AdmissionForm, load: float) -> float:
    return outcome(setup, form, load).goodput(setup.ttft_s, setup.tbt_s)


def rejection_rows(quick: bool = False) -> Iterator[Row]:
    """Rejected of 23,000, in the order none, early, paper, predicted; also what each wasted."""
    for may_wait in (True, False):
        setup = Setup(num_requests=250 if quick else 12_031, may_wait=may_wait)
        scale = NUM_PUBLISHED / setup.num_requests
        about = f"{origin()} at 2x, {setup.num_requests} requests counted as {NUM_PUBLISHED:,}; {setup.name}: assumed"
        for form in FORMS:
            results, case = outcome(setup, form, 2.0), f"{form}{'' if may_wait else ', nobody waits'}"
            note = f"{about}; {goodput(setup, form, 2.0):.2f} good/s"
            yield Row(f"arxiv rejected, {case}", scale * num_rejected(results), "requests", REJECTED[form], note, _WHY)
            yield Row(f"arxiv wasted prefills, {case}", scale * num_wasted(results), "requests", None, note)


def goodput_rows(quick: bool = False) -> Iterator[Row]:
    """`value` of the ratios: goodput over the best one of the same form at a lower rate, or the same."""
    setup = Setup(num_requests=600 if quick else 12_031)
    for form in FORMS:
        good = {load: goodput(setup, form, load) for load in LOADS}
        best = max(good.values())
        for load in LOADS:
            results = outcome(setup, form, load)
            note = f"rejected {num_rejected(results)}, wasted {num_wasted(results)} of {len(results)}; {setup.name}"
            yield Row(f"goodput {form}, load {load:g}", good[load], "requests/s", best, note)


def table_rows(quick: bool = False) -> Iterator[Row]:
    """Where the order holds: over loads and targets."""
    for tbt_s in (0.08, 0.1, 0.2):
        setup = Setup(tbt_s=tbt_s, num_requests=600 if quick else 3000)
        for load in LOADS:
            yield from _cell(setup, load)


def _cell(setup: Setup, load: float) -> Iterator[Row]:
    rejected = {form: num_rejected(outcome(setup, form, load)) for form in FORMS}
    counts = [rejected[form] for form in (AdmissionForm.NONE, AdmissionForm.EARLY, AdmissionForm.PREDICTED)]
    kind = "falls" if counts[0] > counts[1] > counts[2] else "same" if len(set(counts)) == 1 else "other"
    for form in FORMS:
        note = f"order {kind}; wasted {num_wasted(outcome(setup, form, load))}; {goodput(setup, form, load):.2f} good/s"
        yield Row(f"rejected {form}, load {load:g}, {setup.name}", rejected[form], "requests", None, note)


CASES: dict[str, Callable[[bool], Iterator[Row]]] = {
    "rejection": rejection_rows,
    "goodput": goodput_rows,
    "table": table_rows,
}


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="short traces: shows that it runs, not the numbers")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="may be repeated; all without it")
    arguments = parser.parse_args()
    report = BenchReport.from_options("overload", arguments)
    for name in arguments.case or CASES:
        for row in CASES[name](arguments.quick):
            report.add(row.case, row.value, row.unit, row.theirs, compared=False, note=row.comment)


if __name__ == "__main__":
    main()
