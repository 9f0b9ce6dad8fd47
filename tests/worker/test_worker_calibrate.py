"""What a worker measures before it is known: within its pages, its limits and its time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.clock import VirtualClock
from moonpool.engine.sequence import Chunk
from moonpool.worker.calibration import Calibration, Limits

LIMITS = Limits(num_pages=1000, block_tokens=64, max_batch_tokens=512, max_num_seqs=32, max_seq_tokens=8192)


class Machine:
    """Computes a token in `per_token_s` on a virtual clock, and checks what it is asked to do."""

    def __init__(self, limits: Limits, per_token_s: float) -> None:
        self.limits, self.per_token_s, self.clock = limits, per_token_s, VirtualClock()

    def __call__(self, chunks: list[Chunk]) -> None:
        limits = self.limits
        used = [page for chunk in chunks for page in chunk.pages]
        assert len(used) == len(set(used))
        assert max(used) < limits.num_pages
        assert sum(len(chunk.tokens) for chunk in chunks) <= max(limits.max_batch_tokens, len(chunks))
        assert all(chunk.end <= min(len(chunk.pages) * limits.block_tokens, limits.max_seq_tokens) for chunk in chunks)
        self.clock.advance(self.per_token_s * sum(len(chunk.tokens) for chunk in chunks))

    def calibration(self, budget_s: float, repeats: int = 1) -> Calibration:
        return Calibration(self, self.limits, self.clock, budget_s, repeats)


def test_prefills_cold_and_behind_a_prefix() -> None:
    machine = Machine(LIMITS, 1e-4)
    run = machine.calibration(10.0)
    samples = list(run.prefills())
    assert {(512, 0), (512, 384), (2048, 0), (8192, 0)} <= {(one.num_tokens, one.prefix_tokens) for one in samples}
    assert all(abs(one.seconds - 1e-4 * (one.num_tokens - one.prefix_tokens)) < 1e-9 for one in samples)
    assert run.num_pages_used == 128


def test_decode_batches() -> None:
    samples = list(Machine(LIMITS, 1e-3).calibration(10.0).decodes())
    assert {(1, 32), (8, 4096), (32, 32 * 512)} <= {(one.num_seqs, one.kv_tokens) for one in samples}


def test_the_first_run_of_a_shape_does_not_count_where_runs_are_repeated() -> None:
    """On a GPU it prepares kernels, here for 0.5 s."""
    machine, seen = Machine(LIMITS, 1e-4), set[int]()

    def compute(chunks: list[Chunk]) -> None:
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        machine.clock.advance(0.0 if num_tokens in seen else 0.5)
        seen.add(num_tokens)
        machine(chunks)

    samples = list(Calibration(compute, LIMITS, machine.clock, 4.0, repeats=2).prefills())
    assert samples[-1].num_tokens == 8192  # preparing took nothing of the time for measuring
    assert [one.seconds for one in samples] == pytest.approx(
        [1e-4 * (one.num_tokens - one.prefix_tokens) for one in samples]
    )


@given(
    st.builds(
        Limits,
        num_pages=st.integers(1, 600),
        block_tokens=st.sampled_from([16, 64, 512]),
        max_batch_tokens=st.integers(1, 3000),
        max_num_seqs=st.integers(1, 40),
        max_seq_tokens=st.integers(1, 3000),
    ),
    st.floats(1e-6, 1.0),
    st.floats(0.01, 5.0),
    st.integers(1, 3),
)
def test_within_its_limits_and_its_time(limits: Limits, per_token_s: float, budget_s: float, repeats: int) -> None:
    for kind in ("prefills", "decodes"):
        machine = Machine(limits, per_token_s)
        run = machine.calibration(budget_s, repeats)
        samples = list(getattr(run, kind)())
        assert run.num_pages_used <= limits.num_pages
        # Only the first run cannot know how long it takes; where runs are repeated, it is taken for preparing.
        first_s = 32 * per_token_s
        prepared_s = first_s if repeats > 1 else 0.0
        assert machine.clock.now_s() <= max(budget_s, first_s) + prepared_s + 1e-6
        assert all(one.seconds > 0 for one in samples)
