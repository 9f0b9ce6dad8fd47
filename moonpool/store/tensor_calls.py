"""The tensor calls of Store, which inherits them. Each tensor is one object: its header, then its elements.

load_safetensors() maps the file and never reads it as a whole; the file must not become shorter meanwhile.
save_safetensors() gives the file its name when it is complete, so that no reader finds half a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import FewerReplicas, InvalidInput, MoonpoolError, NotFound, Refused, from_wire
from moonpool.store.client.piece_reader import PieceReader
from moonpool.store.client.put_batch import PutBatches
from moonpool.store.client.put_request import Put, PutSettings, is_new, key_value_pairs, put_fields
from moonpool.store.client.reads import ClientReads
from moonpool.store.client.recovery import Got, none_if_missing
from moonpool.store.client.views import ClientViews
from moonpool.store.keys_text import Key, key_bytes, keys_bytes, show_key
from moonpool.store.safetensors_files import checked_names, in_steps, make_index, map_file, read_index, whole_file
from moonpool.store.tensors import (
    MAX_HEADER_NBYTES,
    Library,
    TensorForm,
    as_numpy,
    as_source,
    as_target,
    as_torch,
    is_torch,
    row_major,
    unpack_form,
)
from moonpool.transfer.memory.buffers import address_of

Progress: TypeAlias = Callable[[int, int], None]  # bytes done, bytes in total
_SMALL_NBYTES = 64 * 1024  # a smaller array is copied to new memory of its size


class TensorCalls:
    """A base class: Store sets the attributes."""

    _puts: PutBatches
    _reads: ClientReads
    _views: ClientViews

    def put_tensor(self, key: Key, array: Any, **settings: Unpack[PutSettings]) -> bool:
        """Store an array of numpy, torch or any library with a buffer interface, with type and shape; as put()."""
        return is_new(self.put_tensors([(key, array)], **settings)[0])

    def put_tensors(
        self, items: Mapping[Any, Any] | Iterable[tuple[Key, Any]], **settings: Unpack[PutSettings]
    ) -> list[MoonpoolError | None]:
        """As put_many(), with InvalidInput for what is no array or has elements that cannot be stored."""
        fields = put_fields(settings)
        results: list[MoonpoolError | None] = []
        puts: list[Put] = []
        positions: list[int] = []
        for position, (key, array) in enumerate(key_value_pairs(items)):
            name = key_bytes(key)
            results.append(None)
            try:
                form, elements = as_source(array)
            except InvalidInput as error:
                results[position] = error
                continue
            puts.append(Put(key=name, buffers=[form.pack(), elements], **fields))
            positions.append(position)
        for position, result in zip(positions, self._puts.put_many(puts), strict=True):
            results[position] = result
        return results

    def get_tensor(self, key: Key, *, like: Library = "numpy") -> Any | None:
        """Return a new numpy array or torch tensor; None for a miss. InvalidInput when the object is no tensor, or the
        library has no such element type.
        """
        return self.get_tensors([key], like=like)[0]

    def get_tensors(self, keys: Iterable[Key], *, like: Library = "numpy") -> list[Any | None]:
        """get_tensor() of each. Raise the first error that is no miss."""
        if like not in get_args(Library):
            raise InvalidInput(f"arrays are like {' or '.join(get_args(Library))}, not {like}")
        names = keys_bytes(keys)
        buffers = [np.empty(0 if info is None else info.nbytes, np.uint8) for info in self._reads.find(names)]
        got = self._reads.read(names, [[buffer.data] for buffer in buffers], None)
        return [self._finish(*each, like) for each in zip(names, buffers, got, strict=True)]

    def get_tensor_into(self, key: Key, array: Any) -> bool:
        """Read into an array of that type and shape (else InvalidInput, and the array may hold anything). Return False
        for a miss.
        """
        return self.get_tensors_into([key], [array])[0]

    def get_tensors_into(self, keys: Iterable[Key], arrays: Sequence[Any]) -> list[bool]:
        """get_tensor_into() of each."""
        names = keys_bytes(keys)
        if len(names) != len(arrays):
            raise InvalidInput(f"{len(names)} keys and {len(arrays)} arrays")
        targets = [as_target(array) for array in arrays]
        headers = [bytearray(form.header_nbytes) for form, _ in targets]
        buffers = [[memoryview(header), view] for header, (_, view) in zip(headers, targets, strict=True)]
        got = self._reads.read(names, buffers, None)
        done: list[bool] = []
        for key, array, (form, _), header, each in zip(names, arrays, targets, headers, got, strict=True):
            is_whole = each == form.header_nbytes + form.nbytes and bytes(header) == form.pack()
            done.append(is_whole or self._into_other(key, array, form, each))
        return done

    def view_tensor(self, key: Key) -> NDArray[Any]:
        """Return a read-only numpy array over the value's memory on this machine, else over a copy. The memory stays
        pinned while the array, or any made from it, is used. NotFound for a miss.
        """
        return as_numpy(*self._view_elements(key_bytes(key)))

    def load_safetensors(
        self,
        path: str | Path,
        *,
        prefix: str = "",
        progress: Progress | None = None,
        **settings: Unpack[PutSettings],
    ) -> list[str]:
        """Put every tensor of the file under prefix + its name. Return the keys. AlreadyExists unless `replace`. Raise
        the first error, with the key in its text; tensors stored before it stay.
        """
        data = map_file(Path(path))
        tensors = read_index(data, data.nbytes)
        fields = put_fields(settings)
        done, total = 0, sum(tensor.form.nbytes for tensor in tensors)
        for step in in_steps(tensors):
            puts = [
                Put(
                    key=key_bytes(prefix + tensor.name),
                    buffers=[tensor.form.pack(), data[tensor.start : tensor.start + tensor.form.nbytes]],
                    **fields,
                )
                for tensor in step
            ]
            for tensor, error in zip(step, self._puts.put_many(puts), strict=True):
                if error is not None and not isinstance(error, FewerReplicas):
                    raise from_wire(error.code, f"{prefix + tensor.name}: {error}") from error
            done += sum(tensor.form.nbytes for tensor in step)
            if progress is not None:
                progress(done, total)
        return [prefix + tensor.name for tensor in tensors]

    def save_safetensors(
        self,
        path: str | Path,
        keys: Iterable[str] | None = None,
        *,
        prefix: str = "",
        metadata: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> list[str]:
        """Write the tensors under `keys`, or all whose key begins with `prefix`, to a file. Their names are the keys
        without the prefix. Return the keys. NotFound for a missing key or when there is none, InvalidInput for what is
        no tensor or changed its form meanwhile. After an error an older file stays.
        """
        chosen = list(keys) if keys is not None else self._text_keys(prefix)
        if not chosen:
            raise NotFound(f"no object's key begins with {prefix!r}")
        names = {key.removeprefix(prefix): key_bytes(key) for key in chosen}
        if len(names) < len(chosen):
            raise InvalidInput("two of the keys have the same name in the file")
        forms = {name: self._form(names[name]) for name in checked_names(names)}
        front, order = make_index(forms, metadata)
        done, total = 0, sum(form.nbytes for form in forms.values())
        with whole_file(Path(path)) as file:
            file.write(front)
            for name in order:
                form, elements = self._view_elements(names[name])
                if (form.dtype, form.shape) != (forms[name].dtype, forms[name].shape):
                    raise InvalidInput(f"{name} was {forms[name]} and has become {form} while the file was written")
                file.write(row_major(form, elements))
                done += form.nbytes
                if progress is not None:
                    progress(done, total)
        return chosen

    def _text_keys(self, prefix: str) -> list[str]:
        try:
            return sorted(each.key.decode() for each in self._reads.list_objects(rf"\A{re.escape(prefix)}"))
        except UnicodeDecodeError as error:
            raise InvalidInput(f"a key that begins with {prefix!r} is no text, so no name in a file") from error

    def _form(self, key: bytes) -> TensorForm:
        """Return the form, reading the tensor header only. NotFound for a miss, InvalidInput when it is no tensor."""
        with PieceReader(self._reads, key, identity=None) as reader:
            header = bytearray(reader.piece_sizes[0] if reader.piece_sizes else 0)
            if 0 < len(header) <= MAX_HEADER_NBYTES:
                reader.read_into(0, header)
        return _form_of(key, memoryview(header))

    def _view_elements(self, key: bytes) -> tuple[TensorForm, memoryview]:
        """Return the form and the bytes of a view. NotFound for a miss; raise what makes the object unreadable."""
        (view,) = self._views.view([key], None, False)
        if isinstance(view, MoonpoolError):
            raise view
        return _split(key, _joined(view.pieces))

    def _finish(self, key: bytes, buffer: NDArray[Any], got: Got, like: Library) -> Any | None:
        if isinstance(got, InvalidInput):  # replaced by a larger value since the look-up
            (got,) = self._reads.read([key], [None], None)
            buffer = np.frombuffer(bytearray(got if isinstance(got, bytes) else b""), np.uint8)
        if none_if_missing(got) is None:
            return None
        form, elements = _split(key, buffer.data[: got if isinstance(got, int) else None])
        if form.nbytes < _SMALL_NBYTES:
            elements = memoryview(bytearray(elements))
        return as_torch(form, elements) if like == "torch" else as_numpy(form, elements)

    def _into_other(self, key: bytes, array: Any, form: TensorForm, got: Got) -> bool:
        """Read a tensor that is stored in the other order than the array's. InvalidInput when type or shape differ."""
        if isinstance(got, MoonpoolError) and not isinstance(got, InvalidInput):
            if isinstance(got, NotFound | Refused):
                return False
            raise got
        (found,) = self.get_tensors([key], like="torch" if is_torch(array) else "numpy")
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
    """Join the pieces; without a copy where they follow each other in one array, as those of a view do."""
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
