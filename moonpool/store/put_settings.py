"""How an object is to be stored, as keyword arguments of every kind of put. Each default is PutOptions' own."""

from __future__ import annotations

from typing import Any, TypedDict

from moonpool.base.errors import InvalidInput
from moonpool.store.keys_text import Key, key_bytes
from moonpool.store.messages import PutOptions


class PutSettings(TypedDict, total=False):
    num_replicas: int  # on distinct nodes first; fewer are taken when there is no more room
    all_replicas: bool  # refuse instead of taking fewer
    preferred: tuple[str, ...]  # segments to try first; default: memory of this machine
    pinned: bool  # never evicted, until it is removed
    soft_pin_s: float  # evicted only when nothing else is left, for this long
    replace: bool  # the old value stays readable until the new one is whole
    group: Key  # objects of one group are evicted together
    parent: Key  # the key of the block that this one continues
    identity: bytes  # digest of what makes the bytes usable; readers may insist on it


_OPTIONS = {
    "num_replicas": "num_replicas",
    "all_replicas": "all_replicas",
    "preferred": "preferred",
    "pinned": "hard_pin",
    "soft_pin_s": "soft_pin_s",
    "replace": "replace",
}


def as_wish(settings: PutSettings) -> dict[str, Any]:
    """The fields of a Put or PutRequest beside its key and bytes. InvalidInput for a setting that there is not."""
    given: dict[str, Any] = dict(settings)
    unknown = given.keys() - PutSettings.__annotations__.keys()
    if unknown:
        raise InvalidInput(f"a put has no setting {', '.join(sorted(unknown))}")
    wish: dict[str, Any] = {name: key_bytes(given[name]) for name in ("group", "parent") if name in given}
    if "identity" in given:
        wish["identity"] = given["identity"]
    options = {field: given[name] for name, field in _OPTIONS.items() if name in given}
    if "preferred" in options:
        options["preferred"] = tuple(options["preferred"])
    if options:
        wish["options"] = PutOptions(**options)
    return wish
