"""What tests of pipelines share: a prompt that is long enough, and a look at the stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiny_cluster import ROOT, TinyCluster
from tiny_gates import Gate

from moonpool.base.keys import chain_keys, object_key
from moonpool.engine.sequence import Chunk

LONG = 600  # by the cost models' priors a pipeline of two is faster from about 300 tokens on
NUM_BLOCKS = LONG // 16
PIPELINE: dict[str, Any] = {"pipeline": 2, "calibrate_s": 0.0, "max_batch_tokens": 128}


def leads(cluster: TinyCluster) -> list[int]:
    """Return how many prompts each worker has led through a pipeline."""
    return [worker.num_led for worker in cluster.workers.values()]


def helper_of(cluster: TinyCluster) -> str:
    """Return the worker that computes the first layers of a prompt for another one."""
    [name] = [name for name, worker in cluster.workers.items() if any(not s.is_last for s in worker.stages)]
    return name


def gate_chunks(cluster: TinyCluster, gate: Gate, *, is_last: bool) -> None:
    """Let the gate stop a chunk of the last stage, or of the other one, whichever workers these are."""

    def stop_at(layers: range) -> None:
        if (layers.start > 0) is is_last:
            gate.stop_here()

    on_chunks(cluster, lambda chunk, layers: stop_at(layers))


def on_chunks(cluster: TinyCluster, function: Callable[[Chunk, range], None]) -> None:
    """Call `function(chunk, layers)` before each chunk that a stage computes, on its engine's thread."""
    for worker in cluster.workers.values():
        compute = worker.runner.execute_span

        def noted(chunk: Chunk, layers: range, *rest: Any, compute: Any = compute) -> Any:
            function(chunk, layers)
            return compute(chunk, layers, *rest)

        setattr(worker.runner, "execute_span", noted)  # noqa: B010 - mypy does not let a method be assigned


async def check_pool(cluster: TinyCluster, prompt: list[int], num_blocks: int) -> None:
    """The pool has exactly these leading blocks of the prompt."""
    keys = [object_key(key) for key in chain_keys(ROOT, prompt, 16)]
    # Not only until no put is open: puts begin when the hand-off is over, which may be after the answer's end.
    await cluster.check_idle()
    found = cluster.master.state.lookup(keys, 0.0, lease=False)
    assert [info is not None for info in found] == [True] * num_blocks + [False] * (len(keys) - num_blocks)
