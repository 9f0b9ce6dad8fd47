"""`moonpool why REQUEST_ID` in plain sentences, for every way a request can go."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.messages import Candidate, DecisionRecord
from moonpool.conductor.records.explain import explain


def candidate(worker: str, queue_s: float = 0.0, local: int = 0, pulled: int = 0) -> Candidate:
    return Candidate(
        worker=worker,
        local_blocks=local,
        pulled_blocks=pulled,
        transfer_s=0.01 * pulled,
        queue_s=queue_s,
        prefill_s=0.5,
    )


def record(**fields: Any) -> DecisionRecord:
    defaults: dict[str, Any] = {"request_id": "r1", "routed_at_s": 0.0, "num_tokens": 1000, "max_tokens": 64}
    return DecisionRecord(**(defaults | fields))


def test_a_request_that_went_well() -> None:
    lines = explain(
        record(
            prefill="p0",
            decode="d1",
            pool_blocks=12,
            candidates=(candidate("p0", local=2, pulled=8), candidate("p1", queue_s=2.0)),
            predicted_ttft_s=0.58,
            predicted_tbt_s=0.03,
            measured_ttft_s=0.87,
            cached_tokens=512,
            pool_tokens=384,
            output_tokens=20,
            outcome="done",
        ),
        block_tokens=64,
    )
    assert lines == [
        "Request r1: 1000 prompt tokens, at most 64 to answer with.",
        "It went to p0 for its prompt and to d1 for its answer, expecting the first token after 580.0 ms and then one "
        "every 30.0 ms.",
        "p0 was chosen: 580.0 ms = 0.0 ms in its queue + 80.0 ms to pull 8 blocks + 500.0 ms to compute "
        "(2 blocks of its own).",
        "p1 was not: 2.50 s = 2.00 s in its queue + 0.0 ms to pull 0 blocks + 500.0 ms to compute (0 blocks of its "
        "own); 1.92 s later.",
        "Of its 15 full blocks, 2 were expected in p0's pages, 8 were to be pulled from the pool, 5 to be computed.",
        "2 more blocks lay in the pool: computing them again was expected to take no longer.",
        "3 blocks were known nowhere: never computed with this beginning, or evicted since.",
        "In fact 512 tokens were reused: 128 from p0's pages, 384 from the pool.",
        "That is 128 fewer than expected: blocks were evicted, dropped or failed their check between the decision and "
        "the look-up.",
        "The first token came after 870.0 ms, 50% later than predicted.",
        "It ended as done with 20 tokens of answer.",
    ]


def test_a_request_that_was_refused() -> None:
    assert explain(record(outcome="overloaded"), 64)[1:] == ["It was sent nowhere: overloaded."]


def test_a_request_on_its_way_in_its_second_attempt() -> None:
    lines = explain(record(prefill="p0", decode="d0", attempt=2, candidates=(candidate("p0"),)), 64)
    assert lines[0].endswith("attempt 2 after a worker failed it.")
    assert lines[-1] == "It is still on its way."


def test_many_candidates_are_cut_short() -> None:
    candidates = tuple(candidate(f"p{number:02}", queue_s=number) for number in range(20))
    lines = explain(record(prefill="p00", decode="d0", candidates=candidates), 64)
    assert "14 more workers would have been later still." in lines
    assert len(lines) < 15


@given(
    st.integers(1, 5000),
    st.integers(0, 90),
    st.integers(0, 90),
    st.integers(0, 90),
    st.integers(0, 5000),
    st.one_of(st.none(), st.floats(0, 100)),
    st.sampled_from(["open", "done", "abandoned", "peer_lost"]),
)
def test_any_record_can_be_explained(
    tokens: int, local: int, pulled: int, pool: int, cached: int, ttft_s: float | None, outcome: str
) -> None:
    lines = explain(
        record(
            num_tokens=tokens,
            prefill="p0",
            decode="d0",
            pool_blocks=pool,
            candidates=(candidate("p0", local=local, pulled=pulled), candidate("p1")),
            measured_ttft_s=ttft_s,
            cached_tokens=cached,
            outcome=outcome,
        ),
        16,
    )
    assert len(lines) >= 5
    assert all(line.endswith(".") and "-1" not in line for line in lines)


def test_a_prompt_shorter_than_a_block_is_said_in_plain_words() -> None:
    short = record(num_tokens=31, prefill="p0", decode="d0", candidates=(candidate("p0"),), measured_ttft_s=0.1)
    lines = explain(short, block_tokens=64)
    assert (
        "Its prompt is shorter than one block of 64 tokens, so all of it was computed: "
        "only full blocks are kept and used again."
    ) in lines
    assert not any("0 full blocks" in line or "In fact" in line for line in lines)
