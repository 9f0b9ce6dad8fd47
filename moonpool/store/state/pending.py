"""Puts that were begun and not ended. Pure."""

from __future__ import annotations

from moonpool.store.state.segments import Place


class PendingPut:
    """Space that was granted and is being written. Not visible, not evictable."""

    __slots__ = ("generation", "group", "key", "nbytes", "parent", "places", "renewed_s", "terms")

    def __init__(
        self, key: bytes, nbytes: int, generation: int, places: list[Place], terms: Terms, now_s: float
    ) -> None:
        self.key = key
        self.nbytes = nbytes
        self.generation = generation
        self.places = places
        self.terms = terms
        self.renewed_s = now_s
        self.parent: bytes | None = None
        self.group = b""


class Terms:
    """What the puts of one batch have in common."""

    __slots__ = ("flags", "identity", "replace", "session", "soft_pin_s")

    def __init__(self, session: int, flags: int, identity: int, soft_pin_s: float, replace: bool) -> None:
        self.session = session
        self.flags = flags
        self.identity = identity
        self.soft_pin_s = soft_pin_s
        self.replace = replace
