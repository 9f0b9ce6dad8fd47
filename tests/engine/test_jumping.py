"""Jumping over equal decode steps leads where single steps lead."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_model import BLOCK_TOKENS, CONFIG, sequence

from moonpool.base.errors import Internal
from moonpool.engine.blocks import PageManager
from moonpool.engine.jumping import JumpingScheduler
from moonpool.engine.scheduler import SchedulerConfig
from moonpool.engine.sequence import pages_for

TOKEN = 7


def jumping(num_pages: int = 32, **changes: Any) -> JumpingScheduler:
    fields = {name: getattr(CONFIG, name) for name in CONFIG.__slots__} | changes
    return JumpingScheduler(SchedulerConfig(**fields), PageManager(num_pages, BLOCK_TOKENS))


def step(sched: JumpingScheduler) -> list[str]:
    """One step; who was in it."""
    chunks = sched.schedule()
    if chunks:
        sched.complete({chunk.request_id: TOKEN for chunk in chunks if chunk.wants_logits})
    return [chunk.request_id for chunk in chunks]


def jump(sched: JumpingScheduler, at_most: int) -> int:
    """As far as it goes; how many steps that was."""
    steps = sched.steps_until_change()
    assert steps is not None
    if steps > 1:
        steps = min(steps, at_most)
        sched.advance(steps, TOKEN)
    else:
        step(sched)
    return steps


def look(sched: JumpingScheduler) -> dict[str, Any]:
    """All that matters but the numbers of the pages."""
    sched.check_integrity()
    return {
        "running": [s.request_id for s in sched.queues.running],
        "waiting": [s.request_id for s in sched.queues.waiting],
        "sequences": {
            s.request_id: (
                s.tokens,
                s.keys,
                s.num_computed_tokens,
                s.num_sealed_blocks,
                len(s.pages),
                s.num_preemptions,
            )
            for s in sched.queues.sequences.values()
        },
        "published": sorted(sched.pages.published_keys()),
        "pages": (sched.pages.num_free, sched.pages.num_cached),
    }


def test_steps_until_change() -> None:
    sched = jumping(num_pages=6)
    assert sched.steps_until_change() is None
    sched.add(sequence("a", 3, max_tokens=9))
    assert sched.steps_until_change() == 1
    step(sched)
    assert sched.steps_until_change() == 8
    sched.add(sequence("b", 3, max_tokens=4, start=50))
    assert sched.steps_until_change() == 1
    step(sched)
    assert sched.steps_until_change() == 3
    for _ in range(3):
        assert step(sched) == ["a", "b"]
    assert step(sched) == ["a"]


# Prompt, max_tokens, which prompt, and whether its KV was computed elsewhere.
NEW = st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(0, 2), st.booleans())


def arrive(
    sched: JumpingScheduler, request_id: str, length: int, max_tokens: int, which: int, elsewhere: bool, unique: int
) -> None:
    """Each request has one token unlike any other, the last of its prompt or the one that came with the KV. So no two
    generated blocks are equal: which of two equal blocks is kept may differ between jumps and steps.
    """
    start = 100 * which
    if not elsewhere:
        prompt = [*range(start, start + length - 1), 1000 + unique]
        sched.add(sequence(request_id, prompt, max_tokens=max_tokens))
        return
    it = sequence(request_id, length, max_tokens=max_tokens + 1, start=start, output=[1000 + unique])
    num_pages = pages_for(length + 1, BLOCK_TOKENS)
    if num_pages <= sched.pages.num_available:
        it.pages = sched.pages.allocate(num_pages)
        it.num_computed_tokens = length
        sched.adopt(it)


@given(
    num_pages=st.integers(20, 60),
    max_num_seqs=st.integers(1, 5),
    prefill_first=st.booleans(),
    rounds=st.lists(st.tuples(st.lists(NEW, max_size=3), st.integers(1, 50)), min_size=1, max_size=8),
)
def test_jumps_lead_where_steps_lead(
    num_pages: int, max_num_seqs: int, prefill_first: bool, rounds: list[tuple[list[tuple[int, int, int, bool]], int]]
) -> None:
    stepped, jumped = (
        jumping(num_pages, max_num_seqs=max_num_seqs, prefill_first=prefill_first, max_batch_tokens=16) for _ in "ab"
    )
    for number, (arrivals, at_most) in enumerate(rounds):
        for index, arrival in enumerate(arrivals):
            for sched in (stepped, jumped):
                arrive(sched, f"{number}.{index}", *arrival, number * 10 + index)
        if not jumped.has_work():
            continue
        for _ in range(jump(jumped, at_most)):
            step(stepped)
        assert look(jumped) == look(stepped)


def test_what_is_no_equal_step_is_not_jumped_over() -> None:
    sched = jumping(num_pages=4)
    with pytest.raises(Internal, match="only decodes"):
        sched.advance(1, TOKEN)
    sched.add(sequence("a", 3, max_tokens=9))
    with pytest.raises(Internal, match="only decodes"):
        sched.advance(1, TOKEN)
    step(sched)
    with pytest.raises(Internal, match="only decodes"):
        sched.advance(0, TOKEN)
    with pytest.raises(Internal, match="ends within 9"):
        sched.advance(9, TOKEN)
    sched.add(sequence("b", 3, max_tokens=9, start=50))
    step(sched)
    with pytest.raises(Internal, match="no pages"):
        sched.advance(7, TOKEN)
    assert sched.steps_until_change() == 3
    sched.schedule()
    with pytest.raises(Internal, match="not been completed"):
        sched.advance(1, TOKEN)
