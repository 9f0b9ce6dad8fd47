"""What a measured profile says beside the paper's terms, and that the simulated cluster takes the time it says."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world_cases import BLOCK, chat, cluster, trace_of

from moonpool.base.cluster import DecodeSample, PrefillSample
from moonpool.base.errors import InvalidInput
from moonpool.sim.fleet import Profile, profile_cost, read_profile, write_profile
from moonpool.sim.physics.cost import DecodeCost, EngineCost, Overhead, PrefillCost
from moonpool.sim.physics.paper_fit import paper_cost
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.job import DONE, Job

# A CPU that gathers pages, masks what it computed for nothing, and has a faster way for a single sequence.
CPU = EngineCost(
    PrefillCost(base_s=0.03, per_token_s=1e-3, per_square_s=4e-7, per_masked_s=6e-7, per_context_s=8e-6),
    DecodeCost(base_s=0.010, per_seq_s=1e-3, per_kv_token_s=4.5e-6, batched_s=0.012),
)
OVERHEAD = Overhead(request_s=0.004, handoff_s=0.007)


def samples(seed: int) -> Profile:
    rng = random.Random(seed)
    prefills = [(n, p) for n in range(30, 1200, 90) for p in (0, n // 3, n - rng.randint(1, 20))]
    decodes = [(s, s * k) for s in (1, 2, 3, 5, 8) for k in (100, 500, 900)]
    return Profile(
        [PrefillSample(n, p, CPU.prefill_s(n, p)) for n, p in prefills],
        [DecodeSample(s, k, CPU.decode_step_s(s, k)) for s, k in decodes],
        OVERHEAD.request_s,
        OVERHEAD.handoff_s,
    )


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_a_profile_finds_what_engines_without_paged_kernels_pay(seed: int) -> None:
    fitted = samples(seed).cost()
    for n, p in ((40, 0), (700, 0), (900, 600), (1100, 1090)):
        assert fitted.prefill_s(n, p) == pytest.approx(CPU.prefill_s(n, p), rel=1e-3)
    for s, k in ((1, 300), (2, 300), (4, 3000)):
        assert fitted.decode_step_s(s, k) == pytest.approx(CPU.decode_step_s(s, k), rel=1e-3)
    assert fitted.decode.batched_s == pytest.approx(0.012, rel=0.01)
    assert fitted.overhead == OVERHEAD


def test_many_prefills_cost_what_each_does() -> None:
    lengths, prefixes = [24, 500, 900, 1000], [0, 0, 576, 999]
    each = [CPU.prefill_s(n, p) for n, p in zip(lengths, prefixes, strict=True)]
    assert CPU.prefill.prefills_s(lengths, prefixes).tolist() == pytest.approx(each)


def test_a_single_sequence_takes_the_faster_way_however_many_steps() -> None:
    one, two = CPU.decode_steps_s(1, 100, 50), CPU.decode_steps_s(2, 200, 50)
    assert two - one == pytest.approx(50 * (0.012 + 1e-3) + 4.5e-6 * (50 * 100 + 49 * 50 // 2))
    assert CPU.steps_within(2, 200, two) == 50
    assert CPU.steps_within(1, 100, one * 0.999) == 49


def test_a_prefix_that_workers_report_is_read_not_loaded() -> None:
    """They leave out how long they waited for it; so a simulated step pays for it wherever it came from."""
    fitted = profile_cost(*(getattr(samples(1), kind) for kind in ("prefills", "decodes")))
    assert fitted.prefill.per_prefix_s == 0.0
    assert fitted.prefill.compute_s(900, 600) == pytest.approx(CPU.prefill_s(900, 600), rel=1e-3)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, profile = tmp_path / "profile.json", samples(3)
    write_profile(path, profile)
    assert read_profile(path) == profile.cost()
    raw = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({key: raw[key] for key in ("prefills", "decodes")}))
    assert read_profile(path).overhead == Overhead()


@pytest.mark.parametrize("overhead", [{"request_s": -1.0}, {"handof_s": 1.0}, {"handoff_s": "1"}])
def test_a_wrong_overhead_is_refused(tmp_path: Path, overhead: dict[str, object]) -> None:
    path = tmp_path / "profile.json"
    body = {"prefills": [[100, 0, 0.5]], "decodes": [[1, 100, 0.02]], **overhead}
    path.write_bytes(msgspec.json.encode(body))
    with pytest.raises(InvalidInput):
        read_profile(path)


# --- in the simulated cluster ---

COST = replace(paper_cost(), overhead=OVERHEAD)


def run(*requests: tuple[float, int, int, list[int]], between_steps: bool = True) -> list[Job]:
    config = cluster(num_prefill=1, num_decode=1, cost=COST, answers_between_steps=between_steps, layer_wise=True)
    return SimCluster(config, trace_of(*requests)).run()


@pytest.mark.parametrize("between_steps", [False, True])
def test_a_request_alone_takes_its_overheads_and_no_more(between_steps: bool) -> None:
    (job,) = run((1.0, 400, 11, [1]), between_steps=between_steps)
    sent_s = 400 * cluster().shape.kv_nbytes_per_token / cluster().node.network_bandwidth
    expected = OVERHEAD.request_s + COST.prefill.compute_s(400)
    assert job.ttft_s == pytest.approx(expected)
    assert job.handoff_s == pytest.approx(OVERHEAD.handoff_s, abs=sent_s)
    assert job.end_s - job.first_token_s - job.handoff_s == pytest.approx(COST.decode_steps_s(1, 400, 10))


def test_without_a_second_token_nothing_is_handed_off() -> None:
    (job,) = run((1.0, 400, 1, [1]))
    assert job.ttft_s == pytest.approx(OVERHEAD.request_s + COST.prefill.compute_s(400))


def test_a_busy_decode_worker_takes_a_request_between_its_steps() -> None:
    """The first one decodes all the while; the second gets in at the end of the step under way."""
    steps = run((0.0, 400, 400, [1]), (1.0, 400, 5, [2]))
    at_once = run((0.0, 400, 400, [1]), (1.0, 400, 5, [2]), between_steps=False)
    step_s = COST.decode_step_s(1, 500)
    assert steps[1].ttft_s == pytest.approx(at_once[1].ttft_s, abs=step_s), "one step until it has pages, no other"
    late_s = steps[1].handoff_s - at_once[1].handoff_s
    assert 0 < late_s <= step_s
    first, accepted_s = steps[0], steps[1].first_token_s + steps[1].handoff_s
    since_s = accepted_s - (first.first_token_s + first.handoff_s)
    passed = COST.steps_within(1, 400, since_s + 1e-9)
    assert since_s == pytest.approx(COST.decode_steps_s(1, 400, passed), abs=1e-9), "not between two steps"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_every_request_is_done_and_the_same_twice(seed: int, between_steps: bool) -> None:
    config = cluster(cost=COST, answers_between_steps=between_steps)
    times = []
    for _ in range(2):
        world = SimCluster(config, chat(40, seed, rate=4.0))
        jobs = world.run()
        assert all(job.outcome == DONE for job in jobs)
        assert all(job.ttft_s is not None and job.ttft_s >= OVERHEAD.request_s for job in jobs)
        assert all(job.end_s >= job.first_token_s for job in jobs)
        for worker in world.decodes.values():
            worker.scheduler.check_integrity()
        times.append([(job.ttft_s, job.end_s) for job in jobs])
    assert times[0] == times[1]


assert BLOCK > 400, "the requests above have one block each, in part"
