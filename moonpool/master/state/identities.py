"""Identity digests by small numbers: a pool holds few, and ten million objects name one each. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.base.errors import InvalidInput
from moonpool.master.state.records import Identified, Outcomes

MAX_IDENTITIES = 2**16 - 1
_MAX_DIGEST_NBYTES = 64


class Identities:
    """Number 0 is no identity."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self._numbers: dict[bytes, int] = {}
        self._digests: list[bytes] = [b""]

    def number_of(self, digest: bytes) -> int:
        if not digest.strip(b"\0"):
            return 0
        number = self._numbers.get(digest)
        if number is None:
            if len(digest) > _MAX_DIGEST_NBYTES:
                raise InvalidInput(f"an identity has at most {_MAX_DIGEST_NBYTES} bytes", param="identity")
            if len(self._digests) > MAX_IDENTITIES:
                return 0  # the header says it all the same; only `why` knows less
            number = len(self._digests)
            self.restore(number, digest)
            self._outcomes.add(Identified(number, digest))
        return number

    def digest(self, number: int) -> bytes:
        return self._digests[number] if number < len(self._digests) else b""

    def restore(self, number: int, digest: bytes) -> None:
        while len(self._digests) <= number:
            self._digests.append(b"")
        self._digests[number] = digest
        self._numbers[digest] = number

    def items(self) -> Iterator[tuple[int, bytes]]:
        return ((number, digest) for digest, number in self._numbers.items())
