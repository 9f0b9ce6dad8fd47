"""Work that overlaps: layers that load, compute and store at once; chunks that run on several stages at once. Pure.

Both are the same thing, a line of equal stations: the first item goes through all of them, then each further one
follows at the pace of the slowest.
"""

from __future__ import annotations

from moonpool.base.errors import InvalidInput
from moonpool.sim.physics.cost import PrefillCost


def overlapped_s(compute_s: float, load_s: float, num_layers: int, store_s: float = 0.0) -> float:
    """A prefill whose prefix is loaded layer by layer while it computes, and whose KV is stored or sent likewise
    (paper.md A5): layer j loads while j - 1 computes and j - 2 is stored. Ends when the last layer is stored."""
    if num_layers < 1:
        raise InvalidInput(f"a model has layers, not {num_layers}")
    slowest = max(compute_s, load_s, store_s)
    return (load_s + compute_s + store_s + (num_layers - 1) * slowest) / num_layers


def chunk_ends(num_tokens: int, prefix_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """The uncached part of a prompt in chunks: (end, start) of each; a full hit still computes the last token."""
    if chunk_tokens < 1:
        raise InvalidInput(f"chunks have tokens, not {chunk_tokens}")
    start = min(prefix_tokens, num_tokens - 1)
    return [(min(at + chunk_tokens, num_tokens), at) for at in range(start, num_tokens, chunk_tokens)]


class StageLine:
    """Stages that batches pass in turn. The first is up to the caller: it says when a batch leaves that one."""

    __slots__ = ("_free_s",)

    def __init__(self, num_stages: int) -> None:
        if num_stages < 1:
            raise InvalidInput(f"a pipeline has stages, not {num_stages}")
        self._free_s = [0.0] * (num_stages - 1)

    def leaves_s(self, now_s: float, stage_s: float, boundary_s: float) -> float:
        """When a batch that leaves the first stage now, and takes so long at each, will have left the last."""
        at_s = now_s
        for stage, free_s in enumerate(self._free_s):
            at_s = self._free_s[stage] = max(at_s + boundary_s, free_s) + stage_s
        return at_s


def pipelined_prefill_s(
    cost: PrefillCost,
    num_tokens: int,
    prefix_tokens: int,
    *,
    chunk_tokens: int,
    num_stages: int,
    boundary_s: float = 0.0,
) -> float:
    """A prefill in chunks over stages of equally many layers (CPP, paper.md A4): the chunks' times divided by the
    stages, plus the bubble of the longest chunk, which is the last full one; a stage hands a chunk on in boundary_s
    while it computes the next. Every stage loads its own layers of the prefix at once with the others. `cost` is of
    all layers on one node."""
    if num_stages < 1:
        raise InvalidInput(f"a pipeline has stages, not {num_stages}")
    chunks = chunk_ends(num_tokens, prefix_tokens, chunk_tokens)
    times = [cost.compute_s(end, start) for end, start in chunks]
    # All chunks in turn at one station, and the longest once at each other one.
    passing_s = sum(times) + (num_stages - 1) * max(times)
    load_s = cost.load_s(min(prefix_tokens, num_tokens - 1))
    return (load_s + passing_s) / num_stages + (num_stages - 1) * boundary_s
