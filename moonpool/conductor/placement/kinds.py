"""Cost models per kind of worker: a GPU and a CPU, or two GPUs, take different times for the same work. Pure.

A worker registers with its kind (`WorkerInfo.kind`), and its samples teach the models of that kind alone. While all
workers are of one kind, nothing is compared twice: the models are those of the first kind.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moonpool.conductor.costs import CostModels, ErrorWindow
from moonpool.conductor.placement.paths import PoolPaths
from moonpool.conductor.placement.prefix_index import Leading
from moonpool.conductor.placement.pricing import PlacementRequest, Pricing
from moonpool.conductor.placement.tables import FULL_S, Column, DecodeTable, slots_in
from moonpool.conductor.placement.traffic import Traffic


class WorkerKinds:
    """The models of each kind, and the slots of its workers, as masks. `first` are those of the kind that registers
    first."""

    def __init__(self, first: CostModels | None = None) -> None:
        self.first = first or CostModels()
        self._models: dict[str, CostModels] = {}
        self._prefills: dict[str, int] = {}
        self._decodes: dict[str, int] = {}

    @property
    def are_several(self) -> bool:
        return len(self._models) > 1

    def of(self, kind: str) -> CostModels:
        if kind not in self._models:
            self._models[kind] = CostModels(kind=kind) if self._models else self.first
        return self._models[kind]

    def add(self, kind: str, slot: int, *, is_prefill: bool) -> None:
        """Count a worker that has registered."""
        self.of(kind)
        masks = self._prefills if is_prefill else self._decodes
        masks[kind] = masks.get(kind, 0) | 1 << slot

    def drop(self, kind: str, slot: int, *, is_prefill: bool) -> None:
        masks = self._prefills if is_prefill else self._decodes
        masks[kind] &= ~(1 << slot)

    def prices(
        self, request: PlacementRequest, leading: Leading, traffic: Traffic, paths: PoolPaths | None = None
    ) -> tuple[Pricing, tuple[tuple[int, Pricing], ...]]:
        """Return the request's prices, and (mask of slots, prices) of each kind that has prefill workers if there are
        several kinds."""
        if not self.are_several:
            return Pricing(request, leading, self.first, traffic, paths), ()
        present = [(mask, self._models[kind]) for kind, mask in self._prefills.items() if mask]
        kinds = tuple((mask, Pricing(request, leading, models, traffic, paths)) for mask, models in present)
        return kinds[0][1] if kinds else Pricing(request, leading, self.first, traffic, paths), kinds

    def decode_of(self, slot: int) -> CostModels:
        """Return the models of that decode worker."""
        if not self.are_several:
            return self.first
        return next(self._models[kind] for kind, mask in self._decodes.items() if mask >> slot & 1)

    def decode_rank_s(self, table: DecodeTable, num_tokens: int) -> Column:
        """Return a column whose order is that of the step times of all batches with one more sequence of `num_tokens`,
        by the models of each worker; plus FULL_S where no sequence fits. The caller must not change the column."""
        if not self.are_several:
            return table.rank_s(self.first.decode.terms)
        rank = np.full(len(table.num_seqs), np.inf)
        for kind, mask in self._decodes.items():
            slots = slots_in(mask)
            fixed_s, per_seq_s, per_token_s = self._models[kind].decode.terms
            added_s = fixed_s + per_seq_s + per_token_s * num_tokens
            rank[slots] = added_s + per_seq_s * table.num_seqs[slots] + per_token_s * table.kv_tokens[slots]
        rank += table.is_full * FULL_S
        return rank

    def decode_step_s(self, num_seqs: float, kv_tokens: float) -> float:
        """Return the time between tokens of a batch at the slowest kind that decodes: what is promised must hold at
        whichever worker the batch is."""
        present = [self._models[kind] for kind, mask in self._decodes.items() if mask] or [self.first]
        return max(models.decode_step_s(num_seqs, kv_tokens) for models in present)

    def errors(self) -> Iterator[ErrorWindow]:
        """Yield the errors of all models."""
        for models in self._models.values() or (self.first,):
            yield from models.errors.values()
