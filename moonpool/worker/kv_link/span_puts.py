"""Pages -> the pool, where each stage of a pipeline has the layers that it computed (store/client/shared_puts.py).

Blocks that cannot be put are counted, as in pool.py; the request does not depend on them. On the pool thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from moonpool.base.errors import MoonpoolError
from moonpool.store import Store
from moonpool.store.client.put_session import PutSession
from moonpool.store.client.shared_puts import SharedPut, SharedPuts
from moonpool.store.messages.shared_space import SharedSpace, WrittenPieces
from moonpool.transfer.transports.cuda.copy import in_main_memory
from moonpool.worker.kv_link.pieces import PieceMemory
from moonpool.worker.kv_link.pool import PoolWriter

_COPY_TIMEOUT_S = 10.0  # from a GPU


class SpanPuts:
    def __init__(self, store: Store, memory: PieceMemory, pool: PoolWriter) -> None:
        self._pieces, self._shared = store.piece_puts, SharedPuts(store.piece_puts)
        self._memory, self._pool = memory, pool

    @property
    def block_tokens(self) -> int:
        return self._memory.layout.block_tokens

    def begin(self, keys: Sequence[bytes]) -> tuple[SharedPut, dict[int, PutSession]] | None:
        """Get space for the blocks of a prompt that the pool does not have; return the puts by block. Call end()
        afterwards. None if the pool cannot be asked."""
        parents = dict(zip(keys[1:], keys, strict=False))
        try:
            shared = self._shared.begin([self._pool.request(key, parents) for key in keys])
        except MoonpoolError as error:
            self._pool.record_failures([error] * len(keys))
            return None
        self._pool.record_failures([each for each in shared.puts if isinstance(each, MoonpoolError)])
        return shared, {block: each for block, each in enumerate(shared.puts) if isinstance(each, PutSession)}

    def write(self, puts: Mapping[PutSession, int], layers: range) -> set[PutSession]:
        """Write these layers of each put's page. Return the puts that failed."""
        failed: dict[PutSession, MoonpoolError] = {}
        step = max(1, self._pool.max_pieces // len(layers))
        for first in range(0, len(puts), step):
            some = list(islice(puts.items(), first, first + step))
            pieces = [(put, layer, range(layer, layer + 1), page) for put, page in some for layer in layers]
            memories = in_main_memory([self._memory.memory(page, one) for _, _, one, page in pieces], _COPY_TIMEOUT_S)
            writes = [(put, layer, data, None) for (put, layer, _, _), data in zip(pieces, memories, strict=True)]
            outcomes = self._pieces.write(writes)
            failed |= {write[0]: error for write, error in zip(writes, outcomes, strict=True) if error is not None}
        self._pool.record_failures(failed.values())
        return set(failed)

    def end(self, shared: SharedPut, complete: Sequence[PutSession]) -> None:
        """Make the complete blocks visible; the space of others is free when all stages have left."""
        try:
            outcomes = self._shared.end(shared, complete)
            self._pool.record_failures([each for each in outcomes if each is not None])
        except MoonpoolError as error:
            self._pool.record_failures([error] * len(complete))

    def write_joined(
        self, session: int, page_of: Mapping[bytes, int], spaces: Sequence[SharedSpace], layers: range
    ) -> list[WrittenPieces | None]:
        """Write these layers of blocks that another stage puts; return what was written of each."""
        try:
            puts = self._shared.join(session, [self._pool.request(key, {}) for key in page_of], spaces)
            failed = self.write(dict(zip(puts, page_of.values(), strict=True)), layers)
            written: list[WrittenPieces | None] = []
            for put in puts:
                checksums = put.checksums(layers)
                is_whole = checksums is not None and put not in failed
                written.append(WrittenPieces(checksums, put.failed) if is_whole and checksums is not None else None)
            return written
        finally:
            self._shared.leave(session)
