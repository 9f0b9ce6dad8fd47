"""Cost of steps: closed forms against walking, the three makers against what was measured."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.cluster import DecodeSample, PrefillSample
from moonpool.base.errors import InvalidInput
from moonpool.sim.fleet import profile_cost
from moonpool.sim.physics import paper_fit
from moonpool.sim.physics.cost import DecodeCost, EngineCost, PrefillCost
from moonpool.sim.physics.hardware import GPU_NAMES, NodeSpec, gpu, node
from moonpool.sim.physics.model_shape import preset, shape_from_config
from moonpool.sim.physics.paper_fit import paper_cost
from moonpool.sim.physics.roofline import Efficiency, kv_capacity_tokens, roofline_cost

small = st.floats(0, 1e-3)
prefill_costs = st.builds(
    PrefillCost,
    base_s=st.floats(0, 0.1),
    per_token_s=small,
    per_square_s=st.floats(0, 1e-8),
    per_prefix_s=small,
    window=st.integers(1, 200),
    per_window_pair_s=st.sampled_from([0.0, 1e-8]),
)
decode_costs = st.builds(
    DecodeCost,
    base_s=st.floats(1e-3, 0.1),
    per_seq_s=small,
    per_kv_token_s=st.floats(0, 1e-5),
    window=st.integers(1, 200),
    per_window_token_s=st.sampled_from([0.0, 1e-6]),
    experts_s=st.sampled_from([0.0, 0.01]),
    expert_idle_share=st.floats(0, 1),
)
batches = st.tuples(st.integers(1, 64), st.integers(0, 20_000))


# --- the objects ---


@given(decode_costs, batches, st.integers(0, 400))
def test_many_decode_steps_are_the_sum_of_each(cost: DecodeCost, batch: tuple[int, int], num_steps: int) -> None:
    num_seqs, kv_tokens = batch
    walked = sum(cost.decode_step_s(num_seqs, kv_tokens + step * num_seqs) for step in range(num_steps))
    assert cost.decode_steps_s(num_seqs, kv_tokens, num_steps) == pytest.approx(walked, rel=1e-9, abs=1e-12)


@given(decode_costs, batches, st.floats(0, 20))
def test_steps_within_is_the_inverse(cost: DecodeCost, batch: tuple[int, int], seconds: float) -> None:
    steps = cost.steps_within(*batch, seconds)
    assert cost.decode_steps_s(*batch, steps) <= seconds
    assert cost.decode_steps_s(*batch, steps + 1) > seconds


@given(decode_costs, batches, st.integers(1, 5000))
def test_as_many_steps_as_it_takes_fit_into_their_time(cost: DecodeCost, batch: tuple[int, int], steps: int) -> None:
    assert cost.steps_within(*batch, cost.decode_steps_s(*batch, steps)) == steps


def test_steps_that_take_no_time_are_refused() -> None:
    with pytest.raises(InvalidInput):
        DecodeCost(base_s=0.0, per_seq_s=0.0, per_kv_token_s=0.0).steps_within(1, 0, 1.0)


@given(prefill_costs, st.integers(1, 100_000), st.data())
def test_more_work_never_takes_less(cost: PrefillCost, num_tokens: int, data: st.DataObject) -> None:
    prefix = data.draw(st.integers(0, num_tokens))
    assert cost.compute_s(num_tokens, prefix) <= cost.compute_s(num_tokens, max(0, prefix - 1)) * (1 + 1e-9)
    assert cost.prefill_s(num_tokens, prefix) <= cost.prefill_s(num_tokens + 1, prefix) * (1 + 1e-9)
    loaded = cost.load_s(min(prefix, num_tokens - 1))
    assert cost.prefill_s(num_tokens, prefix) == pytest.approx(cost.compute_s(num_tokens, prefix) + loaded)
    assert cost.prefills_s([num_tokens, 5], [prefix, 0])[0] == pytest.approx(cost.prefill_s(num_tokens, prefix))


@given(prefill_costs, st.integers(2, 20_000), st.data())
def test_chunks_cost_the_whole_and_a_base_each(cost: PrefillCost, num_tokens: int, data: st.DataObject) -> None:
    split = data.draw(st.integers(1, num_tokens - 1))
    chunks = cost.compute_s(split) + cost.compute_s(num_tokens, split)
    assert chunks == pytest.approx(cost.compute_s(num_tokens) + cost.base_s)


def test_a_full_hit_still_computes_the_last_token() -> None:
    cost = paper_cost()
    assert cost.prefill_s(1000, 1000) == cost.prefill_s(1000, 999)
    assert cost.prefill.prefills_s([1000], [1000])[0] == cost.prefill_s(1000, 999)


@given(prefill_costs, decode_costs, batches, st.lists(st.integers(1, 4000), max_size=3))
def test_a_mixed_step_lies_between_the_larger_part_and_the_sum(
    prefill: PrefillCost, decode: DecodeCost, batch: tuple[int, int], chunks: list[int]
) -> None:
    decode = DecodeCost(base_s=decode.base_s, per_seq_s=decode.per_seq_s, per_kv_token_s=decode.per_kv_token_s)
    cost = EngineCost(prefill, decode)
    given_chunks = [(size, 0) for size in chunks]
    alone = cost.step_s(given_chunks, 0, 0)
    mixed = cost.step_s(given_chunks, *batch)
    together = alone + decode.decode_step_s(*batch)
    assert max(alone, decode.decode_step_s(*batch)) <= mixed * (1 + 1e-9)
    assert mixed <= together * (1 + 1e-9)


def test_steps_of_one_kind_and_of_none() -> None:
    cost = paper_cost()
    assert cost.step_s([], 0, 0) == 0.0
    assert cost.step_s([], 4, 1000) == cost.decode_step_s(4, 1000)
    assert cost.step_s([(2048, 1024)], 0, 0) == cost.prefill.compute_s(2048, 1024)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_costs_below_nothing_are_refused(wrong: float) -> None:
    with pytest.raises(InvalidInput, match="per_token_s"):
        PrefillCost(base_s=0.0, per_token_s=wrong)
    with pytest.raises(InvalidInput, match="per_seq_s"):
        DecodeCost(base_s=0.0, per_seq_s=wrong, per_kv_token_s=0.0)


# --- the paper's machine ---


def errors(cost: EngineCost) -> dict[str, list[float]]:
    """Relative errors at Fig 14's points."""
    cached = paper_fit.MEASURED_CACHED_PREFILL_S
    steps = paper_fit.MEASURED_DECODE_STEPS
    return {
        "prefill": [cost.prefill_s(n) / s - 1 for n, s in paper_fit.MEASURED_PREFILL_S.items()],
        "cached": [cost.prefill_s(n, paper_fit.cached_tokens(n)) / s - 1 for n, s in cached.items()],
        "decode": [cost.decode_steps_s(1, n, steps) / s - 1 for n, s in paper_fit.MEASURED_DECODE_S.items()],
    }


def test_the_fit_is_as_good_as_paper_md_says() -> None:
    cost = paper_cost()
    off = errors(cost)
    exact = [
        cost.prefill_s(n, int(n * paper_fit.CACHED_SHARE)) / s - 1
        for n, s in paper_fit.MEASURED_CACHED_PREFILL_S.items()
    ]
    assert max(map(abs, off["prefill"] + exact)) < 0.045
    assert max(map(abs, off["decode"])) < 0.01
    assert cost.decode_step_s(1, 0) == pytest.approx(26.28e-3)


def test_the_roofline_meets_every_measured_point_within_15_percent() -> None:
    off = errors(roofline_cost(preset("llama3-70b"), node("a800")))
    assert max(abs(error) for group in off.values() for error in group) < 0.15


# --- the roofline elsewhere ---


def test_better_machines_are_faster_and_larger_models_slower() -> None:
    times = [
        roofline_cost(preset("llama3-70b"), node(name)).prefill_s(8192) for name in ("a800", "h800", "h100", "b200")
    ]
    assert times == sorted(times, reverse=True)
    steps = [
        roofline_cost(preset("llama3-70b"), node(name)).decode_step_s(8, 8000) for name in ("a800", "h100", "h200")
    ]
    assert steps == sorted(steps, reverse=True)
    assert roofline_cost(preset("llama3-8b"), node("a800")).prefill_s(8192) < 0.2 * times[0]


def test_one_gpu_sends_nothing_to_itself() -> None:
    shape = preset("llama3-8b")
    one = roofline_cost(shape, node("h100", 1), Efficiency(compute=1.0, memory=1.0))
    read = shape.num_params - shape.vocab_size * shape.hidden_size
    assert one.decode.base_s == pytest.approx(2 * read / 3350e9)
    assert one.decode.per_seq_s == pytest.approx(2 * shape.num_active_params / 989.5e12)


def test_a_mixture_reads_more_experts_the_more_sequences_there_are() -> None:
    cost = roofline_cost(preset("deepseek-v3"), node("h200", 16))
    alone, many = cost.decode_step_s(1, 0), cost.decode_step_s(512, 0)
    all_read = cost.decode.base_s + cost.decode.experts_s
    assert alone < 0.2 * all_read
    assert many == pytest.approx(all_read + 512 * cost.decode.per_seq_s, rel=1e-3)
    assert cost.prefill.base_s == pytest.approx(all_read, rel=0.01)


def test_a_windowed_layer_stops_growing() -> None:
    config = {
        "model_type": "mistral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 32000,
    }
    full = roofline_cost(shape_from_config(config), node("l40s", 1))
    windowed = roofline_cost(shape_from_config({**config, "sliding_window": 4096}), node("l40s", 1))
    assert windowed.prefill_s(4096) == pytest.approx(full.prefill_s(4096))
    assert windowed.prefill_s(32768) < full.prefill_s(32768)
    assert windowed.decode_step_s(2, 8192) == pytest.approx(full.decode_step_s(2, 8192))
    assert windowed.decode_step_s(2, 80_000) == pytest.approx(full.decode_step_s(2, 8192))


def test_more_gpus_than_kv_heads_hold_copies() -> None:
    shape = preset("smollm2-135m")  # 3 KV heads
    six, three = node("h100", 6), node("h100", 3)
    assert kv_capacity_tokens(shape, six) == pytest.approx(kv_capacity_tokens(shape, three), rel=0.01)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidInput, match="deepseek-v3"):
        kv_capacity_tokens(preset("deepseek-v3"), node("h100"))
    assert kv_capacity_tokens(preset("llama3-70b"), node("a800")) == pytest.approx((576e9 - 141.1e9) / 327680, rel=1e-3)


# --- machines ---


def test_the_papers_node() -> None:
    spec = node("a800")
    assert spec.flops == 2.496e15
    assert spec.network_bandwidth == pytest.approx(86e9)
    assert spec.h2d_bandwidth == pytest.approx(101e9, rel=0.01)
    assert spec.link_capacities("n0")["n0/ssd_read"] == 0.0


def test_unknown_gpus_and_impossible_nodes_are_refused() -> None:
    assert GPU_NAMES == ("a100", "a800", "h100", "h800", "h200", "l40s", "b200")
    with pytest.raises(InvalidInput, match="h200"):
        gpu("tpu")
    with pytest.raises(InvalidInput, match="nic_share"):
        NodeSpec(gpu=gpu("h100"), nic_share=1.5)
    with pytest.raises(InvalidInput):
        node("h100", 0)


# --- from a profile ---


def profile(cost: EngineCost, seed: int, noise: float) -> EngineCost:
    rng = random.Random(seed)

    def measured(seconds: float) -> float:
        return seconds * rng.uniform(1 - noise, 1 + noise)

    prefills = []
    for _ in range(80):
        n = rng.randint(16, 8192)
        p = rng.choice([0, rng.randrange(n)])
        prefills.append(PrefillSample(n, p, measured(cost.prefill_s(n, p))))
    pairs = [(rng.randint(1, 64), rng.randint(0, 100_000)) for _ in range(80)]
    decodes = [DecodeSample(s, k, measured(cost.decode_step_s(s, k))) for s, k in pairs]
    return profile_cost(prefills, decodes)


@settings(max_examples=25)
@given(st.integers(0, 1000))
def test_a_profile_without_noise_gives_the_cost_back(seed: int) -> None:
    cost, fitted = paper_cost(), profile(paper_cost(), seed, 0.0)
    for n, p in ((100, 0), (4000, 3000), (60_000, 0)):
        assert fitted.prefill_s(n, p) == pytest.approx(cost.prefill_s(n, p), rel=1e-4)
    assert fitted.decode_step_s(30, 50_000) == pytest.approx(cost.decode_step_s(30, 50_000), rel=1e-4)


@settings(max_examples=25)
@given(st.integers(0, 1000))
def test_a_noisy_profile_gives_it_back_nearly(seed: int) -> None:
    cost, fitted = paper_cost(), profile(paper_cost(), seed, 0.1)
    for n, p in ((500, 0), (4000, 3000), (8000, 0)):
        assert fitted.prefill_s(n, p) == pytest.approx(cost.prefill_s(n, p), rel=0.1)
    assert fitted.decode_step_s(30, 50_000) == pytest.approx(cost.decode_step_s(30, 50_000), rel=0.05)


def test_a_profile_of_few_or_like_samples_is_still_one() -> None:
    fitted = profile_cost([PrefillSample(100, 0, 0.5)] * 3, [DecodeSample(4, 100, 0.02)])
    assert fitted.prefill_s(100) == pytest.approx(0.5, rel=1e-3)
    assert fitted.decode_step_s(4, 100) == pytest.approx(0.02, rel=1e-3)
    assert np.isfinite(fitted.prefill_s(10_000, 5000))


def test_a_profile_without_samples_is_refused() -> None:
    with pytest.raises(InvalidInput, match="decode"):
        profile_cost([PrefillSample(10, 0, 1.0)], [DecodeSample(0, 0, 1.0)])
    with pytest.raises(InvalidInput, match="prefill"):
        profile_cost([PrefillSample(10, 10, 1.0)], [DecodeSample(1, 0, 1.0)])
