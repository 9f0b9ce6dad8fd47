"""Why puts are not done: what is wrong with a whole batch, and the words for single objects. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.base.errors import AlreadyExists, InvalidInput, MoonpoolError, StaleGeneration, Unavailable
from moonpool.master.state.index import FIRST_SESSION
from moonpool.store.messages import PutOptions, Refusal
from moonpool.store.messages.values import MAX_REPLICAS

MAX_KEY_NBYTES = 1024


def refusal(error: MoonpoolError) -> Refusal:
    return Refusal(error.code, str(error))


STORED = refusal(AlreadyExists("the key is stored already"))
UNDER_WAY = refusal(AlreadyExists("another put of this key is under way"))
RECOUNTING = refusal(Unavailable("nodes are being recounted after the master's restart: ask again soon"))
DISCARDED = refusal(StaleGeneration("the put was discarded: it took too long, or its space was taken back"))
LOST = refusal(StaleGeneration("no replica of the put is left: its nodes are gone or could not be written to"))


def check_pairs(keys: Sequence[bytes], generations: Sequence[int]) -> None:
    """InvalidInput unless each key has a generation."""
    if len(keys) != len(generations):
        raise InvalidInput(
            f"{len(keys)} keys and {len(generations)} generations: each key needs one", param="generations"
        )


def check_batch(
    keys: Sequence[bytes],
    sizes: Sequence[int],
    options: PutOptions,
    session: int,
    parents: Sequence[bytes] | None,
    groups: Sequence[bytes] | None,
) -> None:
    """InvalidInput when the batch makes no sense as a whole."""
    if len(sizes) != len(keys) or any(column is not None and len(column) != len(keys) for column in (parents, groups)):
        raise InvalidInput("the columns of a put have different lengths")
    if not 0 < options.num_replicas <= MAX_REPLICAS:
        raise InvalidInput(f"a put has 1 to {MAX_REPLICAS} replicas", param="num_replicas")
    if session and session < FIRST_SESSION:
        raise InvalidInput(f"a session is 0 or at least {FIRST_SESSION}", param="session")
