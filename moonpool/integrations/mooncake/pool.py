"""The one place where this API touches the store: batches of buffers in, batches of buffers out.

Answers are positional; an error in a list is about one key, an error raised is about the whole call (no answer from
the master).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from moonpool.base.errors import MoonpoolError, NotFound
from moonpool.store.client import Put, PutOptions, StoreClient
from moonpool.store.messages import ObjectInfo, Tier


class MooncakePool:
    """Borrows the client. Thread-safe as it is."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client

    def is_well(self) -> int:
        """0; raises when the master does not answer."""
        return len(self._client.exist([]))

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """Leases what is there."""
        return self._client.exist(keys)

    def places(self, keys: Sequence[bytes]) -> list[ObjectInfo | None]:
        """Where the objects are; leases them."""
        return self._client.lookup(keys)

    def tiers(self) -> dict[str, Tier]:
        """Of every segment, by its name."""
        return {each.name: each.tier for each in self._client.stats().segments}

    def nbytes(self, key: bytes) -> int:
        """Of the value, without its header. NotFound when there is none."""
        nbytes = self._client.size(key)
        if nbytes is None:
            raise NotFound("no such object")
        return nbytes

    def put_many(
        self,
        keys: Sequence[bytes],
        values: Sequence[Sequence[memoryview]],
        options: PutOptions,
        groups: Sequence[bytes],
    ) -> list[MoonpoolError | None]:
        """Each value gathered from its buffers, each buffer with a checksum of its own. AlreadyExists keeps the old."""
        wishes = zip(keys, values, groups, strict=True)
        return self._client.put_many(
            [Put(key=key, buffers=value, options=options, group=group) for key, value, group in wishes]
        )

    def get(self, key: bytes) -> bytes | None:
        return self._client.get(key)

    def get_many(self, keys: Sequence[bytes], targets: Sequence[Sequence[memoryview]]) -> list[int | MoonpoolError]:
        """Each value scattered over its buffers, which may be cut otherwise than those it was put from.

        The size of each; NotFound, InvalidInput when the buffers are too small, Corrupt, StaleGeneration, Unavailable.
        """
        return self._client.get_many_into(keys, targets)

    def remove(self, key: bytes, force: bool) -> bool:
        """False when it is leased or pinned. NotFound when there is nothing."""
        if not self._client.why(key).startswith("this object is stored"):  # asking otherwise would lease it
            raise NotFound("no such object")
        return self._client.remove([key], force)[0]

    def remove_all(self, namespace: bytes, force: bool) -> int:
        """How many objects with keys of that namespace went; leased and pinned ones stay unless `force`."""
        return self._client.remove_matching(f"^{re.escape(namespace.decode())}", force)[0]
