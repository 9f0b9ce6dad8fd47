"""What the scheduler tells about one step: who entered, what was accepted, which blocks became full."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.engine.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence that entered the batch. Its `blocks`, if any, must be pulled from the pool into `pages`
    before this step reads them."""

    request_id: str
    num_local_blocks: int  # reused from this worker's own pages
    blocks: tuple[int, ...]
    pages: tuple[int, ...]
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FullBlock:
    """A block that this step completed. Its bytes stay in `page` until pages are next allocated;
    `PageManager.hold` keeps them for longer."""

    request_id: str
    index: int
    page: int
    key: bytes
    parent: bytes | None = None  # the key of the block before it


@dataclass(frozen=True, slots=True)
class Accepted:
    """A token that became part of its sequence, and the reason if it was the last one."""

    request_id: str
    token: int
    finish_reason: FinishReason | None
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class StepResult:
    accepted: list[Accepted] = field(default_factory=list)
    full_blocks: list[FullBlock] = field(default_factory=list)

    @property
    def finished(self) -> dict[str, FinishReason]:
        return {a.request_id: a.finish_reason for a in self.accepted if a.finish_reason is not None}
