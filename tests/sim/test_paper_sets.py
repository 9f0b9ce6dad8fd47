"""arXiv's sets, made from what was published about them, and what a chunk of a prompt costs."""

from __future__ import annotations

import numpy as np
import pytest

from moonpool.base.errors import InvalidInput
from moonpool.sim.physics.paper_fit import chunk_cost, mooncake_cost, paper_cost
from moonpool.traces import Trace, describe
from moonpool.traces.published import ARXIV_SETS, arxiv_set

PUBLISHED = {"arxiv-summarization": (8088, 229, 0.0), "l-eval": (19019, 72, 0.8)}
PUBLISHED |= {f"simulated-{k}k": (k * 1024, 512, 0.5) for k in (16, 32, 64, 128)}


def make(name: str, seed: int = 3) -> Trace:
    return arxiv_set(name, 600, 2.0, np.random.default_rng(seed))


@pytest.mark.parametrize("name", ARXIV_SETS)
def test_a_set_has_its_published_means(name: str) -> None:
    num_input, num_output, cached = PUBLISHED[name]
    found = describe(make(name))
    assert found.num_input.mean == pytest.approx(num_input, rel=0.1)
    assert found.num_output.mean == pytest.approx(num_output, rel=0.1)
    assert found.hit_tokens == pytest.approx(cached, abs=0.05)
    assert found.rate_per_s == pytest.approx(2.0, rel=0.01)


def test_the_same_seed_makes_the_same_set() -> None:
    assert make("l-eval") == make("l-eval")
    assert make("l-eval") != make("l-eval", seed=4)


def test_a_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInput, match="l-eval"):
        arxiv_set("wikipedia", 10, 1.0, np.random.default_rng(0))


def test_a_chunk_pays_for_a_pass_and_its_tokens() -> None:
    chunks, whole = chunk_cost(), mooncake_cost()
    assert chunks.decode == whole.decode
    mixed_s = chunks.step_s([(512, 0)], 8, 8000)
    assert mixed_s == pytest.approx(whole.decode_step_s(8, 8000) + whole.prefill.work_s(512, 0))
    assert mixed_s < whole.step_s([(512, 0)], 8, 8000)


def test_one_sequence_takes_what_fig_14_says_whatever_a_batch_costs() -> None:
    ours, theirs = paper_cost(), mooncake_cost()
    assert theirs.prefill == ours.prefill
    assert theirs.decode_step_s(1, 8192) == pytest.approx(ours.decode_step_s(1, 8192))
    assert theirs.decode_step_s(10, 80_000) == pytest.approx(ours.decode_step_s(10, 80_000) + 9 * 3.89e-3, rel=0.01)
