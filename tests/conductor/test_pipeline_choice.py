"""Which prompts several workers compute together, and how much of the pool's prefix they take."""

from __future__ import annotations

import pytest
from worker_info import info

from moonpool.base.cluster import PrefillSample, PullSample
from moonpool.base.keys import chain_keys, object_key
from moonpool.conductor.messages import Decision, Route
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.placement.prefix_index import PrefixIndex, fingerprints
from moonpool.conductor.state import ConductorState
from moonpool.engine.stages import MIN_CHUNKS, chunk_bounds, pipeline_s

BLOCK, BLOCK_NBYTES, NUM_BLOCKS = 64, 1 << 20, 100
TOKENS = NUM_BLOCKS * BLOCK + 1
KEYS = chain_keys(b"r" * 32, range(NUM_BLOCKS * BLOCK), BLOCK)
TOKEN_S = 1e-3


def world(
    num_stored: int = 0,
    block_s: float = 1e-3,
    nodes: int = 1,
    policy: str = "cost",
    min_tokens: int | None = None,
) -> ConductorState:
    """Two workers that share prompts, whose tokens take 1 ms each. The pool has so many leading blocks of KEYS, and a
    block takes `block_s` to pull."""
    state = ConductorState(PolicyConfig(name=policy, pipeline_min_tokens=min_tokens), PrefixIndex(), 100)
    for name in ("p0", "p1", "d0"):
        state.register(info(name, pipeline=2 if name != "d0" else 1))
    state.set_pool_nodes({f"n{number}": "" for number in range(nodes)})
    prefills = [PrefillSample(n, prefix, (n - prefix) * TOKEN_S) for n in (800, 3200, 6400) for prefix in (0, n // 2)]
    pulls = [PullSample(number * BLOCK_NBYTES, number * block_s) for number in (1, 10, 100)]
    state.costs.learn(prefills=prefills * 20, pulls=pulls * 20)
    state.index.replace_pool([object_key(key) for key in KEYS[:num_stored]])
    return state


def send(state: ConductorState) -> Decision:
    return state.route(Route(request_id="r", keys=KEYS, num_tokens=TOKENS, max_tokens=20), "fe", 0.0, 0.0)


def test_without_a_prefix_both_workers_compute_all_of_it() -> None:
    decision = send(world())
    best, alone = decision.candidates[:2]
    assert (len(best.stages), best.pulled_blocks, best.transfer_s) == (1, 0, 0.0)
    assert alone.ttft_s == pytest.approx(TOKENS * TOKEN_S, rel=0.05)
    assert best.ttft_s == pytest.approx(alone.ttft_s / 2, rel=0.2)


@pytest.mark.parametrize("policy", ["cost", "paper"])
@pytest.mark.parametrize("num_stored", [20, 60])
def test_a_prefix_is_pulled_and_the_rest_is_shared(policy: str, num_stored: int) -> None:
    state = world(num_stored, policy=policy)
    decision = send(state)
    best, alone = decision.candidates[:2]
    assert len(best.stages) == 1
    assert best.pulled_blocks == alone.pulled_blocks == decision.pool_blocks == num_stored
    rest = TOKENS - num_stored * BLOCK
    chunks = chunk_bounds(TOKENS, best.chunk_tokens, TOKENS - rest)
    assert len(chunks) >= MIN_CHUNKS
    assert best.prefill_s == pytest.approx(pipeline_s([state.costs.prefill_s(end, start) for start, end in chunks], 2))
    assert best.prefill_s == pytest.approx(rest * TOKEN_S / 2, rel=0.25)
    assert best.transfer_s == pytest.approx(num_stored * 1e-3, rel=0.1)
    assert best.overlap_s == 0, "no stage computes before all have pulled"
    assert decision.max_pool_blocks is None, "what else the pool has is worth pulling too"


def test_where_little_is_left_one_worker_computes_it() -> None:
    decision = send(world(NUM_BLOCKS))
    assert decision.stages == ()
    assert decision.candidates[0].pulled_blocks == NUM_BLOCKS


@pytest.mark.parametrize(("num_stored", "num_computed"), [(0, TOKENS), (60, TOKENS - 60 * BLOCK), (NUM_BLOCKS, 1)])
def test_a_given_length_decides_instead_of_the_prediction(num_stored: int, num_computed: int) -> None:
    """It counts what one worker would have to compute."""
    assert len(send(world(num_stored, min_tokens=num_computed)).stages) == 1
    assert send(world(num_stored, min_tokens=num_computed + 1)).stages == ()


def test_a_worker_that_has_the_prompt_computes_it_alone() -> None:
    """Its pages have what the pool has not; a pipeline would compute all of it."""
    state = world(min_tokens=1000)
    state.index.expect("p1", fingerprints(KEYS))
    decision = send(state)
    assert (decision.prefill.name, decision.stages) == ("p1", ())


def test_a_slow_pool_is_left_alone() -> None:
    """A block takes 64 ms to compute, half of that at two workers: to pull it in 50 ms helps one worker alone."""
    decision = send(world(60, block_s=0.05))
    best, alone = decision.candidates[:2]
    assert (len(best.stages), best.pulled_blocks) == (1, 0)
    assert alone.pulled_blocks == 60
    assert decision.max_pool_blocks == 0


def test_stages_pull_at_once_as_far_as_the_pool_has_nodes() -> None:
    """Each stage pulls half of the bytes; from one node they share its link."""
    transfer_s = [send(world(60, nodes=nodes)).candidates[0].transfer_s for nodes in (1, 2, 8)]
    assert transfer_s[0] == pytest.approx(0.06, rel=0.1)
    assert transfer_s[1] == transfer_s[2] == pytest.approx(transfer_s[0] / 2, rel=0.1)


@pytest.mark.parametrize("policy", ["local", "least-loaded", "random"])
def test_policies_without_the_pool_compute_all_of_it(policy: str) -> None:
    decision = send(world(60, policy=policy))
    assert (len(decision.stages), decision.candidates[0].pulled_blocks, decision.max_pool_blocks) == (1, 0, 0)


def test_the_pull_of_a_pipeline_counts_as_traffic() -> None:
    state = world(60)
    decision = send(state)
    state.traffic.advance(decision.candidates[0].transfer_s / 2)
    assert decision.stages
    assert state.traffic.nbytes == 60 * BLOCK_NBYTES
