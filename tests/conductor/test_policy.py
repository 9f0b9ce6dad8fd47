"""Algorithm 1: the smallest predicted TTFT wins, the threshold decides what is pulled, targets refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import ConfigError, Overloaded, Unavailable
from moonpool.conductor.estimate import CostModels
from moonpool.conductor.policy import DecodeView, Demand, PolicyConfig, PrefillView, choose, weigh

COSTS = CostModels()
BLOCK = 64
DECODE = DecodeView("d0", 0, 8, 0, 1000)


def demand(num_blocks: int = 20, pool: int = 0) -> Demand:
    return Demand(num_blocks * BLOCK, 16, BLOCK, 1 << 20, pool)


PREFILLS = st.lists(
    st.builds(PrefillView, st.sampled_from("abcdef"), st.integers(0, 20), st.floats(0, 5), st.integers(0, 3)),
    min_size=1,
    unique_by=lambda view: view.name,
)
DECODES = st.lists(
    st.builds(
        DecodeView, st.sampled_from("uvwxyz"), st.integers(0, 9), st.just(8), st.integers(0, 9000), st.integers(0, 60)
    ),
    min_size=1,
    unique_by=lambda view: view.name,
)


@given(PREFILLS, DECODES, st.integers(0, 20), st.floats(1, 8))
def test_the_choice_is_the_minimum_and_does_not_depend_on_the_order(prefills, decodes, pool, threshold) -> None:
    config = PolicyConfig(kvcache_balancing_threshold=threshold)
    choice = choose(demand(pool=pool), prefills, decodes, COSTS, config)
    assert choice.prefill.ttft_s == min(one.ttft_s for one in choice.candidates)
    assert {one.worker for one in choice.candidates} == {view.name for view in prefills}
    again = choose(demand(pool=pool), prefills[::-1], decodes[::-1], COSTS, config)
    assert (again.prefill, again.decode, again.tbt_s) == (choice.prefill, choice.decode, choice.tbt_s)


@given(st.integers(0, 20), st.integers(0, 20), st.floats(1, 8))
def test_pulls_exactly_when_the_ratio_is_over_the_threshold(local: int, pool: int, threshold: float) -> None:
    one = weigh(demand(pool=pool), PrefillView("a", local, 1.5, 0), COSTS, threshold)
    if pool > threshold * local:
        assert one.pulled_blocks == pool - local
        assert one.transfer_s == COSTS.transfer_s((pool - local) << 20)
        assert one.prefill_s == COSTS.prefill_s(20 * BLOCK, pool * BLOCK)
    else:
        assert (one.pulled_blocks, one.transfer_s) == (0, 0)
        assert one.prefill_s == COSTS.prefill_s(20 * BLOCK, local * BLOCK)
    assert one.ttft_s == one.transfer_s + 1.5 + one.prefill_s


def test_a_full_hit_on_an_idle_worker_wins() -> None:
    views = [PrefillView("a", 0, 0.0, 0), PrefillView("b", 20, 0.0, 5), PrefillView("c", 19, 0.0, 0)]
    choice = choose(demand(pool=20), views, [DECODE], COSTS, PolicyConfig())
    assert choice.prefill.worker == "b"
    assert choice.prefill.prefill_s > 0  # its last token is computed all the same


def test_a_long_queue_sends_the_request_elsewhere() -> None:
    views = [PrefillView("hot", 20, 60.0, 9), PrefillView("cold", 0, 0.0, 0)]
    assert choose(demand(), views, [DECODE], COSTS, PolicyConfig()).prefill.worker == "cold"


def test_ties_go_to_the_fewest_assigned_then_the_first_name() -> None:
    views = [PrefillView("c", 0, 0.0, 0), PrefillView("b", 0, 0.0, 0), PrefillView("a", 0, 0.0, 1)]
    assert choose(demand(), views, [DECODE], COSTS, PolicyConfig()).prefill.worker == "b"


def test_decode_goes_where_there_is_room_then_by_predicted_time() -> None:
    views = [
        DecodeView("pages", 0, 8, 0, 5),
        DecodeView("slots", 8, 8, 0, 1000),
        DecodeView("busy", 5, 8, 9000, 1000),
        DecodeView("less", 4, 8, 5000, 1000),
    ]
    prefills = [PrefillView("a", 0, 0.0, 0)]
    choice = choose(demand(), prefills, views, COSTS, PolicyConfig())
    assert choice.decode == "less"
    assert choice.tbt_s == COSTS.decode_step_s(5, 5000 + 20 * BLOCK)
    assert choose(demand(), prefills, views[:2], COSTS, PolicyConfig()).decode == "pages"


def test_no_workers() -> None:
    with pytest.raises(Unavailable, match="no prefill worker"):
        choose(demand(), [], [DECODE], COSTS, PolicyConfig())
    with pytest.raises(Unavailable, match="no decode worker"):
        choose(demand(), [PrefillView("a", 0, 0.0, 0)], [], COSTS, PolicyConfig())


def test_a_missed_ttft_is_refused_with_the_time_the_queue_needs() -> None:
    config = PolicyConfig(ttft_slo_s=10.0)
    with pytest.raises(Overloaded, match="first token") as caught:
        choose(demand(), [PrefillView("a", 20, 30.0, 4)], [DECODE], COSTS, config)
    assert 20 <= caught.value.retry_after_s <= 30
    with pytest.raises(Overloaded) as caught:  # too long even when idle: no queue to wait for
        choose(demand(1000), [PrefillView("a", 0, 0.0, 0)], [DECODE], COSTS, config)
    assert caught.value.retry_after_s == 1.0


def test_a_missed_tbt_is_refused() -> None:
    busy = DecodeView("d", 64, 128, 10**7, 10**6)
    with pytest.raises(Overloaded, match="apart"):
        choose(demand(), [PrefillView("a", 0, 0.0, 0)], [busy], COSTS, PolicyConfig(tbt_slo_s=0.1))
    choose(demand(), [PrefillView("a", 0, 0.0, 0)], [busy], COSTS, PolicyConfig())


@pytest.mark.parametrize(
    "values",
    [
        {"kvcache_balancing_threshold": 0.5},
        {"kvcache_balancing_threshold": float("nan")},
        {"ttft_slo_s": 0.0},
        {"tbt_slo_s": -1.0},
    ],
)
def test_bad_configuration(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        PolicyConfig(**values)
