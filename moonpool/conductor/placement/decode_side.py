"""What a request waits for at its decode worker: pages before its prefill begins, and the hand-off after its first
token. Pure.

A worker without enough free pages gives them out as its answers end. How long an answer has been going on says little
about how long it still will, so each is expected to go on for the mean length of answers. Of `used` pages, those that
are short are then free after

    pages_s = short / used * mean answer in tokens * time between tokens

The hand-off is learnt from what prefill workers measure (costs.py).
"""

from __future__ import annotations

import msgspec

from moonpool.conductor.admission.request_forecast import OutputLengths
from moonpool.conductor.costs import CostModels
from moonpool.conductor.messages import RequestEnded
from moonpool.conductor.placement.policy import PlacementChoice
from moonpool.conductor.placement.pricing import PlacementRequest


class DecodeSide:
    def __init__(self, costs: CostModels, lengths: OutputLengths) -> None:
        self._costs, self._lengths = costs, lengths

    def learn(self, ended: RequestEnded, prompt_nbytes: int) -> None:
        """Take the hand-off of a prompt's KV, if there was one."""
        if ended.outcome == "done" and ended.parts is not None and ended.parts.handoff_s is not None:
            self._costs.learn_handoff(prompt_nbytes, ended.parts.handoff_s)

    def pages_s(self, request: PlacementRequest, free_pages: float, num_pages: int, tbt_s: float) -> float:
        """Return how long the request waits for pages at a worker that has `num_pages`; `free_pages` is below 0 if
        others wait before it."""
        short, used = request.num_pages - free_pages, num_pages - max(0.0, free_pages)
        if short <= 0 or used <= 0:
            return 0.0
        return short / used * self._lengths.mean * tbt_s

    def add_waits(
        self, choice: PlacementChoice, request: PlacementRequest, free_pages: float, num_pages: int
    ) -> PlacementChoice:
        """Return the choice with what its decode worker adds: to the time to first token, and after it."""
        pages_s = self.pages_s(request, free_pages, num_pages, choice.tbt_s)
        handoff_s = 0.0 if request.max_tokens == 1 else self._costs.handoff_s(prompt_nbytes(request))
        if not (pages_s or handoff_s):
            return choice
        candidates = tuple(
            msgspec.structs.replace(one, pages_s=pages_s, handoff_s=handoff_s) for one in choice.candidates
        )
        return choice._replace(prefill=candidates[0], candidates=candidates)


def prompt_nbytes(request: PlacementRequest) -> int:
    """Return the bytes of the prompt's KV, in whole blocks."""
    return -(-request.num_tokens // request.block_tokens) * request.block_nbytes
