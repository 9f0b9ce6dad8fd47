"""KV sizes and thresholds: the paper's own numbers (shared/facts/paper.md D)."""

from __future__ import annotations

import pytest

from moonpool.planner.kv_sizes import kv_sizes
from moonpool.sim.fleet import machine_for
from moonpool.sim.physics.hardware import GPU_NAMES, node
from moonpool.sim.physics.model_shape import PRESET_NAMES, preset


def test_the_papers_model_on_the_papers_node() -> None:
    machine = machine_for(preset("llama3-70b"), node("a800"))
    sizes = kv_sizes(machine)
    assert sizes.kv_nbytes_per_token == 327_680
    assert sizes.tokens_per_tb == pytest.approx(3.05e6, rel=0.001)
    paper = {row.num_tokens // 1024: row.paper_nbytes_s for row in sizes.thresholds}
    known = {1: 6.77, 4: 6.35, 8: 5.86, 16: 5.08, 32: 4.01, 64: 2.82, 128: 1.77}
    assert {k: round((paper[k] or 0) / 1e9, 2) for k in known} == known
    # 2.68 GB in 1.0 s and 42.9 GB in 27.5 s were measured; the base of a step is not saved.
    by_cost = {row.num_tokens // 1024: row.cost_nbytes_s / 1e9 for row in sizes.thresholds}
    assert by_cost[8] == pytest.approx(2.7, rel=0.08)
    assert by_cost[128] == pytest.approx(1.6, rel=0.03)
    assert "Fig 14" in machine.cost_source


def test_an_h800_needs_more() -> None:
    sizes = kv_sizes(machine_for(preset("llama3-70b"), node("h800")), (8192,))
    assert (sizes.thresholds[0].paper_nbytes_s or 0) / 1e9 == pytest.approx(18.6, rel=0.005)


@pytest.mark.parametrize("model", PRESET_NAMES)
def test_every_model_on_every_gpu(model: str) -> None:
    for gpu in GPU_NAMES:
        machine = machine_for(preset(model), node(gpu))
        rows = kv_sizes(machine).thresholds
        assert all(row.peak_nbytes_s > 0 and row.cost_nbytes_s > 0 for row in rows)
        # Longer prefixes save more than they weigh.
        assert [row.peak_nbytes_s for row in rows] == sorted((row.peak_nbytes_s for row in rows), reverse=True)
        assert all((row.paper_nbytes_s is None) == (model == "deepseek-v3") for row in rows)
