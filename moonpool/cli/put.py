"""`moonpool put FILE`: store a file as one object, or each tensor of a safetensors file as one object.

A file is mapped and put piece by piece; standard input is read to its end first.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from moonpool.base.errors import AlreadyExists, InvalidInput
from moonpool.base.units import format_nbytes
from moonpool.cli.pool import HexOption, MasterOption, pool
from moonpool.cli.progress import bytes_moved
from moonpool.store import Store
from moonpool.store.client.put_request import PutSettings
from moonpool.store.keys_text import read_key

_STDIN = "-"
_PIECE_NBYTES = 4 * 1024 * 1024


def command(
    file: Annotated[str, typer.Argument(help="file to store; - reads standard input")],
    key: Annotated[str | None, typer.Option(help="key of the object; default: the file's name")] = None,
    replicas: Annotated[int, typer.Option(help="number of replicas, each on a different node")] = 1,
    pinned: Annotated[bool, typer.Option("--pinned", help="protect the object from eviction")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="replace the object that has this key")] = False,
    tensors: Annotated[
        bool,
        typer.Option("--tensors", help="store each tensor of a safetensors file under --key plus its name"),
    ] = False,
    master: MasterOption = None,
    hex: HexOption = False,
) -> None:
    settings = PutSettings(num_replicas=replicas, pinned=pinned, replace=replace)
    with pool(master) as store, bytes_moved(f"put {file}") as show:
        if tensors:
            keys = store.load_safetensors(file, prefix=key or "", progress=show, **settings)
            _warn_of_replicas(store, replicas)
            print(f"stored {len(keys)} tensors", file=sys.stderr)
            return
        if key is None and file == _STDIN:
            raise InvalidInput("standard input has no name; add --key KEY")
        name = key or Path(file).name
        data = _read(file)
        _put(store, read_key(name, hex), data, settings, lambda done: show(done, data.nbytes))
        _warn_of_replicas(store, replicas)
    print(f"stored {format_nbytes(data.nbytes)} as {name}", file=sys.stderr)


def _warn_of_replicas(store: Store, asked: int) -> None:
    count = store.counters()["fewer_replicas"]
    if count:
        objects = "the object has" if count == 1 else f"{count} objects have"
        print(f"warning: {objects} fewer than the {asked} replicas asked for; see moonpool stat", file=sys.stderr)


def _put(store: Store, key: bytes, data: memoryview, settings: PutSettings, show: Callable[[int], None]) -> None:
    """Put the data piece by piece, so that the progress can be shown."""
    pieces = [data[at : at + _PIECE_NBYTES] for at in range(0, data.nbytes, _PIECE_NBYTES)]
    try:
        with store.put_session(key, [piece.nbytes for piece in pieces], **settings) as session:
            for index, piece in enumerate(pieces):
                session.write(index, piece)
                show(index * _PIECE_NBYTES + piece.nbytes)
    except AlreadyExists as error:
        raise AlreadyExists("the pool already holds this key; remove it first, or add --replace") from error


def _read(file: str) -> memoryview:
    if file == _STDIN:
        return memoryview(sys.stdin.buffer.read())
    path = Path(file)
    try:
        if not path.is_file() or path.stat().st_size == 0:  # a pipe or an empty file cannot be mapped
            return memoryview(path.read_bytes())
        with path.open("rb") as opened:
            return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror or error}") from error
