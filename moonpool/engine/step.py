"""What the scheduler tells about one step: who entered, what was accepted, which blocks became full."""

from __future__ import annotations

import msgspec

from moonpool.engine.sequence import FinishReason, Sequence


class AdmittedSequence(msgspec.Struct, frozen=True, gc=False):
    """A sequence that entered the batch. Its `blocks`, if any, must be pulled from the pool into `pages`
    before this step reads them."""

    request_id: str
    num_local_blocks: int  # reused from this worker's own pages
    blocks: tuple[int, ...]
    pages: tuple[int, ...]
    keys: tuple[bytes, ...]


class FullBlock(msgspec.Struct, frozen=True, gc=False):
    """A block that this step completed. Its bytes stay in `page` until pages are next allocated;
    `PageManager.hold` keeps them for longer."""

    request_id: str
    index: int
    page: int
    key: bytes
    parent: bytes | None = None  # the key of the block before it


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """A token that became part of its sequence, and the reason if it was the last one."""

    request_id: str
    token: int
    finish_reason: FinishReason | None
    num_cached_tokens: int


class StepResult(msgspec.Struct, frozen=True):
    accepted: list[Accepted] = msgspec.field(default_factory=list)
    full_blocks: list[FullBlock] = msgspec.field(default_factory=list)

    @property
    def finished(self) -> dict[str, FinishReason]:
        return {a.request_id: a.finish_reason for a in self.accepted if a.finish_reason is not None}


def full_blocks(sequence: Sequence, indices: range) -> list[FullBlock]:
    """Those blocks of a sequence."""
    keys, pages = sequence.keys, sequence.pages
    return [
        FullBlock(sequence.request_id, index, pages[index], keys[index], keys[index - 1] if index else None)
        for index in indices
    ]
