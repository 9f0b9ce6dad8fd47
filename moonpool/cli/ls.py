"""`moonpool ls [PATTERN]`: one object per line, in no particular order."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import typer

from moonpool.base.units import format_nbytes
from moonpool.cli.pool import HexOption, MasterOption, pool
from moonpool.cli.progress import objects_seen
from moonpool.store.keys_text import show_key
from moonpool.store.messages import ListedObject, Tier

_SHOW_EVERY = 1000


def command(
    pattern: Annotated[
        str | None, typer.Argument(help="regular expression (RE2); list keys in which it matches anywhere")
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="also leased (l), pinned (p), size, tiers, replicas")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object per line")] = False,
    master: MasterOption = None,
    hex: HexOption = False,
) -> None:
    num_objects = 0
    # On a terminal the list itself shows the progress.
    with pool(master) as store, objects_seen("objects", shown=not sys.stdout.isatty()) as show:
        for found in store.objects(pattern):
            key = found.key.hex() if hex else show_key(found.key)
            print(_as_json(found, key) if json else _as_line(found, key) if long else key)
            num_objects += 1
            if num_objects % _SHOW_EVERY == 0:
                show(num_objects, None)


def _as_line(found: ListedObject, key: str) -> str:
    use = ("l" if found.is_leased else "-") + ("p" if found.is_pinned else "-")
    return f"{use} {format_nbytes(found.nbytes):>10} {'+'.join(_tiers(found.tier)):>8} x{found.num_replicas} {key}"


def _as_json(found: ListedObject, key: str) -> str:
    fields: dict[str, Any] = {
        "key": key,
        "nbytes": found.nbytes,
        "tiers": _tiers(found.tier),
        "num_replicas": found.num_replicas,
        "is_leased": found.is_leased,
        "is_pinned": found.is_pinned,
    }
    return msgspec.json.encode(fields).decode()


def _tiers(tiers: Tier) -> list[str]:
    return [tier.name.lower() for tier in Tier if tier & tiers and tier.name]
