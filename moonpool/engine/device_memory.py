"""How a GPU's memory is divided: weights, work space of a step, and the rest for KV pages. Arithmetic only, no torch.

Workers that share a GPU have their own weights and work space each, and equal parts of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from moonpool.base.errors import NoSpace
from moonpool.base.units import format_nbytes
from moonpool.engine.config import DTYPE_NBYTES, DType, ModelConfig, tensor_shapes

# A process's CUDA context, with the kernels and work areas of the libraries.
_CONTEXT_NBYTES = 1_500_000_000
# Allocators cannot use every gap, and a step's largest tensors exist twice for a moment.
_STEP_MARGIN = 1.5
_KV_PART = 0.95  # of what is left, for pages; the rest stays free


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """What one worker takes of its GPU beside KV pages, in bytes."""

    weights_nbytes: int
    step_nbytes: int
    page_nbytes: int  # of one KV page, the least that a worker can use

    @classmethod
    def of(
        cls, model: ModelConfig, *, dtype: DType, block_tokens: int, max_batch_tokens: int, max_num_seqs: int
    ) -> DeviceNeed:
        """Estimate the need of a worker; steps of `max_batch_tokens` take the most."""
        width = DTYPE_NBYTES[dtype]
        weights = sum(prod(shape) for shape in tensor_shapes(model).values()) * width
        # Of each token: residual, norm and projections in the model's dtype, and the norm's float32 copies.
        token = (4 * model.hidden_size + model.query_size + 3 * model.intermediate_size) * width + 8 * model.hidden_size
        past = 2 * model.max_position * model.kv_size * width  # one layer's KV of the longest sequence, gathered
        # The model's, those with penalties, weights of a draw, and counts of tokens.
        logits = 4 * max_num_seqs * model.vocab_size * 4
        step = int(_STEP_MARGIN * (max_batch_tokens * token + past + logits)) + _CONTEXT_NBYTES
        page = 2 * model.num_layers * model.kv_size * block_tokens * width
        return cls(weights, step, page)


def kv_share(device: str, free_nbytes: int, num_workers: int, need: DeviceNeed) -> int:
    """Return the bytes of KV pages for each of `num_workers` workers of a GPU with so much free memory.

    Raise NoSpace if not even one page each is left.
    """
    left = free_nbytes // num_workers - need.weights_nbytes - need.step_nbytes
    share = int(left * _KV_PART)
    if share < need.page_nbytes:
        raise NoSpace(
            f"{device} has {format_nbytes(free_nbytes)} free; {_each(num_workers)} {_beside_pages(need)} and needs "
            f"{format_nbytes(need.page_nbytes)} for one KV page; use a larger GPU, fewer workers on this one, "
            "--dtype bfloat16 or a smaller --max-batch-tokens"
        )
    return share


def require_kv_fits(device: str, free_nbytes: int, num_workers: int, need: DeviceNeed, kv_nbytes: int) -> None:
    """Raise NoSpace if the workers of a GPU do not fit with `kv_nbytes` of KV pages each."""
    needed = num_workers * (need.weights_nbytes + need.step_nbytes + kv_nbytes)
    if needed > free_nbytes:
        most = free_nbytes // num_workers - need.weights_nbytes - need.step_nbytes
        advice = f"use at most --kv {max(most, 0) // 1_000_000}MB" if most >= need.page_nbytes else "use another GPU"
        raise NoSpace(
            f"{format_nbytes(kv_nbytes)} of KV pages (--kv) do not fit on {device}: {format_nbytes(free_nbytes)} are "
            f"free and {_each(num_workers)} {_beside_pages(need)}; {advice}"
        )


def _each(num_workers: int) -> str:
    return "the worker" if num_workers == 1 else f"each of {num_workers} workers"


def _beside_pages(need: DeviceNeed) -> str:
    return f"takes {format_nbytes(need.weights_nbytes)} for weights and {format_nbytes(need.step_nbytes)} to compute"
