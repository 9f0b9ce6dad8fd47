"""Whether a long prompt is computed by several workers together (chunked pipeline parallelism). Pure.

The prompt goes to the pipeline if its predicted TTFT is clearly below that of the best single worker: from a length on
that the cost models give, and only while enough workers have little to do. A pipeline computes the whole prompt, so a
prefix that is worth reusing keeps the prompt at one worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from moonpool.conductor.costs import CostModels
from moonpool.conductor.messages import Candidate
from moonpool.conductor.placement.policy import PlacementChoice
from moonpool.conductor.placement.tables import Column
from moonpool.conductor.registration import Registration
from moonpool.engine.stages import MIN_CHUNKS, PipelineShape, best_chunk_tokens, chunk_bounds, pipeline_s

_CLEARLY = 0.9  # of the TTFT of one worker: several are kept busy, so a small gain is not worth it


def choose_pipeline(
    single: PlacementChoice, num_tokens: int, workers: Iterable[Registration], queue_s: Column, costs: CostModels
) -> PlacementChoice:
    """Return `single`, or it with a pipeline of the least busy prefill workers, if that is clearly faster. `queue_s` is
    the work that each has before a new request, infinite where it must not go."""
    able = [(queue_s.item(one.slot), one.info) for one in workers if one.is_prefill and one.info.pipeline > 1]
    num_stages = max((info.pipeline for _, info in able), default=1)
    free = [(wait_s, info) for wait_s, info in able if info.pipeline == num_stages and wait_s < math.inf]
    if num_stages < 2 or len(free) < num_stages or num_tokens < MIN_CHUNKS:
        return single
    chosen = sorted(free, key=lambda one: (one[0], one[1].name))[:num_stages]
    info = chosen[0][1]
    shape = PipelineShape(num_stages, info.step_tokens)
    chunk_tokens = best_chunk_tokens(shape, num_tokens, costs.prefill_s(num_tokens, 0), costs.prefill.terms[0])
    chunk_s = [costs.prefill_s(end, start) for start, end in chunk_bounds(num_tokens, chunk_tokens)]
    leader, *others = [info.name for _, info in chosen]  # the least busy one leads: it has the most to do
    candidate = Candidate(
        worker=leader,
        local_blocks=0,
        pulled_blocks=0,
        transfer_s=0.0,
        queue_s=chosen[-1][0],
        prefill_s=pipeline_s(chunk_s, num_stages),
        stages=tuple(others),
        chunk_tokens=chunk_tokens,
    )
    if candidate.ttft_s >= _CLEARLY * single.prefill.ttft_s:
        return single
    return single._replace(prefill=candidate, candidates=(candidate, *single.candidates))
