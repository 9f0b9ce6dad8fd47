"""`moonpool rm KEY...`, `moonpool rm --matching REGEX`, `moonpool rm --all`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moonpool.base.errors import InvalidInput, Overloaded
from moonpool.cli.pool import HexOption, MasterOption, pool
from moonpool.cli.progress import objects_seen
from moonpool.store import Store
from moonpool.store.keys_text import read_key

_MAX_SHOWN = 5
_WHAT_TO_DO = "Try again later, or remove it now with --force"


def command(
    keys: Annotated[list[str] | None, typer.Argument(help="keys of the objects to remove")] = None,
    matching: Annotated[
        str | None, typer.Option(help="remove objects in whose key this regular expression (RE2) matches anywhere")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="remove every object of the pool")] = False,
    force: Annotated[bool, typer.Option("--force", help="also remove leased and pinned objects")] = False,
    master: MasterOption = None,
    hex: HexOption = False,
) -> None:
    if sum((bool(keys), matching is not None, all)) != 1:
        raise InvalidInput("state what to remove: KEY..., --matching REGEX or --all")
    with pool(master) as store:
        if keys:
            _remove_keys(store, keys, hex, force)
        else:
            _remove_matching(store, None if all else matching, force)


def _remove_keys(store: Store, keys: list[str], is_hex: bool, force: bool) -> None:
    gone = store.remove_many([read_key(key, is_hex) for key in keys], force=force)
    kept = [key for key, is_gone in zip(keys, gone, strict=True) if not is_gone]
    if kept:
        reasons = [f"{key!r} was not removed: {store.why(read_key(key, is_hex))}" for key in kept[:_MAX_SHOWN]]
        more = f"; and {len(kept) - _MAX_SHOWN} more" if len(kept) > _MAX_SHOWN else ""
        raise Overloaded(f"{'; '.join(reasons)}{more}. {_WHAT_TO_DO}")


def _remove_matching(store: Store, pattern: str | None, force: bool) -> None:
    with objects_seen("removing"):
        num_removed, num_kept = (
            store.remove_all(force=force) if pattern is None else store.remove_matching(pattern, force=force)
        )
    print(f"removed {num_removed} objects", file=sys.stderr)
    if num_kept:
        raise Overloaded(
            f"{num_kept} objects are in use and were not removed: a lease ends some seconds after the last read, "
            f"a pin ends with the process that holds it. {_WHAT_TO_DO}"
        )
