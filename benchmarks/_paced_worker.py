"""A `moonpool worker` whose steps take at least a given time, as if each had a slow processor of its own.

On few cores several workers compute faster when the others are idle. With a floor well above what a step of a tiny
model takes, a worker is as fast as it is, whatever the others do. A step takes

    base_s + prompt_token_s for each token of a prompt + answer_s for each answer in it

    python benchmarks/_paced_worker.py '{"base_s": 0.02, "prompt_token_s": 0.0015, "answer_s": 0.005}' OPTIONS

with the options of `moonpool worker`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from moonpool.cli.main import main
from moonpool.engine.sequence import Chunk

if TYPE_CHECKING:
    import torch

    from moonpool.engine.runner import LayerHooks


class Pace(msgspec.Struct, frozen=True):
    """All in seconds."""

    base_s: float
    prompt_token_s: float
    answer_s: float

    def step_s(self, num_prompt_tokens: int, num_answers: int) -> float:
        return self.base_s + self.prompt_token_s * num_prompt_tokens + self.answer_s * num_answers


def hold_steps(pace: Pace) -> None:
    """Let every pass of a model in this process take as long as `pace` says, or longer if it computes longer."""
    from moonpool.base.clock import SystemClock
    from moonpool.engine.runner import Runner
    from moonpool.worker import calibration

    execute = Runner.execute

    def held(runner: Runner, chunks: Sequence[Chunk], hooks: LayerHooks | None = None) -> torch.Tensor:
        began_s = time.perf_counter()
        logits = execute(runner, chunks, hooks)
        answers = sum(len(chunk.tokens) == 1 for chunk in chunks)
        tokens = sum(len(chunk.tokens) for chunk in chunks) - answers
        time.sleep(max(0.0, began_s + pace.step_s(tokens, answers) - time.perf_counter()))
        return logits

    Runner.execute = held  # type: ignore[assignment, method-assign]
    calibration.ThreadClock = SystemClock  # type: ignore[assignment, attr-defined]  # a held step waits, and computes nothing


if __name__ == "__main__":
    hold_steps(Pace(**json.loads(sys.argv[1])))
    sys.argv[1:] = ["worker", *sys.argv[2:]]
    main()
