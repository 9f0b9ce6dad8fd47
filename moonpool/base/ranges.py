"""Ranges of the numbers in messages. A message with a number outside its range is refused when it is decoded
(base/rpc/protocol.py), so no handler meets one that it cannot calculate with. NaN is in no range.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from moonpool.base.keys import KEY_NBYTES

MAX_WHOLE = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_TOKENS = 2**24  # of one request; a loop over the blocks of a longer one would hold its process up
MAX_SECONDS = 1e9
MAX_NAME = 256  # characters of a request's id

Whole: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_WHOLE)]  # identifiers, generations, offsets, bytes
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]  # of things, tokens and pages
Tokens: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Signed: TypeAlias = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
ChainKey: TypeAlias = Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
RequestName: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME)]
Weight: TypeAlias = Annotated[float, Meta(ge=1e-3, le=1e3)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
