"""The removal calls of Store, which inherits them.

A removal has no number of its own that would tell a repeated call from a new one. So each call carries an idempotency
key: a late copy of it removes nothing that was stored since (master/calls.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from moonpool.store import messages as m
from moonpool.store.client.master_client import MasterClient
from moonpool.store.keys_text import Key, key_bytes, keys_bytes


class RemovalCalls:
    """A base class: Store sets the attribute."""

    master: MasterClient

    def remove(self, key: Key, *, force: bool = False) -> bool:
        """Remove the object. Return True when no object is under the key now. Leased and pinned objects stay unless
        `force`.
        """
        return self.remove_many([key], force=force)[0]

    def remove_many(self, keys: Iterable[Key], *, force: bool = False) -> list[bool]:
        return self.master.call(m.Remove(keys=keys_bytes(keys), force=force, idempotency_key=new_idempotency_key()))

    def remove_replicas(self, keys: Iterable[Key], segments: Sequence[str]) -> list[bool]:
        """Remove the objects' replicas in memory of these segments; an object without another one is gone then. Leased
        and pinned objects keep all of theirs. Return for each key whether a replica was removed.
        """
        call = m.RemoveReplicas(keys=keys_bytes(keys), segments=tuple(segments), idempotency_key=new_idempotency_key())
        return self.master.call(call)

    def remove_matching(
        self, pattern: str | None, *, prefix: Key | None = None, force: bool = False
    ) -> tuple[int, int]:
        """Remove the objects whose key's bytes match the regular expression (None: any key). With `prefix`, only keys
        that begin with it, and the expression is searched for in the rest. Return how many were removed and how many
        stayed.
        """
        return self._remove_matching(pattern, force, b"" if prefix is None else key_bytes(prefix))

    def remove_all(self, *, force: bool = False) -> tuple[int, int]:
        return self._remove_matching(None, force)

    def _remove_matching(self, pattern: str | None, force: bool, prefix: bytes = b"") -> tuple[int, int]:
        num_removed, num_kept = 0, 0
        cursor: int | None = 0
        while cursor is not None:
            call = m.RemoveMatching(
                pattern=pattern, force=force, cursor=cursor, idempotency_key=new_idempotency_key(), prefix=prefix
            )
            step = self.master.call(call)
            num_removed, num_kept, cursor = num_removed + step.num_removed, num_kept + step.num_kept, step.cursor
        return num_removed, num_kept


def new_idempotency_key() -> int:
    """Return a number that no other call has. It is random: counters of two clients would give the same."""
    return 1 + secrets.randbelow((1 << 63) - 1)
