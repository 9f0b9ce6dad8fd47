"""Small traces and clusters for tests of the simulated world."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from moonpool.sim.physics.hardware import node
from moonpool.sim.physics.model_shape import preset
from moonpool.sim.physics.paper_fit import paper_cost
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.config import ClusterConfig
from moonpool.sim.world.coupled import CoupledConfig
from moonpool.traces.columns import Trace

BLOCK = 512


def workers_of(world: SimCluster) -> list[Any]:
    """All of them, of both roles: what these have in common has no type of its own."""
    return [*world.prefills.values(), *world.decodes.values()]


def trace_of(*requests: tuple[float, int, int, list[int]]) -> Trace:
    """(arrival_s, num_input, num_output, block ids) each."""
    ids = [request[3] for request in requests]
    return Trace(
        arrival_s=np.array([request[0] for request in requests]),
        num_input=np.array([request[1] for request in requests]),
        num_output=np.array([request[2] for request in requests]),
        block_ids=np.array([number for each in ids for number in each], dtype=np.int64),
        block_offsets=np.cumsum([0, *(len(each) for each in ids)]),
    )


def chat(num_requests: int, seed: int, rate: float = 2.0) -> Trace:
    """Conversations that grow: each turn's prompt contains the one before."""
    chance = random.Random(seed)
    talks: list[list[int]] = []
    requests, now_s, fresh = [], 0.0, 1
    for _ in range(num_requests):
        now_s += chance.expovariate(rate)
        if talks and chance.random() < 0.6:
            ids = chance.choice(talks)
        else:
            ids = [0]
            talks.append(ids)
        count = chance.randint(1, 12)
        ids += range(fresh, fresh + count)
        fresh += count
        num_input = len(ids) * BLOCK - chance.randint(0, BLOCK - 1)
        requests.append((now_s, num_input, chance.choice([1, 2, 50, 300, 600]), list(ids)))
    return trace_of(*requests)


def swing(num_phases: int, seed: int, *, phase_s: float = 60.0, rate: float = 2.0) -> Trace:
    """Phases of long prompts (12,000 tokens, answers of 20) and of long answers (270 tokens, prompts of 1,000) in turn,
    lengths within 30 % of that, all prompts different. With `mooncake_cost` each phase is about what three prefill
    workers, or three decode workers, can do."""
    chance, requests, fresh = random.Random(seed), [], 0
    for phase in range(num_phases):
        num_input, num_output = (12_000, 20) if phase % 2 == 0 else (1000, 270)
        at_s = phase * phase_s + chance.expovariate(rate)
        while at_s < (phase + 1) * phase_s:
            num_tokens = int(num_input * chance.uniform(0.7, 1.3))
            num_blocks = -(-num_tokens // BLOCK)
            ids = list(range(fresh, fresh + num_blocks))
            requests.append((at_s, num_tokens, max(2, int(num_output * chance.uniform(0.7, 1.3))), ids))
            fresh += num_blocks
            at_s += chance.expovariate(rate)
    return trace_of(*requests)


def cluster(**changes: Any) -> ClusterConfig:
    settings: dict[str, Any] = {
        "shape": preset("llama3-70b"),
        "node": node("a800"),
        "cost": paper_cost(),
        "num_prefill": 2,
        "num_decode": 2,
    }
    return ClusterConfig(**(settings | changes))


def coupled(**changes: Any) -> CoupledConfig:
    settings: dict[str, Any] = {
        "shape": preset("llama3-70b"),
        "node": node("a800"),
        "cost": paper_cost(),
        "num_nodes": 2,
    }
    return CoupledConfig(**(settings | changes))
