"""`moonpool get KEY`: read piece by piece, verify each before it is written, never hold the whole object in memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from moonpool.base.errors import NotFound, Refused
from moonpool.cli.pool import HexOption, MasterOption, pool
from moonpool.cli.progress import Show, bytes_moved
from moonpool.store import Store
from moonpool.store.keys_text import read_key
from moonpool.store.safetensors_files import whole_file


def command(
    key: Annotated[str, typer.Argument(help="key of the object")],
    out: Annotated[str, typer.Option(help="file to write; - writes to standard output")] = "-",
    master: MasterOption = None,
    hex: HexOption = False,
) -> None:
    wanted = read_key(key, hex)
    with pool(master) as store, bytes_moved(f"get {key}") as show:
        try:
            if out == "-":
                _copy(store, wanted, sys.stdout.buffer, show)
                sys.stdout.buffer.flush()
                return
            with whole_file(Path(out)) as file:
                _copy(store, wanted, file, show)
        except (NotFound, Refused) as error:
            raise NotFound(f"{key!r} cannot be read: {store.why(wanted)}") from error


def _copy(store: Store, key: bytes, file: BinaryIO, show: Show) -> None:
    done = 0
    with store.get_session(key) as session:
        buffer = memoryview(bytearray(max(session.piece_sizes, default=0)))
        for index, nbytes in enumerate(session.piece_sizes):
            session.read_into(index, buffer[:nbytes])
            file.write(buffer[:nbytes])
            done += nbytes
            show(done, session.nbytes)
