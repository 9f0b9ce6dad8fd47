"""Tensors in the pool: arrays with their element type, shape and order, moved without a copy of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, Refused
from moonpool.store.client import Put, StoreClient
from moonpool.store.keys_text import show_key
from moonpool.store.messages import ObjectInfo
from moonpool.store.piece_sessions import PieceReader
from moonpool.store.put_settings import PutSettings, as_wish
from moonpool.store.tensors.arrays import Library, as_numpy, as_source, as_target, as_torch, is_torch
from moonpool.store.tensors.tensor_form import MAX_HEADER_NBYTES, TensorForm, unpack_form
from moonpool.transfer.memory.buffers import Buffer, address_of

ReadInto: TypeAlias = Callable[[Sequence[bytes], Sequence[Sequence[Buffer]]], list[int | MoonpoolError]]
Lookup: TypeAlias = Callable[[list[bytes]], list[ObjectInfo | None]]
_SMALL_NBYTES = 64 * 1024  # below it an array gets memory of its own, rather than a part of a larger buffer


class TensorCalls:
    """Borrows everything. `read_into` is get_many_into of the client or of its cache."""

    def __init__(self, client: StoreClient, read_into: ReadInto, lookup: Lookup) -> None:
        self._client, self._read_into, self._lookup = client, read_into, lookup

    def put_many(
        self, keys: Sequence[bytes], arrays: Sequence[Any], settings: PutSettings
    ) -> list[MoonpoolError | None]:
        """As StoreClient.put_many; InvalidInput at the place of what is no array or cannot be stored."""
        wish = as_wish(settings)
        results: list[MoonpoolError | None] = [None] * len(keys)
        puts: list[Put] = []
        positions: list[int] = []
        for position, (key, array) in enumerate(zip(keys, arrays, strict=True)):
            try:
                form, elements = as_source(array)
            except InvalidInput as error:
                results[position] = error
                continue
            puts.append(Put(key=key, buffers=[form.pack(), elements], **wish))
            positions.append(position)
        for position, result in zip(positions, self._client.put_many(puts), strict=True):
            results[position] = result
        return results

    def get_many(self, keys: Sequence[bytes], like: Library) -> list[Any | None]:
        """Each in memory of its own; None for a miss. Raises the first error that is no miss."""
        if like not in get_args(Library):
            raise InvalidInput(f"arrays are like {' or '.join(get_args(Library))}, not {like}")
        rooms = [np.empty(0 if info is None else info.nbytes, np.uint8) for info in self._lookup(list(keys))]
        got = self._read_into(keys, [[room] for room in rooms])
        return [self._finish(*each, like) for each in zip(keys, rooms, got, strict=True)]

    def get_many_into(self, keys: Sequence[bytes], arrays: Sequence[Any]) -> list[bool]:
        """False for a miss. InvalidInput when an array is not of the stored type and shape; it may be written to."""
        targets = [as_target(array) for array in arrays]
        headers = [bytearray(form.header_nbytes) for form, _ in targets]
        buffers: list[list[Buffer]] = [[header, view] for header, (_, view) in zip(headers, targets, strict=True)]
        got = self._read_into(keys, buffers)
        done: list[bool] = []
        for key, array, (form, _), header, each in zip(keys, arrays, targets, headers, got, strict=True):
            is_whole = each == form.header_nbytes + form.nbytes and bytes(header) == form.pack()
            done.append(is_whole or self._into_other(key, array, form, each))
        return done

    def form(self, key: bytes) -> TensorForm:
        """NotFound for a miss, InvalidInput when it is no tensor. Reads the header only."""
        with PieceReader(self._client, key, identity=None) as reader:
            header = bytearray(reader.piece_sizes[0] if reader.piece_sizes else 0)
            if 0 < len(header) <= MAX_HEADER_NBYTES:
                reader.read_into(0, header)
        return _form_of(key, memoryview(header))

    def view(self, key: bytes) -> NDArray[Any]:
        """Read-only. What lies on this machine is seen in place, and stays there as long as the array is used."""
        return as_numpy(*self.view_elements(key))

    def view_elements(self, key: bytes) -> tuple[TensorForm, memoryview]:
        """The bytes of the elements, as view() shows them. NotFound for a miss; raises what makes it unreadable."""
        (view,) = self._client.view([key])
        if isinstance(view, MoonpoolError):
            raise view
        return _split(key, _joined(view.pieces))

    def _finish(self, key: bytes, room: NDArray[Any], got: int | MoonpoolError, like: Library) -> Any | None:
        if isinstance(got, InvalidInput):  # another value, larger than the one that was looked up
            value = self._client.get(key)
            got, room = NotFound() if value is None else len(value), np.frombuffer(bytearray(value or b""), np.uint8)
        if isinstance(got, NotFound | Refused):
            return None
        if isinstance(got, MoonpoolError):
            raise got
        form, elements = _split(key, room.data[:got])
        if form.nbytes < _SMALL_NBYTES:
            elements = memoryview(bytearray(elements))
        return as_torch(form, elements) if like == "torch" else as_numpy(form, elements)

    def _into_other(self, key: bytes, array: Any, form: TensorForm, got: int | MoonpoolError) -> bool:
        """What was read does not lie as the array does; it may still be the same tensor in the other order."""
        if isinstance(got, MoonpoolError) and not isinstance(got, InvalidInput):
            if isinstance(got, NotFound | Refused):
                return False
            raise got
        (found,) = self.get_many([key], "torch" if is_torch(array) else "numpy")
        if found is None:
            return False
        stored, _ = as_source(found)
        if (stored.dtype, stored.shape) != (form.dtype, form.shape):
            raise InvalidInput(f"{show_key(key)} holds a tensor of {stored}, the array is one of {form}")
        array[...] = found
        return True


def _form_of(key: bytes, value: memoryview) -> TensorForm:
    try:
        return unpack_form(value)
    except InvalidInput as error:
        raise InvalidInput(f"{show_key(key)}: {error}") from error


def _split(key: bytes, value: memoryview) -> tuple[TensorForm, memoryview]:
    form = _form_of(key, value)
    if value.nbytes != form.header_nbytes + form.nbytes:
        raise InvalidInput(f"{show_key(key)} has {value.nbytes} bytes, too few or too many for {form}")
    return form, value[form.header_nbytes :]


def _joined(pieces: Sequence[memoryview]) -> memoryview:
    """The pieces as one: without a copy where they lie one behind the other in one array, as those of a view do."""
    if not pieces:
        return memoryview(b"")
    first, whole = pieces[0], pieces[0].obj
    if len(pieces) == 1 or not isinstance(whole, np.ndarray) or any(piece.obj is not whole for piece in pieces):
        return memoryview(b"".join(pieces)) if len(pieces) > 1 else first
    start, at = address_of(first) - whole.ctypes.data, address_of(first)
    for piece in pieces:
        if address_of(piece) != at:
            return memoryview(b"".join(pieces))
        at += piece.nbytes
    return whole.data[start : start + sum(piece.nbytes for piece in pieces)].toreadonly()
