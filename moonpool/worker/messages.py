"""The calls of a worker, for the front end and other workers. Service name "worker" (base/cluster.py).

A request's way: the front end opens `Decode` at the decode worker and gets a Ticket (reserved pages); it hands the
ticket to `Prefill`; the prefill worker writes KV straight into those pages, streams the first token back as soon as it
has it, and ends with `CommitHandoff` at the decode worker; the other tokens then come out of the `Decode` stream.
Closing the stream at any time releases everything. `epoch` counts the front end's attempts at one request; calls of an
earlier attempt are refused.

A running answer moves without a prefill worker: the stream of the old decode worker ends with MOVED when all full
blocks are in the pool, and `Decode` with `resumes` lets another decode worker bring them from there.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.ranges import RequestName, Tokens, Weight
from moonpool.base.rpc import Call, StreamCall
from moonpool.engine.sequence import SamplingParams
from moonpool.store.messages.shared_space import SharedSpace, WrittenPieces

# A request under which a worker died continues from the last token that reached the front end. A few tokens after it
# may be lost, so the step that ended the worker is repeated within this many steps.
ALONE_STEPS = 4


# The finish reason of a stream whose answer has to go on at another worker.
MOVED = "moved"


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A request as workers see it. `tokens` = prompt + output accepted so far (a replanned request has some)."""

    request_id: RequestName
    epoch: int
    tokens: list[int]
    num_prompt_tokens: int
    root: bytes  # the tenant's chain root (base/keys.py); the secret itself never reaches a worker
    params: SamplingParams
    timeout_s: float = 600.0
    alone: bool = False  # workers died under it: its prompt and first ALONE_STEPS decode steps are not batched
    tenant: str = ""  # tenants share the places and pages of a decode worker by their weights
    weight: Weight = 1.0


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Pages that a decode worker keeps free for one hand-off, one per block of the prompt, partial last included.

    The first `num_present_blocks` of them hold the right KV already and must not be written.
    """

    request_id: str
    epoch: int
    address: str  # of the decode worker
    segment: SegmentDescriptor
    pages: list[int]
    num_present_blocks: int
    generation: int


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token; `top` holds the most likely ones where the request asked for logprobs."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class PrefillReply(msgspec.Struct, frozen=True, kw_only=True):
    """The first token and where the prompt's KV came from."""

    first: TokenOut
    finish_reason: str | None  # set when the first token was also the last; nothing was handed off then
    local_tokens: int  # found in the worker's own pages
    pool_tokens: int  # pulled from the pool
    pool_nbytes: int
    queue_s: float
    compute_s: float
    ssd_tokens: int = 0  # of `pool_tokens`, read from SSD
    remote_tokens: int = 0  # of `pool_tokens`, read from the memory of another machine
    pull_s: float = 0.0
    pull_layers_s: tuple[float, ...] = ()  # as PrefillParts of the conductor has them


class PrefillItem(msgspec.Struct, frozen=True, kw_only=True):
    """Element of a Prefill stream: first the reply, as soon as the first token is sampled. If the answer goes on, then
    `handoff_s`, the time from the first token until the decode worker had the KV."""

    reply: PrefillReply | None = None
    handoff_s: float | None = None


class DecodeItem(msgspec.Struct, frozen=True, kw_only=True):
    """Element of a Decode stream: the ticket comes first and alone, then tokens, the last with `finish_reason`. MOVED
    comes alone. With Decode.resumes there is no ticket."""

    ticket: Ticket | None = None
    tokens: tuple[TokenOut, ...] = ()
    finish_reason: str | None = None


class Decode(StreamCall[DecodeItem]):
    """Reserve pages for the prompt, wait for its KV, then decode. NoSpace when pages never suffice.

    With `resumes` no KV is handed over: what the pool has of it is pulled, and the rest is computed.
    """

    spec: RequestSpec
    resumes: bool = False


class Prefill(StreamCall[PrefillItem]):
    """Compute the prompt's KV and the first token, and hand them to the ticket's owner. If that fails, the stream ends
    with the error, after the reply or before it.

    No more than the first `max_pool_blocks` blocks come from the pool; None: all that it has. With `stages`, the
    addresses of other prefill workers, these compute the first layers and this one the last ones, in chunks of
    `chunk_tokens`, or larger ones where less comes from the pool than was expected. The conductor expects the KV of the
    first `reused_tokens` tokens to be in the worker's pages or in the pool; reports say so until the prompt is begun.
    """

    spec: RequestSpec
    ticket: Ticket
    max_pool_blocks: int | None = None
    stages: tuple[str, ...] = ()
    chunk_tokens: int = 0
    reused_tokens: Tokens = 0


class StageInbox(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stage takes hidden states: chunk i at offset `i % num_slots * slot_nbytes`, once it has computed with
    chunk `i - num_slots`."""

    address: str  # of the stage's worker
    segment: SegmentDescriptor
    num_slots: int
    slot_nbytes: int


class StageItem(msgspec.Struct, frozen=True, kw_only=True):
    """Element of a RunStage stream: that the stage has its pages, and its inbox unless it is the first one; then how
    many leading blocks it has from the pool; then the checksums of its part of the hand-off, as in CommitHandoff, when
    all of it is written."""

    inbox: StageInbox | None = None
    pulled_blocks: int | None = None
    checksums: bytes | None = None


class RunStage(StreamCall[StageItem]):
    """From the last stage of a pipeline to another one: pull these layers of the first `num_pool_blocks` blocks from
    the pool and wait for StartStage; then compute the layers of the rest, in chunks of at most `max_chunk_tokens`, send
    hidden states to `next`, and hand the KV of the layers to the ticket's owner. NoSpace when pages are short now.

    The stage keeps its pages until the stream is closed, for PutSpan.
    """

    spec: RequestSpec
    ticket: Ticket
    first_layer: int
    num_layers: int
    max_chunk_tokens: int
    next: StageInbox
    num_pool_blocks: int = 0


class StartStage(Call[None]):
    """From the last stage to another one: compute from `first_token` on, in chunks of `chunk_tokens`. All stages have
    the KV before it. NotFound if the stage has ended, InvalidInput if it has less KV, has no room for such chunks or
    computes already."""

    request_id: str
    epoch: int
    first_token: int
    chunk_tokens: int


class ChunkReady(Call[None]):
    """From stage to stage: the hidden states of a chunk are in the inbox. Answered once the chunk is computed, and its
    place in the inbox is free."""

    request_id: str
    epoch: int
    number: int


class PutSpan(Call[list[WrittenPieces | None]]):
    """From the last stage to another one: write the pieces of your layers of these blocks to the pool. Returns for each
    what was written, None if it could not be."""

    request_id: str
    epoch: int
    session: int
    blocks: list[int]
    spaces: list[SharedSpace]


class OpenHandoff(Call[None]):
    """From prefill to decode worker, before the first write: from now on the writer's connection owns the pages.

    Until that connection commits, aborts or ends, the pages are kept, even if the request ends. StaleGeneration when
    the reservation has ended.
    """

    request_id: str
    epoch: int
    generation: int


class CommitHandoff(Call[None]):
    """From prefill to decode worker: all pieces are written. Every one is checked before the request may run.

    `checksums` are CRC-32C of the pieces as little-endian u32, `[block][layer]`, for the blocks that were written.
    Corrupt when one does not match; the request then fails over.
    """

    request_id: str
    epoch: int
    generation: int
    first: TokenOut
    num_tokens: int
    checksums: bytes


class EndWrites(Call[None]):
    """From a stage of a pipeline to the decode worker: its part is written, and another stage commits."""

    outlives_caller: ClassVar[bool] = True
    request_id: str
    epoch: int
    generation: int


class AbortHandoff(Call[None]):
    """From prefill to decode worker: nothing more will be written by this one. When no other prefill worker writes
    either, the pages may be used again. A commit is refused from then on."""

    outlives_caller: ClassVar[bool] = True
    request_id: str
    epoch: int
    generation: int


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts for tests and operators; all of them are zero-based and monotonic unless they name a state."""

    name: str
    role: str
    incarnation: int
    pid: int
    num_pages: int
    free_pages: int  # without a reference; their content may still be reusable
    cached_pages: int
    reserved_pages: int
    num_waiting: int
    num_running: int
    pool_read_nbytes: int
    pool_written_nbytes: int
    handoff_nbytes: int
    pull_failures: dict[str, int]
    failed_requests: int = 0  # ended with an error of their own: NaN, or a step that failed with them alone
    resumed_answers: int = 0  # came back after a preemption, or from another worker
    recomputed_tokens: int = 0  # of these answers: tokens whose KV was computed again, the last one included


class GetStats(Call[WorkerStats]):
    pass


class VerifyObject(Call[int]):
    """Read an object of the pool, check every byte against its checksums, and return its size. NotFound when it is not
    there, or no replica passes: wrong replicas are reported to the master, which never returns them again."""

    key: bytes


class PieceChecksums(Call[bytes]):
    """Return CRC-32C of every piece of a cached block, read from the worker's pages now: u32 per layer. NotFound when
    the block is not there.
    """

    key: bytes
