"""The policies side by side: which worker, what is pulled, ties, targets."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.cluster import PullSample
from moonpool.base.errors import ConfigError, Unavailable
from moonpool.conductor.costs import CostModels, LearnedCost
from moonpool.conductor.placement.kinds import WorkerKinds
from moonpool.conductor.placement.policy import (
    POLICY_NAMES,
    Chooser,
    PlacementChoice,
    PlacementInput,
    PolicyConfig,
    make_policy,
)
from moonpool.conductor.placement.prefix_index import Leading
from moonpool.conductor.placement.pricing import PlacementRequest, PricedPlacement, Pricing, Replicated, replicated
from moonpool.conductor.placement.tables import Backlog, DecodeTable, PrefillTable
from moonpool.conductor.placement.traffic import Traffic

BLOCK = 64


def measured(*terms: float) -> LearnedCost:
    """A model that stands on measurements."""
    model = LearnedCost(terms)
    model.num_samples = 1
    return model


def costs(
    prefill: tuple[float, ...] = (0.01, 1e-3, 1e-8, 1e-6),
    transfer: tuple[float, ...] = (1e-3, 1e-9),
    ssd: tuple[float, ...] = (2e-3, 4e-9),
) -> CostModels:
    return CostModels(measured(*prefill), transfer=measured(*transfer), transfer_ssd=measured(*ssd))


COSTS = costs()


class Prefill(NamedTuple):
    local: int = 0
    queue_s: float = 0.0
    assigned: int = 0


class Decode(NamedTuple):
    num_seqs: int = 0
    max_num_seqs: int = 8
    kv_tokens: int = 0
    free_pages: int = 1000


IDLE = (Decode(),)


class World:
    """Workers p0, p1, ... and d0, d1, ... and one prompt."""

    def __init__(
        self,
        prefills: Sequence[Prefill],
        decodes: Sequence[Decode] = IDLE,
        *,
        pool: int = 0,
        on_ssd: Iterable[int] = (),
        num_blocks: int = 20,
        costs: CostModels = COSTS,
        layers: int = 1,
        step: int = 0,
    ) -> None:
        self.table, self.decodes = PrefillTable(), DecodeTable()
        groups: dict[int, int] = {}
        for slot, one in enumerate(prefills):
            self.table.add(slot, f"p{slot}")
            backlog = Backlog()
            for number in range(one.assigned):
                backlog.add(str(number), one.queue_s / one.assigned, 0.0)
            self.table.update(slot, backlog)
            groups[one.local] = groups.get(one.local, 0) | 1 << slot
        for slot, decode in enumerate(decodes):
            self.decodes.add(slot, f"d{slot}", decode.max_num_seqs)
            self.decodes.update(slot, decode.num_seqs, decode.kv_tokens, decode.free_pages)
        self.traffic = Traffic()
        self.costs = costs
        demand = PlacementRequest(num_blocks * BLOCK, 4096, 16, BLOCK, 1 << 20, layers, step)
        leading = Leading(pool, tuple(on_ssd), tuple(sorted(groups.items())))
        prices = Pricing(demand, leading, costs, self.traffic)
        self.inputs = PlacementInput(demand, leading, self.table.wait_s(0.0), self.table, prices, self.traffic)

    def chooser(self, **settings: Any) -> Chooser:
        config = PolicyConfig(**settings)
        return Chooser(make_policy(config, random.Random(config.seed)))

    def choose(self, chooser: Chooser | None = None, **config: Any) -> PlacementChoice:
        return (chooser or self.chooser(**config)).choose(self.inputs, self.decodes, (), WorkerKinds(self.costs))


PREFILLS = st.lists(st.builds(Prefill, st.integers(0, 20), st.floats(0, 5), st.integers(1, 3)), min_size=1, max_size=9)
DECODES = st.lists(
    st.builds(Decode, st.integers(0, 9), st.just(8), st.integers(0, 9000), st.integers(0, 60)), min_size=1, max_size=9
)
WEIGHING = st.sampled_from(["local", "paper", "cost"])


@given(PREFILLS, DECODES, st.integers(0, 20), st.floats(1, 8), WEIGHING)
def test_the_choice_is_the_minimum(
    prefills: list[Prefill], decodes: list[Decode], pool: int, threshold: float, policy: str
) -> None:
    world = World(prefills, decodes, pool=pool, layers=30)
    config: dict[str, Any] = {"name": policy, "kvcache_balancing_threshold": threshold, "num_candidates": 20}
    choice = world.choose(tie_slack=0.0, **config)
    assert choice.prefill.ttft_s == pytest.approx(min(one.ttft_s for one in choice.candidates))
    assert sorted(one.worker for one in choice.candidates) == [f"p{slot}" for slot in range(len(prefills))]
    best = choice.prefill
    relaxed = world.choose(tie_slack=0.1, **config).prefill
    assert relaxed.ttft_s <= best.ttft_s + 0.1 * best.service_s + 1e-9


@given(PREFILLS, st.integers(0, 20), st.sets(st.integers(0, 19)), st.integers(1, 30))
def test_cost_is_never_slower_than_without_the_pool(
    prefills: list[Prefill], pool: int, on_ssd: set[int], layers: int
) -> None:
    world = World(prefills, pool=pool, on_ssd=sorted(at for at in on_ssd if at < pool), layers=layers)
    ours = world.choose(name="cost", tie_slack=0.0).prefill
    for other in ("local", "paper"):
        assert ours.ttft_s <= world.choose(name=other, tie_slack=0.0).prefill.ttft_s + 1e-12


@given(st.integers(0, 20), st.integers(0, 20), st.floats(1, 8))
def test_paper_pulls_exactly_when_the_ratio_is_over_the_threshold(local: int, pool: int, threshold: float) -> None:
    config: dict[str, Any] = {"name": "paper", "kvcache_balancing_threshold": threshold}
    one = World([Prefill(local, 1.5, 1)], pool=pool).choose(**config).prefill
    if pool > threshold * local:
        assert one.pulled_blocks == pool - local
        assert one.transfer_s == COSTS.transfer_s((pool - local) << 20)
        assert one.prefill_s == pytest.approx(COSTS.prefill_s(20 * BLOCK, pool * BLOCK))
    else:
        assert (one.pulled_blocks, one.transfer_s) == (0, 0)
        assert one.prefill_s == pytest.approx(COSTS.prefill_s(20 * BLOCK, local * BLOCK))
    assert one.ttft_s == pytest.approx(one.transfer_s + 1.5 + one.prefill_s)


RATE = st.floats(1e-11, 1e-6)


@given(
    st.tuples(st.floats(0, 0.1), st.floats(1e-6, 1e-2), st.floats(0, 1e-7), st.just(0.0)),
    st.tuples(st.floats(0, 0.05), RATE),
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(1, 64),
    st.sampled_from([0, 100, 512, 5000]),
)
def test_cost_pulls_the_best_number_of_blocks(
    prefill: tuple[float, ...], transfer: tuple[float, ...], local: int, pool: int, layers: int, step: int
) -> None:
    world = World([Prefill(local)], pool=pool, costs=costs(prefill, transfer), layers=layers, step=step)
    found = world.choose(name="cost").prefill
    each = [
        world.inputs.prices.plan(local, pulled, None, layers).service_s for pulled in range(max(0, pool - local) + 1)
    ]
    # To pull a part only must save a tenth of what pulling everything takes.
    takes_all = each[-1] < each[0] and min(each) >= 0.9 * each[-1]
    assert found.service_s == pytest.approx(each[-1] if takes_all else min(each), rel=1e-9)


def test_cost_leaves_what_is_on_a_slow_disk() -> None:
    world = World([Prefill()], pool=20, on_ssd=range(8, 20), costs=costs(ssd=(0.5, 1e-6)))
    choice = world.choose(name="cost")
    assert (choice.prefill.pulled_blocks, choice.max_pool_blocks) == (8, 8)
    everything = world.choose(name="paper").prefill
    assert (everything.pulled_blocks, everything.ssd_blocks) == (20, 12)
    assert everything.transfer_s > 12


def test_the_worker_is_told_where_to_stop() -> None:
    slow = costs(transfer=(1e-3, 1e-5))
    assert World([Prefill()], pool=20).choose(name="cost").max_pool_blocks is None  # all: it may find even more
    assert World([Prefill(3)], pool=20, costs=slow).choose(name="cost").max_pool_blocks == 0
    assert World([Prefill(3)], pool=2, costs=slow).choose(name="cost").max_pool_blocks == 0  # if it should find more
    assert World([Prefill(3)], pool=2, costs=slow).choose(name="paper").max_pool_blocks is None
    assert World([Prefill(3)], pool=2).choose(name="cost").max_pool_blocks is None
    assert World([Prefill(3)], pool=8).choose(name="cost").max_pool_blocks is None
    assert World([Prefill(20)], pool=20, costs=slow).choose(name="cost").max_pool_blocks == 0  # if its pages are gone
    for name in ("random", "round-robin", "least-loaded", "local"):
        assert World([Prefill(3)], pool=20).choose(name=name).max_pool_blocks == 0


MB_S = 1e-6  # seconds a byte


def test_a_slow_pool_is_not_waited_for() -> None:
    """16 MB that compute in 1 s from a pool of 1 MB/s."""
    slow = costs(prefill=(0.0, 1.0 / (16 * BLOCK), 0.0, 0.0), transfer=(1e-3, MB_S))
    for layers in (1, 30):
        world = World([Prefill()], pool=16, num_blocks=16, costs=slow, layers=layers)
        choice = world.choose()
        assert (choice.prefill.pulled_blocks, choice.max_pool_blocks) == (0, 0)
        assert choice.prefill.ttft_s == pytest.approx(1.0)
        assert world.choose(name="paper").prefill.ttft_s > 16


@pytest.mark.parametrize("slow_tier", ["dram", "ssd"])
def test_a_tier_that_was_never_measured_is_tried_with_one_block(slow_tier: str) -> None:
    """Whatever its prior says: the first decision must not wait for a whole prompt."""
    on_ssd = range(20) if slow_tier == "ssd" else ()
    found = costs()
    if slow_tier == "dram":
        found.transfer = LearnedCost((1e-3, 1e-12))
    else:
        found.transfer_ssd = LearnedCost((1e-3, 1e-12))
    choice = World([Prefill(3)], pool=20, on_ssd=on_ssd, costs=found).choose()
    assert (choice.prefill.pulled_blocks, choice.max_pool_blocks) == (1, 4)
    found.learn(pulls=[PullSample(1 << 20, 1e-3, (1 << 20) * len(on_ssd[:1]))])
    assert World([Prefill(3)], pool=20, on_ssd=on_ssd, costs=found).choose().prefill.pulled_blocks == 17


def test_dram_is_pulled_up_to_the_second_block_of_disks_never_measured() -> None:
    found = costs()
    found.transfer_ssd = LearnedCost((1e-3, 1e-9))
    world = World([Prefill()], pool=20, on_ssd=(4, 9, 15), costs=found)
    assert world.choose().prefill.pulled_blocks == 9


def test_disks_are_never_believed_faster_than_the_way_to_them() -> None:
    slow = costs(transfer=(0.5, 1e-6), ssd=(1e-3, 1e-12))
    assert slow.transfer_s(1 << 20, 1 << 20) == slow.transfer_s(1 << 20)


def test_what_the_index_did_not_know_of_is_not_pulled_from_a_slow_pool() -> None:
    slow = costs(prefill=(0.0, 1.0 / (16 * BLOCK), 0.0, 0.0), transfer=(1e-3, MB_S))
    assert World([Prefill()], pool=0, num_blocks=16, costs=slow).choose().max_pool_blocks == 0
    assert World([Prefill()], pool=0, num_blocks=16, costs=CostModels()).choose().max_pool_blocks == 0
    assert World([Prefill()], pool=0, num_blocks=16).choose().max_pool_blocks is None


@pytest.mark.parametrize(("former", "name"), [("global", "paper"), ("ours", "cost"), ("cost", "cost")])
def test_former_names_are_still_taken(former: str, name: str) -> None:
    assert PolicyConfig(name=former).name == make_policy(PolicyConfig(name=former), random.Random(0)).name == name


def test_loading_while_computing_shortens_both_to_the_longer_one() -> None:
    plan = World([Prefill()], pool=19, layers=30).inputs.prices.plan(0, 19, None, 30)
    longer, shorter = max(plan.transfer_s, plan.prefill_s), min(plan.transfer_s, plan.prefill_s)
    assert plan.service_s == pytest.approx(longer + shorter / 30)


def test_loading_overlaps_with_the_first_step_only() -> None:
    """All blocks are needed in the first step; what later steps compute hides nothing."""
    linear = costs(prefill=(0.0, 1e-3, 0.0, 0.0), transfer=(0.0, 0.5 / (1 << 20)))  # 0.5 s to load a block
    whole, steps = (World([Prefill()], pool=4, layers=1000, costs=linear, step=step) for step in (0, 256))
    assert whole.inputs.prices.plan(0, 2, None, 1000).service_s == pytest.approx(18 * BLOCK * 1e-3, rel=0.01)
    first_s, later_s = 0.256, 18 * BLOCK * 1e-3 - 0.256
    plan = steps.inputs.prices.plan(0, 2, None, 1000)
    assert plan.service_s == pytest.approx(max(first_s, 1.0) + later_s, rel=0.01)
    assert whole.choose().prefill.pulled_blocks == 2
    assert steps.choose().prefill.pulled_blocks == 0  # pulling two blocks would take 1.9 s, computing takes 1.28 s


def test_a_full_hit_on_an_idle_worker_wins() -> None:
    choice = World([Prefill(0), Prefill(20, 0.0, 5), Prefill(19)], pool=20).choose(tie_slack=0.0)
    assert choice.prefill.worker == "p1"
    assert choice.prefill.prefill_s > 0  # its last token is computed all the same


def test_a_long_queue_sends_the_request_elsewhere() -> None:
    assert World([Prefill(20, 60.0, 9), Prefill()]).choose().prefill.worker == "p1"


@pytest.mark.parametrize("policy", ["local", "paper", "cost", "least-loaded"])
def test_ties_go_to_the_fewest_assigned_and_then_in_turn(policy: str) -> None:
    world = World([Prefill(0, 0.0, 1), Prefill(), Prefill(), Prefill()])
    chooser = world.chooser(name=policy)
    assert [world.choose(chooser).prefill.worker for _ in range(5)] == ["p1", "p2", "p3", "p1", "p2"]


@pytest.mark.parametrize("policy", ["local", "paper", "cost"])
def test_a_tiny_prefix_that_all_share_does_not_draw_all_requests(policy: str) -> None:
    world = World([Prefill(1), Prefill(), Prefill(), Prefill()], num_blocks=24)
    chooser = world.chooser(name=policy)
    assert Counter(world.choose(chooser).prefill.worker for _ in range(8)) == dict.fromkeys(["p0", "p1", "p2", "p3"], 2)
    real = World([Prefill(12), Prefill(), Prefill(), Prefill()], num_blocks=24)
    assert {real.choose(chooser).prefill.worker for _ in range(8)} == {"p0"}


def test_round_robin_and_random_pass_over_closed_workers() -> None:
    world = World([Prefill(), Prefill(), Prefill(), Prefill()])
    world.inputs.queue_s[1] = np.inf
    turns = world.chooser(name="round-robin")
    assert [world.choose(turns).prefill.worker for _ in range(5)] == ["p0", "p2", "p3", "p0", "p2"]
    draws = [[world.choose(chooser).prefill.worker for _ in range(300)] for chooser in _twice(world, "random")]
    assert draws[0] == draws[1]  # the same seed, the same draws
    assert min(Counter(draws[0]).values()) > 60
    assert set(draws[0]) == {"p0", "p2", "p3"}


def _twice(world: World, policy: str) -> list[Chooser]:
    return [world.chooser(name=policy, seed=7) for _ in range(2)]


@pytest.mark.parametrize("policy", POLICY_NAMES)
@given(PREFILLS, st.integers(0, 20))
def test_every_policy_finds_an_open_worker_and_says_what_it_expects(
    policy: str, prefills: list[Prefill], pool: int
) -> None:
    world = World(prefills, pool=pool)
    world.inputs.queue_s[:-1] = np.inf
    if len(prefills) < len(world.inputs.queue_s):
        world.inputs.queue_s[len(prefills) - 1] = 1.0
    choice = world.choose(name=policy)
    assert choice.prefill.worker == f"p{len(prefills) - 1}"
    assert choice.prefill.local_blocks == prefills[-1].local
    assert 0 < choice.prefill.ttft_s < 1e6


def test_pulls_under_way_make_another_slower() -> None:
    world = World([Prefill(), Prefill()], pool=20)
    quiet = world.choose(name="paper").prefill
    world.traffic.num_sources = 4
    world.traffic.expect("other", 0, 100 << 20, 0.0, 9.0)
    world.traffic.advance(0.0)
    choice = world.choose(name="paper", num_candidates=2)
    by_name = {one.worker: one for one in choice.candidates}
    per_byte_s = COSTS.transfer.terms[1]
    assert choice.prefill.worker == "p1"
    assert by_name["p0"].congestion_s == pytest.approx((20 << 20) * per_byte_s)
    assert by_name["p1"].congestion_s == pytest.approx((20 << 20) * per_byte_s / 4)
    assert by_name["p1"].transfer_s == pytest.approx(quiet.transfer_s + by_name["p1"].congestion_s)
    world.traffic.advance(9.0)
    assert world.choose(name="paper").prefill.congestion_s == 0


def test_decode_goes_where_there_is_room_then_by_predicted_time() -> None:
    views = [Decode(free_pages=5), Decode(num_seqs=8), Decode(5, kv_tokens=9000), Decode(4, kv_tokens=5000)]
    choice = World([Prefill()], views).choose()
    assert choice.decode_slot == 3
    assert choice.tbt_s == pytest.approx(COSTS.decode_step_s(5, 5000 + 20 * BLOCK))
    assert World([Prefill()], views[:2]).choose().decode_slot == 0


def test_equal_decode_workers_take_turns() -> None:
    world = World([Prefill()], [Decode()] * 3)
    chooser = world.chooser()
    assert [world.choose(chooser).decode_slot for _ in range(4)] == [0, 1, 2, 0]


@given(DECODES)
def test_the_decode_worker_is_the_minimum_of_those_with_room(decodes: list[Decode]) -> None:
    choice = World([Prefill()], decodes).choose()
    pages = -(-(20 * BLOCK + 16) // BLOCK)

    def rank(one: Decode) -> tuple[bool, float]:
        full = one.free_pages < pages or one.num_seqs >= one.max_num_seqs
        return full, COSTS.decode_step_s(one.num_seqs + 1, one.kv_tokens + 20 * BLOCK)

    full, predicted_s = rank(decodes[choice.decode_slot])
    least_full, least_s = min(map(rank, decodes))
    assert full == least_full
    assert predicted_s == pytest.approx(least_s, abs=1e-6)
    assert choice.tbt_s == pytest.approx(predicted_s)


def test_no_workers() -> None:
    with pytest.raises(Unavailable, match="no prefill worker"):
        World([]).choose()
    world = World([Prefill()])
    world.decodes.drop(0)
    with pytest.raises(Unavailable, match="no decode worker"):
        world.choose()
    with pytest.raises(Unavailable, match="no decode worker"):
        World([Prefill()], []).choose()


@pytest.mark.parametrize(
    "values",
    [
        {"kvcache_balancing_threshold": 0.5},
        {"kvcache_balancing_threshold": float("nan")},
        {"ttft_slo_s": 0.0},
        {"tbt_slo_s": -1.0},
        {"tie_slack": 1.0},
        {"tie_slack": float("nan")},
        {"pool_sources": 0},
        {"num_candidates": 0},
        {"queue_capacity": -1},
        {"queue_timeout_s": 0.0},
    ],
)
def test_bad_configuration(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PolicyConfig(**values)


def test_a_policy_that_is_none() -> None:
    with pytest.raises(ConfigError, match="none of random, round-robin"):
        World([]).chooser(name="best")


@pytest.mark.parametrize(
    ("local", "pulled", "expected"),
    [(12, 8, (0, 0)), (0, 20, (12, 0)), (0, 0, (0, 12)), (4, 3, (3, 5)), (4, 0, (0, 8))],
)
def test_what_another_worker_has_is_replicated(local: int, pulled: int, expected: tuple[int, int]) -> None:
    leading = Leading(20, (), ((0, 0b1), (4, 0b10), (12, 0b100)))
    plan = PricedPlacement(local, pulled, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert replicated(leading, plan) == Replicated(*expected)


@pytest.mark.parametrize("policy", ["paper", "cost"])
def test_of_many_workers_that_pull_the_few_near_the_best_are_priced(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice and the candidates are those of pricing every worker by the pulls to it."""
    num_plans = 0
    for seed in range(12):
        draw = random.Random(seed)
        prefills = [Prefill(draw.choice([0, 0, 4, 9]), draw.uniform(0.0, 4.0), 1) for _ in range(300)]
        world = World(prefills, pool=16, layers=draw.choice([1, 30]), step=draw.choice([0, 640]))
        world.traffic.num_sources = 300
        for number in range(200):
            nbytes = draw.choice([1 << 26, draw.randint(1 << 24, 1 << 31)])
            world.traffic.expect(str(number), draw.randrange(300), nbytes, 0.0, 9.0)
        world.traffic.advance(0.0)
        chooser = world.chooser(name=policy, tie_slack=0.0)
        plan, busy, calls = chooser.policy.plan, set(world.traffic.busy_slots), list[object]()  # type: ignore[attr-defined]
        every_s = [
            world.inputs.queue_s[slot] + plan(world.inputs, one.local, slot if slot in busy else None, "").service_s
            for slot, one in enumerate(prefills)
        ]
        monkeypatch.setattr(
            chooser.policy, "plan", lambda *given, plan=plan, calls=calls: calls.append(1) or plan(*given)
        )
        found = world.choose(chooser).candidates
        assert [one.ttft_s for one in found] == pytest.approx(sorted(every_s)[:4])
        assert [int(one.worker[1:]) for one in found] == sorted(range(300), key=every_s.__getitem__)[:4]
        num_plans += len(calls)
    assert num_plans < 12 * 20, "of 140 to 150 that receive pulls"
