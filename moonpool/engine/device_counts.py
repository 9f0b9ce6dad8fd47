"""Counts of tokens on a GPU: which sequence has which row of them, and how a new sequence's counts get there.

    slots, due = counts.place(rows)      before a step, on the stream that computes it
    penalize(logits, ...)                in the step: counts the newest token of each row that is due

Each step counts one token per row on the GPU, so a step may be launched before the token that it counts is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from moonpool.engine.kernels.host_memory import fetch
from moonpool.engine.kernels.penalties import bar_tokens, penalize
from moonpool.engine.penalties import CountSlots, count_tokens, fits_16_bits
from moonpool.engine.sampler import Adjusted, SampleRow, most_likely

_ALIGN = 16


class DeviceCounts:
    """The LogitsAdjuster of a GPU, for at most `num_slots` rows at once; for the engine's thread only.

    The counts are allocated when the first penalty comes. `address` is where, for kernels.
    """

    def __init__(self, device: torch.device, vocab_size: int, num_slots: int, max_seq_tokens: int) -> None:
        self._device, self._vocab_size, self._num_slots = device, vocab_size, num_slots
        self._slots = CountSlots(num_slots)
        self._table: torch.Tensor | None = None
        self._uploads: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self.wide = not fits_16_bits(max_seq_tokens)
        self.row_counts = -(-vocab_size // _ALIGN) * _ALIGN
        self.address = torch.zeros(1, dtype=torch.int64, device=device)

    def place(self, rows: Sequence[SampleRow]) -> tuple[list[int], list[int]]:
        """Return for each row its slot plus 1, 0 if it has no penalties, and whether its newest token is due. What new
        sequences have so far is counted on the current stream; the caller's next step must run, or clear() follows.
        """
        penalized = [i for i, row in enumerate(rows) if row.params.penalizes]
        slots, due = [0] * len(rows), [0] * len(rows)
        if penalized:
            sequences = [(rows[i].tokens, rows[i].num_prompt_tokens) for i in penalized]
            num_ahead = rows[penalized[0]].num_ahead
            for i, place in zip(penalized, self._slots.place(sequences, num_ahead), strict=True):
                slots[i], due[i] = place.slot + 1, int(place.is_due)
                if place.is_new:
                    self._upload(rows[i], place.slot)
        return slots, due

    def clear(self) -> None:
        """Forget all counts, because a step may not have counted its tokens."""
        self._slots.clear()

    def _upload(self, row: SampleRow, slot: int) -> None:
        if self._table is None:
            dtype = torch.int32 if self.wide else torch.int16
            self._table = torch.zeros(self._num_slots, self.row_counts, dtype=dtype, device=self._device)
            self.address.fill_(self._table.data_ptr())
        counts = count_tokens(row.tokens, row.num_prompt_tokens, self.row_counts, wide=self.wide)
        # By a kernel: a copy engine serves copies in order, and this one would wait for the KV that is pulled.
        here = torch.from_numpy(counts).pin_memory() if self._device.type == "cuda" else torch.from_numpy(counts)
        fetch(here, self._table[slot])
        if self._device.type == "cuda":
            while self._uploads and self._uploads[0][0].query():  # type: ignore[no-untyped-call]
                self._uploads.popleft()
            read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            read.record()
            self._uploads.append((read, here))

    @contextmanager
    def adjusted(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Iterator[Adjusted]:
        adjusted = logits.float().clone()
        try:
            self._adjust(adjusted, rows)
            yield Adjusted(adjusted, most_likely(adjusted))
        except BaseException:
            self.clear()
            raise

    def _adjust(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        slots, due = self.place(rows)
        newest = [row.tokens[-1] for row in rows]
        barred = [sorted(t for t in row.barred if 0 <= t < self._vocab_size) for row in rows]
        numbers = [len(tokens) for tokens in barred]
        each = torch.tensor([newest, slots, due, numbers], dtype=torch.int32, device=self._device)
        if any(slots):
            draws = torch.tensor([row.draw() for row in rows], dtype=torch.float64, device=self._device)
            penalize(logits, each[0], each[1], each[2], draws, self.address, row_counts=self.row_counts, wide=self.wide)
        if any(numbers):
            width = 1 << (max(numbers) - 1).bit_length()
            padded = [tokens + [0] * (width - len(tokens)) for tokens in barred]
            hidden = torch.empty(len(rows), dtype=torch.int32, device=self._device)
            bar_tokens(logits, torch.tensor(padded, dtype=torch.int32, device=self._device), each[3], hidden)
